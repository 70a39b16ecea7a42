"""The chunked form's forward pass on TPU, p = 2: one kernel, whose state never leaves the chip.

    y_i = (inside chunk + b_i sum_f w_f S_f phi_f(q_i)) / (inside chunk + b_i q_i . Z q_i)
    S_f <- b S_f + sum_j b_j phi_f(k_j) v_j             Z <- b Z + sum_j b_j k_j k_j^T

The grid walks the chunks of a head in order with S and Z in VMEM. Pairs inside the chunk come first. A turn of the loop
over shifts then writes some features of the state with all keys of the chunk, and reads what they were for all queries.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from kernels_pallas.tpu import shifts
from kernels_pallas.tpu.features import Shifts, for_all_shifts
from kernels_pallas.tpu.shifts import LANES, Carried, Chunks, State, dot, tile
from kernels_pallas.weights import SMALLEST


class Outputs(NamedTuple):
  """What each query gathers."""

  y: Float[Array, "B H g dv T"]
  normaliser: Float[Array, "B H g 1 T"]
  heard: Float[Array, "B H g 1 T"]  # 1, or 0 where rounding left nothing of what the state gave the normaliser


def forward(
  x: Chunks, initial: State | None, *, return_final: bool, interpret: Any = None
) -> tuple[Outputs, State | None]:
  """The outputs in float32, and the state after the last chunk."""
  batch, heads, group, head_dim, time = x.q.shape
  value_dim, count = x.v.shape[2], x.across.shape[-1]
  chunk = time // count
  tiles = chunk // LANES

  def kernel(q_ref, k_ref, v_ref, gate_ref, until_ref, across_ref, *more):
    refs = list(more)
    initial_refs = None if initial is None else (refs.pop(0), refs.pop(0))
    y_ref, normaliser_ref, heard_ref = (refs.pop(0) for _ in range(3))
    final_refs = (refs.pop(0), refs.pop(0)) if return_final else None
    key_factors, query_factors, sums, discounted, features, key_features, rounded, *rooms = refs[3:]
    carried = Carried(*refs[:3])
    S, Z = carried[:2]
    *place, n = (pl.program_id(axis) for axis in range(3))

    @pl.when(n == 0)
    def _():
      shifts.begin(carried, initial_refs, (*place,))

    for t in range(tiles):
      shifts.write_factors(key_factors, t, k_ref[0, 0, :, tile(t)])

    def prepare(g):
      for t in range(tiles):
        shifts.write_factors(query_factors, g * tiles + t, q_ref[0, 0, g, :, tile(t)])

    shifts.for_all_groups(group, prepare)
    decay = across_ref[0, 0, 0, n]
    discounted[...] = (v_ref[0, 0].astype(jnp.float32) * until_ref[0, 0]).astype(jnp.bfloat16)
    sums[...] = jnp.zeros_like(sums)
    keys_down = [shifts.tokens_down(k_ref[0, 0, :, tile(t)]) for t in range(tiles)]
    pulls = [shifts.column(gate_ref[0, 0, :, tile(t)]) for t in range(tiles)]
    high, low = shifts.pieces(Z[...])

    def inside(g):
      """Writes the normaliser, and what the queries gather inside the chunk."""

      def begin(pair):
        i, j = pair
        return dot(keys_down[j], q_ref[0, 0, g, :, i])

      for (i, j), scores in shifts.begun_ahead(shifts.triangle(tiles), begin):
        gate = gate_ref[0, 0, :, i]
        if j == 0:
          q = q_ref[0, 0, g, :, i]
          far = jnp.sum((dot(high, q) + dot(low, q)) * q.astype(jnp.float32), axis=0, keepdims=True)
          heard = jnp.where(far < 0, 0.0, 1.0)  # in exact arithmetic it is not; NaN stays
          total, normaliser = jnp.zeros((value_dim, q.shape[1]), jnp.float32), far * jnp.exp2(gate) * heard
          heard_ref[0, 0, g, :, i] = heard
        weights = (scores * scores * shifts.discounts(gate, pulls[j], i.start - j * LANES)).astype(jnp.bfloat16)
        # Of the rounded weights, so that a row of one key gives that key's value exactly.
        normaliser += jnp.sum(weights.astype(jnp.float32), axis=0, keepdims=True)
        total += dot(v_ref[0, 0, :, tile(j)], weights)
        if (j + 1) * LANES == i.stop:
          y_ref[0, 0, g, :, i] = total
          normaliser_ref[0, 0, g, :, i] = normaliser

    shifts.for_all_groups(group, inside)
    shifts.add_gram(Z, decay, k_ref[0, 0], until_ref[0, 0])

    def visit(turn: Shifts) -> None:
      found = turn.room_in(rooms)
      state = S[turn.rows]
      # By way of memory, for the state would wait in registers, that are too few, until it is transposed.
      rounded[: turn.size] = turn.weighted(state).astype(jnp.bfloat16)
      shifts.transpose(found, rounded)
      S[turn.rows] = state * decay
      # Written first: the matrix units are then busy while it is transposed to be read.
      turn.add_to_state(S, key_factors, range(tiles), lambda: discounted[...], room=key_features)

      def read(g):
        for some in shifts.by_twos(tiles):
          for t in some:
            turn.expand(features, query_factors, g * tiles + t, t)
          at = pl.ds(some[0] * LANES, len(some) * LANES)
          sums[g, :, at] += dot(shifts.transposed(found), shifts.side_by_side(features[t, : turn.size] for t in some))

      shifts.for_all_groups(group, read)

    for_all_shifts(head_dim, visit)

    def finish(g):
      normaliser = normaliser_ref[0, 0, g]
      empty = normaliser <= SMALLEST
      total = y_ref[0, 0, g] + sums[g] * (jnp.exp2(gate_ref[0, 0]) * heard_ref[0, 0, g])
      y_ref[0, 0, g] = total * jnp.where(empty, 0.0, 1 / jnp.where(empty, 1.0, normaliser))

    shifts.for_all_groups(group, finish)
    if final_refs is not None:

      @pl.when(n == count - 1)
      def _():
        shifts.keep(carried, final_refs, (*place,))

  shape = shifts.vary_as(x.q)
  lead = (batch, heads)
  out_shape = [shape((*lead, group, rows, time), jnp.float32) for rows in (value_dim, 1, 1)]
  features = head_dim * (head_dim + 1) // 2
  if return_final:
    sizes = ((features, value_dim), (head_dim, head_dim))
    out_shape += [shape((*lead, *size), jnp.float32) for size in sizes]
  results = pl.pallas_call(
    kernel,
    grid=(batch, heads, count),
    in_specs=[*shifts.specs(x, chunk), *(() if initial is None else (shifts.IN_MEMORY,) * 2)],
    out_specs=[
      *(shifts.by_group(group, rows, chunk) for rows in (value_dim, 1, 1)),
      *((shifts.IN_MEMORY,) * 2 if return_final else ()),
    ],
    out_shape=out_shape,
    scratch_shapes=[
      *Carried.scratch(head_dim, value_dim),
      shifts.scratch_of_factors(tiles, head_dim),
      shifts.scratch_of_factors(group * tiles, head_dim),
      pltpu.VMEM((group, value_dim, chunk), jnp.float32),
      pltpu.VMEM((value_dim, chunk), jnp.bfloat16),
      shifts.scratch_of_features(tiles),
      shifts.scratch_of_features(tiles, 2 * shifts.PART),
      pltpu.VMEM((shifts.ROWS, value_dim), jnp.bfloat16),
      *shifts.scratch_of_transposed(head_dim, value_dim),
    ],
    compiler_params=shifts.PARAMETERS,
    interpret=interpret or False,
    name="chunked_forward",
  )(*x, *(() if initial is None else initial))
  return Outputs(*results[:3]), State(*results[3:]) if return_final else None
