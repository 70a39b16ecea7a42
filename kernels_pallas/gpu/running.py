"""Running totals on Hopper, to more bits than float32 has.

    total_i = x_1 + ... + x_i          an unevaluated sum of two float32s

A block of the grid owns 64 tiles of 128 tokens, of one sequence or of several. Inside a tile a total is a product with
a triangle of ones: what is added are bfloat16s, three of which make a float32. To it comes the sum of all tiles before
it in its sequence, whose own sums are given.
"""

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float

from kernels_pallas.gpu.tiles import ROWS, TILE, WGMMA, across, down, index, rounded, shared, varying_as
from kernels_pallas.sums import Pair, add_pairs, two_sum

_PIECES = 3  # bfloat16s that make a float32
# Added to a number below 2 and taken away again it leaves a multiple of 2 ** -15; a float32 holds any sum of 128 such.
_GRID = 384.0


def totals(x: Float[Array, "B H T"], *, interpret: Any = None) -> tuple[Float[Array, "B H T"], Float[Array, "B H T"]]:
  """The totals' high and low halves."""
  batch, heads, time = x.shape
  # Pairs of tiles: numbers are loaded by twos, which begin at even places.
  whole = jnp.pad(x, ((0, 0), (0, 0), (0, -time % (2 * TILE))))
  in_sequence = whole.shape[-1] // TILE
  count = batch * heads * in_sequence
  tiles = jnp.pad(whole.reshape(count, TILE), ((0, -count % ROWS), (0, 0)))
  ends = lax.reduce((tiles, jnp.zeros_like(tiles)), (jnp.float32(0),) * 2, add_pairs, (1,))
  shape, f32 = (ROWS, TILE), jnp.float32

  def kernel(x_ref, high_ref, low_ref, ones_ref, out_high_ref, out_low_ref, pieces_smem, ones_smem, filled):
    plgpu.copy_gmem_to_smem(ones_ref, ones_smem, filled)
    first = lax.axis_index("block") * ROWS
    given = plgpu.load(x_ref.at[pl.ds(first, ROWS)], layout=WGMMA, optimized=False)
    # Tiles of the sequence that goes on from the block before, many at a time; then those of this block.
    behind = lax.rem(first, jnp.int32(in_sequence))
    place = index((ROWS, ROWS), 0, first)
    begins = place - lax.rem(place, jnp.int32(in_sequence))

    def of_tiles(start):
      at = pl.ds(start, ROWS)
      return tuple(plgpu.load(ref.at[at], layout=WGMMA.reduce(0), optimized=False) for ref in (high_ref, low_ref))

    def earlier(n, found):
      start = first - behind + n * ROWS
      early = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=WGMMA.reduce(0)) + start < first
      return add_pairs(found, [jnp.where(early, part, 0.0) for part in of_tiles(start)])

    nothing = plgpu.layout_cast(jnp.zeros((ROWS,), f32), WGMMA.reduce(0))
    carried = lax.fori_loop(0, lax.div(behind + ROWS - 1, jnp.int32(ROWS)), earlier, (nothing, nothing))
    other = index((ROWS, ROWS), 1, first)
    before = add_pairs(
      _row_sums(carried, begins <= first - behind), _row_sums(of_tiles(first), (begins <= other) & (other < place))
    )

    unit, *parts = _on_grid(given, jnp.abs(given).max(axis=1))
    for n, part in enumerate(parts):
      for piece in range(_PIECES):
        high = rounded(part, jnp.bfloat16)
        pieces_smem[n, piece] = high
        part = part - high.astype(f32)
    plgpu.commit_smem()
    plgpu.barrier_wait(filled)

    def products(*sums):
      for n, sum_of_part in enumerate(sums):
        for piece in range(_PIECES):
          plgpu.wgmma(sum_of_part, pieces_smem.at[n, piece], ones_smem)
      plgpu.wgmma_wait(0)
      return tuple(sum_of_part[...] for sum_of_part in sums)

    inside = pl.run_scoped(products, plgpu.ACC(shape, f32), plgpu.ACC(shape, f32))
    inside = two_sum(*(down(unit, shape) * part for part in inside))
    high, low = add_pairs([down(part, shape) for part in before], inside)
    out_high_ref[pl.ds(first, ROWS), :] = high
    out_low_ref[pl.ds(first, ROWS), :] = low

  ones = jnp.asarray(np.tri(TILE).T, jnp.bfloat16)
  found = plgpu.kernel(
    kernel,
    out_type=[jax.ShapeDtypeStruct(tiles.shape, f32)] * 2,
    scratch_types=[
      shared((2, _PIECES, *shape), jnp.bfloat16),
      shared((TILE, TILE), jnp.bfloat16),
      plgpu.Barrier(num_arrivals=1),
    ],
    grid=(tiles.shape[0] // ROWS,),
    grid_names=("block",),
    interpret=interpret,
    kernel_name="totals",
  )(tiles, *ends, ones)
  high, low = varying_as(x, [half[:count].reshape(whole.shape)[..., :time] for half in found])
  return high, low


def _row_sums(pair: Pair, counts: Bool[Array, "rows columns"]) -> tuple[Array, Array]:
  """For each row the sum of those pairs, of which there is one a column, that count in it."""
  high, low = (jnp.where(counts, across(part, counts.shape), 0.0) for part in pair)
  unit, coarse, fine = _on_grid(high, jnp.abs(high).max(axis=1))
  fine = fine + low / down(unit, low.shape)
  return two_sum(unit * coarse.sum(axis=1), unit * fine.sum(axis=1))


def _on_grid(x: Float[Array, "rows columns"], largest: Float[Array, "rows"]) -> tuple[Array, Array, Array]:
  """A power of two for each row, and x over it as a sum of two parts, the first such that sums of it are exact."""
  bits = lax.bitcast_convert_type(jnp.clip(largest, 2.0**-126, 2.0**126), jnp.int32)
  unit, inverse = (lax.bitcast_convert_type(e * 2**23, jnp.float32) for e in (bits >> 23, 254 - (bits >> 23)))
  x = x * down(inverse, x.shape)
  coarse = lax.optimization_barrier(x + _GRID) - _GRID
  return unit, coarse, x - coarse
