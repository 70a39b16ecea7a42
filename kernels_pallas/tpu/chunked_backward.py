"""The chunked form's backward pass on TPU, p = 2: two kernels, whose states never leave the chip but for a few copies.

`queries` walks the chunks as the forward pass does, computing the states again, for what queries get through them:

    dq_i <- phi'(q_i)^T (w S dn_i) + 2 dz_i Z q_i         dn, dz: cotangents of numerator and normaliser, discounted

`keys` walks them backwards with the cotangents of the states, and takes the pairs inside each chunk along:

    dS_f <- b dS_f + sum_i phi_f(q_i) dn_i                dZ <- b dZ + sum_i dz_i q_i q_i^T
    dv_j <- b_j (w dS)^T phi(k_j)                         dk_j <- b_j phi'(k_j)^T (w dS v_j) + 2 b_j dZ k_j

Every few chunks both leave a copy of what they carry: the inner product of a state and its cotangent is what a sum of
gradients over all tokens before it must come to.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, BFloat16, Float

from kernels_pallas.tpu import shifts
from kernels_pallas.tpu.features import Shifts, Sums, for_all_shifts
from kernels_pallas.tpu.shifts import LANES, NT, Carried, Chunks, State, dot, tile

_PIECES = 4  # of a turn's features, whose cotangents for two tiles are taken up while others' products are made


class Rows(NamedTuple):
  """What the queries bring to the backward pass."""

  dy: BFloat16[Array, "B H g dv T"]
  inverse: Float[Array, "B H g 1 T"]  # 1 / normaliser
  far: Float[Array, "B H g 1 T"]  # the same, discounted since the chunk began, or 0 where the state was not heard
  delta: Float[Array, "B H g 1 T"]  # dy . y


class Gradients(NamedTuple):
  """Cotangents; those of queries without what comes through states."""

  q: Float[Array, "B H g d T"]
  k: Float[Array, "B H d T"]
  v: Float[Array, "B H dv T"]


def queries(
  x: Chunks, rows: Rows, initial: State | None, stretch: int, *, interpret: Any = None
) -> tuple[Float[Array, "B H g d T"], State]:
  """What queries get through states, and the states that each `stretch` of chunks finds."""
  batch, heads, group, head_dim, time = x.q.shape
  value_dim, count = x.v.shape[2], x.across.shape[-1]
  chunk = time // count
  tiles = chunk // LANES

  def kernel(q_ref, k_ref, v_ref, gate_ref, until_ref, across_ref, dy_ref, far_ref, delta_ref, *more):
    del gate_ref
    refs = list(more)
    initial_refs = None if initial is None else (refs.pop(0), refs.pop(0))
    dq_ref, *kept_refs = (refs.pop(0) for _ in range(3))
    key_factors, queries, plain, shifted, cotangents, discounted, found = refs[3:]
    carried, sums = Carried(*refs[:3]), Sums(plain, shifted)
    S, Z = carried[:2]
    *place, n = (pl.program_id(axis) for axis in range(3))

    @pl.when(n == 0)
    def _():
      shifts.begin(carried, initial_refs, (*place,))

    @pl.when(lax.rem(n, jnp.int32(stretch)) == 0)
    def _():
      shifts.keep(carried, (kept_refs[0], kept_refs[1]), (*place, lax.div(n, jnp.int32(stretch))))

    for t in range(tiles):
      shifts.write_factors(key_factors, t, k_ref[0, 0, :, tile(t)])
    high, low = shifts.pieces(Z[...])

    def prepare(g):
      for t in range(tiles):
        at, q, far = g * tiles + t, q_ref[0, 0, g, :, tile(t)], far_ref[0, 0, g, :, tile(t)]
        shifts.double(queries, at, q)
        cotangents[at] = _discounted(dy_ref[0, 0, g, :, tile(t)], far)
        sums.clear(at)
        normaliser = -delta_ref[0, 0, g, :, tile(t)] * far
        dq_ref[0, 0, g, :, tile(t)] = 2 * normaliser * (dot(high, q) + dot(low, q))

    shifts.for_all_groups(group, prepare)
    decay = across_ref[0, 0, 0, n]
    shifts.add_gram(Z, decay, k_ref[0, 0], until_ref[0, 0])
    discounted[...] = _discounted(v_ref[0, 0], until_ref[0, 0])

    def visit(turn: Shifts) -> None:
      found[: turn.size] = turn.weighted(S[turn.rows]).astype(jnp.bfloat16)

      def reads(g):
        for some in shifts.by_twos(tiles):
          at = [g * tiles + t for t in some]
          for piece in turn.pieces(_PIECES):
            yield piece.add_transposed(sums, queries, at, found, shifts.side_by_side(cotangents[n] for n in at))

      def writes():
        for piece in turn.pieces(_PIECES * len(shifts.by_twos(tiles))):
          yield piece.add_to_state(S, key_factors, range(tiles), lambda: discounted[...], decay=decay)

      if group == 1:
        shifts.take_turns(reads(0), writes())
      else:
        shifts.for_all_groups(group, lambda g: shifts.take_turns(reads(g)))
        shifts.take_turns(writes())

    for_all_shifts(head_dim, visit)

    def finish(g):
      for t in range(tiles):
        dq_ref[0, 0, g, :, tile(t)] += sums.total(g * tiles + t)

    shifts.for_all_groups(group, finish)

  shape = shifts.vary_as(x.q)
  dq, *kept = pl.pallas_call(
    kernel,
    grid=(batch, heads, count),
    in_specs=[
      *shifts.specs(x, chunk),
      *(shifts.by_group(group, size, chunk) for size in (value_dim, 1, 1)),
      *(() if initial is None else (shifts.IN_MEMORY,) * 2),
    ],
    out_specs=[shifts.by_group(group, head_dim, chunk), *(shifts.IN_MEMORY,) * 2],
    out_shape=[shape(x.q.shape, jnp.float32), *_kept_shapes(x, stretch)],
    scratch_shapes=[
      *Carried.scratch(head_dim, value_dim),
      shifts.scratch_of_factors(tiles, head_dim),
      shifts.scratch_of_vectors(group * tiles, head_dim),
      *Sums.scratch(group * tiles, head_dim),
      pltpu.VMEM((group * tiles, value_dim, LANES), jnp.bfloat16),
      pltpu.VMEM((value_dim, chunk), jnp.bfloat16),
      pltpu.VMEM((shifts.ROWS, value_dim), jnp.bfloat16),
    ],
    compiler_params=shifts.PARAMETERS,
    interpret=interpret or False,
    name="chunked_queries",
  )(*x, rows.dy, rows.far, rows.delta, *(() if initial is None else initial))
  return dq, State(*kept)


def keys(
  x: Chunks, rows: Rows, final: State | None, stretch: int, *, interpret: Any = None
) -> tuple[Gradients, State, State]:
  """What keys and values get, and queries inside chunks; the cotangents of the states that each stretch leaves, and of
  the initial state. `final` is that of the last state.
  """
  batch, heads, group, head_dim, time = x.q.shape
  value_dim, count = x.v.shape[2], x.across.shape[-1]
  chunk = time // count
  tiles = chunk // LANES

  def kernel(
    q_ref, k_ref, v_ref, gate_ref, until_ref, across_ref, dy_ref, inverse_ref, far_ref, delta_ref, *more
  ):  # fmt: skip
    refs = list(more)
    final_refs = None if final is None else (refs.pop(0), refs.pop(0))
    dq_ref, dk_ref, dv_ref, *kept_refs = (refs.pop(0) for _ in range(7))
    keys, key_factors, query_factors, plain, shifted, cotangents, discounted, found, value_sums, *rooms = refs[3:]
    carried, sums = Carried(*refs[:3]), Sums(plain, shifted)
    dS, dZ = carried[:2]
    *place, step = (pl.program_id(axis) for axis in range(3))
    n = count - 1 - step

    @pl.when(step == 0)
    def _():
      shifts.begin(carried, final_refs, (*place,))

    @pl.when((step == 0) | (lax.rem(n + 1, jnp.int32(stretch)) == 0))
    def _():
      shifts.keep(carried, (kept_refs[0], kept_refs[1]), (*place, lax.div(n, jnp.int32(stretch))))

    high, low = shifts.pieces(dZ[...])
    for t in range(tiles):
      k, until = k_ref[0, 0, :, tile(t)], until_ref[0, 0, :, tile(t)]
      shifts.double(keys, t, k)
      shifts.write_factors(key_factors, t, k)
      sums.clear(t)
      value_sums[t] = jnp.zeros_like(value_sums[t])
      dk_ref[0, 0, :, tile(t)] = 2 * until * (dot(high, k) + dot(low, k))
      dv_ref[0, 0, :, tile(t)] = jnp.zeros_like(value_sums[t])
    decay = across_ref[0, 0, 0, n]
    dZ[...] = dZ[...] * decay

    def prepare(g):
      for t in range(tiles):
        at = g * tiles + t
        shifts.write_factors(query_factors, at, q_ref[0, 0, g, :, tile(t)])
        cotangents[at] = _discounted(dy_ref[0, 0, g, :, tile(t)], far_ref[0, 0, g, :, tile(t)])
      _inside(
        q_ref.at[0, 0, g], k_ref.at[0, 0], v_ref.at[0, 0], gate_ref.at[0, 0], dy_ref.at[0, 0, g],
        inverse_ref.at[0, 0, g], delta_ref.at[0, 0, g], dq_ref.at[0, 0, g], dk_ref.at[0, 0], dv_ref.at[0, 0],
      )  # fmt: skip
      shifts.add_gram(dZ, 1.0, q_ref[0, 0, g], -delta_ref[0, 0, g] * far_ref[0, 0, g])

    shifts.for_all_groups(group, prepare)
    discounted[...] = _discounted(v_ref[0, 0], until_ref[0, 0])

    def visit(turn: Shifts) -> None:
      found[: turn.size] = turn.weighted(dS[turn.rows]).astype(jnp.bfloat16)
      found_transposed = turn.room_in(rooms)
      shifts.transpose(found_transposed, found)

      def reads():
        for some in shifts.by_twos(tiles):
          pieces, lanes = turn.pieces(_PIECES), pl.ds(some[0] * LANES, len(some) * LANES)
          for n, piece in enumerate(pieces):
            piece.add_transposed(sums, keys, some, found, discounted[:, lanes])
            for t in some[n * len(some) // len(pieces) : (n + 1) * len(some) // len(pieces)]:
              value_sums[t] += dot(shifts.transposed(found_transposed), turn.features(key_factors, t))
            yield

      def writes(g, decay):
        at = [g * tiles + t for t in range(tiles)]
        for piece in turn.pieces(_PIECES * len(shifts.by_twos(tiles))):
          yield piece.add_to_state(
            dS, query_factors, at, lambda: shifts.side_by_side(cotangents[n] for n in at), decay=decay
          )

      if group == 1:
        shifts.take_turns(reads(), writes(0, decay))
      else:
        shifts.take_turns(reads())
        dS[turn.rows] = dS[turn.rows] * decay
        shifts.for_all_groups(group, lambda g: shifts.take_turns(writes(g, None)))

    for_all_shifts(head_dim, visit)
    for t in range(tiles):
      dk_ref[0, 0, :, tile(t)] += sums.total(t)
      dv_ref[0, 0, :, tile(t)] += value_sums[t] * until_ref[0, 0, :, tile(t)]

    @pl.when(step == count - 1)
    def _():
      shifts.keep(carried, (kept_refs[2], kept_refs[3]), (*place,))

  def place(step: Any) -> Any:
    return count - 1 - step

  shape = shifts.vary_as(x.q)
  kept_shapes = _kept_shapes(x, stretch)
  dq, dk, dv, *kept = pl.pallas_call(
    kernel,
    grid=(batch, heads, count),
    in_specs=[
      *shifts.specs(x, chunk, place),
      *(shifts.by_group(group, size, chunk, place) for size in (value_dim, 1, 1, 1)),
      *(() if final is None else (shifts.IN_MEMORY,) * 2),
    ],
    out_specs=[
      shifts.by_group(group, head_dim, chunk, place),
      shifts.by_token(head_dim, chunk, place),
      shifts.by_token(value_dim, chunk, place),
      *(shifts.IN_MEMORY,) * 4,
    ],
    out_shape=[
      *(shape(array.shape, jnp.float32) for array in (x.q, x.k, x.v)),
      *kept_shapes,
      *(shape((batch, heads, *kept.shape[3:]), jnp.float32) for kept in kept_shapes),
    ],
    scratch_shapes=[
      *Carried.scratch(head_dim, value_dim),
      shifts.scratch_of_vectors(tiles, head_dim),
      shifts.scratch_of_factors(tiles, head_dim),
      shifts.scratch_of_factors(group * tiles, head_dim),
      *Sums.scratch(tiles, head_dim),
      pltpu.VMEM((group * tiles, value_dim, LANES), jnp.bfloat16),
      pltpu.VMEM((value_dim, chunk), jnp.bfloat16),
      pltpu.VMEM((shifts.ROWS, value_dim), jnp.bfloat16),
      pltpu.VMEM((tiles, value_dim, LANES), jnp.float32),
      *shifts.scratch_of_transposed(head_dim, value_dim),
    ],
    compiler_params=shifts.PARAMETERS,
    interpret=interpret or False,
    name="chunked_keys",
  )(*x, *rows, *(() if final is None else final))
  return Gradients(dq, dk, dv), State(*kept[:2]), State(*kept[2:])


def _inside(q_ref, k_ref, v_ref, gate_ref, dy_ref, inverse_ref, delta_ref, dq_ref, dk_ref, dv_ref):
  """Pairs inside a chunk: writes what queries get, and adds what keys and values do.

  dq and dk come from the same rounded numbers: most of them cancels in the gradients of gates.
  """
  tiles = [tile(t) for t in range(q_ref.shape[-1] // LANES)]
  keys_down, values_down = ([shifts.tokens_down(ref[:, at]) for at in tiles] for ref in (k_ref, v_ref))
  pulls = [shifts.column(gate_ref[:, at]) for at in tiles]

  def begin(pair):
    i, j = pair
    return dot(keys_down[j], q_ref[:, i]), dot(values_down[j], dy_ref[:, i])

  for (i, j), (scores, dweights) in shifts.begun_ahead(shifts.triangle(len(tiles)), begin):
    slopes = scores * inverse_ref[:, i] * shifts.discounts(gate_ref[:, i], pulls[j], i.start - j * LANES)
    weights = (slopes * scores).astype(jnp.bfloat16)
    dscores = (slopes * (dweights - delta_ref[:, i])).astype(jnp.bfloat16)
    dv_ref[:, tiles[j]] += dot(dy_ref[:, i], weights, NT)
    dk_ref[:, tiles[j]] += 2 * dot(q_ref[:, i], dscores, NT)
    if j == 0:
      dq = jnp.zeros((q_ref.shape[0], scores.shape[1]), jnp.float32)
    dq += dot(k_ref[:, tiles[j]], dscores)
    if (j + 1) * LANES == i.stop:
      dq_ref[:, i] = 2 * dq


def _discounted(x: BFloat16[Array, "v t"], discount: Float[Array, "1 t"]) -> BFloat16[Array, "v t"]:
  return (x.astype(jnp.float32) * discount).astype(jnp.bfloat16)


def _kept_shapes(x: Chunks, stretch: int) -> list[Any]:
  """Of copies of the state, one for each stretch."""
  (batch, heads, _, head_dim, _), value_dim = x.q.shape, x.v.shape[2]
  lead = (batch, heads, -(-x.across.shape[-1] // stretch))
  shape = shifts.vary_as(x.q)
  return [
    shape((*lead, head_dim * (head_dim + 1) // 2, value_dim), jnp.float32),
    shape((*lead, head_dim, head_dim), jnp.float32),
  ]
