"""All that attention over short sequences needs of gates, on Hopper, in one launch, and of betas, or how long keys are.

    since_start_i = g_m + ... + g_i        g: log gates to base 2; m: the first token of i's tile
    until_end_i   = g_{i+1} + ... + g_n    n: its last one

and the totals of natural logarithms before each tile and at its end; and of betas the total at the first of every 64
tokens, and since then. A sequence is no longer than the 64 tiles of a block of the grid, so nothing need be known of it
before; `running.py` has longer ones. Blocks of betas follow those of gates.
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
from kernels_pallas.gpu.tiles import IN_TILE, ROWS, TILE, WGMMA, down, index, varying_as
from kernels_pallas.sums import add_pairs, leading_bits
from kernels_pallas.weights import LOG2E

LONGEST = ROWS * TILE  # tokens


class Turning(NamedTuple):
  """The totals of betas, as `angles.Angles` need them."""

  first: Float[Array, "2 B H n"]  # at the first of each ROWS tokens, high and low
  since: Float[Array, "2 B H T"]  # from there on: the first 12 bits, and the rest


class Gates(NamedTuple):
  """Of n tiles, a power of two: those after the last one forget nothing."""

  since_start: Float[Array, "B H T"]
  until_end: Float[Array, "B H T"]  # or 2 to it over `power`, if one was given
  decay: Float[Array, "B H n"]  # the discount across each tile
  totals: Float[Array, "4 B H n"]  # before each tile and at its end, high and low each
  largest: Float[Array, "B H T"] | None  # the largest coordinate of each vector, without its sign
  turning: Turning | None


def gates(
  log_gate: Float[Array, "B H T"],
  vectors: Float[Array, "B T H d"] | None = None,
  power: int | None = None,
  *,
  beta: Float[Array, "B H T"] | None = None,
  interpret: Any = None,
) -> Gates:
  """Of a sequence of whole tiles and, if vectors are to be read, whole ROWS of them; or, beside them, of betas."""
  batch, heads, time = log_gate.shape
  assert time % TILE == 0
  assert time <= LONGEST
  assert vectors is None or beta is None
  in_sequence = 1 << (time // TILE - 1).bit_length()
  given = log_gate[None] if beta is None else jnp.stack([log_gate, beta])
  whole = jnp.pad(given, ((0, 0), (0, 0), (0, 0), (0, in_sequence * TILE - time)))
  count = batch * heads * in_sequence
  tiles = jnp.pad(whole.reshape(-1, count, TILE), ((0, 0), (0, -count % ROWS), (0, 0)))
  shape, f32 = (ROWS, TILE), jnp.float32
  many = tiles.shape[1]
  blocks = many // ROWS
  outputs = [jax.ShapeDtypeStruct(x, f32) for x in ((many, TILE), (many, TILE), (many,), (4, many))]
  of_turning = [jax.ShapeDtypeStruct((2, *x), f32) for x in ((IN_TILE, many), (many, TILE)) if beta is not None]

  def sum_up(x_ref, ones_ref, since_ref, until_ref, decay_ref, totals_ref, *refs):
    turning_refs, (ends_smem, *memory) = refs[: len(of_turning)], refs[len(of_turning) :]
    ones_smem, filled, *staging = memory
    plgpu.copy_gmem_to_smem(ones_ref, ones_smem, filled)
    kind, block = (f(lax.axis_index("block"), jnp.int32(blocks)) for f in (lax.div, lax.rem))
    rows = pl.ds(block * ROWS, ROWS)
    x = plgpu.load(x_ref.at[kind, rows], layout=WGMMA, optimized=False)
    inside = totals_in_tiles(x, ones_smem, filled, *staging)
    column = index(shape, 1, jnp.int32(0))

    def at(token):
      return [jnp.where(column == token, part, 0.0).sum(axis=1) for part in inside]

    ends = at(TILE - 1)
    for half, end in enumerate(ends):
      ends_smem[half] = end
    plgpu.commit_smem()
    of_tiles = [plgpu.load(ends_smem.at[half], layout=WGMMA.reduce(0), optimized=False) for half in range(2)]
    place, other = (index((ROWS, ROWS), axis, jnp.int32(0)) for axis in range(2))
    before = row_sums(of_tiles, (place - lax.rem(place, jnp.int32(in_sequence)) <= other) & (other < place))

    def of_gates():
      since_ref[rows, :] = (inside[0] + inside[1]) * LOG2E
      until_end = sum(down(end, shape) - part for end, part in zip(ends, inside, strict=True)) * LOG2E
      until_ref[rows, :] = until_end if power is None else jnp.exp2(until_end / power)
      decay_ref[rows] = jnp.exp2((ends[0] + ends[1]) * LOG2E)
      for n, part in enumerate([*before, *add_pairs(before, ends)]):
        totals_ref[n, rows] = part

    def of_betas():
      first_ref, since_first_ref = turning_refs
      early, late = (at(n * ROWS) for n in range(IN_TILE))
      for n, first in enumerate((early, late)):
        for half, part in enumerate(add_pairs(before, first)):
          first_ref[half, n, rows] = part
      firsts = zip(early, late, strict=True)
      less = [-jnp.where(column < ROWS, down(a, shape), down(b, shape)) for a, b in firsts]
      high, low = add_pairs(inside, less)
      coarse = leading_bits(high)
      since_first_ref[0, rows, :] = coarse
      since_first_ref[1, rows, :] = (high - coarse) + low

    if beta is None:
      of_gates()
    else:
      pl.when(kind == 0)(of_gates)
      pl.when(kind > 0)(of_betas)

  found = run_beside_readers(
    sum_up,
    [tiles, ones_until_each()],
    vectors,
    outputs=[*outputs, *of_turning],
    scratch=[plgpu.SMEM((2, ROWS), f32), *memory_of_sums(interpret)],
    blocks=tiles.shape[0] * blocks,
    name="gates",
    interpret=interpret,
  )
  since_start, until_end, decay, totals, *rest = varying_as(log_gate, found)

  def by_token(x):
    return x[..., :count, :].reshape(*x.shape[:-2], batch, heads, in_sequence * TILE)[..., :time]

  def by_tile(x):
    return x[..., :count].reshape(*x.shape[:-1], batch, heads, in_sequence)

  turning = None
  if beta is not None:
    first = jnp.moveaxis(by_tile(rest[0]), 1, -1).reshape(2, batch, heads, -1)
    turning = Turning(first[..., : time // ROWS], by_token(rest[1]))
  largest = None if vectors is None else rest[0]
  return Gates(by_token(since_start), by_token(until_end), by_tile(decay), by_tile(totals), largest, turning)
