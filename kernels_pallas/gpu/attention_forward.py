"""The attention form's forward pass on Hopper.

    y_i = sum_j B_ij v_j / sum_j B_ij          B_ij = b_ij (q_i . k_j) ** p

Time is cut into tiles. Keys of earlier tiles come discounted to their tile's end (b folded into the key, whose p-th
power carries it), so a block of their weights is one matrix product and p/2 multiplications an element; the sums so far
are multiplied by one number, the tile's decay, when the next one begins. Only inside the query's own tile are gates
exponentials of pairs.

    warpgroups 0, 1   64 queries each; the scores of the next block are computed while those of this one are raised
    warpgroup 2       loads
    grid              a tile of 128 queries each, those that see most keys first

Products of scores and values have bfloat16 operands, for weights span many powers of ten; scores have float16 ones,
because the power multiplies their rounding, and the inputs are scaled so that they fit.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike
from jaxtyping import Array, BFloat16, Float, Float16, Int

from kernels_pallas.gpu.tiles import (
  ROWS,
  TILE,
  WGMMA,
  across,
  down,
  index,
  place_in_grid,
  rounded,
  shared,
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
  first: Int[Array, "B H tiles"]  # the earliest tile that a tile's queries can still see


class Carried(NamedTuple):
  """What each query has found in a state. Where rounding left a negative normaliser there is nothing to be found."""

  numerator: Float[Array, "B T Hq dv"]
  normaliser: Float[Array, "B Hq T"]


class Outputs(NamedTuple):
  """What each query gathers: y = high + low, and the normaliser in the keys' scale."""

  high: Float[Array, "B T Hq dv"]
  low: Float[Array, "B T Hq dv"] | None  # what rounding `high` lost
  normaliser: Float[Array, "B Hq T"]


def block_of_keys(head_dim: int, value_dim: int) -> int:
  """Keys in a block of scores: as many as registers and shared memory hold."""
  return 128 if max(head_dim, value_dim) <= 64 else 64


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
  """Attention over whole tiles of tokens, and what is carried; y in `dtype`."""
  batch, time, query_heads, head_dim = q.shape
  heads, value_dim = v.shape[2:]
  group, columns = query_heads // heads, block_of_keys(head_dim, value_dim)
  slots = 4 if head_dim + value_dim <= 128 else 3  # of keys and values
  blocks, tiles = TILE // columns, time // TILE
  wide = value_dim > 64  # there is no room for what wide heads carry

  def kernel(q_ref, folded_ref, k_ref, v_ref, gate_ref, pull_ref, decay_ref, first_ref, *more):
    carried_refs, more = (None, more) if carried is None else (more[:2], more[2:])
    (y_ref, low_ref, normaliser_ref), scratch = (
      (more[:3], more[3:]) if save_low else ((more[0], None, more[1]), more[2:])
    )
    q_smem, k_smem, v_smem, y_smem, low_smem, normaliser_smem, carried_smem, gate_smem, pull_smem, *barriers = scratch
    q_filled, carried_filled, k_filled, k_freed, v_filled, v_freed, *staging = barriers
    item, thread = lax.axis_index("block"), lax.axis_index("thread")
    row, n = place_in_grid(item, batch * query_heads, tiles)
    b, head = (f(row, jnp.int32(query_heads)) for f in (lax.div, lax.rem))
    kv, first_token = lax.div(head, jnp.int32(group)), n * TILE
    first = first_ref[b, kv, n]
    # Blocks of keys: from `start`, from `near` on in the queries' own tile.
    start, near, stop = first * blocks, n * blocks, (n + 1) * blocks

    def slot_of(j):
      return lax.rem(j - start, jnp.int32(slots))

    @pl.when(thread < 2)
    def compute():
      plgpu.set_max_registers(232, action="increase")

      def gather(sums, weights, slot):
        if staging:  # the interpreter's wgmma takes no operand from registers
          staging[0][thread] = weights
          plgpu.commit_smem()
          weights = staging[0].at[thread]
        plgpu.wgmma(sums, weights, v_smem.at[slot])

      token = first_token + thread * ROWS
      queries = q_smem.at[thread]
      plgpu.barrier_wait(q_filled)

      def scores(j):
        def product(s):
          plgpu.wgmma(s, queries, k_smem.at[slot_of(j)].transpose((1, 0)))
          return s[...]

        plgpu.barrier_wait(k_filled.at[slot_of(j)])
        s = pl.run_scoped(product, plgpu.ACC((ROWS, columns), jnp.float32))
        plgpu.barrier_arrive(k_freed.at[slot_of(j)])
        return s

      def far_tiles(m, count, carry):
        s, total, normaliser = carry
        decays = [decay_ref[b, kv, m + later] for later in range(count)]

        def far_blocks(sums):
          now, summed = s, nothing
          for block in range(count * blocks):
            j = m * blocks + block
            plgpu.barrier_wait(k_filled.at[slot_of(j + 1)])

            def overlapped(following, j=j, later=block // blocks + 1, now=now, summed=summed):
              plgpu.wgmma(following, queries, k_smem.at[slot_of(j + 1)].transpose((1, 0)))
              plgpu.barrier_wait(v_filled.at[slot_of(j)])  # ptxas then issues the whole product before the powers
              weights = even_power(now, power)
              for decay in decays[later:]:
                weights = weights * decay
              summed = summed + weights.sum(axis=1)
              gather(sums, weights.astype(v.dtype), slot_of(j))
              return following[...], summed

            now, summed = pl.run_scoped(overlapped, plgpu.ACC((ROWS, columns), jnp.float32))
            plgpu.barrier_arrive(k_freed.at[slot_of(j + 1)])
            plgpu.barrier_arrive(v_freed.at[slot_of(j)])
          return now, sums[...], summed

        s, gathered, summed = pl.run_scoped(far_blocks, plgpu.ACC((ROWS, value_dim), jnp.float32))
        decay = functools.reduce(jnp.multiply, decays)
        return s, total * decay + gathered, normaliser * decay + summed

      total = plgpu.layout_cast(jnp.zeros((ROWS, value_dim), jnp.float32), WGMMA)
      normaliser = nothing = plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), WGMMA.reduce(1))
      # By twos, where no scores are moved between registers: those of a turn are where the last turn left them.
      pairs, odd = (f(n - first, jnp.int32(2)) for f in (lax.div, lax.rem))
      carry = scores(start), total, normaliser
      carry = lax.fori_loop(0, pairs, lambda i, carry: far_tiles(first + 2 * i, 2, carry), carry)
      s, total, normaliser = lax.fori_loop(0, odd, lambda i, carry: far_tiles(n - 1, 1, carry), carry)

      rows = pl.ds(token, ROWS)
      gate = plgpu.load(gate_smem.at[thread], layout=WGMMA.reduce(1), optimized=False)
      since_start = jnp.exp2(gate)
      total, normaliser = total * down(since_start, total.shape), normaliser * since_start

      def near_blocks(sums):
        def add(block, s, normaliser):
          slot, first_key = slot_of(near + block), block * columns
          pull = plgpu.load(pull_smem.at[pl.ds(first_key, columns)], layout=WGMMA.reduce(0), optimized=False)
          seen = index(s.shape, 1, first_key) <= index(s.shape, 0, thread * ROWS)
          exponent = jnp.where(seen, down(gate, s.shape) - across(pull, s.shape), -jnp.inf)
          weights = rounded(even_power(s, power) * jnp.exp2(exponent), v.dtype)
          plgpu.barrier_wait(v_filled.at[slot])
          gather(sums, weights, slot)
          # Of the rounded weights, so that a row of one key gives that key's value exactly.
          normaliser = normaliser + weights.astype(jnp.float32).sum(axis=1)
          plgpu.wgmma_wait(0)
          plgpu.barrier_arrive(v_freed.at[slot])
          return normaliser

        summed = add(0, s, normaliser)
        for block in range(1, blocks):
          summed = add(block, scores(near + block), summed)
        return sums[...], summed

      gathered, normaliser = pl.run_scoped(near_blocks, plgpu.ACC((ROWS, value_dim), jnp.float32))
      total = total + gathered
      if carried_refs is not None:
        source = carried_refs[0].at[b, rows, head] if wide else carried_smem.at[thread]
        if not wide:
          plgpu.barrier_wait(carried_filled)
        weight = plgpu.load(carried_refs[1].at[b, head, rows], layout=WGMMA.reduce(1), optimized=False)
        heard = weight >= 0
        normaliser = normaliser + jnp.where(heard, weight, 0.0)
        total = total + plgpu.load(source, layout=WGMMA, optimized=not wide) * down(
          jnp.where(heard, 1.0, 0.0), total.shape
        )
      found = normaliser > SMALLEST
      inverse = jnp.where(found, 1.0 / jnp.where(found, normaliser, 1.0), 0.0)
      y = total * down(inverse, total.shape)
      high = rounded(y, dtype)
      y_smem[thread] = high
      normaliser_smem[thread] = normaliser
      if save_low:
        low_smem[thread] = (y - high.astype(jnp.float32)).astype(jnp.bfloat16)
      plgpu.commit_smem()
      plgpu.copy_smem_to_gmem(y_smem.at[thread], y_ref.at[b, rows, head])
      plgpu.copy_smem_to_gmem(normaliser_smem.at[thread], normaliser_ref.at[b, head, rows])
      if save_low:
        plgpu.copy_smem_to_gmem(low_smem.at[thread], low_ref.at[b, rows, head])
      plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    @pl.when(thread == 2)
    def load():
      plgpu.set_max_registers(40, action="decrease")
      plgpu.copy_gmem_to_smem(pull_ref.at[b, kv, pl.ds(first_token, TILE)], pull_smem, q_filled)
      for w in range(2):
        rows = q_ref.at[b, pl.ds(first_token + w * ROWS, ROWS), head]
        plgpu.copy_gmem_to_smem(rows, q_smem.at[w], q_filled)
        gates = gate_ref.at[b, kv, pl.ds(first_token + w * ROWS, ROWS)]
        plgpu.copy_gmem_to_smem(gates, gate_smem.at[w], q_filled)
        if carried_refs is not None and not wide:
          rows = carried_refs[0].at[b, pl.ds(first_token + w * ROWS, ROWS), head]
          plgpu.copy_gmem_to_smem(rows, carried_smem.at[w], carried_filled)

      def copy(keys_ref):
        def step(j, none):
          slot, rows = slot_of(j), pl.ds(j * columns, columns)
          wait_if(j - start >= slots, k_freed.at[slot])
          plgpu.copy_gmem_to_smem(keys_ref.at[b, rows, kv], k_smem.at[slot], k_filled.at[slot])
          wait_if(j - start >= slots, v_freed.at[slot])
          plgpu.copy_gmem_to_smem(v_ref.at[b, rows, kv], v_smem.at[slot], v_filled.at[slot])
          return none

        return step

      lax.fori_loop(start, near, copy(folded_ref), None)
      lax.fori_loop(near, stop, copy(k_ref), None)

      def settle(j, none):  # leave no arrival unseen
        plgpu.barrier_wait(k_freed.at[slot_of(j)])
        plgpu.barrier_wait(v_freed.at[slot_of(j)])
        return none

      lax.fori_loop(jnp.maximum(stop - slots, start), stop, settle, None)

  f32 = jnp.float32
  y_shape = (batch, time, query_heads, value_dim)
  outputs = [jax.ShapeDtypeStruct(y_shape, dtype), jax.ShapeDtypeStruct((batch, query_heads, time), f32)]
  if save_low:
    outputs.insert(1, jax.ShapeDtypeStruct(y_shape, jnp.bfloat16))
  filled, freed = plgpu.Barrier(num_barriers=slots), plgpu.Barrier(num_arrivals=2, num_barriers=slots)
  scratch = [
    shared((2, ROWS, head_dim), q.dtype),
    shared((slots, columns, head_dim), q.dtype),
    shared((slots, columns, value_dim), v.dtype),
    shared((2, ROWS, value_dim), dtype),
    shared((2, ROWS, value_dim), jnp.bfloat16) if save_low else plgpu.SMEM((1,), f32),
    plgpu.SMEM((2, ROWS), f32),
    plgpu.SMEM((1,), f32) if carried is None or wide else shared((2, ROWS, value_dim), f32),
    plgpu.SMEM((2, ROWS), f32),
    plgpu.SMEM((TILE,), f32),
    plgpu.Barrier(num_arrivals=5),
    plgpu.Barrier(num_arrivals=2),
    *(filled, freed) * 2,
    *((shared((2, ROWS, columns), v.dtype),) if interpret is not None else ()),
  ]
  results = plgpu.kernel(
    kernel,
    out_type=outputs,
    scratch_types=scratch,
    grid=(tiles * batch * query_heads,),
    grid_names=("block",),
    num_threads=3,
    thread_name="thread",
    compiler_params=plgpu.CompilerParams(approx_math=True),
    interpret=interpret,
    kernel_name="attention_forward",
  )(q, *keys[:2], v, *keys[2:], *(() if carried is None else carried))
  results = varying_as(q, results)
  return Outputs(*results) if save_low else Outputs(results[0], None, results[1])
