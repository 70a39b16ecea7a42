"""Running totals on Hopper, to more bits than float32 has, and beside them the sizes of vectors.

    total_i   = x_1 + ... + x_i          an unevaluated sum of two float32s
    largest_i = max_a |k_ia|

Inside a tile of 128 tokens a total is a product with a triangle of ones: what is added are bfloat16s, three of which
make a float32. To it comes the sum of all tiles before it in its sequence, whose own sums are given.
One warpgroup sums up 64 tiles, of one sequence or of several; others may read vectors meanwhile (`readers.py`).
"""

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, BFloat16, Bool, Float

from kernels_pallas.gpu.readers import run_beside_readers
from kernels_pallas.gpu.tiles import (
  ROWS,
  TILE,
  WGMMA,
  across,
  down,
  index,
  multiply,
  rounded,
  shared,
  varying_as,
)
from kernels_pallas.sums import Pair, add_pairs, two_sum

_PIECES = 3  # bfloat16s that make a float32
# Added to a number below 2 and taken away again it leaves a multiple of 2 ** -15; a float32 holds any sum of 128 such.
_GRID = 384.0


def totals(x: Float[Array, "B H T"], *, interpret: Any = None) -> tuple[Float[Array, "B H T"], Float[Array, "B H T"]]:
  """The totals' high and low halves."""
  high, low = _run(x, None, interpret)
  return high, low


def totals_and_sizes(
  x: Float[Array, "B H T"], vectors: Float[Array, "B T H d"], *, interpret: Any = None
) -> tuple[Float[Array, "B H T"], Float[Array, "B H T"], Float[Array, "B H T"]]:
  """The same, and the largest coordinate of each vector, without its sign; of whole ROWS of tokens."""
  high, low, largest = _run(x, vectors, interpret)
  return high, low, largest


def _run(x: Float[Array, "B H T"], vectors: Float[Array, "B T H d"] | None, interpret: Any) -> list[Array]:
  batch, heads, time = x.shape
  # Pairs of tiles: numbers are loaded by twos, which begin at even places.
  whole = jnp.pad(x, ((0, 0), (0, 0), (0, -time % (2 * TILE))))
  in_sequence = whole.shape[-1] // TILE
  count = batch * heads * in_sequence
  tiles = jnp.pad(whole.reshape(count, TILE), ((0, -count % ROWS), (0, 0)))
  ends = lax.reduce((tiles, jnp.zeros_like(tiles)), (jnp.float32(0),) * 2, add_pairs, (1,))
  shape, f32 = (ROWS, TILE), jnp.float32

  def sum_up(x_ref, high_ref, low_ref, ones_ref, out_high_ref, out_low_ref, ones_smem, filled, *staging):
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
      row_sums(carried, begins <= first - behind), row_sums(of_tiles(first), (begins <= other) & (other < place))
    )

    inside = totals_in_tiles(given, ones_smem, filled, *staging)
    high, low = add_pairs([down(part, shape) for part in before], inside)
    out_high_ref[pl.ds(first, ROWS), :] = high
    out_low_ref[pl.ds(first, ROWS), :] = low

  found = run_beside_readers(
    sum_up,
    [tiles, *ends, ones_until_each()],
    vectors,
    outputs=[jax.ShapeDtypeStruct(tiles.shape, f32)] * 2,
    scratch=memory_of_sums(interpret),
    blocks=tiles.shape[0] // ROWS,
    name="totals" if vectors is None else "totals_and_sizes",
    interpret=interpret,
  )
  halves = [half[:count].reshape(whole.shape)[..., :time] for half in found[:2]]
  result: list[Array] = varying_as(x, [*halves, *found[2:]])
  return result


def ones_until_each() -> BFloat16[Array, "tile tile"]:
  """The triangle: its product with a tile's numbers is their running total."""
  return jnp.asarray(np.tri(TILE).T, jnp.bfloat16)


def memory_of_sums(interpret: Any) -> list[Any]:
  """Shared memory of `totals_in_tiles`: the triangle, a barrier that tells that it has come, and for interpreters."""
  staging = [] if interpret is None else [shared((ROWS, TILE), jnp.bfloat16)]
  return [shared((TILE, TILE), jnp.bfloat16), plgpu.Barrier(num_arrivals=1), *staging]


def totals_in_tiles(x: Float[Array, "rows tile"], ones_smem: Any, filled: Any, staging: Any = None) -> Pair:
  """The running totals of each row."""
  unit, *parts = _on_grid(x, jnp.abs(x).max(axis=1))
  plgpu.barrier_wait(filled)

  def products(*sums: Any) -> tuple[Array, ...]:
    for sum_of_part, part in zip(sums, parts, strict=True):
      for _ in range(_PIECES):
        high = rounded(part, jnp.bfloat16)
        part = part - high.astype(jnp.float32)
        multiply(sum_of_part, high, ones_smem, staging)
        plgpu.wgmma_wait(0)  # there are no registers for all pieces
    return tuple(sum_of_part[...] for sum_of_part in sums)

  accumulator = plgpu.ACC((ROWS, TILE), jnp.float32)
  inside = pl.run_scoped(products, accumulator, accumulator)
  return two_sum(*(down(unit, x.shape) * part for part in inside))


def row_sums(pair: Pair, counts: Bool[Array, "rows columns"]) -> tuple[Array, Array]:
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
