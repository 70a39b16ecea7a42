"""What surrounds the attention kernels, in plain jax.numpy: operands that fit 16 bits on the way in, gradients out.

Queries are scaled by a power of two so that their largest coordinate is between 1/2 and 1, which the normalisation
cancels, and so are keys, whose weights are scaled by the p-th power of that, relative to the longest key of the head.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, BFloat16, Float, Float16, Int

from csympow.prefix import Total
from csympow.rotation import rotate
from kernels_pallas.gpu import attention_backward, attention_forward
from kernels_pallas.gpu.tiles import FRAME
from kernels_pallas.weights import LOG2E, SMALLEST

FLOAT16, BFLOAT16 = (5, 10), (8, 7)  # bits of exponent and mantissa
_LEAST, _LARGEST = -125, 128  # the exponents of 0 and of the largest number
_INVISIBLE = -126.0  # a discount of 2 to this or less is exactly 0 in the kernels' arithmetic


class Rotation(NamedTuple):
  """What queries and keys are to be rotated by: `turns`, which follow the total of the betas at these rates.

  The gradient of a beta is that of `total`, one number a token, of which nothing else is used; to it `turns` are
  constants. Only rates and states that are differentiated ask for the gradient of `turns`.
  """

  turns: Float[Array, "B T H r"]
  total: Float[Array, "B T H"]
  rates: Float[Array, "r"]  # radians


class Tokens(NamedTuple):
  """What a form by kernels is a function of, in float32."""

  q: Float[Array, "B T H g d"]
  k: Float[Array, "B T H d"]
  v: Float[Array, "B T H dv"]
  log_gate: Float[Array, "B T H"]
  rotation: Rotation | None


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


class Pulls(NamedTuple):
  """What each token's query, and its key, adds to the cotangents of running totals: of gates, and of a rotation.

  They are sums of large terms that cancel, and do so only if the queries and keys are those that the kernels had.
  """

  G: tuple[Float[Array, "B T H"], Float[Array, "B T H"]]
  turns: tuple[Float[Array, "B T H r"], Float[Array, "B T H r"]]
  total: tuple[Float[Array, "B T H"], Float[Array, "B T H"]] | None  # of the betas


def spans(G: Total, size: int) -> Spans:
  """Spans of `size` tokens, of which there are whole ones."""
  G = Total(*(x.reshape(x.shape[0], -1, size, x.shape[-1]) for x in G))
  end = Total(*(x[:, :, -1:] for x in G))
  return Spans(G, Total(*(jnp.concatenate([jnp.zeros_like(x[:, :1]), x[:, :-1]], axis=1) for x in end)), end)


def operands(x: Tokens, G: Total, power: int, chunk: int) -> Operands:
  """Operands of attention inside chunks of whole frames."""
  q, k, v, _, rotation = x
  batch, time, heads, head_dim = k.shape
  q_exponent, exponent, top = exponents(x)
  log_scale = (power * (exponent - top[:, None])).astype(jnp.float32)

  def frames(x: Float[Array, "B T H"]) -> Float[Array, "B n t H"]:
    return x.reshape(batch, -1, FRAME, heads)

  def by_head(x: Array) -> Array:
    return jnp.moveaxis(x.reshape(batch, -1, heads), 1, 2)

  G, before, end = spans(G, FRAME)
  since_start, until_end = (G - before) * LOG2E, (end - G) * LOG2E
  fold = jnp.exp2((until_end + frames(log_scale)) / power).reshape(batch, time, heads)
  q, k = rotated(q * power_of_two(-q_exponent), k * power_of_two(-exponent), rotation)
  q, k = rounded(q, FLOAT16), rounded(k, FLOAT16)
  # Written once, in 16 bits: XLA would rather hold what several read in float32.
  q, plain = lax.optimization_barrier((q.astype(jnp.float16), k.astype(jnp.float16)))
  first, last = _visible(before, end, chunk // FRAME)
  return Operands(
    q=q.reshape(batch, time, -1, head_dim),
    keys=attention_forward.Keys(
      folded=(plain * fold[..., None]).astype(jnp.float16),
      plain=plain,
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


def exponents(x: Tokens) -> tuple[Int[Array, "B T H g"], Int[Array, "B T H"], Int[Array, "B H"]]:
  """Of queries, of keys, and of the longest key of each head."""
  q_exponent, exponent = _exponent(x.q), _exponent(x.k)
  # Of no key there is no length, nor of one that is no number.
  top = jnp.max(jnp.where(exponent > _LARGEST, _LEAST, exponent), axis=1)
  room = 0 if x.rotation is None else 1  # a rotation can make a coordinate larger, though not twice as large
  q_exponent, top = (jnp.where(x == _LEAST, 0, x + room) for x in (q_exponent, top))
  return q_exponent, exponent + room, top


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


def forward(x: Operands, *, power: int, dtype: DTypeLike, save_low: bool, interpret: Any) -> attention_forward.Outputs:
  """What each query gathers."""
  how: dict[str, Any] = {"power": power, "dtype": dtype, "save_low": save_low, "interpret": interpret}
  return attention_forward.forward(x.q, x.keys, x.v, **how)


class Cotangents(NamedTuple):
  """Of queries' outputs, as the kernels take them."""

  dy: BFloat16[Array, "B T Hq dv"]
  delta: Float[Array, "B Hq T"]  # dy . y
  inverse: Float[Array, "B Hq T"]  # 1 / normaliser, over all keys that a query sees


def cotangents(y: attention_forward.Outputs, dy: Float[Array, "B T H g dv"]) -> Cotangents:
  """From queries' outputs and normalisers."""
  exact = y.high.astype(jnp.float32) + (0.0 if y.low is None else y.low.astype(jnp.float32))
  dy = dy.reshape(exact.shape)
  rounded_dy = dy if dy.dtype == jnp.bfloat16 else rounded(dy, BFLOAT16)
  delta = jnp.moveaxis(jnp.sum(rounded_dy * exact, axis=-1), 1, 2)
  return Cotangents(rounded_dy.astype(jnp.bfloat16), delta, inverse(y.normaliser))


def inverse(normaliser: Float[Array, "..."]) -> Float[Array, "..."]:
  """1 / normaliser, and 0 for an empty row."""
  found = ~(normaliser <= SMALLEST)  # NaN is no empty row
  return jnp.where(found, 1 / jnp.where(found, normaliser, 1.0), 0.0)


def state_scale(top: Int[Array, "B H"]) -> Float[Array, "B H 1 1"]:
  """What the kernels' states were divided by, where the longest key was by 2 to `top`: a number, whatever the keys."""
  return power_of_two(jnp.clip(2 * top, -126, 126))[..., None]


def backward(x: Operands, given: Cotangents, power: int, interpret: Any) -> attention_backward.Gradients:
  """By pairs inside chunks; p times those of `q` and `k` are cotangents of scaled and rotated queries and keys."""
  group = x.q_exponent.shape[-1]
  rows = attention_backward.Rows(
    q=x.q,
    rounded=rounded(x.q, BFLOAT16).astype(jnp.bfloat16),
    dy=given.dy,
    inverse=given.inverse,
    discounted=given.inverse * jnp.exp2(jnp.repeat(x.keys.gate, group, axis=1)),
    delta=given.delta,
  )
  return attention_backward.backward(rows, x.keys, x.ends, x.v, power=power, interpret=interpret)


def pulls(
  x: Operands, dq: Float[Array, "B T Hq d"], dk: Float[Array, "B T H d"], rotation: Rotation | None, power: int
) -> Pulls:
  """From the gradients by kernels, to which the factor p is missing."""
  shape = (*x.q_exponent.shape[:3], -1, dq.shape[-1])
  q, k, dq, dk = (a.reshape(shape) for a in (rounded(x.q, BFLOAT16), rounded(x.keys.plain, BFLOAT16), dq, dk))
  return pulls_of(q, k, dq, dk, rotation, power)


def pulls_of(
  q: Float[Array, "B T H g d"],
  k: Float[Array, "B T H 1 d"],
  dq: Float[Array, "B T H g d"],
  dk: Float[Array, "B T H 1 d"],
  rotation: Rotation | None,
  power: int,
) -> Pulls:
  """From queries and keys as the kernels had them, and their gradients but for the factor p."""
  turns, total = (torque(power * q, dq), torque(power * k, dk)), None
  if rotation is not None:  # sums of the same form as the gates', which XLA can do together with them
    speed = jnp.repeat(rotation.rates * (power / (2 * jnp.pi)), 2)
    total = jnp.sum(speed * q * _turning(dq), axis=(-2, -1)), jnp.sum(speed * k * _turning(dk), axis=(-2, -1))
  # Euler: q . dq = p * (the sum of a query's pulls).
  return Pulls((jnp.sum(q * dq, axis=(-2, -1)), -jnp.sum(k * dk, axis=(-2, -1))), turns, total)


def unscaled(
  x: Operands, dq: Float[Array, "B T Hq d"], dk: Float[Array, "B T H d"], power: int
) -> tuple[Float[Array, "B T H g d"], Float[Array, "B T H d"]]:
  """From the gradients by kernels those of rotated queries and keys."""
  dq = dq.reshape(*x.q_exponent.shape, -1)
  return power * dq * power_of_two(-x.q_exponent), power * dk * power_of_two(-x.exponent)


def padded(rotation: Rotation | None, more: int, width: int) -> Rotation | None:
  """A rotation of more tokens, and of heads of `width`, which does nothing to what was added."""
  if rotation is None:
    return None
  rest = width // 2 - rotation.turns.shape[-1]
  turns = jnp.pad(rotation.turns, ((0, 0), (0, more), (0, 0), (0, rest)))
  return Rotation(turns, jnp.pad(rotation.total, ((0, 0), (0, more), (0, 0))), jnp.pad(rotation.rates, (0, rest)))


def rotated(
  q: Float[Array, "B T H g d"], k: Float[Array, "B T H d"], rotation: Rotation | None
) -> tuple[Float[Array, "B T H g d"], Float[Array, "B T H d"]]:
  """Queries and keys rotated."""
  return (q, k) if rotation is None else (rotate(q, rotation.turns[..., None, :]), rotate(k, rotation.turns))


def before_rotation(dtokens: Tokens, rotation: Rotation | None, dtype: DTypeLike) -> Tokens:
  """From cotangents of rotated queries and keys those of what was rotated, with no more bits than `dtype`.

  A conversion to `dtype` follows anyway, and in this way XLA does it here.
  """
  if rotation is not None:  # its sines are computed again: to keep them until now would take memory
    rotation = rotation._replace(turns=-lax.optimization_barrier(rotation.turns))
  q, k = rotated(*dtokens[:2], rotation)
  q, k = (x.astype(dtype).astype(jnp.float32) for x in (q, k))
  return dtokens._replace(q=q, k=k)


def torque(x: Float[Array, "*lead g d"], dx: Float[Array, "*lead g d"]) -> Float[Array, "*lead r"]:
  """The cotangent of the turns by which all pairs of x are rotated together."""
  turned = x * _turning(dx)
  return jnp.sum(turned.reshape(*x.shape[:-1], -1, 2), axis=(-3, -1))


def _turning(dx: Float[Array, "*lead d"]) -> Float[Array, "*lead d"]:
  """The cotangent of the turns of each pair, of which each coordinate's share is what it is multiplied by."""
  pairs = dx.reshape(*dx.shape[:-1], -1, 2)
  return (pairs[..., ::-1] * jnp.array([2 * jnp.pi, -2 * jnp.pi], jnp.float32)).reshape(dx.shape)


def rounded(x: Array, bits: tuple[int, int]) -> Array:
  """X in float32, as a 16-bit type holds it: a conversion there and back XLA would leave out."""
  return lax.reduce_precision(x.astype(jnp.float32), *bits)


def power_of_two(exponent: Int[Array, "*lead"]) -> Float[Array, "*lead 1"]:
  """2 to the exponent, with an axis to multiply vectors by."""
  return jnp.exp2(exponent.astype(jnp.float32))[..., None]


def _exponent(x: Float[Array, "*lead d"]) -> Int[Array, "*lead"]:
  """The e with 2 ** (e - 1) <= the largest coordinate < 2 ** e."""
  bits = lax.bitcast_convert_type(jnp.max(jnp.abs(x), axis=-1).astype(jnp.float32), jnp.int32)
  return jnp.maximum((bits >> 23) - 126, _LEAST)
