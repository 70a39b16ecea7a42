"""Kernels that sum over time, running totals and the normaliser's state: in the interpreter and, if asked, on a GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from csympow import prefix
from kernels_pallas.gpu import readers
from kernels_pallas.gpu.gates import gates
from kernels_pallas.gpu.running import totals, totals_and_sizes
from kernels_pallas.gpu.scan import scan
from kernels_pallas.gpu.tiles import ROWS, TILE
from tests.comparing import WHERE

pytestmark = pytest.mark.usefixtures("no_races_if_interpreted")


def assert_total(found, expected, bits):
  high, low = (np.asarray(half, np.float64) for half in found)
  error = np.max(np.abs(high + low - expected) / np.max(np.abs(expected), axis=-1, keepdims=True))
  assert error < 2.0**-bits, f"2 ** {np.log2(error):.1f}"
  assert np.all(np.abs(low) <= 2.0**-24 * np.abs(high))


# Several sequences in a block of the grid; tiles odd in number; sequences that go on in the next block, and after it.
@pytest.mark.parametrize("shape", [(3, 2, 700), (1, 12, 1025), (1, 2, 70 * 128), (1, 1, 150 * 128)], ids=str)
@pytest.mark.parametrize("interpret", WHERE)
def test_totals_keep_more_bits_than_float32_has(interpret, shape):
  x = np.asarray(np.exp(4 * np.random.default_rng(0).standard_normal(shape)), np.float32)
  found = jax.jit(functools.partial(totals, interpret=interpret))(x)
  assert_total(found, np.cumsum(x, axis=-1, dtype=np.float64), 31)  # matrix units cut off what an adder would round


@pytest.mark.parametrize("interpret", WHERE)
def test_a_prefix_sum_by_the_kernel_is_the_same_backwards(interpret):
  x = jnp.asarray(np.random.default_rng(1).standard_normal((2, 300, 3)), jnp.float32)
  kernel = functools.partial(totals, interpret=interpret)
  found, expected = (jax.jit(functools.partial(prefix.prefix_sum, reverse=True, kernel=by))(x) for by in (kernel, None))
  np.testing.assert_allclose(found.hi, expected.hi, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("interpret", WHERE)
@pytest.mark.parametrize("value", [1e-37, 3e37])
def test_totals_of_small_and_large_numbers(interpret, value):
  x = jnp.zeros((1, 1, 384), jnp.float32).at[0, 0, ::200].set(value)
  high, _ = jax.jit(functools.partial(totals, interpret=interpret))(x)
  np.testing.assert_allclose(high, np.cumsum(np.asarray(x, np.float64), axis=-1), rtol=1e-5)


@pytest.mark.parametrize("interpret", WHERE)
@pytest.mark.parametrize(("time", "head_dim", "dtype"), [(448, 32, jnp.bfloat16), (64, 128, jnp.float16)])
def test_sizes_of_vectors_are_found_beside_totals(interpret, time, head_dim, dtype, monkeypatch):
  monkeypatch.setattr(readers, "multiprocessors", lambda: 2)  # several turns for each reader
  random = np.random.default_rng(0)
  x = jnp.float32(-random.uniform(size=(2, 3, time)))
  vectors = random.normal(size=(2, time, 3, head_dim)) * np.exp2(random.integers(-10, 10, (2, time, 3, 1)))
  vectors[:, 5], vectors[0, 6, 0, 3] = 0, -np.inf
  vectors = jnp.asarray(vectors, dtype)
  found = jax.jit(functools.partial(totals_and_sizes, interpret=interpret))(x, vectors)
  np.testing.assert_array_equal(found[:2], totals(x, interpret=interpret))
  expected = np.max(np.abs(np.asarray(vectors, np.float32)), axis=-1)
  np.testing.assert_array_equal(found[2], np.swapaxes(expected, 1, 2))


@pytest.mark.parametrize("interpret", WHERE)
@pytest.mark.filterwarnings("ignore:.* encountered in matmul:RuntimeWarning")  # the interpreter's
@pytest.mark.parametrize("value", [np.nan, 1e9])
def test_what_comes_later_does_not_change_the_totals_of_tiles_before(interpret, value):
  x = jnp.full((2, 1, 512), 0.1, jnp.float32)
  run = jax.jit(functools.partial(totals, interpret=interpret))
  (before, _), (after, _) = run(x), run(x.at[0, 0, 300].set(value))
  np.testing.assert_array_equal(after[0, 0, :256], before[0, 0, :256])
  np.testing.assert_array_equal(after[1], before[1])
  assert np.isfinite(after[0, 0, 384:]).all() == np.isfinite(value)


# Tiles that are no power of two; sequences that share a block of the grid, and several blocks; the longest there is.
@pytest.mark.parametrize("interpret", WHERE)
@pytest.mark.parametrize(
  ("shape", "power"), [((3, 2, 3 * TILE), 2), ((9, 1, 8 * TILE), 4), ((1, 1, 64 * TILE), None)], ids=str
)
def test_gates_of_tiles_are_those_of_float64(interpret, shape, power):
  batch, heads, time = shape
  random = np.random.default_rng(0)
  x = np.float32(-np.exp(4 * random.standard_normal(shape)))
  x[0, 0, TILE + 5], x[-1, -1, time - 1] = -1e4, -300.0  # nothing is left of what came before
  vectors = None
  if power is not None:
    vectors = random.normal(size=(batch, time, heads, 32))
    vectors[0, 6, 0, 3], vectors[:, ROWS : 2 * ROWS, -1] = -np.inf, 0.0
    vectors = jnp.asarray(vectors, jnp.bfloat16)
  found = jax.jit(functools.partial(gates, power=power, interpret=interpret))(x, vectors)

  tiles = x.astype(np.float64).reshape(batch, heads, -1, TILE)
  since, of_tile = np.cumsum(tiles, axis=-1), np.sum(tiles, axis=-1)
  until = of_tile[..., None] - since
  end = np.cumsum(of_tile, axis=-1)
  np.testing.assert_allclose(found.since_start, since.reshape(shape) / np.log(2), rtol=1e-6)
  count = time // TILE
  np.testing.assert_allclose(found.decay[..., :count], np.exp(of_tile), rtol=1e-6, atol=1e-37)
  for halves, expected in ((found.totals[:2], end - of_tile), (found.totals[2:], end)):
    assert_total([half[..., :count] for half in halves], expected, 31)
  if power is None:
    np.testing.assert_allclose(found.until_end, until.reshape(shape) / np.log(2), rtol=1e-6, atol=1e-4)
    assert found.largest is None
    return
  np.testing.assert_allclose(found.until_end, np.exp(until / power).reshape(shape), rtol=1e-4, atol=1e-37)
  sizes = np.abs(np.asarray(vectors, np.float32)).max(axis=-1)
  np.testing.assert_array_equal(found.largest, np.swapaxes(sizes, 1, 2))


# In a block with others that is not full, and with tiles that there are not; blocks of several sequences.
@pytest.mark.parametrize("interpret", WHERE)
@pytest.mark.parametrize("shape", [(3, 2, 3 * TILE), (9, 2, 4 * TILE)], ids=str)
def test_betas_are_summed_up_beside_gates(interpret, shape):
  random = np.random.default_rng(1)
  x, beta = np.float32(-random.uniform(size=shape)), np.float32(random.uniform(size=shape) * 2)
  beta[0, 0, 5], beta[0, 0, TILE + 3] = 1e5, -1e5  # a float32 total would lose what follows
  run = jax.jit(functools.partial(gates, interpret=interpret))
  found, alone = run(x, beta=beta), run(x)
  for with_betas, without in zip(found[:4], alone[:4], strict=True):
    np.testing.assert_array_equal(with_betas, without)

  parts = np.cumsum(beta, axis=-1, dtype=np.float64).reshape(*shape[:2], -1, ROWS)
  assert_total(found.turning.first, parts[..., 0], 31)
  since = np.asarray(found.turning.since, np.float64)
  expected = (parts - parts[..., :1]).reshape(shape)
  np.testing.assert_allclose(since[0] + since[1], expected, rtol=2e-7, atol=2e-6)
  np.testing.assert_array_equal(np.asarray(found.turning.since[0]).view(np.uint32) % 2**12, 0)  # 12 bits


@pytest.mark.parametrize("interpret", WHERE)
@pytest.mark.parametrize(
  ("count", "d", "reverse", "begins"),
  [(1, 64, False, False), (11, 64, True, True), pytest.param(2, 128, False, False, marks=pytest.mark.slow)],
)
def test_chunks_find_the_state_of_those_before_them(interpret, count, d, reverse, begins):
  rng = np.random.default_rng(count)
  added = rng.standard_normal((2, 1, count, d, d)).astype(np.float32)
  across = rng.random((2, 1, count)).astype(np.float32)
  initial = rng.standard_normal((2, 1, d, d)).astype(np.float32) if begins else None
  found, final = jax.jit(functools.partial(scan, reverse=reverse, interpret=interpret))(added, across, initial)
  expected, Z = {}, np.zeros((2, 1, d, d)) if initial is None else initial.astype(np.float64)
  for c in range(count)[:: -1 if reverse else 1]:
    expected[c], Z = Z, across[:, :, c, None, None] * Z + added[:, :, c]
  np.testing.assert_allclose(final, Z, atol=1e-5)
  terms = np.sum(np.asarray(found, np.float64), axis=3)
  np.testing.assert_allclose(terms, np.stack([expected[c] for c in range(count)], axis=2), atol=1e-4)
