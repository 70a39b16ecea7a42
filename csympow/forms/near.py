"""What surrounds the attention kernels, in plain jax.numpy: operands that fit 16 bits on the way in, gradients out.

Queries are scaled by a power of two so that their largest coordinate is between 1/2 and 1, which the normalisation
cancels, and so are keys, whose weights are scaled by the p-th power of that, relative to the longest key of the head.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, BFloat16, Float, Float16, Int

from csympow.prefix import Total
from kernels_pallas.gpu import attention_backward, attention_forward
from kernels_pallas.gpu.tiles import FRAME, LOG2E, SMALLEST

FLOAT16, BFLOAT16 = (5, 10), (8, 7)  # bits of exponent and mantissa
_LEAST, _LARGEST = -125, 128  # the exponents of 0 and of the largest number
_INVISIBLE = -126.0  # a discount of 2 to this or less is exactly 0 in the kernels' arithmetic


class Tokens(NamedTuple):
  """What a form by kernels is a function of, in float32.

  `twist` is 0: turns by which queries and keys might be rotated further, there for its gradient. Taken through q and k
  themselves, that gradient would be a difference of large sums whose rounding does not cancel.
  """

  q: Float[Array, "B T H g d"]
  k: Float[Array, "B T H d"]
  v: Float[Array, "B T H dv"]
  log_gate: Float[Array, "B T H"]
  twist: Float[Array, "B T H r"] | None


class Spans(NamedTuple):
  """The running totals of the log gates, cut into equal spans: at each token, just before the span, at its end."""

  G: Total  # B n t H
  before: Total  # B n 1 H
  end: Total


class Operands(NamedTuple):
  """What the kernels are given, and how it was scaled."""

  q: Float16[Array, "B T Hq d"]
  keys: attention_forward.Keys
  ends: attention_backward.Ends
  v: BFloat16[Array, "B T H dv"]
  q_exponent: Int[Array, "B T H g"]  # queries were divided by 2 to this
  exponent: Int[Array, "B T H"]  # keys were divided by 2 to this
  top: Int[Array, "B H"]  # the largest of them: weights are divided by 2 to p times this


class Gradients(NamedTuple):
  """Cotangents of scaled queries and keys by pairs inside a chunk, and what the gates' and rotations' are made of."""

  q: Float[Array, "B T H g d"]
  k: Float[Array, "B T H d"]
  v: Float[Array, "B T H dv"]
  G: Float[Array, "B T H"]  # of the running total of the log gates
  twist: Float[Array, "B T H r"]


def spans(G: Total, size: int) -> Spans:
  """Spans of `size` tokens, of which there are whole ones."""
  G = Total(*(x.reshape(x.shape[0], -1, size, x.shape[-1]) for x in G))
  end = Total(*(x[:, :, -1:] for x in G))
  return Spans(G, Total(*(jnp.concatenate([jnp.zeros_like(x[:, :1]), x[:, :-1]], axis=1) for x in end)), end)


def operands(x: Tokens, G: Total, power: int, chunk: int) -> Operands:
  """Operands of attention inside chunks of whole frames."""
  q, k, v, *_ = x
  batch, time, heads, head_dim = k.shape
  q_exponent, exponent = _exponent(q), _exponent(k)
  q_exponent = jnp.where(q_exponent == _LEAST, 0, q_exponent)  # of no query
  # Of no key there is no length, nor of one that is no number.
  top = jnp.max(jnp.where(exponent > _LARGEST, _LEAST, exponent), axis=1)
  top = jnp.where(top == _LEAST, 0, top)
  log_scale = (power * (exponent - top[:, None])).astype(jnp.float32)
  plain = rounded(k * power_of_two(-exponent), FLOAT16)

  def frames(x: Float[Array, "B T H"]) -> Float[Array, "B n t H"]:
    return x.reshape(batch, -1, FRAME, heads)

  def by_head(x: Array) -> Array:
    return jnp.moveaxis(x.reshape(batch, -1, heads), 1, 2)

  G, before, end = spans(G, FRAME)
  since_start, until_end = (G - before) * LOG2E, (end - G) * LOG2E
  fold = jnp.exp2((until_end + frames(log_scale)) / power).reshape(batch, time, heads)
  first, last = _visible(before, end, chunk // FRAME)
  return Operands(
    q=rounded(q * power_of_two(-q_exponent), FLOAT16).astype(jnp.float16).reshape(batch, time, -1, head_dim),
    keys=attention_forward.Keys(
      folded=(plain * fold[..., None]).astype(jnp.float16),
      plain=plain.astype(jnp.float16),
      gate=by_head(since_start),
      pull=by_head(since_start.reshape(batch, time, heads) - log_scale),
      decay=by_head(jnp.exp2(since_start[:, :, -1])),
      first=by_head(first),
    ),
    ends=attention_backward.Ends(
      fold=by_head(fold),
      total=jnp.stack([by_head(x[:, :, 0]) for x in end]),
      last=by_head(last),
    ),
    v=v.astype(jnp.bfloat16),
    q_exponent=q_exponent,
    exponent=exponent,
    top=top,
  )


def _visible(before: Total, end: Total, in_chunk: int) -> tuple[Int[Array, "B n H"], Int[Array, "B n H"]]:
  """Of each frame: the earliest of its chunk's frames that it can see, and the latest that can see it."""
  batch, count, _, heads = end.hi.shape

  def by_chunk(total: Total) -> Total:
    return Total(*(x.reshape(batch, -1, in_chunk, 1, heads) for x in total))

  # Between the end of one frame and the start of a later one: B chunk, query frame, key frame, H.
  keys = Total(*(jnp.swapaxes(x, 2, 3) for x in by_chunk(end)))
  invisible = ((by_chunk(before) - keys) * LOG2E < _INVISIBLE) & jnp.tri(in_chunk, k=-1, dtype=bool)[:, :, None]
  start = in_chunk * jnp.arange(count // in_chunk, dtype=jnp.int32)[:, None, None]
  first = start + jnp.sum(invisible, axis=3, dtype=jnp.int32)
  last = start + in_chunk - 1 - jnp.sum(invisible, axis=2, dtype=jnp.int32)
  return first.reshape(batch, count, heads), last.reshape(batch, count, heads)


class Cotangents(NamedTuple):
  """Of queries' outputs, as the kernels take them."""

  dy: BFloat16[Array, "B T Hq dv"]
  delta: Float[Array, "B Hq T"]  # dy . y
  inverse: Float[Array, "B Hq T"]  # 1 / normaliser, over all keys that a query sees


def cotangents(y: attention_forward.Outputs, dy: Float[Array, "B T H g dv"]) -> Cotangents:
  """From queries' outputs and normalisers."""
  normaliser = y.normaliser
  exact = y.high.astype(jnp.float32) + (0.0 if y.low is None else y.low.astype(jnp.float32))
  found = ~(normaliser <= SMALLEST)  # NaN is no empty row
  inverse = jnp.where(found, 1 / jnp.where(found, normaliser, 1.0), 0.0)
  dy = dy.reshape(exact.shape)
  rounded_dy = dy if dy.dtype == jnp.bfloat16 else rounded(dy, BFLOAT16)
  delta = jnp.moveaxis(jnp.sum(rounded_dy * exact, axis=-1), 1, 2)
  return Cotangents(rounded_dy.astype(jnp.bfloat16), delta, inverse)


def backward(x: Operands, given: Cotangents, power: int, interpret: Any) -> Gradients:
  """The gradients by pairs inside chunks."""
  batch, time, heads, group = x.q_exponent.shape
  rounded_q, rounded_k = (rounded(a, BFLOAT16) for a in (x.q, x.keys.plain))
  rows = attention_backward.Rows(
    q=x.q,
    rounded=rounded_q.astype(jnp.bfloat16),
    dy=given.dy,
    inverse=given.inverse,
    discounted=given.inverse * jnp.exp2(jnp.repeat(x.keys.gate, group, axis=1)),
    delta=given.delta,
  )
  by_kernel = attention_backward.backward(rows, x.keys, x.ends, x.v, power=power, interpret=interpret)
  rounded_q, rounded_k, dq, dk = (
    a.reshape(batch, time, heads, -1, a.shape[-1]) for a in (rounded_q, rounded_k, by_kernel.q, by_kernel.k)
  )
  return Gradients(
    q=power * dq,
    k=power * dk[..., 0, :],
    v=by_kernel.v.astype(jnp.float32),
    # Euler: q . dq = p * (the sum of a query's pulls), and the factor p is not in the kernel's gradients.
    G=jnp.sum(rounded_q * dq, axis=(-2, -1)) - jnp.sum(rounded_k * dk, axis=(-2, -1)),
    twist=power * (torque(rounded_q, dq) + torque(rounded_k, dk)),
  )


def torque(x: Float[Array, "*lead g d"], dx: Float[Array, "*lead g d"]) -> Float[Array, "*lead r"]:
  """The cotangent of the turns by which all pairs of x are rotated together."""
  turned = x[..., 0::2] * dx[..., 1::2] - x[..., 1::2] * dx[..., 0::2]
  return 2 * jnp.pi * jnp.sum(turned, axis=-2)


def rounded(x: Array, bits: tuple[int, int]) -> Array:
  """X in float32, as a 16-bit type holds it: a conversion there and back XLA would leave out."""
  return lax.reduce_precision(x.astype(jnp.float32), *bits)


def power_of_two(exponent: Int[Array, "*lead"]) -> Float[Array, "*lead 1"]:
  """2 to the exponent, with an axis to multiply vectors by."""
  return jnp.exp2(exponent.astype(jnp.float32))[..., None]


def _exponent(x: Float[Array, "*lead d"]) -> Int[Array, "*lead"]:
  """The e with 2 ** (e - 1) <= the largest coordinate < 2 ** e."""
  bits = lax.bitcast_convert_type(jnp.max(jnp.abs(x), axis=-1), jnp.int32)
  return jnp.maximum((bits >> 23) - 126, _LEAST)
