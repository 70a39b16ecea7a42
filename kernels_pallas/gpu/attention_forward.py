"""The attention form's forward pass on Hopper.

    y_i = sum_j B_ij v_j / sum_j B_ij          B_ij = b_ij (q_i . k_j) ** p

Time is cut into tiles. Keys of earlier tiles come discounted to their tile's end (b folded into the key, whose p-th
power carries it), so a block of their weights is one matrix product and p/2 multiplications an element; the sums so far
are multiplied by one number, the tile's decay, when the next one begins. Only inside the query's own tile are gates
exponentials of pairs. Where sequences are too short for a copy of discounted keys to pay, weights are multiplied by
their keys' discounts instead, and queries can come as they were given, to be scaled and rotated here. The loader makes
these discounts, until the place's first query: then sums need no decay but that of the first of two tiles.

    4 warpgroups   64 queries each (2, if heads are wide): while one raises scores, others have products under way
    the last one   loads
    grid           one or two tiles of queries each, those that see most keys first. Where keys are not discounted
                   copies, and no state is carried, a block may take several of them by turns: the next one's queries
                   come while it is at work

Products of scores and values have bfloat16 operands, for weights span many powers of ten; scores have float16 ones,
because the power multiplies their rounding, and the inputs are scaled so that they fit, or bfloat16 ones as they were
given, which are not rounded.
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

from kernels_pallas.gpu.angles import Angles, along, memory, of_tiles, parts_of, radians, rotated
from kernels_pallas.gpu.arrays import Carried, Keys, Outputs
from kernels_pallas.gpu.products import product
from kernels_pallas.gpu.tiles import (
  IN_TILE,
  LOADING_REGISTERS,
  REGISTERS,
  ROWS,
  TILE,
  WGMMA,
  across,
  by_eights,
  by_eights_in_pairs,
  causal,
  down,
  multiprocessors,
  place_in_ring,
  power_of_two,
  rounded,
  shared,
  unless_stateless,
  varying_as,
  wait_for_all,
  wait_if,
)
from kernels_pallas.gpu.turns import Turns
from kernels_pallas.weights import LOG2E, SMALLEST, even_power, raised

_BATCH = 2 * IN_TILE  # blocks of keys whose discounts are computed together, for they come from afar
_BY_THREAD = plgpu.Layout.WG_STRIDED((TILE,), vec_size=1)


class _Place(NamedTuple):
  """One or two tiles of queries that a block of the grid is about, and the blocks of keys that these read.

  Blocks are numbered as they come: discounted keys of the tiles from `first` on, then plain ones of the queries' own
  tiles. To the second tile of queries the first one's keys are discounted: a folded copy of them comes before, too, but
  keys that the kernel discounts come once.
  """

  room: Int[Array, ""]  # where its queries lie
  b: Int[Array, ""]
  head: Int[Array, ""]
  kv: Int[Array, ""]
  tile: Int[Array, ""]  # the first of its queries'
  first: Int[Array, ""]
  start: Int[Array, ""]  # blocks of keys: the first of all, the first of the queries' own, and the end
  plain: Int[Array, ""]
  stop: Int[Array, ""]
  top: Int[Array, ""] | None

  @property
  def token(self) -> Int[Array, ""]:
    """The first of its queries."""
    return self.tile * TILE


def forward(
  q: Float[Array, "B T Hq d"],
  keys: Keys,
  v: BFloat16[Array, "B T H dv"],
  carried: Carried | None = None,
  *,
  angles: Angles | None = None,
  power: int,
  dtype: DTypeLike,
  save_low: bool,
  alike: bool = False,
  interpret: Any = None,
) -> Outputs:
  """Attention over whole blocks of queries, and what is carried; y in `dtype`.

  With `angles` queries come as they were given, to be rotated by these. `alike`: no head is known to be read less far
  back than others. `save_low`: what rounding left of y, for gradients, in which the rest of sums that cancel counts:
  without it, and where y has 16 bits and keys are no discounted copies, weights are multiplied and added as bfloat16s.
  """
  batch, time, query_heads, head_dim = q.shape
  heads, value_dim = v.shape[2:]
  group, computing = query_heads // heads, 4 if max(head_dim, value_dim) <= 64 else 2  # what registers are enough for
  slots = 4 if head_dim + value_dim <= 128 else 3  # of keys and values, by blocks
  assert slots <= _BATCH  # a slot that is free tells that the discounts before the last batch's have been read
  pairs = computing // 2  # of warpgroups, whose queries are those of one tile
  tiles = time // TILE // pairs
  assert time % (TILE * pairs) == 0
  wide = value_dim > 64  # there is no room for what wide heads carry
  f32 = jnp.float32
  folding, given = keys.folded is not None, keys.top is not None or angles is not None
  unread: Any = None
  keys = keys._replace(fold=unread, totals=unread) if folding else keys
  narrow, of_rows = jnp.dtype(dtype).itemsize == 2, batch * query_heads
  in_pairs = narrow and not (folding or save_low)  # beside a state y has 32 bits
  turns = Turns(of_rows, tiles, blocks=of_rows * tiles)
  if not folding and carried is None and narrow:  # there is room for two places' queries, and outputs
    turns = Turns.of_few_blocks(of_rows, tiles, multiprocessors(), alike, None if wide else heads)
  rooms = 2 if turns.several else 1
  again = pairs - 1 if folding else 0  # tiles of queries whose own keys come discounted, too

  def kernel(*refs):
    found = len(leaves) + len(out_leaves)
    q_ref, keys_ref, v_ref, carried_refs, angles_ref = jax.tree.unflatten(structure, refs[: len(leaves)])
    outputs, scratch = jax.tree.unflatten(out_structure, refs[len(leaves) : found]), refs[found:]
    queries_and_y, k_smem, fold_smem, v_smem, low_smem, normaliser_smem, *others = scratch
    carried_smem, weight_smem, gate_smem, pull_smem, angles_smem, *barriers = others
    (*all_queries, y_smem) = queries_and_y if in_place else (*queries_and_y[0], queries_and_y[1])
    given_smem, q_smem = all_queries[0], all_queries[-1]
    q_filled, q_freed, carried_filled, k_filled, k_freed, v_filled, v_freed, *staging = barriers
    item, thread = lax.axis_index("block"), lax.axis_index("thread")

    def look_up(turn):
      """Where a place is, and what it needs of memory before it begins."""
      row, n = turns.place(item, turn)
      if not turns.by_head:
        b, head = (f(row, jnp.int32(query_heads)) for f in (lax.div, lax.rem))
        kv = lax.div(head, jnp.int32(group))
      else:  # those of one head of keys beside one another
        kv, rest = (f(row, jnp.int32(batch * group)) for f in (lax.div, lax.rem))
        b, head = lax.div(rest, jnp.int32(group)), kv * group + lax.rem(rest, jnp.int32(group))
      tile = n * pairs
      return b, head, kv, tile, keys_ref.first[b, kv, tile], None if keys.top is None else keys_ref.top[b, kv]

    def for_each_place(visit):
      """Visits this block's places by turns; returns how many there were, and how many blocks of keys they had."""

      def take(turn, so_far):
        start, (b, head, kv, tile, first, top) = so_far
        of_next = look_up(jnp.minimum(turn + 1, count - 1))  # on its way from now on, if anyone asks for it
        plain = start + (tile - first + again) * IN_TILE
        stop, room = plain + pairs * IN_TILE, place_in_ring(turn, rooms)
        visit(turn, _Place(room, b, head, kv, tile, first, start, plain, stop, top))
        return stop, of_next

      count, so_far = turns.many(item), (jnp.int32(0), look_up(jnp.int32(0)))
      if turns.each is None:
        stop, _ = lax.fori_loop(0, count, take, so_far)
      else:  # written out: inside another loop ptxas moves scores between registers
        for turn in range(turns.each):
          so_far = take(jnp.int32(turn), so_far)
        stop, _ = so_far
      return count, stop

    def slot_of(j):
      return place_in_ring(j, slots)

    def discounts_of(j, many=ROWS):
      return pl.ds(place_in_ring(j, 2 * _BATCH) * ROWS, many)

    def compute(turn, place):
      b, head, kv = place.b, place.head, place.kv
      pair, second = (f(thread, jnp.int32(2)) for f in (lax.div, lax.rem))
      first, tile, near = place.first, place.tile + pair, place.plain + pair * IN_TILE
      mine = place.room * computing + thread
      token = place.token + thread * ROWS
      rows, queries = pl.ds(token, ROWS), q_smem.at[mine]
      accumulator = plgpu.ACC((ROWS, value_dim), f32)
      plgpu.barrier_wait(q_filled.at[place.room])
      if given:
        exponent = prepare_queries(place, mine)

      @pl.when(turn > 0)
      def _():
        leave(place_in_ring(turn - 1, rooms))

      if outputs.scaled is not None:  # now, for which that would have waited, too
        plgpu.copy_smem_to_gmem(queries, outputs.scaled.at[b, rows, head])
        outputs.exponent[b, head, rows] = exponent
        if outputs.rounded is not None:  # by way of where the rest of y will be
          copy = low_smem.at[thread]
          copy[...] = plgpu.load(queries, layout=WGMMA, optimized=False).astype(f32).astype(copy.dtype)
          plgpu.commit_smem()
          plgpu.copy_smem_to_gmem(copy, outputs.rounded.at[b, rows, head])

      def free(freed, j):
        plgpu.barrier_arrive(freed.at[slot_of(j)])

      def free_keys(j):
        if folding:  # or they go with the values
          free(k_freed, j)

      def wait_for_keys(j):
        plgpu.barrier_wait((k_filled if folding else v_filled).at[slot_of(j)])

      def wait_for_values(j):
        if folding:  # or they came with the keys
          plgpu.barrier_wait(v_filled.at[slot_of(j)])

      def pass_by(start, stop):
        """Sees blocks come that others read: a barrier that went on twice unseen would look as if it had not."""

        def see(j, none):
          wait_for_keys(j)
          free_keys(j)
          wait_for_values(j)
          free(v_freed, j)
          return none

        lax.fori_loop(start, stop, see, None)

      def scores(j):
        return product(queries, k_smem.at[slot_of(j)], interpret)

      def gather(sums, weights, j):
        values = v_smem.at[slot_of(j)]
        if not staging:
          plgpu.wgmma(sums, weights, values)
          return

        def weighted(added):
          plgpu.wgmma(added, staging[0].at[thread], values)
          return added[...]

        # The interpreter's wgmma takes no operand from registers, and its accumulators cannot be multiplied.
        staging[0][thread] = weights
        plgpu.commit_smem()
        sums[...] = sums[...] + pl.run_scoped(weighted, accumulator)

      def decayed(decay, normaliser, sums):
        sums[...] = sums[...] * decay
        return normaliser * decay

      def far_tile(m, normaliser, sums):
        added: Any = None
        for block in range(IN_TILE):
          j = place.start + (m - first) * IN_TILE + block
          wait_for_keys(j)
          if not folding:  # discounts are on their way before the product is
            fold = plgpu.load(fold_smem.at[discounts_of(j)], layout=WGMMA.reduce(0), optimized=False)
          s = scores(j)
          free_keys(j)
          if block > 0:  # those products have come before the scores
            free(v_freed, j - 1)
          # The barriers: ptxas is short of registers if sums, or scores for their squares, wait for products to be
          # under way, and then it runs one product after another.
          weights = lax.optimization_barrier(even_power(s, power))
          if not folding:
            weights = (weights.astype(v.dtype) if in_pairs else weights) * across(fold, s.shape)
          if in_pairs:
            of_block = by_eights_in_pairs(weights)
            added, weights = lax.optimization_barrier((of_block if added is None else added + of_block, weights))
          else:
            normaliser, weights = lax.optimization_barrier((normaliser + by_eights(weights), weights.astype(v.dtype)))
          wait_for_values(j)
          gather(sums, weights, j)
          if value_dim < ROWS:  # or ptxas would overlap more than it has registers for
            plgpu.wgmma_wait(0)
        if in_pairs:
          normaliser = normaliser + added.astype(f32)
        plgpu.wgmma_wait(0)
        free(v_freed, j)
        return normaliser

      def far_tiles(normaliser, sums):
        """Discounted to the start of its own tile."""
        if folding:  # each to its own end, and from there on with all that came before

          def next_tile(i, carry):
            normaliser, decay = carry
            decay_of_next = 1 * keys_ref.decay[b, kv, first + i + 1]  # times 1: loads vary over shard_map's axes
            return far_tile(first + i, decayed(decay, normaliser, sums), sums), decay_of_next

          normaliser, _ = lax.fori_loop(0, tile - first, next_tile, (normaliser, f32(1)))
          return normaliser
        normaliser = lax.fori_loop(0, place.tile - first, lambda i, x: far_tile(first + i, x, sums), normaliser)

        def other_tile(m, normaliser):
          """The first of the place's own, to the second."""
          return far_tile(m, decayed(keys_ref.decay[b, kv, m], normaliser, sums), sums)

        return lax.fori_loop(place.tile, tile, other_tile, normaliser) if pairs > 1 else normaliser

      def near_block(block, normaliser, sums, masked):
        j, first_key = near + block, (place.room * pairs + pair) * TILE + block * ROWS
        wait_for_keys(j)
        s = scores(j)
        pull = plgpu.load(pull_smem.at[pl.ds(first_key, ROWS)], layout=WGMMA.reduce(0), optimized=False)
        exponent = down(gate, s.shape) - across(pull, s.shape)
        if masked:
          exponent = causal(exponent)
        weights = rounded(even_power(s, power) * jnp.exp2(exponent), v.dtype)
        wait_for_values(j)
        gather(sums, weights, j)
        # Of the rounded weights, so that a row of one key gives that key's value exactly.
        normaliser = normaliser + by_eights(weights.astype(f32))
        plgpu.wgmma_wait(0)
        free_keys(j)
        free(v_freed, j)
        return normaliser

      def gathered(sums):
        if staging:
          sums[...] = jnp.zeros(sums.shape, f32)
        normaliser = plgpu.layout_cast(jnp.zeros((ROWS, 8), f32), WGMMA)
        normaliser = far_tiles(normaliser, sums)
        if again:
          pass_by(place.start + (tile - first) * IN_TILE, near)
        since_start = jnp.exp2(gate)
        sums[...] = sums[...] * down(since_start, sums.shape)
        normaliser = normaliser * down(since_start, normaliser.shape)
        if carried is not None:  # now, for in the end ptxas would be short of registers
          lax.fori_loop(0, states, functools.partial(add_state, sums), None)
        normaliser = lax.fori_loop(0, second, lambda _, x: near_block(0, x, sums, False), normaliser)
        normaliser = near_block(second, normaliser, sums, True)
        return sums[...], normaliser.sum(axis=1)

      def from_state():
        """Its normaliser; and whether there is anything to be found."""
        weight = plgpu.load(weight_smem.at[thread], layout=WGMMA.reduce(1), optimized=False)
        return weight, weight >= 0

      def add_state(sums, _, none):
        centre: Any = None
        if carried_refs.centre is not None:  # early, for it comes from afar
          centre = plgpu.load(carried_refs.centre.at[b, kv], layout=WGMMA.reduce(0), optimized=False)
        plgpu.barrier_wait(carried_filled)
        source = carried_refs.numerator.at[b, rows, head] if wide else carried_smem.at[thread]
        weight, heard = from_state()
        added = plgpu.load(source, layout=WGMMA, optimized=not wide).astype(f32)
        if centre is not None:
          added = added + across(centre, added.shape) * down(weight, added.shape)
        sums[...] = sums[...] + added * down(jnp.where(heard, 1.0, 0.0), added.shape)
        return none

      def add_weight(_, normaliser):
        weight, heard = from_state()
        return normaliser + jnp.where(heard, weight, 0.0)

      gate = plgpu.load(gate_smem.at[mine], layout=WGMMA.reduce(1), optimized=False)
      states = unless_stateless(1, None if carried is None else carried_refs.has_state, b, kv)
      total, normaliser = gathered(staging[1].at[thread]) if staging else pl.run_scoped(gathered, accumulator)
      if carried is not None:
        normaliser = lax.fori_loop(0, states, add_weight, normaliser)
      found = normaliser > SMALLEST
      inverse = jnp.where(found, 1.0 / jnp.where(found, normaliser, 1.0), 0.0)
      y = total * down(inverse, total.shape)
      high = rounded(y, dtype)
      if outputs.scaled is not None:  # queries may still be on their way from where y goes, and the rest of it
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
      here = y_smem.at[mine if in_place else thread]
      here[...] = high
      normaliser_smem[thread] = normaliser
      if save_low:
        low_smem[thread] = (y - high.astype(f32)).astype(jnp.bfloat16)
      plgpu.commit_smem()
      plgpu.copy_smem_to_gmem(here, outputs.high.at[b, rows, head])
      plgpu.copy_smem_to_gmem(normaliser_smem.at[thread], outputs.normaliser.at[b, head, rows])
      if save_low:
        plgpu.copy_smem_to_gmem(low_smem.at[thread], outputs.low.at[b, rows, head])
      pass_by(near + second + 1, place.stop)

    def leave(room):
      """Gives it back to the loader when outputs have been read from there: a place later, when that costs no wait."""
      plgpu.wait_smem_to_gmem(0, wait_read_only=True)
      plgpu.barrier_arrive(q_freed.at[room])

    def prepare_queries(place, mine):
      """Such that the largest coordinate of each is below 1, over what the longest key comes to, and rotated."""
      x = plgpu.load(given_smem.at[mine], layout=WGMMA, optimized=False).astype(f32)
      scale, exponent = power_of_two(jnp.abs(x).max(axis=1), 0 if angles is None else 1)
      x = x * down(scale, x.shape)
      if place.top is not None:
        x = x * jnp.exp2(-place.top.astype(f32))
      if angles is not None:
        here = jax.tree.map(lambda smem: smem.at[place.room], angles_smem)
        turns = along(here, thread)
        turned = [rotated(part, radians(here, turns, thread, n), interpret) for n, part in enumerate(parts_of(x))]
        x = jnp.concatenate(turned, axis=1)
      q_smem[mine] = x.astype(q_smem.dtype)
      plgpu.commit_smem()
      return exponent

    @pl.when(thread < computing)
    def _():
      plgpu.set_max_registers(REGISTERS[computing], action="increase")
      count, _ = for_each_place(compute)
      leave(place_in_ring(count - 1, rooms))

    def load_queries(place):
      b, head, kv = place.b, place.head, place.kv
      filled, tokens = q_filled.at[place.room], TILE * pairs
      here = pull_smem.at[pl.ds(place.room * tokens, tokens)]
      plgpu.copy_gmem_to_smem(keys_ref.pull.at[b, kv, pl.ds(place.token, tokens)], here, filled)
      if angles is not None:
        sources = of_tiles(angles_ref, b, kv, place.tile * IN_TILE, computing)
        for source, smem in zip(sources, jax.tree.leaves(angles_smem), strict=True):
          plgpu.copy_gmem_to_smem(source, smem.at[place.room], filled)
      for w in range(computing):
        rows, of_place = pl.ds(place.token + w * ROWS, ROWS), place.room * computing + w
        plgpu.copy_gmem_to_smem(q_ref.at[b, rows, head], given_smem.at[of_place], filled)
        plgpu.copy_gmem_to_smem(keys_ref.gate.at[b, kv, rows], gate_smem.at[of_place], filled)
        if carried is not None:
          states = unless_stateless(1, carried_refs.has_state, b, kv)

          @pl.when(states > 0)
          def _(w=w, rows=rows):
            plgpu.copy_gmem_to_smem(carried_refs.normaliser.at[b, head, rows], weight_smem.at[w], carried_filled)
            if not wide:
              plgpu.copy_gmem_to_smem(carried_refs.numerator.at[b, rows, head], carried_smem.at[w], carried_filled)

    def load_block(place, j, source, block):
      b, kv, slot, rows = place.b, place.kv, slot_of(j), pl.ds(block * ROWS, ROWS)
      wait_if(j >= slots, (k_freed if folding else v_freed).at[slot])
      plgpu.copy_gmem_to_smem(source.at[b, rows, kv], k_smem.at[slot], (k_filled if folding else v_filled).at[slot])
      if folding:
        wait_if(j >= slots, v_freed.at[slot])
      plgpu.copy_gmem_to_smem(v_ref.at[b, rows, kv], v_smem.at[slot], v_filled.at[slot])

    def load_keys(place, start, stop, source, first_tile):
      def load(j, none):
        load_block(place, j, source, first_tile * IN_TILE + j - start)
        return none

      lax.fori_loop(start, stop, load, None)

    def load_keys_and_discounts(place):
      """Discounts until the place begins; of its own tiles each until its own end."""
      b, kv = place.b, place.kv
      begin = [keys_ref.totals[piece, b, kv, place.tile] for piece in range(2)]

      def load_plain(j):
        load_block(place, j, keys_ref.plain, place.first * IN_TILE + j - place.start)

      def load_batch(n, none):
        start = place.start + n * _BATCH
        found = []  # from afar, while the first block's slot is waited for
        for i in range(_BATCH // IN_TILE):
          tile = jnp.minimum(place.first + n * (_BATCH // IN_TILE) + i, place.tile + pairs - 1)
          fold = keys_ref.fold.at[b, kv, pl.ds(tile * TILE, TILE)]
          end = [keys_ref.totals[2 + piece, b, kv, tile] for piece in range(2)]
          found.append((plgpu.load(fold, layout=_BY_THREAD, optimized=False), *end))
        load_plain(start)
        for i, (fold, high, low) in enumerate(found):
          since = (begin[0] - high) + (begin[1] - low)
          here = fold_smem.at[discounts_of(start + i * IN_TILE, TILE)]
          discounts = raised(fold, power) * jnp.exp2(jnp.minimum(since, 0.0) * LOG2E)
          here[...] = discounts.astype(fold_smem.dtype)
        plgpu.barrier_arrive(v_filled.at[slot_of(start)])

        def load(j, none):
          load_plain(j)
          plgpu.barrier_arrive(v_filled.at[slot_of(j)])
          return none

        return lax.fori_loop(start + 1, jnp.minimum(start + _BATCH, place.stop), load, none)

      batches = lax.div(place.stop - place.start + _BATCH - 1, jnp.int32(_BATCH))
      lax.fori_loop(0, batches, load_batch, None)

    def load(turn, place):
      wait_if(turn >= rooms, q_freed.at[place.room])
      load_queries(place)
      if folding:
        load_keys(place, place.start, place.plain, keys_ref.folded, place.first)
        load_keys(place, place.plain, place.stop, keys_ref.plain, place.tile)
      else:
        load_keys_and_discounts(place)

    @pl.when(thread == computing)
    def _():
      plgpu.set_max_registers(LOADING_REGISTERS, action="decrease")
      count, blocks_of_keys = for_each_place(load)
      wait_for_all(q_freed, count)
      if folding:
        wait_for_all(k_freed, blocks_of_keys)
      wait_for_all(v_freed, blocks_of_keys)

  of_q: Any = jax.ShapeDtypeStruct(q.shape, keys.plain.dtype)
  by_token: Any = jax.ShapeDtypeStruct((batch, time, query_heads, value_dim), dtype)
  by_head: Any = jax.ShapeDtypeStruct((batch, query_heads, time), f32)
  scaling = given and save_low
  outputs = Outputs(
    high=by_token,
    low=by_token.update(dtype=jnp.bfloat16) if save_low else None,
    normaliser=by_head,
    scaled=of_q if scaling else None,
    rounded=of_q.update(dtype=jnp.bfloat16) if scaling and angles is not None and head_dim == value_dim else None,
    exponent=by_head.update(dtype=jnp.int32) if scaling else None,
  )
  unused: Any = plgpu.SMEM((1,), f32)
  # A warpgroup's outputs where its queries were.
  in_place = interpret is None and head_dim == value_dim and narrow
  kinds = [q.dtype] if angles is None else [q.dtype, keys.plain.dtype]  # as given, and rotated
  q_memory = [shared((rooms * computing, ROWS, head_dim), kind) for kind in kinds]
  y_memory = shared((rooms * computing if in_place else computing, ROWS, value_dim), dtype)
  staging = (
    [] if interpret is None else [shared((computing, ROWS, n), t) for n, t in ((ROWS, v.dtype), (value_dim, f32))]
  )
  together = plgpu.RefUnion(*q_memory) if interpret is None and angles is not None else q_memory
  angles_memory: Any = None if angles is None else memory(angles, computing, rooms)
  freed = plgpu.Barrier(num_arrivals=computing, num_barriers=slots)
  scratch = [
    plgpu.RefUnion(*q_memory, y_memory) if in_place else (together, y_memory),
    shared((slots, ROWS, head_dim), keys.plain.dtype),
    unused if folding else plgpu.SMEM((2 * _BATCH * ROWS,), v.dtype if in_pairs else f32),
    shared((slots, ROWS, value_dim), v.dtype),
    shared((computing, ROWS, value_dim), jnp.bfloat16) if save_low else unused,
    plgpu.SMEM((computing, ROWS), f32),
    unused if carried is None or wide else shared((computing, ROWS, value_dim), carried.numerator.dtype),
    plgpu.SMEM((computing, ROWS), f32),
    plgpu.SMEM((rooms * computing, ROWS), f32),
    plgpu.SMEM((rooms * TILE * pairs,), f32),
    angles_memory,
    plgpu.Barrier(num_arrivals=1 + 2 * computing + len(jax.tree.leaves(angles)), num_barriers=rooms),
    plgpu.Barrier(num_arrivals=computing, num_barriers=rooms),
    plgpu.Barrier(num_arrivals=computing if wide else 2 * computing),
    plgpu.Barrier(num_barriers=slots),
    freed,
    plgpu.Barrier(num_arrivals=1 if folding else 3, num_barriers=slots),
    freed,
    *staging,
  ]
  leaves, structure = jax.tree.flatten((q, keys, v, carried, angles))
  out_leaves, out_structure = jax.tree.flatten(outputs)
  results = plgpu.kernel(
    kernel,
    out_type=out_leaves,
    scratch_types=scratch,
    grid=(turns.blocks,),
    grid_names=("block",),
    num_threads=computing + 1,
    thread_name="thread",
    compiler_params=plgpu.CompilerParams(approx_math=True),
    interpret=interpret,
    kernel_name="attention_forward",
  )(*leaves)
  result: Outputs = jax.tree.unflatten(out_structure, varying_as(q, results))
  return result
