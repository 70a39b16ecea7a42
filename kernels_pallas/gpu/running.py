"""Running totals on Hopper, to more bits than float32 has, and beside them the sizes of vectors.

    total_i   = x_1 + ... + x_i          an unevaluated sum of two float32s
    largest_i = max_a |k_ia|

Inside a tile of 128 tokens a total is a product with a triangle of ones: what is added are bfloat16s, three of which
make a float32. To it comes the sum of all tiles before it in its sequence, whose own sums are given.

    warpgroup 0   sums up 64 tiles, of one sequence or of several
    3 others      read vectors, if there are any, 64 tokens of a head by turns
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, BFloat16, Bool, Float, Int

from kernels_pallas.gpu.tiles import (
  ROWS,
  TILE,
  WGMMA,
  across,
  down,
  index,
  multiprocessors,
  place_in_ring,
  rounded,
  shared,
  varying_as,
)
from kernels_pallas.sums import Pair, add_pairs, two_sum

_PIECES = 3  # bfloat16s that make a float32
# Added to a number below 2 and taken away again it leaves a multiple of 2 ** -15; a float32 holds any sum of 128 such.
_GRID = 384.0
REGISTERS = 232, 88  # of a thread that sums up and of one that reads: together no more than a block starts with
READERS, _BYTES = 3, 72 * 1024  # of vectors, and what is on its way to them together


def totals(x: Float[Array, "B H T"], *, interpret: Any = None) -> tuple[Float[Array, "B H T"], Float[Array, "B H T"]]:
  """The totals' high and low halves."""
  high, low = _run(x, None, interpret)
  return high, low


def totals_and_sizes(
  x: Float[Array, "B H T"], vectors: Float[Array, "B T H d"], *, interpret: Any = None
) -> tuple[Float[Array, "B H T"], Float[Array, "B H T"], Float[Array, "B H T"]]:
  """The same, and the largest coordinate of each vector, without its sign; of whole ROWS of tokens."""
  assert x.shape[2] % ROWS == 0
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
  summing = tiles.shape[0] // ROWS
  blocks = blocks_of(summing, vectors)

  def kernel(x_ref, high_ref, low_ref, ones_ref, *refs):
    if vectors is None:
      sum_up(x_ref, high_ref, low_ref, ones_ref, *refs)
      return
    vectors_ref, out_high_ref, out_low_ref, largest_ref, *scratch, vectors_smem, vectors_filled = refs
    thread = lax.axis_index("thread")

    @pl.when((thread == 0) & (lax.axis_index("block") < summing))
    def _():
      plgpu.set_max_registers(REGISTERS[0], action="increase")
      sum_up(x_ref, high_ref, low_ref, ones_ref, out_high_ref, out_low_ref, *scratch)

    @pl.when(thread > 0)
    def _():
      plgpu.set_max_registers(REGISTERS[1], action="decrease")

      def keep(b, part, head, largest):
        largest_ref[b, head, pl.ds(part * ROWS, ROWS)] = largest

      find_largest(vectors_ref, vectors_smem, vectors_filled, thread - 1, blocks, keep)

  def sum_up(x_ref, high_ref, low_ref, ones_ref, out_high_ref, out_low_ref, pieces_smem, ones_smem, filled):
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

    inside = totals_in_tiles(given, pieces_smem, ones_smem, filled)
    high, low = add_pairs([down(part, shape) for part in before], inside)
    out_high_ref[pl.ds(first, ROWS), :] = high
    out_low_ref[pl.ds(first, ROWS), :] = low

  outputs = [jax.ShapeDtypeStruct(tiles.shape, f32)] * 2
  scratch = memory_of_sums()
  arrays = [tiles, *ends, ones_until_each()]
  threads: dict[str, Any] = {}
  if vectors is not None:
    arrays.append(vectors)
    outputs.append(jax.ShapeDtypeStruct(x.shape, f32))
    scratch += memory_of_vectors(vectors)
    threads = {"num_threads": 1 + READERS, "thread_name": "thread"}
  found = plgpu.kernel(
    kernel,
    out_type=outputs,
    scratch_types=scratch,
    grid=(blocks,),
    grid_names=("block",),
    interpret=interpret,
    kernel_name="totals" if vectors is None else "totals_and_sizes",
    **threads,
  )(*arrays)
  halves = [half[:count].reshape(whole.shape)[..., :time] for half in found[:2]]
  result: list[Array] = varying_as(x, [*halves, *found[2:]])
  return result


def ones_until_each() -> BFloat16[Array, "tile tile"]:
  """The triangle: its product with a tile's numbers is their running total."""
  return jnp.asarray(np.tri(TILE).T, jnp.bfloat16)


def memory_of_sums() -> list[Any]:
  """Shared memory of `totals_in_tiles`: the pieces, the triangle, and a barrier that tells that it has come."""
  return [
    shared((2, _PIECES, ROWS, TILE), jnp.bfloat16),
    shared((TILE, TILE), jnp.bfloat16),
    plgpu.Barrier(num_arrivals=1),
  ]


def totals_in_tiles(x: Float[Array, "rows tile"], pieces_smem: Any, ones_smem: Any, filled: Any) -> Pair:
  """The running totals of each row."""
  unit, *parts = _on_grid(x, jnp.abs(x).max(axis=1))
  for n, part in enumerate(parts):
    for piece in range(_PIECES):
      high = rounded(part, jnp.bfloat16)
      pieces_smem[n, piece] = high
      part = part - high.astype(jnp.float32)
  plgpu.commit_smem()
  plgpu.barrier_wait(filled)

  def products(*sums: Any) -> tuple[Array, ...]:
    for n, sum_of_part in enumerate(sums):
      for piece in range(_PIECES):
        plgpu.wgmma(sum_of_part, pieces_smem.at[n, piece], ones_smem)
    plgpu.wgmma_wait(0)
    return tuple(sum_of_part[...] for sum_of_part in sums)

  accumulator = plgpu.ACC((ROWS, TILE), jnp.float32)
  inside = pl.run_scoped(products, accumulator, accumulator)
  return two_sum(*(down(unit, x.shape) * part for part in inside))


def memory_of_vectors(vectors: Float[Array, "B T H d"]) -> list[Any]:
  """Shared memory of `find_largest`, for all readers."""
  head_dim, kind = vectors.shape[-1], vectors.dtype
  slots = max(1, _BYTES // (READERS * ROWS * head_dim * kind.itemsize))
  return [shared((READERS, slots, ROWS, head_dim), kind), plgpu.Barrier(num_barriers=READERS * slots)]


def find_largest(
  vectors_ref: Any, smem: Any, filled: Any, reader: Int[Array, ""], blocks: int, keep: Callable[..., None]
) -> None:
  """One of READERS of `blocks` blocks has some vectors come, and keeps the largest coordinate of each.

  `keep` is given the sequence, which 64 tokens of it, the head, and the 64 coordinates, without their signs.
  """
  batch, time, heads, _ = vectors_ref.shape
  slots, smem = smem.shape[1], smem.at[reader]
  turns, step = batch * heads * (time // ROWS), READERS * blocks
  first = reader * blocks + lax.axis_index("block")

  def place(n: Int[Array, ""]) -> tuple[Int[Array, ""], Int[Array, ""], Int[Array, ""]]:
    """(sequence, tokens, head) of the n-th turn: those of all heads lie side by side."""
    row, head = (f(first + n * step, jnp.int32(heads)) for f in (lax.div, lax.rem))
    b, part = (f(row, jnp.int32(time // ROWS)) for f in (lax.div, lax.rem))
    return b, part, head

  def fetch(n: Int[Array, ""]) -> None:
    slot, (b, part, head) = place_in_ring(n, slots), place(n)
    source = vectors_ref.at[b, pl.ds(part * ROWS, ROWS), head]
    plgpu.copy_gmem_to_smem(source, smem.at[slot], filled.at[reader * slots + slot])

  def find(n: Int[Array, ""], none: None) -> None:
    slot = place_in_ring(n, slots)
    plgpu.barrier_wait(filled.at[reader * slots + slot])
    vector = plgpu.load(smem.at[slot], layout=WGMMA, optimized=False).astype(jnp.float32)
    plgpu.commit_smem()  # all have read it
    pl.when(n + slots < mine)(lambda: fetch(n + slots))
    keep(*place(n), jnp.abs(vector).max(axis=1))
    return none

  mine = lax.div(turns - first + step - 1, jnp.int32(step))
  for n in range(slots):
    pl.when(n < mine)(functools.partial(fetch, jnp.int32(n)))
  lax.fori_loop(0, mine, find, None)


def blocks_of(summing: int, vectors: Float[Array, "B T H d"] | None) -> int:
  """Of a grid in which so many blocks sum up, and all read vectors."""
  if vectors is None:
    return summing
  batch, time, heads, _ = vectors.shape
  return max(summing, min(multiprocessors(), -(-batch * heads * (time // ROWS) // READERS)))


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
