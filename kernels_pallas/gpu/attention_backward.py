"""The attention form's backward pass on Hopper: one kernel, five products a block, scores computed again.

    P_ij  = B_ij / normaliser_i                     dV_j = sum_i P_ij dy_i
    dS_ij = P_ij / s_ij (dy_i . v_j - delta_i)      dK_j = p sum_i dS_ij q_i      dQ_i = p sum_j dS_ij k_j

A block of the grid owns 128 keys and walks the queries after them. Scores are held transposed, keys down and queries
across, so that P and dS are left operands straight from registers. dQ alone sums over keys, hence over blocks of the
grid, which add to memory. They take turns, so that results are the same to the bit on every run; the order is that in
which they reach the queries anyway, nearest keys first, and the grid starts them in that order.

    warpgroups 0, 1   64 keys each: scores, dP, dV, dK; and 64 of the 128 queries each: dQ, of the tile before, so that
                      neither waits for the other's dS
    warpgroup 2       loads
    warpgroup 3       adds dQ to memory, in turn

Products with dS have bfloat16 operands, for gradients span many powers of ten. The gradients of gates and rotations are
what is left of dS_ij s_ij, and of dS_ij times the angle between q_i and k_j, when pairs cancel: so dQ and dK come from
the same rounded dS, q and k, and whoever needs those gradients must take them with q and k rounded to bfloat16.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike
from jaxtyping import Array, BFloat16, Float, Int

from kernels_pallas.gpu.angles import Angles, all_rotated_back, memory, of_tiles
from kernels_pallas.gpu.arrays import Keys
from kernels_pallas.gpu.tiles import (
  ROWS,
  TILE,
  WGMMA,
  across,
  by_token,
  down,
  index,
  multiply,
  place_in_grid,
  place_in_ring,
  shared,
  varying_as,
  wait_for_all,
  wait_for_warps,
  wait_if,
)
from kernels_pallas.weights import LOG2E, raised, slope

_UNITS = TILE // ROWS  # queries are loaded by units of 64


class Rows(NamedTuple):
  """What the queries bring to the backward pass."""

  q: Float[Array, "B T Hq d"]
  rounded: BFloat16[Array, "B T Hq d"] | None  # the same, as the products with dS take them; None: they are bfloat16
  dy: BFloat16[Array, "B T Hq dv"]
  exponent: Float[Array, "B Hq T"]  # of the next, to base 2
  discounted: Float[Array, "B Hq T"]  # 1 / normaliser, times the discount since the tile began
  delta: Float[Array, "B Hq T"]  # dy . y


class WayBack(NamedTuple):
  """From dk to what was scaled and rotated: see `gradients`."""

  factor: Float[Array, "B H T"]
  angles: Angles | None
  speed: Float[Array, "d"] | None


class Gradients(NamedTuple):
  """Cotangents, but for the factor p of dq and dk.

  If keys came as they were given, or it was said how they did, dk is finished, p times as much and in their dtype. As
  they were given, dq is over 2 to their `top`, so that it is of one size whatever theirs is.
  """

  q: Float[Array, "B T Hq d"]
  k: Float[Array, "B T H d"]  # of the plain keys
  v: BFloat16[Array, "B T H dv"]
  pulled: Float[Array, "B H T"] | None = None  # k . dk, but for p, if dk is finished
  turned: Float[Array, "B H T"] | None = None  # and the torque, if keys were rotated


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
  """The cotangents of q, of the plain keys or, with a `way_back`, of those that were given, in `dtype`, and of v.

  `last`: the latest tile whose queries read a tile's keys. Heads of up to 64; of wider ones, see
  attention_backward_wide.py. Not to be batched: blocks take turns by semaphores that know nothing of vmap's axis.
  """
  ordered = interpret is None  # the interpreter can neither wait for a turn nor add to memory
  batch, time, query_heads, head_dim = rows.q.shape
  f32, half = jnp.float32, v.dtype
  heads, value_dim = v.shape[2:]
  group, tiles = query_heads // heads, time // TILE
  assert max(head_dim, value_dim) <= ROWS
  slots = 4  # of queries, by units
  as_given = keys.top is not None  # keys, and queries but for a scale
  folding = keys.folded is not None
  folded = 1 if folding else 0  # the place of folded keys: the next, or that of plain ones
  rotated = way_back is not None and way_back.angles is not None
  assert way_back is None or not (as_given or folding)
  assert jnp.dtype(dtype).itemsize == 2

  def kernel(*refs):
    rows_ref, keys_ref, last_ref, v_ref, way_back_ref = jax.tree.unflatten(structure, refs[: len(leaves)])
    found = len(leaves) + len(outputs)
    dq_ref, dk_ref, dv_ref, *sums_ref = refs[len(leaves) : found]
    k_smem, rounded_k_smem, v_smem, way_back_smem, *others = refs[found:]
    q_smem, rounded_q_smem, dy_smem, scale_smem, delta_smem, (ds_smem, dq_smem), *barriers = others
    k_filled, folded_filled, q_filled, q_freed, ds_filled, dq_filled, dq_freed, *staging = barriers
    item, thread = lax.axis_index("block"), lax.axis_index("thread")
    row, n = place_in_grid(item, batch * heads, tiles)
    b, kv = (f(row, jnp.int32(heads)) for f in (lax.div, lax.rem))
    far_end = last_ref[b, kv, n] + 1
    far = far_end - n - 1  # tiles of queries of each head, after the keys' own
    turns: Any = pl.get_global(plgpu.SemaphoreType.REGULAR((batch, query_heads, tiles))) if ordered else None

    visits = group * (1 + far)

    def visit_near(visit, carry=None, start=0):
      """Visits the keys' own tile of queries, of each head: a visit has a number, a query head and a tile."""
      return lax.fori_loop(start, jnp.int32(group), lambda g, carry: visit(g, kv * group + g, n, carry), carry)

    def visit_far(visit, carry=None):
      """Visits all later tiles of queries that see the keys, of each head."""

      def of_head(g, carry):
        number, head = group + g * far - n - 1, kv * group + g
        return lax.fori_loop(n + 1, far_end, lambda m, carry: visit(number + m, head, m, carry), carry)

      return of_head(0, carry) if group == 1 else lax.fori_loop(0, jnp.int32(group), of_head, carry)

    @pl.when(thread < 2)
    def compute():
      # 2 x 216 + 2 x 40 is what the block starts with, 4 x 128: a warpgroup that asked for more would wait for ever.
      plgpu.set_max_registers(216, action="increase")
      token = n * TILE + thread * ROWS

      stage = staging[0].at[thread] if staging else None
      rounded_k, rounded_q = (k_smem.at[0], q_smem) if as_given else (rounded_k_smem, rounded_q_smem)

      def free(visited):
        plgpu.barrier_arrive(q_freed.at[place_in_ring(visited, slots)])

      def product(dq, buffer):
        """Of the dS of both warpgroups' keys with this one's queries."""
        for w in range(2):
          plgpu.wgmma(dq, ds_smem.at[buffer, thread, w].transpose((1, 0)), rounded_k.at[w])

      def hand_over(dq, buffer):
        """To the warpgroup that adds it to memory. Only when `dq_freed` was seen for the visit before."""
        if in_place:  # another warp's product may still read dS: the interpreter, which has other memory, can't tell
          wait_for_warps()
        dq_smem[buffer, thread] = dq if of_keys is None else dq * of_keys
        plgpu.commit_smem()
        plgpu.barrier_arrive(dq_filled)

      def visit(place, fetch, weigh, dk, dv, first=False):
        def visit_tile(number, head, m, none):
          fetched = fetch(m)  # from afar, while queries come and products are under way
          buffer = place_in_ring(number, 2)
          for unit in range(_UNITS):
            slot = place_in_ring(number * _UNITS + unit, slots)
            plgpu.barrier_wait(q_filled.at[slot])
            # The dQ of the visit before.
            late = unit == 0 and not first

            def products(s, dp, *dq, slot=slot, late=late):
              plgpu.wgmma(s, k_smem.at[place, thread], q_smem.at[slot].transpose((1, 0)))
              plgpu.wgmma(dp, values, dy_smem.at[slot].transpose((1, 0)))
              if late:
                plgpu.barrier_wait(ds_filled)
                product(dq[0], 1 - buffer)
              return s[...], dp[...], *(sums[...] for sums in dq)

            square = plgpu.ACC((ROWS, ROWS), f32)
            s, dp, *dq = pl.run_scoped(products, square, square, *(plgpu.ACC((ROWS, head_dim), f32),) * late)
            if late:
              wait_if(number > 1, dq_freed)
              hand_over(dq[0], 1 - buffer)
            scales = plgpu.load(scale_smem.at[slot], layout=WGMMA.reduce(0))
            scale, fold = weigh(fetched, scales, unit, s.shape)
            slopes = slope(s, scale, power)
            weights = (slopes * s).astype(half)
            ds = slopes * (dp - across(plgpu.load(delta_smem.at[slot], layout=WGMMA.reduce(0)), s.shape))
            ds = (ds if fold is None else ds * fold).astype(half)

            if unit > 0:  # the products of the unit before have come before these
              free(number * _UNITS)
            ds_smem[buffer, unit, thread] = ds
            multiply(dv, weights, dy_smem.at[slot], stage)
            multiply(dk, ds, rounded_q.at[slot], stage)
          plgpu.commit_smem()  # of both units, while products are under way; nor can it tell this one
          plgpu.barrier_arrive(ds_filled)
          plgpu.wgmma_wait(0)  # ptxas gives the registers of left operands to the next visit's
          free(number * _UNITS + 1)
          return none

        return visit_tile

      here = pl.ds(token, ROWS)
      pull = plgpu.load(keys_ref.pull.at[b, kv, here], layout=WGMMA.reduce(1), optimized=False)
      fold = plgpu.load(keys_ref.fold.at[b, kv, here], layout=WGMMA.reduce(1), optimized=False)
      if not folding:  # then it is not keys that are discounted, but the p-th powers of their scores
        fold = raised(fold, power)
      of_keys = jnp.exp2(-keys_ref.top[b, kv].astype(f32)) if as_given else None
      end = [keys_ref.totals[2 + piece, b, kv, n] for piece in range(2)]
      plgpu.barrier_wait(k_filled)
      if not as_given:
        mine = plgpu.load(k_smem.at[0, thread], layout=WGMMA, optimized=False)
        rounded_k_smem[thread] = mine.astype(half)
        plgpu.commit_smem()

      def near_weigh(fetched, exponent, unit, shape):
        seen = index(shape, 0, thread * ROWS) <= index(shape, 1, unit * ROWS)
        return jnp.exp2(jnp.where(seen, across(exponent, shape) - down(pull, shape), -jnp.inf)), None

      def far_fetch(m):
        return [keys_ref.totals[piece, b, kv, m] for piece in range(2)]

      def far_weigh(before, discounted, unit, shape):
        discount = jnp.exp2(((before[0] - end[0]) + (before[1] - end[1])) * LOG2E)
        scale = across(discounted * discount, shape)
        if folding:
          return scale, down(fold, shape)
        return scale * down(fold, shape), None

      # In registers: shared memory is busier than the matrix unit.
      values = v_smem.at[thread]
      if not staging:
        values = plgpu.load(values, layout=WGMMA, optimized=False)

      def gradients(dk, dv):
        near = functools.partial(visit, 0, lambda m: None, near_weigh, dk, dv)
        near(first=True)(jnp.int32(0), kv * group, n, None)
        if group > 1:
          visit_near(near(), start=1)
        if folding:
          plgpu.barrier_wait(folded_filled)
        visit_far(visit(folded, far_fetch, far_weigh, dk, dv))
        return dk[...], dv[...]

      accumulators = plgpu.ACC((ROWS, head_dim), f32), plgpu.ACC((ROWS, value_dim), f32)
      dk, dv = pl.run_scoped(gradients, *accumulators)

      def last_product(dq):
        product(dq, buffer)
        return dq[...]

      buffer = place_in_ring(visits - 1, 2)
      plgpu.barrier_wait(ds_filled)
      last_dq = pl.run_scoped(last_product, plgpu.ACC((ROWS, head_dim), f32))
      wait_if(visits > 1, dq_freed)
      hand_over(last_dq, buffer)
      # While that is added to memory.
      dk_smem = dq_smem.at[0, thread]
      if as_given:
        dk_smem = k_smem.at[0, thread]
        mine = plgpu.load(k_smem.at[0, thread], layout=WGMMA, optimized=False)
        sums_ref[0][b, kv, here] = (mine.astype(f32) * dk).sum(axis=1)
        dk = (power * dk).astype(half)
      if way_back is not None:
        dk_smem = rounded_k_smem.at[thread] if jnp.dtype(dtype) == half else k_smem.at[0, thread]
        mine = plgpu.load(rounded_k_smem.at[thread], layout=WGMMA, optimized=False).astype(f32)
        sums_ref[0][b, kv, here] = (mine * dk).sum(axis=1)
        if rotated:
          dk, torque = all_rotated_back(dk, mine, way_back_smem.angles, way_back_smem.speed, thread, interpret)
          sums_ref[1][b, kv, here] = torque
        dk = (dk * down(by_token(way_back_smem.factor, thread), dk.shape)).astype(dtype)
      # All is free now: both warpgroups have handed over their last dQ, so that no product reads keys or dS any more.
      plgpu.barrier_wait(dq_freed)
      dk_smem[...] = dk
      v_smem[thread] = dv.astype(half)
      plgpu.commit_smem()
      plgpu.copy_smem_to_gmem(dk_smem, dk_ref.at[b, here, kv])
      plgpu.copy_smem_to_gmem(v_smem.at[thread], dv_ref.at[b, here, kv])
      plgpu.wait_smem_to_gmem(0)

    @pl.when(thread == 2)
    def load():
      plgpu.set_max_registers(40, action="decrease")

      def load_keys(source, target, filled):
        for w in range(2):
          plgpu.copy_gmem_to_smem(source.at[b, pl.ds(n * TILE + w * ROWS, ROWS), kv], target.at[w], filled)

      def load_queries(scale_ref):
        def load_tile(number, head, m, none):
          for unit in range(_UNITS):
            visited = number * _UNITS + unit
            slot, at = place_in_ring(visited, slots), pl.ds(m * TILE + unit * ROWS, ROWS)
            wait_if(visited >= slots, q_freed.at[slot])
            sources = [
              (rows_ref.q.at[b, at, head], q_smem),
              (rows_ref.dy.at[b, at, head], dy_smem),
              (scale_ref.at[b, head, at], scale_smem),
              (rows_ref.delta.at[b, head, at], delta_smem),
            ]
            if not as_given:
              sources.append((rows_ref.rounded.at[b, at, head], rounded_q_smem))
            for source, target in sources:
              plgpu.copy_gmem_to_smem(source, target.at[slot], q_filled.at[slot])
          return none

        return load_tile

      load_keys(keys_ref.plain, k_smem.at[0], k_filled)
      load_keys(v_ref, v_smem, k_filled)
      if way_back is not None:
        sources = [way_back_ref.factor.at[b, kv, pl.ds(n * TILE, TILE)]]
        if rotated:
          sources += [*of_tiles(way_back_ref.angles, b, kv, n * _UNITS, _UNITS), way_back_ref.speed]
        for source, target in zip(sources, jax.tree.leaves(way_back_smem), strict=True):
          plgpu.copy_gmem_to_smem(source, target, k_filled)
      if folding:
        load_keys(keys_ref.folded, k_smem.at[folded], folded_filled)
      visit_near(load_queries(rows_ref.exponent))
      visit_far(load_queries(rows_ref.discounted))

      wait_for_all(q_freed, visits * _UNITS)

    @pl.when(thread == 3)
    def add():
      plgpu.set_max_registers(40, action="decrease")

      def add_tile(number, head, m, none):
        buffer = place_in_ring(number, 2)
        plgpu.barrier_wait(dq_filled)
        if ordered:
          plgpu.semaphore_wait(turns.at[b, head, m], m - n, decrement=False, memory_scope="gpu")
        for unit in range(_UNITS):
          at = pl.ds(m * TILE + unit * ROWS, ROWS)
          if not ordered:
            plgpu.copy_smem_to_gmem(dq_smem.at[buffer, unit], dq_ref.at[n, b, at, head])
            continue

          @pl.when(m == n)
          def _(unit=unit, at=at):
            plgpu.copy_smem_to_gmem(dq_smem.at[buffer, unit], dq_ref.at[b, at, head])

          @pl.when(m > n)
          def _(unit=unit, at=at):
            plgpu.copy_smem_to_gmem(dq_smem.at[buffer, unit], dq_ref.at[b, at, head], reduction_op="add")

        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(dq_freed)
        if ordered:  # at once: the next block is but a tile behind this one, and each delay adds to those before it
          plgpu.wait_smem_to_gmem(0)
          plgpu.semaphore_signal(turns.at[b, head, m], 1, memory_scope="gpu")
        return none

      visit_near(add_tile)
      visit_far(add_tile)
      if not ordered:
        plgpu.wait_smem_to_gmem(0)

  # A warpgroup's dQ lies where the dS were that it is made of. The interpreter would see races in that.
  in_place = interpret is None and head_dim == ROWS
  ds_memory, dq_memory = shared((2, _UNITS, 2, ROWS, ROWS), half, head_dim), shared((2, _UNITS, ROWS, head_dim), f32)
  unused = plgpu.SMEM((1,), f32)
  of_tile: Any = None
  if way_back is not None:
    angles = None if way_back.angles is None else memory(way_back.angles, _UNITS)
    of_tile = plgpu.SMEM((TILE,), f32), angles, None if angles is None else plgpu.SMEM((head_dim,), f32)
    of_tile = WayBack(*of_tile)
  scratch = [
    shared((1 + folded, 2, ROWS, head_dim), rows.q.dtype),
    unused if as_given else shared((2, ROWS, head_dim), half),
    shared((2, ROWS, value_dim), half),
    of_tile,
    shared((slots, ROWS, head_dim), rows.q.dtype),
    unused if as_given else shared((slots, ROWS, head_dim), half),
    shared((slots, ROWS, value_dim), half),
    plgpu.SMEM((slots, ROWS), f32),
    plgpu.SMEM((slots, ROWS), f32),
    plgpu.RefUnion(ds_memory, dq_memory) if in_place else (ds_memory, dq_memory),
    plgpu.Barrier(num_arrivals=4 + len(jax.tree.leaves(way_back))),
    plgpu.Barrier(num_arrivals=2),
    plgpu.Barrier(num_arrivals=4 if as_given else 5, num_barriers=slots),
    plgpu.Barrier(num_arrivals=2, num_barriers=slots),
    *(plgpu.Barrier(num_arrivals=2),) * 2,
    plgpu.Barrier(num_arrivals=1),
  ]
  if interpret is not None:
    scratch.append(shared((2, ROWS, ROWS), half))
  dq_shape = (batch, time, query_heads, head_dim)
  outputs = [
    jax.ShapeDtypeStruct(dq_shape, f32),
    jax.ShapeDtypeStruct((batch, time, heads, head_dim), half if as_given else f32 if way_back is None else dtype),
    jax.ShapeDtypeStruct((batch, time, heads, value_dim), half),
  ]
  sums = 0 if way_back is None and not as_given else 2 if rotated else 1
  outputs += [jax.ShapeDtypeStruct((batch, heads, time), f32)] * sums
  leaves, structure = jax.tree.flatten((rows, keys, last, v, way_back))
  # Out of order each tile of keys leaves its own dq.
  parts = None if ordered else jax.new_ref(jnp.zeros((tiles, *dq_shape), f32))
  results = plgpu.kernel(
    kernel,
    out_type=outputs if parts is None else outputs[1:],
    scratch_types=scratch,
    grid=(tiles * batch * heads,),
    grid_names=("block",),
    num_threads=4,
    thread_name="thread",
    # What is written to shared memory is read, or written again, beyond a barrier that all warps have passed.
    compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
    interpret=interpret,
    kernel_name="attention_backward",
  )(*leaves, *(() if parts is None else (parts,)))
  results = results if parts is None else (jax.freeze(parts).sum(0), *results)
  return Gradients(*varying_as(v, results))
