"""Running totals: more bits than float32 has, over any length, forwards and backwards, anew at restarts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from csympow import prefix

prefix_sum = jax.jit(prefix.prefix_sum, static_argnames="reverse")


def exact(x, restarts=None, reverse=False):
  """The same sums in float64."""
  flip = slice(None, None, -1 if reverse else 1)
  x = np.asarray(x, np.float64)[:, flip]
  total = np.cumsum(x, axis=1)
  if restarts is not None:
    begins = np.asarray(restarts)[:, flip, 0]
    last = np.maximum.accumulate(np.where(begins, np.arange(x.shape[1]), 0), axis=1)
    before = np.pad(total, ((0, 0), (1, 0), (0, 0)))
    total = total - np.take_along_axis(before, last[..., None], axis=1)
  return total[:, flip]


@pytest.mark.parametrize(
  ("T", "restarting", "reverse"),
  [
    (1, True, False),
    (129, False, True),
    (1000, True, True),
    (1000, False, False),
    (140_000, False, False),  # three levels of blocks
    pytest.param(65_536, True, False, marks=pytest.mark.slow),
  ],
)
def test_totals_keep_more_bits_than_float32_has(T, restarting, reverse):
  rng = np.random.default_rng(T)
  # Of one sign, as log gates and betas are, and of many sizes, so that a float32 total would lose most of them.
  x = np.asarray(np.exp(4 * rng.standard_normal((2, T, 3))), np.float32)
  restarts = None
  if restarting:  # at random, at the first and last tokens, and where a block begins and ends
    edges = np.isin(np.arange(T), [0, 127, 128, T - 1])[None, :, None] & np.array([True, False])[:, None, None]
    restarts = jnp.asarray((rng.random((2, T, 1)) < 3 / T) | edges)
  total = prefix_sum(x, restarts, reverse=reverse)
  found = np.asarray(total.hi, np.float64) + np.asarray(total.lo, np.float64)
  expected = exact(x, restarts, reverse)
  largest = np.max(np.abs(expected), axis=1, keepdims=True)
  assert np.max(np.abs(found - expected) / largest) < 2.0**-35
  assert np.all(np.abs(total.lo) <= 2.0**-24 * np.abs(total.hi))


def test_differences_of_far_totals_are_as_exact_as_of_near_ones():
  x = jnp.full((1, 2**18, 1), 0.1, jnp.float32)
  total = prefix_sum(x)
  step = (total.hi[0, -1, 0] - total.hi[0, -2, 0]) + (total.lo[0, -1, 0] - total.lo[0, -2, 0])
  assert abs(float(step) / float(np.float32(0.1)) - 1) < 1e-6


def test_sums_that_are_exact_in_float32_are_exact():
  x = np.random.default_rng(0).integers(-8, 9, (1, 140_000, 2)).astype(np.float32)
  np.testing.assert_array_equal(prefix_sum(jnp.asarray(x)).hi, np.cumsum(x, axis=1))


@pytest.mark.parametrize("size", [0.0, 1e-37, 3e35])
def test_small_and_large_terms_have_finite_sums(size):
  x = jnp.full((1, 1000, 1), size, jnp.float32)
  np.testing.assert_allclose(prefix_sum(x, reverse=True).hi[0, :, 0], size * np.arange(1000, 0, -1), rtol=1e-5)


def test_the_largest_number_has_a_sum():
  largest = np.finfo(np.float32).max
  total = prefix_sum(jnp.zeros((1, 300, 1), jnp.float32).at[0, 7].set(-largest)).hi[0, :, 0]
  np.testing.assert_array_equal(total, np.where(np.arange(300) < 7, 0.0, -largest))


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e9])
def test_what_comes_later_does_not_change_the_totals_of_blocks_before(value):
  x = jnp.full((1, 2000, 1), 0.1, jnp.float32)
  before, after = (prefix_sum(x.at[0, 1500].set(last)) for last in (0.1, value))
  np.testing.assert_allclose(after.hi[0, :1408, 0], before.hi[0, :1408, 0], rtol=1e-6)
  assert np.isfinite(after.hi[0, 1600:, 0]).all() == np.isfinite(value)
