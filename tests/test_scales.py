"""How queries and keys of any size are scaled for the kernels, and gradients back."""

import functools

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

from csympow.forms import near, scales
from csympow.forms.spans import Settings
from csympow.prefix import prefix_sum
from kernels_pallas.gpu.tiles import BLOCK, TILE
from kernels_pallas.weights import LEAST
from tests import comparing
from tests.comparing import Case, cotangents, inputs
from tests.test_kernels import attend


def test_heads_without_keys_and_keys_that_are_no_numbers_do_not_set_the_scale():
  k = jnp.ones((1, TILE, 3, 32)).at[:, :, 1].set(0.0).at[:, 7, 2].set(jnp.nan)
  G = prefix_sum(jnp.zeros((1, TILE, 3)))
  np.testing.assert_array_equal(near.exponents(near.Tokens(k[:, :, :, None], k, k, G.hi, None)).top, [[1, 0, 1]])


def test_tokens_as_given_have_the_scale_of_their_largest_number_up_to_a_most_and_of_zeros_the_least():
  sizes = jnp.array([1.0, 0.0, 1.0, 2.0**120])
  k = (jnp.ones((1, BLOCK, 4, 32)) * sizes[:, None]).astype(jnp.bfloat16).at[:, 7, 2].set(jnp.nan)
  settings = Settings(2, BLOCK, TILE, TILE, "high", interpret=plgpu.InterpretGPUParams())
  tokens = near.Tokens(k[:, :, :, None], k, k, jnp.zeros((1, BLOCK, 4)), None)
  given, _ = near.operands(tokens, settings, with_state=False, save=True)
  np.testing.assert_array_equal(given.keys.top, [[1, LEAST, 1, near._MOST_AS_GIVEN]])


def test_powers_of_two_are_exact():
  exponents = np.arange(-126, 128)
  np.testing.assert_array_equal(scales.power_of_two(jnp.array(exponents))[:, 0], 2.0**exponents)
  np.testing.assert_array_equal(scales.power_of_two(jnp.array([-1000, -127, 128, 1000]))[:, 0], [0, 0, np.inf, np.inf])


# Of queries and of keys, in exponents of 2.
SIZES = np.array([[0, 0], [60, -110], [-80, 105]])


def of_sizes(a, which):
  """Rows that are alike but for a power of two."""
  return a * jnp.asarray(2.0 ** SIZES[:, which], a.dtype).reshape(-1, *(1,) * (a.ndim - 1))


def rows_of_sizes(**options):
  case = Case(
    T=BLOCK, B=1, H=1, d=32, dv=32, gate="weak", rotation="none", dtype="bfloat16", entry="attention", **options
  )
  x, rest = inputs(case)
  x |= {name: of_sizes(x[name], which) for which, name in enumerate("qk")}
  return case, x | {name: jnp.repeat(x[name], len(SIZES), axis=0) for name in ("v", "log_gate")}, rest


@pytest.mark.slow
def test_queries_and_keys_as_they_were_given_weigh_the_same_whatever_their_size():
  case, x, _ = rows_of_sizes(power=4)
  interpret = plgpu.InterpretGPUParams()
  settings = Settings(case.power, BLOCK, TILE, TILE, "high", interpret=interpret)
  tokens = near.Tokens(x["q"][:, :, :, None], x["k"], x["v"], x["log_gate"], None)
  given, _ = near.operands(tokens, settings, with_state=False, save=True)
  y, scaled = near.forward(given, power=case.power, dtype=jnp.bfloat16, save_low=True, interpret=interpret)
  for found in (y.high, y.low, y.normaliser, of_sizes(scaled.q, 1)):
    np.testing.assert_array_equal(found, jnp.repeat(found[:1], len(SIZES), axis=0))
  by_query = np.broadcast_to(SIZES[:, :1, None, None], scaled.q_exponent.shape)
  np.testing.assert_array_equal(scaled.q_exponent - scaled.q_exponent[:1], by_query)
  np.testing.assert_array_equal(scaled.top - scaled.top[:1], SIZES[:, 1:])


@pytest.mark.slow
def test_gradients_of_queries_and_keys_as_they_were_given_are_as_large_as_these_are_small():
  case, x, rest = rows_of_sizes()
  weights = {name: jnp.repeat(a, len(SIZES), axis=0) for name, a in cotangents(case).items()}
  run = attend(case, plgpu.InterpretGPUParams())
  found = comparing.with_gradients(lambda x: run(x, rest), x, weights)
  found |= {"dq": of_sizes(found["dq"], 0), "dk": of_sizes(found["dk"], 1)}
  for name, array in found.items():
    assert np.any(array)
    alike = jnp.repeat(array[:1], len(SIZES), axis=0).astype(jnp.float32)
    # Of the smallest keys some coordinates are no normal numbers.
    np.testing.assert_allclose(array.astype(jnp.float32), alike, rtol=0, atol=1e-5, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("size", [0, 1])
@pytest.mark.usefixtures("no_races")
def test_weights_too_small_for_float32_make_empty_rows_without_a_gradient_unless_there_is_a_state(size):
  case = Case(T=40, B=1, H=1, d=32, dv=32, gate="weak", dtype="bfloat16", entry="continued")
  x, rest = inputs(case)
  x |= {"k": 1e-20 * x["k"], "S": size * x["S"], "Z": size * x["Z"]}
  results = {}
  for name, run in (
    ("kernels", attend(case, plgpu.InterpretGPUParams(detect_races=True))),
    ("xla", functools.partial(comparing.call, entry=case.entry, power=2, form="chunked", implementation="xla")),
  ):
    results[name] = comparing.with_gradients(lambda x, run=run: run(x, rest), x, cotangents(case))
  nothing = ("y", "dq", "dv") if size == 0 else ("dv",)
  for name in nothing:
    assert not np.any(results["kernels"][name]), name
  for name in ("dS", "dZ", "dbeta", "dphase", *(("dk",) if size == 0 else ("y", "dq"))):
    comparing.assert_close(results["kernels"][name], results["xla"][name], 1e-3, name)


def test_queries_beside_a_state_are_scaled_by_a_power_of_two_and_nothing_pulls_along_them():
  random = np.random.default_rng(0)
  q, dq = (jnp.asarray(random.normal(size=(1000, 64)), jnp.bfloat16).astype(jnp.float32) for _ in range(2))
  q = q * 10.0 ** random.integers(-30, 30, (1000, 1)).astype(np.float32)
  unit, transpose = jax.vjp(scales.unit, q)
  ratio = np.float64(unit) / np.float64(q)
  np.testing.assert_allclose(ratio, np.exp2(np.round(np.log2(ratio[:, :1]))) * np.ones_like(ratio), rtol=1e-6)
  length = np.linalg.norm(np.float64(unit), axis=1)
  assert 0.5 < length.min() < 0.6
  assert 1.8 < length.max() < 2
  pulled, q64 = (np.float64(x) for x in (*transpose(dq), q))
  along = np.sum(pulled * q64, axis=1) / (np.linalg.norm(pulled, axis=1) * np.linalg.norm(q64, axis=1))
  assert np.abs(along).max() < 1e-6
  nothing, transpose = jax.vjp(scales.unit, 0 * q)
  np.testing.assert_array_equal(np.stack([nothing, *transpose(dq)]), 0)
