"""All that attention over short sequences needs of gates, on Hopper, in one launch, and beside it how long keys are.

    since_start_i = g_m + ... + g_i        g: log gates to base 2; m: the first token of i's tile
    until_end_i   = g_{i+1} + ... + g_n    n: its last one

and the totals of natural logarithms before each tile and at its end. A sequence is no longer than the 64 tiles of a
block of the grid, so nothing need be known of it before; `running.py` has longer ones.
"""

from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from kernels_pallas.gpu.readers import run_beside_readers
from kernels_pallas.gpu.running import memory_of_sums, ones_until_each, row_sums, totals_in_tiles
from kernels_pallas.gpu.tiles import ROWS, TILE, WGMMA, down, index, varying_as
from kernels_pallas.sums import add_pairs
from kernels_pallas.weights import LOG2E

LONGEST = ROWS * TILE  # tokens


class Gates(NamedTuple):
  """Of n tiles, a power of two: those after the last one forget nothing."""

  since_start: Float[Array, "B H T"]
  until_end: Float[Array, "B H T"]  # or 2 to it over `power`, if one was given
  decay: Float[Array, "B H n"]  # the discount across each tile
  totals: Float[Array, "4 B H n"]  # before each tile and at its end, high and low each
  largest: Float[Array, "B H T"] | None  # the largest coordinate of each vector, without its sign


def gates(
  log_gate: Float[Array, "B H T"],
  vectors: Float[Array, "B T H d"] | None = None,
  power: int | None = None,
  *,
  interpret: Any = None,
) -> Gates:
  """Of a sequence of whole tiles and, if vectors are to be read, whole ROWS of them."""
  batch, heads, time = log_gate.shape
  assert time % TILE == 0
  assert time <= LONGEST
  in_sequence = 1 << (time // TILE - 1).bit_length()
  whole = jnp.pad(log_gate, ((0, 0), (0, 0), (0, in_sequence * TILE - time)))
  count = batch * heads * in_sequence
  tiles = jnp.pad(whole.reshape(count, TILE), ((0, -count % ROWS), (0, 0)))
  shape, f32 = (ROWS, TILE), jnp.float32

  def sum_up(x_ref, ones_ref, since_ref, until_ref, decay_ref, totals_ref, ends_smem, *memory):
    pieces_smem, ones_smem, filled = memory
    plgpu.copy_gmem_to_smem(ones_ref, ones_smem, filled)
    rows = pl.ds(lax.axis_index("block") * ROWS, ROWS)
    given = plgpu.load(x_ref.at[rows], layout=WGMMA, optimized=False)
    inside = totals_in_tiles(given, pieces_smem, ones_smem, filled)
    is_last = index(shape, 1, jnp.int32(0)) == TILE - 1
    ends = [jnp.where(is_last, part, 0.0).sum(axis=1) for part in inside]
    since_ref[rows, :] = (inside[0] + inside[1]) * LOG2E
    until_end = sum(down(end, shape) - part for end, part in zip(ends, inside, strict=True)) * LOG2E
    until_ref[rows, :] = until_end if power is None else jnp.exp2(until_end / power)
    decay_ref[rows] = jnp.exp2((ends[0] + ends[1]) * LOG2E)

    for half, end in enumerate(ends):
      ends_smem[half] = end
    plgpu.commit_smem()
    of_tiles = [plgpu.load(ends_smem.at[half], layout=WGMMA.reduce(0), optimized=False) for half in range(2)]
    place, other = (index((ROWS, ROWS), axis, jnp.int32(0)) for axis in range(2))
    before = row_sums(of_tiles, (place - lax.rem(place, jnp.int32(in_sequence)) <= other) & (other < place))
    for n, part in enumerate([*before, *add_pairs(before, ends)]):
      totals_ref[n, rows] = part

  by_token = jax.ShapeDtypeStruct(tiles.shape, f32)
  by_tile = jax.ShapeDtypeStruct(tiles.shape[:1], f32)
  of_totals = jax.ShapeDtypeStruct((4, *by_tile.shape), f32)
  found = run_beside_readers(
    sum_up,
    [tiles, ones_until_each()],
    vectors,
    outputs=[by_token, by_token, by_tile, of_totals],
    scratch=[plgpu.SMEM((2, ROWS), f32), *memory_of_sums()],
    blocks=tiles.shape[0] // ROWS,
    name="gates",
    interpret=interpret,
  )
  *found, largest = varying_as(log_gate, found if vectors is not None else [*found, None])
  since_start, until_end = (x[:count].reshape(whole.shape)[..., :time] for x in found[:2])
  by_sequence = (batch, heads, in_sequence)
  totals = found[3][:, :count].reshape(4, *by_sequence)
  return Gates(since_start, until_end, found[2][:count].reshape(by_sequence), totals, largest)
