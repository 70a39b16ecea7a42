"""The attention form's forward pass on TPU.

    y_i = sum_j B_ij v_j / sum_j B_ij          B_ij = b_ij (q_i . k_j) ** p

The grid walks the blocks of keys that a block of queries sees, in order, with the sums in VMEM.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from kernels_pallas.tpu import pairs, shifts
from kernels_pallas.tpu.shifts import LANES, Chunks, dot, tile
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
  tiles, triangle = block // LANES, pairs.Triangle(count)

  def place(g, row, col):
    return (g, *triangle.pair(row, col))

  def kernel(q_ref, k_ref, v_ref, gate_ref, until_ref, across_ref, y_ref, normaliser_ref, sums, weight_sums):
    i, j = triangle.pair(pl.program_id(3), pl.program_id(4))

    @pl.when(j == 0)
    def _():
      sums[...] = jnp.zeros_like(sums)
      weight_sums[...] = jnp.zeros_like(weight_sums)

    values = v_ref[0, 0]

    def gather(t, discount, factor):
      """Adds a block's keys to the sums of a tile of queries, those so far times a factor."""
      q = q_ref[0, 0, 0, :, tile(t)]
      total, normaliser = sums[t] * factor, weight_sums[t] * factor
      for keys in pairs.keys_at_once(block):
        if (discounts := discount(keys)) is None:
          continue
        scores = dot(pairs.tokens_down(k_ref[0, 0, :, keys]), q)
        weights = (even_power(scores, power) * discounts).astype(jnp.bfloat16)
        # Of the rounded weights, so that a row of one key gives that key's value exactly.
        normaliser += jnp.sum(weights.astype(jnp.float32), axis=0, keepdims=True)
        total += dot(values[:, keys], weights)
      return total, normaliser

    @pl.when(j < i)
    def far():
      for t in range(tiles):
        sums[t], weight_sums[t] = gather(
          t, lambda keys: shifts.column(until_ref[0, 0, :, keys]), across_ref[0, 0, 0, j]
        )

    @pl.when(j == i)
    def near():
      for t in range(tiles):
        gate = gate_ref[0, 0, :, tile(t)]

        def discount(keys, gate=gate, t=t):
          return pairs.within_block(gate, gate_ref[0, 0, :, keys], t * LANES, keys.start)

        total, normaliser = gather(t, discount, jnp.exp2(gate))
        empty = normaliser <= SMALLEST
        y_ref[0, 0, 0, :, tile(t)] = total * jnp.where(empty, 0.0, 1 / jnp.where(empty, 1.0, normaliser))
        normaliser_ref[0, 0, 0, :, tile(t)] = normaliser

  shape = shifts.vary_as(x.q)
  results = pl.pallas_call(
    kernel,
    grid=(batch, heads, group, *triangle.grid),
    in_specs=pairs.specs(x, block, place),
    out_specs=[pairs.of_queries(rows, block, place) for rows in (value_dim, 1)],
    out_shape=[shape((batch, heads, group, rows, time), jnp.float32) for rows in (value_dim, 1)],
    scratch_shapes=[pltpu.VMEM((tiles, rows, LANES), jnp.float32) for rows in (value_dim, 1)],
    compiler_params=pairs.PARAMETERS,
    interpret=interpret or False,
    name="attention_forward",
  )(*x)
  return Outputs(*results)
