"""Keys and values into states on Hopper, p = 2: every chunk's state, and the scan over them, in one kernel.

    S[a] <- decay S[a] + sum_j (x_ja v_j)^T k_j         one matrix dv x d for each coordinate a of the key

A block of the grid owns a few coordinates a of one piece and walks the chunks in order, so that a state never leaves
the registers but to be written, once, before its chunk begins. Features are not expanded: v^T times one row of x, in
registers, is the left operand.

    2 to 4 warpgroups   some coordinates each
    the last one        loads
"""

from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, BFloat16, Float, Int

from kernels_pallas.gpu.pieces import Pieces, coordinates
from kernels_pallas.gpu.tiles import (
  LOADING_REGISTERS,
  REGISTERS,
  ROWS,
  STATE_WIDTH,
  WGMMA,
  accumulate,
  across,
  down,
  fastest,
  multiply,
  place_in_ring,
  shared,
  unless_stateless,
  varying_as,
  wait_for_all,
  wait_if,
)

# Warpgroups that compute, and the coordinates of each: with more of them registers would not be enough.
_SHARES = (2, 4), (3, 2), (4, 1)


class States(NamedTuple):
  """The state that each chunk finds, the last one, and inner products; in `pieces`, of which there are m.

  With the states T that another scan found, of the chunk after c in time: S[a] T[a], and S[a] T[b], b being the other
  one of a's pair of coordinates; both still to be summed over the last axis. `symmetric_write` has found S[a]^T, and of
  it not all.
  """

  found: BFloat16[Array, "B H m n w w w"]
  final: Float[Array, "B H m w w w"]
  inner: Float[Array, "B H m n w 2 w"] | None
  squares: Float[Array, "B H n"] | None  # of all numbers of a found state, summed; none of a reverse scan


def write(
  x: BFloat16[Array, "B Hq d T"],
  v: BFloat16[Array, "B T Hq dv"],
  k: BFloat16[Array, "B T Hq d"],
  decay: Float[Array, "B H n"],
  initial: Float[Array, "B H m w w w"] | None,
  *,
  others: BFloat16[Array, "B H m n w w w"] | None = None,
  has_state: Int[Array, "B H"] | None = None,
  centre: BFloat16[Array, "B H dv"] | None = None,
  reverse: bool = False,
  interpret: Any = None,
) -> States:
  """Scans over the chunks, from the last to the first if `reverse`; several heads may share a state.

  The discount until the chunk is left is in `x`. `others`, for a reverse scan, are the states that the forward one
  found, to take inner products with. States are of values less `centre`, and so must `initial` be. Heads without a
  state (`has_state` 0) are left out: what they find is anything.
  """
  assert others is None or reverse
  batch, all_heads, head_dim, time = x.shape
  heads, count = decay.shape[1:]
  pieces, width = Pieces.of(head_dim, v.shape[3]), STATE_WIDTH
  group, blocks = all_heads // heads, time // count // ROWS  # blocks of tokens in a chunk
  computing, each = _shares(batch * heads * pieces.total)
  owned = computing * each  # coordinates
  visits, slices = group * blocks, -(-width // owned)
  slots = 6 if others is None else 4
  given = initial, others, has_state, centre

  def kernel(x_ref, v_ref, k_ref, decay_ref, *more):
    refs = list(more)
    others_ref: Any
    has_state_ref: Any
    centre_ref: Any
    initial_ref, others_ref, has_state_ref, centre_ref = (None if x is None else refs.pop(0) for x in given)
    found_ref, final_ref = refs.pop(0), refs.pop(0)
    inner_ref: Any = None if others is None else refs.pop(0)
    squares_ref: Any = None if reverse else refs.pop(0)
    x_smem, v_smem, k_smem, s_smem, others_smem, filled, freed, others_filled, others_freed, *staging = refs
    item, thread = lax.axis_index("block"), lax.axis_index("thread")
    rest, share = (f(item, jnp.int32(slices)) for f in (lax.div, lax.rem))
    row, number = (f(rest, jnp.int32(pieces.total)) for f in (lax.div, lax.rem))
    b, head = (f(row, jnp.int32(heads)) for f in (lax.div, lax.rem))
    piece = pieces.at(number)
    chunks = unless_stateless(count, has_state_ref, b, head)
    first = jnp.minimum(share * owned, width - owned)  # the last block does again what fills it up

    def chunk_of(i):
      return count - 1 - i if reverse else i

    @pl.when(thread < computing)
    def compute():
      plgpu.set_max_registers(REGISTERS[computing], action="increase")
      places = [thread * each + n for n in range(each)]  # of the coordinates among the block's
      if centre is not None:
        middle = plgpu.load(centre_ref.at[b, head, coordinates(piece.u)], layout=WGMMA.reduce(1), optimized=False)

      def store(states, target):
        """Leaves a copy of the states in memory."""
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for state, place in zip(states, places, strict=True):
          s_smem[place] = state.astype(k.dtype)
        plgpu.commit_smem()
        for place in places:
          plgpu.copy_smem_to_gmem(s_smem.at[place], target.at[first + place])

      def fetch_others(c):
        """All warpgroups' by the first."""

        @pl.when(thread == 0)
        def _():
          for n in range(owned):
            plgpu.copy_gmem_to_smem(others_ref.at[b, head, number, c, first + n], others_smem.at[n], others_filled)

      def multiply_with_others(states, c):
        plgpu.barrier_wait(others_filled)
        for state, place in zip(states, places, strict=True):
          for m, other in enumerate((place, place ^ 1)):
            found = plgpu.load(others_smem.at[other], layout=WGMMA, optimized=False).astype(jnp.float32)
            inner_ref[b, head, number, c, first + place, m] = (state * found).sum(axis=1)
        plgpu.commit_smem()
        plgpu.barrier_arrive(others_freed)

      def advance(i, states):
        c = chunk_of(i)
        kept = decay_ref[b, head, c]  # early, for it comes from afar
        store(states, found_ref.at[b, head, number, c])
        if not reverse:
          for state, place in zip(states, places, strict=True):
            squares_ref[b, head, number, c, first + place] = (state * state).sum(axis=1)
        if others is not None:

          @pl.when(i > 0)  # after the last chunk there is no other state
          def _():
            multiply_with_others(states, c)

          @pl.when(i < count - 1)
          def _():
            wait_if((thread == 0) & (i > 0), others_freed)
            fetch_others(c)

        decayed = tuple(state * kept for state in states)

        def add(*sums):
          def visit(n, none):
            visited = i * visits + n
            slot = place_in_ring(visited, slots)
            plgpu.barrier_wait(filled.at[slot])
            values = plgpu.load(v_smem.at[slot].transpose((1, 0)), layout=WGMMA)
            if centre is not None:
              values = values - down(middle, values.shape)
            for total, place in zip(sums, places, strict=True):
              along = plgpu.load(x_smem.at[slot, place], layout=WGMMA.reduce(0), optimized=False)
              left = values * across(along, values.shape)
              multiply(total, left, k_smem.at[slot], staging[0].at[thread] if staging else None)
            plgpu.wgmma_wait(0)  # for all: ptxas gives the registers of left operands to the next block's
            plgpu.barrier_arrive(freed.at[slot])
            return none

          lax.fori_loop(0, jnp.int32(visits), visit, None)

        return accumulate(add, decayed, interpret)

      if initial_ref is None:
        states = (plgpu.layout_cast(jnp.zeros((width, width), jnp.float32), WGMMA),) * each
      else:  # times 1: to shard_map what was loaded varies over its axes, and what was computed does not
        matrices = initial_ref.at[b, head, number]
        states = tuple(1 * plgpu.load(matrices.at[first + n], layout=WGMMA, optimized=False) for n in places)
      states = lax.fori_loop(0, chunks, advance, states)
      if others is not None:
        wait_if((thread == 0) & (chunks > 1), others_freed)  # leave no arrival unseen
      for state, place in zip(states, places, strict=True):
        final_ref[b, head, number, first + place] = state
      plgpu.wait_smem_to_gmem(0)

    @pl.when(thread == computing)
    def load():
      plgpu.set_max_registers(LOADING_REGISTERS, action="decrease")

      def copy(visited, none):
        slot = place_in_ring(visited, slots)
        c, n = chunk_of(lax.div(visited, jnp.int32(visits))), lax.rem(visited, jnp.int32(visits))
        source = head * group + lax.div(n, jnp.int32(blocks))
        at = pl.ds((c * blocks + lax.rem(n, jnp.int32(blocks))) * ROWS, ROWS)
        wait_if(visited >= slots, freed.at[slot])
        rows = pl.ds(piece.i * width + first, owned)
        plgpu.copy_gmem_to_smem(x_ref.at[b, source, rows, at], x_smem.at[slot], filled.at[slot])
        plgpu.copy_gmem_to_smem(v_ref.at[b, at, source, coordinates(piece.u)], v_smem.at[slot], filled.at[slot])
        plgpu.copy_gmem_to_smem(k_ref.at[b, at, source, coordinates(piece.j)], k_smem.at[slot], filled.at[slot])
        return none

      total = chunks * visits
      lax.fori_loop(0, total, copy, None)
      wait_for_all(freed, total)

  scratch = [
    plgpu.SMEM((slots, owned, ROWS), x.dtype),
    shared((slots, ROWS, width), v.dtype),
    shared((slots, ROWS, width), k.dtype),
    shared((owned, width, width), k.dtype),
    plgpu.SMEM((1,), jnp.float32) if others is None else shared((owned, width, width), others.dtype),
    plgpu.Barrier(num_arrivals=3, num_barriers=slots),
    plgpu.Barrier(num_arrivals=computing, num_barriers=slots),
    plgpu.Barrier(num_arrivals=owned),
    plgpu.Barrier(num_arrivals=computing),
    *((shared((computing, width, ROWS), v.dtype),) if interpret is not None else ()),
  ]
  shape = (batch, heads, pieces.total)
  outputs = [
    jax.ShapeDtypeStruct((*shape, count, width, width, width), k.dtype),
    jax.ShapeDtypeStruct((*shape, width, width, width), jnp.float32),
  ]
  if others is not None:
    outputs.append(jax.ShapeDtypeStruct((*shape, count, width, 2, width), jnp.float32))
  if not reverse:
    outputs.append(jax.ShapeDtypeStruct((*shape, count, width, width), jnp.float32))
  results = plgpu.kernel(
    kernel,
    out_type=outputs,
    scratch_types=scratch,
    grid=(batch * heads * pieces.total * slices,),
    grid_names=("block",),
    num_threads=computing + 1,
    thread_name="thread",
    compiler_params=plgpu.CompilerParams(approx_math=True),
    interpret=interpret,
    kernel_name="state_write",
  )(x, v, k, decay, *(array for array in given if array is not None))
  found, final, *more = varying_as(x, results)
  inner = None if others is None else more.pop(0)
  return States(found, final, inner, None if reverse else jnp.sum(more[0], axis=(2, 4, 5)))


def _shares(rows: int) -> tuple[int, int]:
  """Those with which the chip is done first."""
  return fastest(_SHARES, lambda owned: rows * -(-STATE_WIDTH // owned))
