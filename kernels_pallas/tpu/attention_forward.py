"""The attention form's forward pass on TPU.

    y_i = sum_j B_ij v_j / sum_j B_ij          B_ij = b_ij (q_i . k_j) ** p

The grid walks the blocks of keys that a block of queries sees, in order, with the sums in VMEM, where the results are.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from kernels_pallas.tpu import pairs, shifts
from kernels_pallas.tpu.shifts import Chunks, dot
from kernels_pallas.weights import SMALLEST, even_power


class Outputs(NamedTuple):
  """What each query gathers."""

  y: Float[Array, "B H g dv T"]
  normaliser: Float[Array, "B H g 1 T"]


def forward(x: Chunks, *, power: int, interpret: Any = None) -> Outputs:
  """Attention over whole blocks of tokens, for which x's gates are."""
  batch, heads, group, _, time = x.q.shape
  value_dim, count = x.v.shape[2], x.across.shape[-1]
  block = time // count
  triangle = pairs.Triangle(count)

  def place(g, row, col):
    return (g, *triangle.pair(row, col))

  def kernel(q_ref, k_ref, v_ref, gate_ref, until_ref, across_ref, y_ref, normaliser_ref, keys_down, until_down):
    i, j = triangle.pair(pl.program_id(3), pl.program_id(4))

    @pl.when(j == 0)
    def _():
      y_ref[...] = jnp.zeros_like(y_ref)
      normaliser_ref[...] = jnp.zeros_like(normaliser_ref)

    def gather(near, discount, factor):
      """Adds the block's keys to the sums of the queries, those so far times a factor."""
      pairs.lay_down(keys_down, k_ref[0, 0])

      def begin(piece):
        return dot(keys_down[piece.keys], q_ref[0, 0, 0, :, piece.queries])

      for piece, scores in shifts.begun_ahead(pairs.pieces(block, near=near), begin):
        weights = (even_power(scores, power) * discount(piece)).astype(jnp.bfloat16)
        # Of the rounded weights, so that a row of one key gives that key's value exactly.
        weight_sum = jnp.sum(weights.astype(jnp.float32), axis=0, keepdims=True)
        before = factor(piece) if piece.keys.start == 0 else 1.0
        for sums, found in ((y_ref, dot(v_ref[0, 0, :, piece.keys], weights)), (normaliser_ref, weight_sum)):
          sums[0, 0, 0, :, piece.queries] = sums[0, 0, 0, :, piece.queries] * before + found

    @pl.when(j < i)
    def far():
      pairs.spread(until_down, until_ref[0, 0])
      gather(False, lambda piece: until_down[piece.keys], lambda piece: across_ref[0, 0, 0, j])

    @pl.when(j == i)
    def near():
      gather(
        True,
        lambda piece: pairs.within_block(gate_ref, piece),
        lambda piece: jnp.exp2(gate_ref[0, 0, :, piece.queries]),
      )
      normaliser = normaliser_ref[0, 0, 0]
      empty = normaliser <= SMALLEST
      y_ref[0, 0, 0] = y_ref[0, 0, 0] * jnp.where(empty, 0.0, 1 / jnp.where(empty, 1.0, normaliser))

  shape = shifts.vary_as(x.q)
  results = pl.pallas_call(
    kernel,
    grid=(batch, heads, group, *triangle.grid),
    in_specs=pairs.specs(x, block, place),
    out_specs=[pairs.of_queries(rows, block, place) for rows in (value_dim, 1)],
    out_shape=[shape((batch, heads, group, rows, time), jnp.float32) for rows in (value_dim, 1)],
    scratch_shapes=pairs.scratch(x.k.shape[2], block=block),
    compiler_params=pairs.PARAMETERS,
    interpret=interpret or False,
    name="attention_forward",
  )(*x)
  return Outputs(*results)
