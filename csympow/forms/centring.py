"""Values about their mean, p = 2.

    y_i = sum_j B_ij v_j / sum_j B_ij = c + sum_j B_ij (v_j - c) / sum_j B_ij          whatever c is

A state of values that have much in common is large, and so is its rounding: without c a query that is nearly orthogonal
to most keys hears little else, and in its gradient the same sums must cancel. So states hold values less their mean.

It is that of the whole sequence, so it must not hurt values that are unlike those of other times or documents.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, BFloat16

from csympow.forms.spans import scattered

NO_MORE = 1.25  # times as large as it was, in the mean square, may a state become that is given
_SPAN = 16  # values of a coordinate that are looked at together, of tokens that follow one another
_NO_MORE_IN_SPAN = 8.0  # the same of a span's values, of which so few may be small by chance
_AT_ONCE = 4  # are summed first: XLA has a thread for each sum, and more threads are faster
_EACH, _AT_LEAST = 64, 256  # tokens of which one is looked at, if that makes enough of a sequence
# A coordinate's c is a multiple of this part of its size, a power of two, and values up to 16 times that size are
# multiples of a smaller one: if c were not, all of a size would be rounded the same way, which adds up.
_STEP = 2.0**-4
_SURELY = 4  # times the error that it has for being that of some values only, at least, is a mean that counts


def centre(v: BFloat16[Array, "B T H dv"]) -> BFloat16[Array, "B H dv"]:
  """About the mean of the values of tokens that are not padding; 0 for coordinates of which not all are about it."""
  batch, time, *sizes = v.shape
  wanted = max(_AT_LEAST, time // (_EACH * _SPAN) * _SPAN)
  some = v[:, scattered(time, wanted)].astype(jnp.float32)
  some = some.reshape(batch, -1, _AT_ONCE, *sizes)
  counted = jnp.broadcast_to(jnp.any(some != 0, axis=-1, keepdims=True), some.shape)
  kinds = jnp.stack([some, some * some, jnp.where(counted, 1.0, 0.0)])
  some_sums = lax.optimization_barrier(jnp.sum(kinds, axis=3))  # or XLA would begin with the values again below
  in_spans = jnp.sum(some_sums.reshape(3, batch, -1, _SPAN // _AT_ONCE, *sizes), axis=3)
  total, square, counted = in_spans
  sums = jnp.sum(some_sums, axis=2)
  in_all = jnp.maximum(sums[2], 1)
  mean, mean_square = sums[0] / in_all, sums[1] / in_all
  step = _STEP * jnp.exp2(jnp.floor(0.5 * jnp.log2(jnp.maximum(mean_square, 2.0**-100))))
  counts = mean**2 * in_all > _SURELY**2 * mean_square
  middle = jnp.where(counts, step * jnp.round(mean / step), 0.0)
  rest = square + counted * middle[:, None] ** 2 - 2 * middle[:, None] * total
  fits = jnp.all(rest <= _NO_MORE_IN_SPAN * square, axis=1)  # numbers only
  return jnp.where(fits, middle, 0.0).astype(v.dtype)
