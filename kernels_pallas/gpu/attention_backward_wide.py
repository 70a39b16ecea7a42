"""The attention form's backward pass of heads of 128 on Hopper: each score is computed once for all coordinates.

The equations, and how blocks of the grid take turns, are those of attention_backward.py. There a warpgroup has room for
the scores of two visits; here its sums are twice as wide, 64 keys by 128 coordinates for each of dK and dV, so that a
visit is of 64 queries, and dQ, 64 queries by 128 coordinates, is shared out by coordinates: each warpgroup makes half
of them, from the dS of both.

    warpgroups 0, 1   64 keys each: scores, dP, dV, dK; and 64 coordinates each of dQ
    warpgroup 2       loads
    warpgroup 3       adds dQ to memory, in turn

Of each pair of coordinates' halves the first is warpgroup 0's: keys stand in memory by halves, for an operand of a
product cannot begin where the warpgroup's number says within a row.
"""

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike
from jaxtyping import Array, BFloat16, Int

from kernels_pallas.gpu.angles import all_rotated_back, of_head
from kernels_pallas.gpu.arrays import Keys
from kernels_pallas.gpu.attention_backward import Gradients, Rows, WayBack
from kernels_pallas.gpu.tiles import (
  ROWS,
  TILE,
  WGMMA,
  across,
  down,
  index,
  multiply,
  place_in_grid,
  shared,
  varying_as,
  wait_for_all,
  wait_if,
)
from kernels_pallas.weights import LOG2E, raised, slope

WIDTH = 128  # of a head
_UNITS = TILE // ROWS
_COLUMNS = 16  # of scores that are looked at together
_HALVES = tuple(pl.ds(part * 64, 64) for part in range(2))  # of the coordinates
_LOADING_REGISTERS = 24
_COMPUTING_REGISTERS = 256 - _LOADING_REGISTERS  # together what a block of four warpgroups starts with, 4 x 128


def backward(
  rows: Rows,
  keys: Keys,
  last: Int[Array, "B H tiles"],
  v: BFloat16[Array, "B T H dv"],
  way_back: WayBack | None,
  *,
  power: int,
  dtype: DTypeLike,
  interpret: Any,
) -> Gradients:
  """As attention_backward.backward, which see."""
  ordered = interpret is None  # the interpreter can neither wait for a turn nor add to memory
  batch, time, query_heads, head_dim = rows.q.shape
  f32, half = jnp.float32, v.dtype
  heads, value_dim = v.shape[2:]
  assert head_dim == WIDTH
  group, tiles = query_heads // heads, time // TILE
  as_given = keys.top is not None  # keys, and queries but for a scale: they are rounded, and there is room for more
  folding = keys.folded is not None
  rotated = way_back is not None and way_back.angles is not None
  assert not (as_given and (folding or way_back is not None))
  assert jnp.dtype(dtype).itemsize == 2
  slots = 3 if as_given else 2

  def kernel(*refs):
    rows_ref, keys_ref, last_ref, v_ref, way_back_ref = jax.tree.unflatten(structure, refs[: len(leaves)])
    found = len(leaves) + len(outputs)
    dq_ref, dk_ref, dv_ref, *sums_ref = refs[len(leaves) : found]
    k_smem, v_smem, q_smem, dy_smem, scale_smem, delta_smem, ds_smem, dq_smem, rounded, *others = refs[found:]
    of_rounded: Any = (k_smem, None, None, None) if as_given else rounded
    rounded_k_smem, rounded_q_smem, rounded_filled, rounded_freed = of_rounded
    k_filled, v_filled, q_filled, q_freed, ds_filled, ds_freed, dq_filled, dq_freed, *staging = others
    item, thread = lax.axis_index("block"), lax.axis_index("thread")
    row, n = place_in_grid(item, batch * heads, tiles)
    b, kv = (f(row, jnp.int32(heads)) for f in (lax.div, lax.rem))
    # Units of 64 queries: the keys' own, of each head, and those after them that see the keys.
    own, far_end = n * _UNITS, (last_ref[b, kv, n] + 1) * _UNITS
    far = far_end - own - _UNITS
    turns: Any = pl.get_global(plgpu.SemaphoreType.REGULAR((batch, query_heads, tiles * _UNITS))) if ordered else None
    first_far = group * _UNITS  # the number of that visit
    visits = first_far + group * far

    def visit_units(visit, first, end, number):
      """Visits some units, of each head: a visit has a number, a query head and a unit."""

      def of_head(g, none):
        before = number + g * (end - first) - first

        def of_unit(unit, none):
          visit(before + unit, kv * group + g, unit)
          return none

        return lax.fori_loop(first, end, of_unit, none)

      if group == 1:
        of_head(0, None)
      else:
        lax.fori_loop(0, jnp.int32(group), of_head, None)

    def visit_near(visit):
      visit_units(visit, own, own + _UNITS, jnp.int32(0))

    def visit_far(visit):
      visit_units(visit, own + _UNITS, far_end, jnp.int32(first_far))

    def of_unit(unit):
      return pl.ds(unit * ROWS, ROWS)

    def in_ring(visited):  # which of two it is the compiler must not see: it would keep more of either, and spill
      return lax.rem(visited, jnp.int32(slots))

    @pl.when(thread < 2)
    def compute():
      plgpu.set_max_registers(_COMPUTING_REGISTERS, action="increase")
      here = pl.ds(n * TILE + thread * ROWS, ROWS)
      stage = staging[0].at[thread] if staging else None
      pull = plgpu.load(keys_ref.pull.at[b, kv, here], layout=WGMMA.reduce(1), optimized=False)
      fold = plgpu.load(keys_ref.fold.at[b, kv, here], layout=WGMMA.reduce(1), optimized=False)
      if not folding:  # then it is not keys that are discounted, but the p-th powers of their scores
        fold = raised(fold, power)
      of_keys = jnp.exp2(-keys_ref.top[b, kv].astype(f32)) if as_given else None
      tile_end = [keys_ref.totals[2 + piece, b, kv, n] for piece in range(2)]
      for filled in (k_filled, v_filled):
        plgpu.barrier_wait(filled)
      if not as_given:
        for part in range(2):
          mine = plgpu.load(k_smem.at[part, thread], layout=WGMMA, optimized=False)
          rounded_k_smem[part, thread] = mine.astype(half)
        plgpu.commit_smem()

      def near_weigh(_, first, exponent, shape):
        seen = index(shape, 0, n * TILE + thread * ROWS) <= index(shape, 1, first)
        return jnp.exp2(jnp.where(seen, across(exponent, shape) - down(pull, shape), -jnp.inf)), None

      def far_fetch(unit):
        return [keys_ref.totals[piece, b, kv, lax.div(unit, jnp.int32(_UNITS))] for piece in range(2)]

      def far_weigh(before, _, discounted, shape):
        discount = jnp.exp2(((before[0] - tile_end[0]) + (before[1] - tile_end[1])) * LOG2E)
        scale = across(discounted * discount, shape)
        return (scale, down(fold, shape)) if folding else (scale * down(fold, shape), None)

      def visit(fetch, weigh, dk, dv):
        def visit_unit(number, head, unit):
          fetched = fetch(unit)  # from afar, while queries come and products are under way
          # 0, but the compiler does not know. It would compute all operands' addresses before the loop, and spill them.
          nought = number >> 30
          slot, mine = in_ring(number), thread + nought
          q_slot, dy_slot = q_smem.at[slot], dy_smem.at[slot]
          plgpu.barrier_wait(q_filled.at[slot])

          def of_scores(s, dp):
            """The weights, of which dV is under way, and dS."""
            for part, some in enumerate(_HALVES):
              plgpu.wgmma(s, k_smem.at[part, mine], q_slot.at[:, some].transpose((1, 0)))
            plgpu.wgmma(dp, v_smem.at[mine], dy_slot.transpose((1, 0)))
            s = plgpu.wgmma_accumulator_load(s, wait_n=1)
            by_columns: list[Any] = []  # not all at once, for want of registers
            for start in range(0, ROWS, _COLUMNS):
              exponent = plgpu.load(scale_smem.at[slot, pl.ds(start, _COLUMNS)], layout=WGMMA.reduce(0))
              some = lax.optimization_barrier(s[:, start : start + _COLUMNS])
              scale, factor = weigh(fetched, unit * ROWS + start, exponent, some.shape)
              slopes = slope(some, scale, power)
              by_columns.append(((slopes * some).astype(half), slopes if factor is None else slopes * factor))
            weights, slopes = (jnp.concatenate(parts, axis=1) for parts in zip(*by_columns, strict=True))
            multiply(dv, weights, dy_slot, stage)
            dp = plgpu.wgmma_accumulator_load(dp, wait_n=1)  # while that is under way
            by_columns = []
            for start in range(0, ROWS, _COLUMNS):
              delta = plgpu.load(delta_smem.at[slot, pl.ds(start, _COLUMNS)], layout=WGMMA.reduce(0))
              some = lax.optimization_barrier(dp[:, start : start + _COLUMNS])
              ds = slopes[:, start : start + _COLUMNS] * (some - across(delta, some.shape))
              by_columns.append(ds.astype(half))
            return weights, jnp.concatenate(by_columns, axis=1)

          weights, ds = pl.run_scoped(of_scores, *(plgpu.ACC((ROWS, ROWS), f32),) * 2)
          if not as_given:
            plgpu.barrier_wait(rounded_filled)
          multiply(dk, ds, q_slot if as_given else rounded_q_smem, stage)
          wait_if(number > 0, ds_freed)
          ds_smem[thread] = ds
          plgpu.commit_smem()
          plgpu.barrier_arrive(ds_filled)

          def gathered(dq):
            plgpu.barrier_wait(ds_filled)
            for w in range(2):
              plgpu.wgmma(dq, ds_smem.at[nought + w].transpose((1, 0)), rounded_k_smem.at[mine, w])
            return dq[...]

          dq = pl.run_scoped(gathered, plgpu.ACC((ROWS, 64), f32))
          dq, *_ = lax.optimization_barrier(
            (dq, weights, ds)
          )  # ptxas does not see it: for left operands see gpu_static
          for barrier in (ds_freed, q_freed.at[slot], *(() if as_given else (rounded_freed,))):
            plgpu.barrier_arrive(barrier)
          wait_if(number > 0, dq_freed)
          dq_smem[thread] = dq if of_keys is None else dq * of_keys
          plgpu.commit_smem()
          plgpu.barrier_arrive(dq_filled)

        return visit_unit

      def gradients(dk, dv):
        visit_near(visit(lambda unit: None, near_weigh, dk, dv))
        if folding:  # folded ones have taken their place
          plgpu.barrier_wait(k_filled)
        visit_far(visit(far_fetch, far_weigh, dk, dv))
        return dk[...], dv[...]

      dk, dv = pl.run_scoped(gradients, *(plgpu.ACC((ROWS, width), f32) for width in (WIDTH, value_dim)))
      v_smem[thread] = dv.astype(half)
      plgpu.commit_smem()
      plgpu.copy_smem_to_gmem(v_smem.at[thread], dv_ref.at[b, here, kv])
      if as_given or way_back is not None:
        halves = [plgpu.load(rounded_k_smem.at[part, thread], layout=WGMMA, optimized=False) for part in range(2)]
        mine = jnp.concatenate(halves, axis=1).astype(f32)
        sums_ref[0][b, kv, here] = (mine * dk).sum(axis=1)
      if as_given:
        dk = (power * dk).astype(half)
      if way_back is not None:
        if rotated:
          angles, tile = of_head(way_back_ref.angles, b, kv), n * _UNITS + thread
          dk, torque = all_rotated_back(dk, mine, angles, way_back_ref.speed, tile, interpret)
          sums_ref[1][b, kv, here] = torque
        factor = plgpu.load(way_back_ref.factor.at[b, kv, here], layout=WGMMA.reduce(1), optimized=False)
        dk = (dk * down(factor, dk.shape)).astype(dtype)
      # All is free when both warpgroups have made their last dQ, and it has gone. A warp reads and writes its own keys.
      for barrier in (ds_freed, dq_freed):
        plgpu.barrier_wait(barrier)
      for part, some in enumerate(_HALVES):
        dk_smem = dq_smem.at[thread]
        if dk.dtype != f32:
          dk_smem = (rounded_k_smem if dk.dtype == half else k_smem).at[part, thread]
        dk_smem[...] = dk[:, 64 * part : 64 * (part + 1)]
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(dk_smem, dk_ref.at[b, here, kv, some])
        if dk.dtype == f32:  # the next half takes its place
          plgpu.wait_smem_to_gmem(0, wait_read_only=True)
      plgpu.wait_smem_to_gmem(0)

    @pl.when(thread == 2)
    def load():
      plgpu.set_max_registers(_LOADING_REGISTERS, action="decrease")

      awaited = first_far if folding else 0  # the visit before which rounded queries' place is known to be free

      def load_keys(source):
        for part, some in enumerate(_HALVES):
          for w in range(2):
            at = pl.ds(n * TILE + w * ROWS, ROWS)
            plgpu.copy_gmem_to_smem(source.at[b, at, kv, some], k_smem.at[part, w], k_filled)

      def load_queries(scale_ref):
        def load_unit(number, head, unit):
          slot, at = in_ring(number), of_unit(unit)
          wait_if(number >= slots, q_freed.at[slot])
          for source, target in (
            (rows_ref.q.at[b, at, head], q_smem),
            (rows_ref.dy.at[b, at, head], dy_smem),
            (scale_ref.at[b, head, at], scale_smem),
            (rows_ref.delta.at[b, head, at], delta_smem),
          ):
            plgpu.copy_gmem_to_smem(source, target.at[slot], q_filled.at[slot])
          if not as_given:
            wait_if((number > 0) & (number != awaited), rounded_freed)
            plgpu.copy_gmem_to_smem(rows_ref.rounded.at[b, at, head], rounded_q_smem, rounded_filled)

        return load_unit

      load_keys(keys_ref.plain)
      for w in range(2):
        plgpu.copy_gmem_to_smem(v_ref.at[b, pl.ds(n * TILE + w * ROWS, ROWS), kv], v_smem.at[w], v_filled)
      visit_near(load_queries(rows_ref.exponent))
      if folding:  # when all near visits are over
        plgpu.barrier_wait(rounded_freed)
        load_keys(keys_ref.folded)
      visit_far(load_queries(rows_ref.discounted))
      wait_for_all(q_freed, visits)
      if not as_given:
        wait_if(visits != awaited, rounded_freed)

    @pl.when(thread == 3)
    def add():
      plgpu.set_max_registers(_LOADING_REGISTERS, action="decrease")

      def add_unit(number, head, unit):
        at = of_unit(unit)
        if ordered:  # its turn comes while products are under way, as a rule
          turn, earlier = turns.at[b, head, unit], lax.div(unit, jnp.int32(_UNITS)) - n
          plgpu.semaphore_wait(turn, earlier, decrement=False, memory_scope="gpu")
        plgpu.barrier_wait(dq_filled)
        for part, some in enumerate(_HALVES):
          if not ordered:
            plgpu.copy_smem_to_gmem(dq_smem.at[part], dq_ref.at[n, b, at, head, some])
            continue

          @pl.when(unit < own + _UNITS)
          def _(part=part, some=some):
            plgpu.copy_smem_to_gmem(dq_smem.at[part], dq_ref.at[b, at, head, some])

          @pl.when(unit >= own + _UNITS)
          def _(part=part, some=some):
            plgpu.copy_smem_to_gmem(dq_smem.at[part], dq_ref.at[b, at, head, some], reduction_op="add")

        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(dq_freed)
        if ordered:  # at once: the next block is but a unit behind this one, and each delay adds to those before it
          plgpu.wait_smem_to_gmem(0)
          plgpu.semaphore_signal(turn, 1, memory_scope="gpu")

      visit_near(add_unit)
      visit_far(add_unit)
      if not ordered:
        plgpu.wait_smem_to_gmem(0)

  rounded = shared((2, 2, ROWS, 64), half), shared((ROWS, WIDTH), half), plgpu.Barrier(), plgpu.Barrier(num_arrivals=2)
  scratch = [
    shared((2, 2, ROWS, 64), rows.q.dtype),
    shared((2, ROWS, value_dim), half),
    shared((slots, ROWS, WIDTH), rows.q.dtype),
    shared((slots, ROWS, value_dim), half),
    plgpu.SMEM((slots, ROWS), f32),
    plgpu.SMEM((slots, ROWS), f32),
    shared((2, ROWS, ROWS), half),
    shared((2, ROWS, 64), f32, 32),
    None if as_given else rounded,
    plgpu.Barrier(num_arrivals=4),
    plgpu.Barrier(num_arrivals=2),
    plgpu.Barrier(num_arrivals=4, num_barriers=slots),
    plgpu.Barrier(num_arrivals=2, num_barriers=slots),
    *(plgpu.Barrier(num_arrivals=2),) * 3,
    plgpu.Barrier(num_arrivals=1),
  ]
  if interpret is not None:
    scratch.append(shared((2, ROWS, ROWS), half))
  outputs = [
    jax.ShapeDtypeStruct((batch, time, query_heads, WIDTH), f32),
    jax.ShapeDtypeStruct((batch, time, heads, WIDTH), half if as_given else f32 if way_back is None else dtype),
    jax.ShapeDtypeStruct((batch, time, heads, value_dim), half),
  ]
  sums = 0 if way_back is None and not as_given else 2 if rotated else 1
  outputs += [jax.ShapeDtypeStruct((batch, heads, time), f32)] * sums
  leaves, structure = jax.tree.flatten((rows, keys, last, v, way_back))
  # Out of order each tile of keys leaves its own dq.
  parts = None if ordered else jax.new_ref(jnp.zeros((tiles, *outputs[0].shape), f32))
  results = plgpu.kernel(
    kernel,
    out_type=outputs if parts is None else outputs[1:],
    scratch_types=scratch,
    grid=(tiles * batch * heads,),
    grid_names=("block",),
    num_threads=4,
    thread_name="thread",
    # What is written to shared memory is read, or written again, beyond a barrier that all warps have passed.
    # Nor does a sum along a row need memory.
    compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0),
    interpret=interpret,
    kernel_name="attention_backward",
  )(*leaves, *(() if parts is None else (parts,)))
  results = results if parts is None else (jax.freeze(parts).sum(0), *results)
  return Gradients(*varying_as(v, results))
