"""Which heads are read without states, and what their states are about."""

import jax.numpy as jnp
import numpy as np
import pytest

from csympow.forms import faint
from csympow.forms.centring import centre
from kernels_pallas.gpu.state_read import Found
from tests.test_numerics import nearly_orthogonal

CHUNK, CHUNKS, WIDTH = 256, 4, 64
TIME = CHUNK * CHUNKS


def bfloat16(x):
  return np.asarray(jnp.asarray(x, jnp.bfloat16), np.float64)


def tokens(cosine, seed=0):
  """Queries, keys and values, of one head: queries at an angle to all keys, or anywhere."""
  if cosine is None:
    return tuple(bfloat16(x) for x in np.random.default_rng(seed).normal(size=(3, TIME, WIDTH)))
  x = nearly_orthogonal(cosine, T=TIME, d=WIDTH, dtype="bfloat16", seed=seed)
  return tuple(np.asarray(x[name][0, :, 0], np.float64) for name in "qkv")


def read_by_chunk(q, k, v):
  """What `faint` is given, of states and features in bfloat16; and how wrong y would be, but for the first chunk's."""
  numerators, errors, weights, squares, own = [], [], [], [], []
  for start in range(0, TIME, CHUNK):
    some = slice(start, start + CHUNK)
    S = np.einsum("jau,jb->aub", bfloat16(k[:start, :, None] * v[:start, None]), k[:start], optimize=True)
    features = bfloat16(q[some, :, None] * q[some, None])
    scores = np.square(q[some] @ k[:start].T)
    numerators.append(np.einsum("iab,aub->iu", features, bfloat16(S), optimize=True))
    errors.append(numerators[-1] - scores @ v[:start])
    weights.append(np.sum(scores, axis=-1))
    squares.append(np.sum(S**2))
    own.append(k[some].T @ k[some])
  numerator, error, weight = (np.concatenate(x) for x in (numerators, errors, weights))
  scores = np.tril(np.square(q @ k.T))
  wrong = (error / np.sum(scores, axis=-1, keepdims=True))[CHUNK:]
  y = (scores @ v / np.sum(scores, axis=-1, keepdims=True))[CHUNK:]
  found = Found(jnp.float32(numerator)[None, :, None], jnp.float32(weight)[None, None])
  of_chunks = (jnp.float32(np.stack(x))[None, None] for x in (squares, own))
  return (found, *of_chunks), np.linalg.norm(wrong) / np.linalg.norm(y)


def is_faint(q, found, squares, own, *, centre=0.0, discount=1.0):
  since_start = jnp.full((1, 1, TIME), discount)
  given = jnp.float32(q)[None, :, None], found, since_start, squares, jnp.full((1, 1), centre), own
  return bool(faint.faint(*given, head_dim=WIDTH)[0, 0])


@pytest.mark.parametrize("cosine", [None, 0.3, 0.1, 0.05, 0.03, 0.01])
def test_heads_are_faint_whose_y_would_be_wrong(cosine):
  x = tokens(cosine)
  given, wrong = read_by_chunk(*x)
  assert is_faint(x[0], *given) == (wrong > faint.AUDIBLE)
  assert (wrong > faint.AUDIBLE) == (cosine is not None and cosine < 0.1)


def test_a_head_that_hears_its_own_chunk_need_not_hear_the_state():
  q, k, v = tokens(0.01)
  for start in range(0, TIME, CHUNK):  # each chunk has a key like its queries
    k[start] = 8 * q[start]
  given, wrong = read_by_chunk(q, k, v)
  assert wrong < faint.AUDIBLE
  assert not is_faint(q, *given)


def test_who_asks_for_nothing_is_not_faint():
  q, k, v = tokens(0.01)
  (found, *rest), _ = read_by_chunk(q, k, v)
  assert is_faint(q, found, *rest)
  erased = Found(*(jnp.zeros_like(x) for x in found))
  assert not is_faint(q, erased, *rest, discount=0.0)
  assert not is_faint(0 * q, erased, *rest)
  # Values that are all but the same: what is left of a state is less than their rounding.
  assert not is_faint(q, found._replace(numerator=1e-4 * found.numerator), 1e-8 * rest[0], rest[1], centre=1e3)


def values(means, seed=0):
  """A head's, with a mean for each chunk."""
  x = np.random.default_rng(seed).normal(size=(CHUNKS, CHUNK, WIDTH)) + np.reshape(means, (CHUNKS, 1, -1))
  return jnp.asarray(x.reshape(1, TIME, 1, WIDTH), jnp.bfloat16)


def centre_of(v):
  return np.asarray(centre(v, CHUNKS)[0, 0], np.float64)


def test_states_are_about_the_mean_of_values():
  means = np.linspace(-3, 3, WIDTH)
  found = centre_of(values([means] * CHUNKS))
  assert np.linalg.norm(found - means) < 0.06 * np.linalg.norm(means)
  assert np.all(found[np.abs(means) < 0.1] == 0)  # of 256 values that might be chance


@pytest.mark.parametrize("mean", [0.3, 1.0, 5.0])
def test_values_less_their_mean_are_not_all_rounded_the_same_way(mean):
  v = values([mean] * CHUNKS)
  c = centre(v, CHUNKS)[:, None]
  wrong = np.asarray(v - c, np.float64) - (np.asarray(v, np.float64) - np.asarray(c, np.float64))
  assert np.max(np.abs(np.mean(wrong, axis=1))) < 2e-4  # less the mean itself 7e-4, of means of 0.3 and 1


@pytest.mark.parametrize(
  "means", [[0] * 4, [8, 8, 0, 8], [0, 0, 0, 1e6], [1e-3, 1e3, 1e3, 1e3], [1, -1, 1, -1]], ids=str
)
def test_states_are_about_0_if_values_of_some_chunk_are_not_about_the_mean(means):
  np.testing.assert_array_equal(centre_of(values([[m] for m in means])), 0)


@pytest.mark.parametrize("bad", [np.nan, np.inf, 3e38])
def test_values_that_are_no_numbers_do_not_make_others_none(bad):
  found = centre_of(values([1.0] * 4).at[0, 702, 0, 3].set(bad))
  assert np.all(np.isfinite(found))
  assert found[3] == 0


def test_padding_does_not_count():
  v = values([2.0] * CHUNKS)
  np.testing.assert_array_less(1.5, centre_of(v.at[:, 600:].set(0)))
