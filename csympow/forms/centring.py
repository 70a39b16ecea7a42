"""Values about their mean, p = 2.

    y_i = sum_j B_ij v_j / sum_j B_ij = c + sum_j B_ij (v_j - c) / sum_j B_ij          whatever c is

A state of values that have much in common is large, and so is its rounding: without c a query that is nearly orthogonal
to most keys hears little else, and in its gradient the same sums must cancel. So states hold values less their mean.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, BFloat16

from csympow.forms.spans import some_of

NO_MORE = 1.25  # times as large, in the mean square, as they were may values of no chunk become
# Of a coordinate's size, a power of two: coarse enough for values up to 16 times that to be as exact without it. Else
# all of a size would be rounded the same way, which adds up.
_STEP = 2.0**-4
_SURELY = 4  # times the error that it has for being that of some values only, at least, is a mean that counts


def centre(v: BFloat16[Array, "B T H dv"], count: int) -> BFloat16[Array, "B H dv"]:
  """About the mean of values, of those that are not 0; or 0 if in one of `count` chunks they are not about it."""
  some = some_of(v, 1).astype(jnp.float32).reshape(v.shape[0], count, -1, *v.shape[2:])
  kinds = jnp.stack([some, some * some, jnp.where(some != 0, 1.0, 0.0)])
  by_chunk = lax.optimization_barrier(jnp.sum(kinds, axis=3))  # or XLA would begin with the values again below
  total, square, counted = by_chunk
  sums = jnp.sum(by_chunk, axis=2)
  in_all = jnp.maximum(sums[2], 1)
  mean, mean_square = sums[0] / in_all, sums[1] / in_all
  step = _STEP * jnp.exp2(jnp.floor(0.5 * jnp.log2(jnp.maximum(mean_square, 2.0**-100))))
  counts = mean**2 * in_all > _SURELY**2 * mean_square
  middle = jnp.where(counts, step * jnp.round(mean / step), 0.0)[:, None]
  rest = square + counted * middle**2 - 2 * middle * total
  fits = jnp.all(jnp.sum(rest - NO_MORE * square, axis=-1) <= 0, axis=1)  # numbers only
  return jnp.where(fits[..., None], middle[:, 0], 0.0).astype(v.dtype)
