"""The attention form's forward pass on Hopper.

    y_i = sum_j B_ij v_j / sum_j B_ij          B_ij = b_ij (q_i . k_j) ** p

Time is cut into tiles. Keys of earlier tiles come discounted to their tile's end (b folded into the key, whose p-th
power carries it), so a block of their weights is one matrix product and p/2 multiplications an element; the sums so far
are multiplied by one number, the tile's decay, when the next one begins. Only inside the query's own tile are gates
exponentials of pairs.

    4 warpgroups   64 queries each (2, if heads are wide): while one raises scores, others have products under way
    the last one   loads
    grid           one or two tiles of queries each, those that see most keys first

Products of scores and values have bfloat16 operands, for weights span many powers of ten; scores have float16 ones,
because the power multiplies their rounding, and the inputs are scaled so that they fit.
"""

from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike
from jaxtyping import Array, BFloat16, Float, Float16, Int

from kernels_pallas.gpu.tiles import (
  IN_TILE,
  LOADING_REGISTERS,
  REGISTERS,
  ROWS,
  TILE,
  WGMMA,
  across,
  by_eights,
  down,
  index,
  place_in_grid,
  rounded,
  shared,
  unless_stateless,
  varying_as,
  wait_if,
)
from kernels_pallas.weights import SMALLEST, even_power


class Keys(NamedTuple):
  """Keys and gates as the kernels read them. Gates are logarithms to base 2, counted from the start of a tile."""

  folded: Float16[Array, "B T H d"]  # discounted to the end of their tile
  plain: Float16[Array, "B T H d"]
  gate: Float[Array, "B H T"]  # of a query: the discount since its tile began
  pull: Float[Array, "B H T"]  # of a key: the same, less the logarithm of its scale
  decay: Float[Array, "B H tiles"]  # the discount across each tile
  first: Int[Array, "B H tiles"]  # the earliest tile that is read: by a block of the grid, its first tile's


class Carried(NamedTuple):
  """What each query has found in a state. Where rounding left a negative normaliser there is nothing to be found."""

  numerator: Float[Array, "B T Hq dv"]
  normaliser: Float[Array, "B Hq T"]
  has_state: Int[Array, "B H"] | None = None  # 0: in the head there was none, and the other two are anything


class Outputs(NamedTuple):
  """What each query gathers: y = high + low, and the normaliser in the keys' scale."""

  high: Float[Array, "B T Hq dv"]
  low: Float[Array, "B T Hq dv"] | None  # what rounding `high` lost
  normaliser: Float[Array, "B Hq T"]


def forward(
  q: Float16[Array, "B T Hq d"],
  keys: Keys,
  v: BFloat16[Array, "B T H dv"],
  carried: Carried | None = None,
  *,
  power: int,
  dtype: DTypeLike,
  save_low: bool,
  interpret: Any = None,
) -> Outputs:
  """Attention over whole blocks of queries, and what is carried; y in `dtype`."""
  batch, time, query_heads, head_dim = q.shape
  heads, value_dim = v.shape[2:]
  group, computing = query_heads // heads, 4 if max(head_dim, value_dim) <= 64 else 2  # what registers are enough for
  slots = 4 if head_dim + value_dim <= 128 else 3  # of keys and values, by blocks
  pairs = computing // 2  # of warpgroups, whose queries are those of one tile
  tiles = time // TILE // pairs
  assert time % (TILE * pairs) == 0
  wide = value_dim > 64  # there is no room for what wide heads carry
  f32 = jnp.float32

  def kernel(q_ref, folded_ref, k_ref, v_ref, gate_ref, pull_ref, decay_ref, first_ref, *more):
    carried_refs: Any
    carried_refs, more = jax.tree.unflatten(structure, more[: len(leaves)]), more[len(leaves) :]
    (y_ref, low_ref, normaliser_ref), scratch = (
      (more[:3], more[3:]) if save_low else ((more[0], None, more[1]), more[2:])
    )
    (q_smem, y_smem), k_smem, v_smem, low_smem, normaliser_smem, *others = scratch
    carried_smem, weight_smem, gate_smem, pull_smem, *barriers = others
    q_filled, carried_filled, k_filled, k_freed, v_filled, v_freed, *staging = barriers
    item, thread = lax.axis_index("block"), lax.axis_index("thread")
    row, n = place_in_grid(item, batch * query_heads, tiles)
    b, head = (f(row, jnp.int32(query_heads)) for f in (lax.div, lax.rem))
    kv, first_token, own = lax.div(head, jnp.int32(group)), n * TILE * pairs, n * pairs
    first = first_ref[b, kv, own]
    # Blocks of 64 keys in the order in which they come: folded ones of tiles from `first` on, those of the first tile
    # of queries among them if there is a second; then plain ones of the queries' own tiles.
    plain = (own - first + pairs - 1) * IN_TILE
    stop = plain + pairs * IN_TILE
    states = unless_stateless(1, None if carried is None else carried_refs.has_state, b, kv)

    def slot_of(j):
      return lax.rem(j, jnp.int32(slots))

    @pl.when(thread < computing)
    def compute():
      plgpu.set_max_registers(REGISTERS[computing], action="increase")
      pair, second = (f(thread, jnp.int32(2)) for f in (lax.div, lax.rem))
      tile, near = own + pair, plain + pair * IN_TILE
      token, queries = first_token + thread * ROWS, q_smem.at[thread]
      accumulator = plgpu.ACC((ROWS, value_dim), f32)
      plgpu.barrier_wait(q_filled)

      def free(freed, j):
        plgpu.barrier_arrive(freed.at[slot_of(j)])

      def pass_by(start, stop):
        """Sees blocks come that others read: a barrier that went on twice unseen would look as if it had not."""

        def see(j, none):
          for filled, freed in ((k_filled, k_freed), (v_filled, v_freed)):
            plgpu.barrier_wait(filled.at[slot_of(j)])
            free(freed, j)
          return none

        lax.fori_loop(start, stop, see, None)

      def scores(j):
        def product(s):
          plgpu.wgmma(s, queries, k_smem.at[slot_of(j)].transpose((1, 0)))
          return s[...]

        plgpu.barrier_wait(k_filled.at[slot_of(j)])
        return pl.run_scoped(product, plgpu.ACC((ROWS, ROWS), f32))

      def gather(sums, weights, j):
        plgpu.barrier_wait(v_filled.at[slot_of(j)])
        values = v_smem.at[slot_of(j)]
        if not staging:
          plgpu.wgmma(sums, weights, values)
          return

        def product(added):
          plgpu.wgmma(added, staging[0].at[thread], values)
          return added[...]

        # The interpreter's wgmma takes no operand from registers, and its accumulators cannot be multiplied.
        staging[0][thread] = weights
        plgpu.commit_smem()
        sums[...] = sums[...] + pl.run_scoped(product, accumulator)

      def far_tile(m, carry, sums):
        normaliser, decay = carry
        decay_of_next = decay_ref[b, kv, m + 1]
        sums[...] = sums[...] * decay
        normaliser = normaliser * decay
        for block in range(IN_TILE):
          j = (m - first) * IN_TILE + block
          s = scores(j)
          free(k_freed, j)
          if block > 0:  # those products have come before the scores
            free(v_freed, j - 1)
          weights = even_power(s, power)
          # The barrier: ptxas is short of registers if sums wait for products to be under way.
          normaliser, weights = lax.optimization_barrier((normaliser + by_eights(weights), weights.astype(v.dtype)))
          gather(sums, weights, j)
          if value_dim < ROWS:  # or ptxas would overlap more than it has registers for
            plgpu.wgmma_wait(0)
        plgpu.wgmma_wait(0)
        free(v_freed, j)
        return normaliser, decay_of_next

      def near_block(block, normaliser, sums, masked):
        j, first_key = near + block, pair * TILE + block * ROWS
        s = scores(j)
        pull = plgpu.load(pull_smem.at[pl.ds(first_key, ROWS)], layout=WGMMA.reduce(0), optimized=False)
        exponent = down(gate, s.shape) - across(pull, s.shape)
        if masked:
          seen = index(s.shape, 1, jnp.int32(0)) <= index(s.shape, 0, jnp.int32(0))
          exponent = jnp.where(seen, exponent, -jnp.inf)
        weights = rounded(even_power(s, power) * jnp.exp2(exponent), v.dtype)
        gather(sums, weights, j)
        # Of the rounded weights, so that a row of one key gives that key's value exactly.
        normaliser = normaliser + by_eights(weights.astype(f32))
        plgpu.wgmma_wait(0)
        free(k_freed, j)
        free(v_freed, j)
        return normaliser

      def gathered(sums):
        if staging:
          sums[...] = jnp.zeros(sums.shape, f32)
        normaliser = plgpu.layout_cast(jnp.zeros((ROWS, 8), f32), WGMMA)
        carry = normaliser, decay_ref[b, kv, first]
        normaliser, _ = lax.fori_loop(0, tile - first, lambda i, carry: far_tile(first + i, carry, sums), carry)
        pass_by((tile - first) * IN_TILE, near)
        since_start = jnp.exp2(gate)
        sums[...] = sums[...] * down(since_start, sums.shape)
        normaliser = normaliser * down(since_start, normaliser.shape)
        normaliser = lax.fori_loop(0, second, lambda _, x: near_block(0, x, sums, False), normaliser)
        normaliser = near_block(second, normaliser, sums, True)
        return sums[...], normaliser.sum(axis=1)

      rows = pl.ds(token, ROWS)
      gate = plgpu.load(gate_smem.at[thread], layout=WGMMA.reduce(1), optimized=False)
      total, normaliser = gathered(staging[1].at[thread]) if staging else pl.run_scoped(gathered, accumulator)

      def add_state(_, sums):
        total, normaliser = sums
        plgpu.barrier_wait(carried_filled)
        source = carried_refs.numerator.at[b, rows, head] if wide else carried_smem.at[thread]
        weight = plgpu.load(weight_smem.at[thread], layout=WGMMA.reduce(1), optimized=False)
        heard = weight >= 0
        from_state = plgpu.load(source, layout=WGMMA, optimized=not wide).astype(f32)
        total = total + from_state * down(jnp.where(heard, 1.0, 0.0), total.shape)
        return total, normaliser + jnp.where(heard, weight, 0.0)

      if carried is not None and carried.has_state is None:
        total, normaliser = add_state(0, (total, normaliser))
      elif carried is not None:
        total, normaliser = lax.fori_loop(0, states, add_state, (total, normaliser))
      found = normaliser > SMALLEST
      inverse = jnp.where(found, 1.0 / jnp.where(found, normaliser, 1.0), 0.0)
      y = total * down(inverse, total.shape)
      high = rounded(y, dtype)
      y_smem[thread] = high
      normaliser_smem[thread] = normaliser
      if save_low:
        low_smem[thread] = (y - high.astype(f32)).astype(jnp.bfloat16)
      plgpu.commit_smem()
      plgpu.copy_smem_to_gmem(y_smem.at[thread], y_ref.at[b, rows, head])
      plgpu.copy_smem_to_gmem(normaliser_smem.at[thread], normaliser_ref.at[b, head, rows])
      if save_low:
        plgpu.copy_smem_to_gmem(low_smem.at[thread], low_ref.at[b, rows, head])
      plgpu.wait_smem_to_gmem(0, wait_read_only=True)
      pass_by(near + second + 1, stop)

    @pl.when(thread == computing)
    def load():
      plgpu.set_max_registers(LOADING_REGISTERS, action="decrease")
      plgpu.copy_gmem_to_smem(pull_ref.at[b, kv, pl.ds(first_token, TILE * pairs)], pull_smem, q_filled)
      for w in range(computing):
        rows = pl.ds(first_token + w * ROWS, ROWS)
        plgpu.copy_gmem_to_smem(q_ref.at[b, rows, head], q_smem.at[w], q_filled)
        plgpu.copy_gmem_to_smem(gate_ref.at[b, kv, rows], gate_smem.at[w], q_filled)
        if carried is not None:

          @pl.when(states > 0)
          def _(w=w, rows=rows):
            plgpu.copy_gmem_to_smem(carried_refs.normaliser.at[b, head, rows], weight_smem.at[w], carried_filled)
            if not wide:
              plgpu.copy_gmem_to_smem(carried_refs.numerator.at[b, rows, head], carried_smem.at[w], carried_filled)

      def copy(keys_ref, first_block):
        def step(j, none):
          slot, rows = slot_of(j), pl.ds((first_block + j) * ROWS, ROWS)
          wait_if(j >= slots, k_freed.at[slot])
          plgpu.copy_gmem_to_smem(keys_ref.at[b, rows, kv], k_smem.at[slot], k_filled.at[slot])
          wait_if(j >= slots, v_freed.at[slot])
          plgpu.copy_gmem_to_smem(v_ref.at[b, rows, kv], v_smem.at[slot], v_filled.at[slot])
          return none

        return step

      lax.fori_loop(0, plain, copy(folded_ref, first * IN_TILE), None)
      lax.fori_loop(plain, stop, copy(k_ref, own * IN_TILE - plain), None)

      def settle(j, none):  # leave no arrival unseen
        plgpu.barrier_wait(k_freed.at[slot_of(j)])
        plgpu.barrier_wait(v_freed.at[slot_of(j)])
        return none

      lax.fori_loop(jnp.maximum(stop - slots, 0), stop, settle, None)

  y_shape = (batch, time, query_heads, value_dim)
  outputs = [jax.ShapeDtypeStruct(y_shape, dtype), jax.ShapeDtypeStruct((batch, query_heads, time), f32)]
  if save_low:
    outputs.insert(1, jax.ShapeDtypeStruct(y_shape, jnp.bfloat16))
  filled, freed = plgpu.Barrier(num_barriers=slots), plgpu.Barrier(num_arrivals=computing, num_barriers=slots)
  q_memory, y_memory = shared((computing, ROWS, head_dim), q.dtype), shared((computing, ROWS, value_dim), dtype)
  # A warpgroup's outputs where its queries were.
  in_place = interpret is None and head_dim == value_dim and jnp.dtype(dtype).itemsize == 2
  staging = (
    [] if interpret is None else [shared((computing, ROWS, n), t) for n, t in ((ROWS, v.dtype), (value_dim, f32))]
  )
  scratch = [
    plgpu.RefUnion(q_memory, y_memory) if in_place else (q_memory, y_memory),
    shared((slots, ROWS, head_dim), q.dtype),
    shared((slots, ROWS, value_dim), v.dtype),
    shared((computing, ROWS, value_dim), jnp.bfloat16) if save_low else plgpu.SMEM((1,), f32),
    plgpu.SMEM((computing, ROWS), f32),
    plgpu.SMEM((1,), f32) if carried is None or wide else shared((computing, ROWS, value_dim), carried.numerator.dtype),
    plgpu.SMEM((computing, ROWS), f32),
    plgpu.SMEM((computing, ROWS), f32),
    plgpu.SMEM((TILE * pairs,), f32),
    plgpu.Barrier(num_arrivals=1 + 2 * computing),
    plgpu.Barrier(num_arrivals=computing if wide else 2 * computing),
    *(filled, freed) * 2,
    *staging,
  ]
  leaves, structure = jax.tree.flatten(carried)
  results = plgpu.kernel(
    kernel,
    out_type=outputs,
    scratch_types=scratch,
    grid=(tiles * batch * query_heads,),
    grid_names=("block",),
    num_threads=computing + 1,
    thread_name="thread",
    compiler_params=plgpu.CompilerParams(approx_math=True),
    interpret=interpret,
    kernel_name="attention_forward",
  )(q, *keys[:2], v, *keys[2:], *leaves)
  results = varying_as(q, results)
  return Outputs(*results) if save_low else Outputs(results[0], None, results[1])
