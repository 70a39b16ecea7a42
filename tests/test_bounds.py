"""Bounds of what tiles add and of what queries gather, by kernel: those that the formulas give in float64."""

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.gpu.bounds import bounds
from kernels_pallas.gpu.tiles import ROWS, TILE
from tests.test_visible import before_of, bound_by_moments, sizes_of, tiles_of, weights_of

TILES = 4


def make(d):
  """Queries, keys and values. Which half of the keys, and of their coordinates, is large differs from tile
  to tile; and so does whether all values are alike or one is by far the largest. The third tile's keys are alike: what
  they add is all that the moments say, of which float16 has a little less, each being a third of the trace.
  """
  random = np.random.default_rng(0)
  q, k = 0.3 * random.normal(size=(2, 1, TILES, TILE, 1, d))
  for tile, half in enumerate((slice(0, 1), slice(1, 2))):
    k.reshape(TILES, 2, ROWS, 2, d // 2)[tile, half] *= 2
    k.reshape(TILES, 2, ROWS, 2, d // 2)[tile, :, :, half] *= 2
  k[:, 2] = np.arange(d) < 3
  sizes = random.uniform(1, 2, (1, 1, TILES, TILE))
  sizes[:, :, 1, 7] = 1e4
  v = random.uniform(-1, 1, (TILES * TILE, 64))
  v[:, 5] = -sizes.reshape(-1)
  q, k = (jnp.asarray(x.reshape(1, TILES * TILE, 1, d), jnp.float16) for x in (q, k))
  return q, k, jnp.asarray(v[None, :, None], jnp.bfloat16)


@pytest.mark.parametrize(("d", "power"), [(128, 2), (128, 6)])
def test_bounds_are_those_of_the_formulas(d, power):
  q, k, v = make(d)
  end = np.array([[[-1.0, -3.0, -4.0, -9.0]]])
  decay = np.exp(end - before_of(end))
  decay, fades = jnp.asarray(decay, jnp.float32), jnp.ones((1, 1), jnp.int32)
  found = bounds(q, k, v, decay, fades, power=power, interpret=plgpu.InterpretGPUParams())

  q, k, sizes = tiles_of(q), tiles_of(k), sizes_of(v)
  lengths = np.sum(q**2, axis=-1) ** (power // 2)
  for kind, value in enumerate((np.ones_like(sizes), sizes)):
    alone = np.sum(value * np.sum(k**2, axis=-1) ** (power // 2), axis=-1)
    most = np.minimum(alone, np.max(value, axis=-1) * bound_by_moments(k, power))
    np.testing.assert_allclose(found.most[kind, ..., : TILES - 1], most[..., :-1], rtol=2e-4)  # moments are float16s
    assert np.all(found.most[kind, ..., 2] >= (1 - 1e-6) * alone[..., 2])
    for n in range(1, TILES):
      weights = [weights_of(q, k, end, power, n, m)[:, :, 0] * value[:, :, m, None] for m in range(max(0, n - 2), n)]
      least = np.min(sum(w.sum(axis=-1) for w in weights) / lengths[:, :, n], axis=-1)
      np.testing.assert_allclose(found.least[kind, ..., n], least, rtol=1e-3)
