"""How far back the queries of a tile can hear, on Hopper.

    heard = sum_{m' <= m} most_m' exp(before_n - end_m')         all that comes to tile n from m and the tiles before it

Tile n need not read the tiles m for which that is at most `left_out` times `least_n`, of both kinds: these are bounds
of what queries of length 1 gather there, and from the two tiles before their own (`bounds.py`). Discounts of
2 ** INVISIBLE and less are 0, as they are in the attention kernels' arithmetic.

A block of the grid is one warpgroup with 64 tiles of queries of a head, which walks all earlier tiles of keys; sums
over these are products with a triangle of ones, of bfloat16s.
"""

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from kernels_pallas.gpu.bounds import Bounds
from kernels_pallas.gpu.tiles import ROWS, WGMMA, across, down, index, shared, varying_as
from kernels_pallas.weights import INVISIBLE, LOG2E


def reach(
  bounds: Bounds,
  totals: Float[Array, "4 B H n"],
  fades: Int[Array, "B H"],
  tiles: int,
  *,
  left_out: float,
  interpret: Any = None,
) -> Int[Array, "B H n"]:
  """How many tiles from the first on each of them need not read; none in heads that do not fade.

  `totals` are those of log gates before each tile and at its end, two float32s each, for whole ROWS of tiles.
  """
  kinds, batch, heads, whole = bounds.most.shape
  group = bounds.least.shape[2] // heads
  blocks, shape, f32 = whole // ROWS, (ROWS, ROWS), jnp.float32
  written = tiles if tiles < ROWS and tiles % 4 == 0 else ROWS  # what a copy can be of, or all

  def kernel(least_ref, most_ref, totals_ref, fades_ref, ones_ref, first_ref, *scratch):
    ones_smem, weights_smem, first_smem, filled = scratch
    plgpu.copy_gmem_to_smem(ones_ref, ones_smem, filled)
    row, block = (f(lax.axis_index("block"), jnp.int32(blocks)) for f in (lax.div, lax.rem))
    b, kv = (f(row, jnp.int32(heads)) for f in (lax.div, lax.rem))
    rows = pl.ds(block * ROWS, ROWS)

    def load(ref, at, axis):
      return plgpu.load(ref.at[at], layout=WGMMA.reduce(axis), optimized=False)

    def least_of(head, so_far):
      return [jnp.minimum(x, load(least_ref.at[kind, b, kv * group + head], rows, 1)) for kind, x in enumerate(so_far)]

    def by_row(x):
      return plgpu.layout_cast(jnp.full((ROWS,), x, f32), WGMMA.reduce(1))

    start = [load(totals_ref.at[half, b, kv], rows, 1) for half in range(2)]
    enough = lax.fori_loop(0, jnp.int32(group), least_of, [by_row(jnp.inf)] * kinds)
    plgpu.barrier_wait(filled)

    def total(sums):
      plgpu.wgmma(sums, weights_smem, ones_smem)
      return sums[...]

    def hear(far, carry):
      """From 64 tiles of keys."""
      count, so_far = carry
      columns = pl.ds(far * ROWS, ROWS)
      stop = [load(totals_ref.at[2 + half, b, kv], columns, 0) for half in range(2)]
      high, low = (down(a, shape) - across(z, shape) for a, z in zip(start, stop, strict=True))
      exponent = jnp.minimum((high + low) * LOG2E, 0.0)  # of tiles that fill up whole ROWS it could be anything
      earlier = index(shape, 1, far * ROWS) < index(shape, 0, block * ROWS)
      discount = jnp.where(earlier & (exponent > INVISIBLE), jnp.exp2(exponent), 0.0)
      unheard, sums = earlier, []
      for kind in range(kinds):
        most = load(most_ref.at[kind, b, kv], columns, 0)
        weights = jnp.where(earlier, across(most, shape) * discount, 0.0)
        weights_smem[...] = weights.astype(jnp.bfloat16)
        plgpu.commit_smem()
        heard = pl.run_scoped(total, plgpu.ACC(shape, f32)) + down(so_far[kind], shape)
        unheard = unheard & (heard <= down(left_out * enough[kind], shape))
        sums.append(so_far[kind] + weights.sum(axis=1))
      return count + jnp.where(unheard, f32(1), f32(0)).sum(axis=1), sums

    some = (block + 1) * fades_ref[b, kv]
    count, _ = lax.fori_loop(0, some, hear, (by_row(0.0), [by_row(0.0)] * kinds))
    first_smem[...] = count.astype(jnp.int32)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(first_smem.at[pl.ds(0, written)], first_ref.at[b, kv, pl.ds(block * ROWS, written)])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)

  first = plgpu.kernel(
    kernel,
    out_type=jax.ShapeDtypeStruct((batch, heads, blocks * written), jnp.int32),
    scratch_types=[
      shared(shape, jnp.bfloat16),
      shared(shape, jnp.bfloat16),
      plgpu.SMEM((ROWS,), jnp.int32),
      plgpu.Barrier(num_arrivals=1),
    ],
    grid=(batch * heads * blocks,),
    grid_names=("block",),
    compiler_params=plgpu.CompilerParams(approx_math=True),
    interpret=interpret,
    kernel_name="reach",
  )(*bounds, totals, fades, jnp.asarray(np.tri(ROWS).T, jnp.bfloat16))
  result: Array = varying_as(bounds.least, first)[..., :tiles]
  return result
