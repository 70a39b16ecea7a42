"""The attention form's backward pass on TPU: one kernel for queries and one for keys and values.

    P_ij  = B_ij / normaliser_i                     dV_j = sum_i P_ij dy_i
    dS_ij = P_ij / s_ij (dy_i . v_j - delta_i)      dK_j = p sum_i dS_ij q_i      dQ_i = p sum_j dS_ij k_j

Both compute scores again, by the same function, so that dQ and dK come from the same rounded numbers: most of them
cancels in the gradients of gates and rotations.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, BFloat16, Float

from kernels_pallas.tpu import pairs, shifts
from kernels_pallas.tpu.shifts import NT, Chunks, dot
from kernels_pallas.weights import LOG2E, slope


class Rows(NamedTuple):
  """What the queries bring to the backward pass."""

  dy: BFloat16[Array, "B H g dv T"]
  inverse: Float[Array, "B H g 1 T"]  # 1 / normaliser
  delta: Float[Array, "B H g 1 T"]  # dy . y


_INPUTS = len(Chunks._fields) + len(Rows._fields) + 1  # of both kernels; the last are the totals


class Gradients(NamedTuple):
  """Cotangents, but for the factor p of dq and dk."""

  q: Float[Array, "B H g d T"]
  k: Float[Array, "B H d T"]
  v: Float[Array, "B H dv T"]


def backward(x: Chunks, rows: Rows, ends: Float[Array, "B H 2 n"], *, power: int, interpret: Any = None) -> Gradients:
  """The cotangents of q, k and v; `ends` are the totals of the log gates at each block's end, high and low."""
  dq = _queries(x, rows, ends, power, interpret)
  return Gradients(dq, *_keys(x, rows, ends, power, interpret))


def _queries(x: Chunks, rows: Rows, ends: Array, power: int, interpret: Any) -> Float[Array, "B H g d T"]:
  batch, heads, group, head_dim, time = x.q.shape
  block = time // x.across.shape[-1]
  triangle = pairs.Triangle(x.across.shape[-1])

  def place(g, row, col):
    return (g, *triangle.pair(row, col))

  def kernel(*refs):
    inputs, (dq_ref, *down) = refs[:_INPUTS], refs[_INPUTS:]
    i, j = triangle.pair(pl.program_id(3), pl.program_id(4))

    @pl.when(j == 0)
    def _():
      dq_ref[...] = jnp.zeros_like(dq_ref)

    def add(piece, weights, dscores):
      dq_ref[0, 0, 0, :, piece.queries] += dot(inputs[1][0, 0, :, piece.keys], dscores)

    _for_pieces(inputs, down, i, j, power, add)

  return pl.pallas_call(
    kernel,
    grid=(batch, heads, group, *triangle.grid),
    in_specs=_specs(x, block, place),
    out_specs=pairs.of_queries(head_dim, block, place),
    out_shape=shifts.vary_as(x.q)(x.q.shape, jnp.float32),
    scratch_shapes=pairs.scratch(x.k.shape[2], x.v.shape[2], block=block),
    compiler_params=pairs.PARAMETERS,
    interpret=interpret or False,
    name="attention_queries",
  )(*x, *rows, ends)


def _keys(x: Chunks, rows: Rows, ends: Array, power: int, interpret: Any) -> list[Array]:
  batch, heads, group, head_dim, time = x.q.shape
  value_dim, count = x.v.shape[2], x.across.shape[-1]
  block, triangle = time // count, pairs.Triangle(count)

  def place(row, col, g):
    return (g, *triangle.reversed_pair(row, col))

  def kernel(*refs):
    inputs, (dk_ref, dv_ref, *down) = refs[:_INPUTS], refs[_INPUTS:]
    q_ref, dy_ref = inputs[0], inputs[6]
    i, j = triangle.reversed_pair(pl.program_id(2), pl.program_id(3))

    @pl.when((i == count - 1) & (pl.program_id(4) == 0))
    def _():
      dk_ref[...] = jnp.zeros_like(dk_ref)
      dv_ref[...] = jnp.zeros_like(dv_ref)

    def add(piece, weights, dscores):
      dk_ref[0, 0, :, piece.keys] += dot(q_ref[0, 0, 0, :, piece.queries], dscores, NT)
      dv_ref[0, 0, :, piece.keys] += dot(dy_ref[0, 0, 0, :, piece.queries], weights, NT)

    _for_pieces(inputs, down, i, j, power, add)

  shape = shifts.vary_as(x.q)
  return pl.pallas_call(
    kernel,
    grid=(batch, heads, *triangle.grid, group),
    in_specs=_specs(x, block, place),
    out_specs=[pairs.of_keys(size, block, place) for size in (head_dim, value_dim)],
    out_shape=[shape(array.shape, jnp.float32) for array in (x.k, x.v)],
    scratch_shapes=pairs.scratch(x.k.shape[2], x.v.shape[2], block=block),
    compiler_params=pairs.PARAMETERS,
    interpret=interpret or False,
    name="attention_keys",
  )(*x, *rows, ends)


def _for_pieces(inputs, down, i, j, power, add):
  """Calls `add` for all pieces of block i of queries and block j of keys, with their weights and scores' cotangents."""
  q_ref, k_ref, v_ref, gate_ref, until_ref, _, dy_ref, inverse_ref, delta_ref, ends_ref = inputs
  keys_down, values_down, until_down = down

  def visit(near, rows, discount):
    pairs.lay_down(keys_down, k_ref[0, 0])
    pairs.lay_down(values_down, v_ref[0, 0])

    def begin(piece):
      q, dy = (ref[0, 0, 0, :, piece.queries] for ref in (q_ref, dy_ref))
      return dot(keys_down[piece.keys], q), dot(values_down[piece.keys], dy)

    for piece, (scores, dweights) in shifts.begun_ahead(pairs.pieces(q_ref.shape[-1], near=near), begin):
      slopes = slope(scores, discount(piece) * rows(piece.queries), power)
      dscores = slopes * (dweights - delta_ref[0, 0, 0, :, piece.queries])
      add(piece, (slopes * scores).astype(jnp.bfloat16), dscores.astype(jnp.bfloat16))

  @pl.when(j < i)
  def far():
    before = jnp.maximum(i - 1, 0)  # the end of the block before the queries'
    between = (ends_ref[0, 0, 0, before] - ends_ref[0, 0, 0, j]) + (ends_ref[0, 0, 1, before] - ends_ref[0, 0, 1, j])
    pairs.spread(until_down, until_ref[0, 0])

    def rows(queries):
      return inverse_ref[0, 0, 0, :, queries] * jnp.exp2(gate_ref[0, 0, :, queries] + between * LOG2E)

    visit(False, rows, lambda piece: until_down[piece.keys])

  @pl.when(j == i)
  def near():
    visit(
      True,
      lambda queries: inverse_ref[0, 0, 0, :, queries],
      lambda piece: pairs.within_block(gate_ref, piece),
    )


def _specs(x: Chunks, block: int, place: Any) -> list[pl.BlockSpec]:
  rows = [pairs.of_queries(size, block, place) for size in (x.v.shape[2], 1, 1)]
  count = x.across.shape[-1]
  totals = pl.BlockSpec((1, 1, 2, count), lambda b, h, *at: (b, h, 0, 0), memory_space=pltpu.SMEM)
  return [*pairs.specs(x, block, place), *rows, totals]
