"""What surrounds the attention kernels: operands that fit 16 bits on the way in, gradients on the way out.

Queries are scaled by a power of two so that their largest coordinate is between 1/2 and 1, which the normalisation
cancels, and so are keys, whose weights are scaled by the p-th power of that, relative to the longest key of the head.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, BFloat16, Float, Float16, Int

from csympow.forms.rotating import Rotation, angles, padded, torque, turning, unrotated
from csympow.forms.spans import Settings, by_head
from csympow.forms.visible import Tiles, visible
from csympow.prefix import Total, TotalsKernel, prefix_sum
from kernels_pallas.gpu import attention_backward, attention_forward, gradients
from kernels_pallas.gpu.copies import Copy, copies
from kernels_pallas.gpu.running import totals
from kernels_pallas.gpu.tiles import TILE, attention_widths
from kernels_pallas.weights import LEAST, LOG2E, MOST, SMALLEST

FLOAT16, BFLOAT16 = (5, 10), (8, 7)  # bits of exponent and mantissa
_LARGEST = 128  # the exponent of the largest number


class Tokens(NamedTuple):
  """What a form by kernels is a function of: 16 bits, but for gates, and queries that are scaled to go with a state."""

  q: Float[Array, "B T H g d"]
  k: Float[Array, "B T H d"]
  v: Float[Array, "B T H dv"]
  log_gate: Float[Array, "B T H"]
  rotation: Rotation | None


def as_wide_as_kernels(x: Tokens) -> Tokens:
  """Filled up with zeros to heads that the attention kernels have."""
  head_dim, value_dim = attention_widths(x.k.shape[-1], x.v.shape[-1])
  q, k, v = (filled_up(a, width) for a, width in zip(x[:3], (head_dim, head_dim, value_dim), strict=True))
  return Tokens(q, k, v, x.log_gate, padded(x.rotation, 0, head_dim))


def filled_up(x: Float[Array, "*lead d"], width: int) -> Float[Array, "*lead width"]:
  """Vectors with zeros after them."""
  return jnp.pad(x, ((0, 0),) * (x.ndim - 1) + ((0, width - x.shape[-1]),))


class Spans(NamedTuple):
  """The running totals of the log gates, cut into equal spans: at each token, just before the span, at its end."""

  G: Total  # B H n t
  before: Total  # B H n 1
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
  has_state: Int[Array, "B H"] | None = None  # 1 or 0: see visible.Visible


class Pulls(NamedTuple):
  """What each token's query, and its key, adds to the cotangents of running totals: of gates, and of a rotation.

  They are sums of large terms that cancel, and do so only if the queries and keys are those that the kernels had.
  """

  G: tuple[Float[Array, "B T H"], Float[Array, "B T H"]]
  turns: tuple[Float[Array, "B T H r"], Float[Array, "B T H r"]]
  total: tuple[Float[Array, "B T H"], Float[Array, "B T H"]] | None  # of the betas


def totals_kernel(settings: Settings) -> TotalsKernel | None:
  """What sums over time, if not XLA."""
  return functools.partial(totals, interpret=settings.interpret) if settings.chip == "gpu" else None


def running(log_gate: Float[Array, "B T H"], settings: Settings) -> Total:
  """The running totals of the log gates."""
  return prefix_sum(log_gate, kernel=totals_kernel(settings))


def spans(G: Total, size: int) -> Spans:
  """Spans of `size` tokens, of which there are whole ones."""
  batch, _, heads = G.hi.shape
  G = Total(*(by_head(x).reshape(batch, heads, -1, size) for x in G))
  end = Total(*(x[..., -1:] for x in G))
  return Spans(G, Total(*(jnp.pad(x[:, :, :-1], ((0, 0), (0, 0), (1, 0), (0, 0))) for x in end)), end)


class Exponents(NamedTuple):
  """Of queries, of keys, and of the longest key of each head: they are divided by 2 to these."""

  q: Int[Array, "B T H g"]
  k: Int[Array, "B T H"]
  top: Int[Array, "B H"]


def operands(x: Tokens, G: Total, settings: Settings) -> Operands:
  """Operands of attention in chunks of whole BLOCKs."""
  return operands_and_copies(x, G, exponents(x), (), (), settings)[0]


def operands_and_copies(
  x: Tokens,
  G: Total,
  exponents: Exponents,
  of_q: Sequence[Copy],
  of_k: Sequence[Copy],
  settings: Settings,
  beyond_chunks: bool = False,
) -> tuple[Operands, list[Array], list[Array]]:
  """The same, and further copies of scaled and rotated queries and keys.

  Heads that forget soon may have their queries read `beyond_chunks`, and no state.
  """
  power = settings.power
  batch, time, heads, head_dim = x.k.shape
  log_scale = power * by_head(exponents.k - exponents.top[:, None]).astype(jnp.float32)

  def all_tokens(x: Float[Array, "B H n t"]) -> Float[Array, "B H T"]:
    return x.reshape(batch, heads, time)

  G, before, end = spans(G, TILE)
  since_start, until_end = (all_tokens(x * LOG2E) for x in (G - before, end - G))
  fold = jnp.exp2((until_end + log_scale) / power)

  turned = angles(x.rotation)
  of_q, of_k = [Copy(jnp.float16), *of_q], [Copy(jnp.float16), Copy(jnp.float16, fold), *of_k]
  q, q_exponent = x.q.reshape(batch, time, -1, head_dim), exponents.q
  if q.dtype == jnp.float32:
    q = (x.q * power_of_two(-q_exponent)).astype(jnp.float16).reshape(q.shape)
    q, *q_copies = copies(q, of_q, angles=turned, interpret=settings.interpret)
  else:
    q, *q_copies, found_exponent = copies(q, of_q, room=_room(x.rotation), angles=turned, interpret=settings.interpret)
    q_exponent = jnp.moveaxis(found_exponent, 1, 2).reshape(q_exponent.shape)
  scale = by_head(jnp.exp2(-exponents.k.astype(jnp.float32)))
  plain, folded, *k_copies = copies(x.k, of_k, scale=scale, angles=turned, interpret=settings.interpret)
  decay = jnp.exp(end - before)[..., 0]
  v = x.v.astype(jnp.bfloat16)
  starts, ends = (Total(*(half[..., 0] for half in total)) for total in (before, end))
  seen = visible(Tiles(starts, ends, decay, q, folded, v), settings, beyond_chunks)
  found = Operands(
    q=q,
    keys=attention_forward.Keys(
      folded=folded,
      plain=plain,
      gate=since_start,
      pull=since_start - log_scale,
      decay=decay,
      first=seen.first,
    ),
    ends=attention_backward.Ends(
      fold=fold,
      total=jnp.stack([x[..., 0] for x in end]),
      last=seen.last,
    ),
    v=v,
    q_exponent=q_exponent,
    exponent=exponents.k,
    top=exponents.top,
    has_state=seen.has_state,
  )
  return found, q_copies, k_copies


def exponents(x: Tokens) -> Exponents:
  """Such that the largest coordinate of each is between 1/2 and 1."""
  q_exponent, exponent = _exponent(x.q), _exponent(x.k)
  # Of no key there is no length, nor of one that is no number.
  top = jnp.max(jnp.where(exponent > _LARGEST, LEAST, exponent), axis=1)
  room = _room(x.rotation)
  q_exponent, top = (jnp.where(x == LEAST, 0, x + room) for x in (q_exponent, top))
  # No more, or 2 to less than that would be no normal number; 16 bits have room for the rest.
  return Exponents(*(jnp.minimum(x, MOST) for x in (q_exponent, exponent + room, top)))


def _room(rotation: Rotation | None) -> int:
  """A rotation can make a coordinate larger, though not twice as large."""
  return 0 if rotation is None else 1


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


def backward(
  x: Operands,
  given: Cotangents,
  power: int,
  interpret: Any,
  rounded_q: BFloat16[Array, "B T Hq d"] | None = None,
) -> attention_backward.Gradients:
  """By pairs inside chunks; p times those of `q` and `k` are cotangents of scaled and rotated queries and keys."""
  group = x.q_exponent.shape[-1]
  gate = jnp.repeat(x.keys.gate, group, axis=1)
  rows = attention_backward.Rows(
    q=x.q,
    rounded=rounded(x.q, BFLOAT16).astype(jnp.bfloat16) if rounded_q is None else rounded_q,
    dy=filled_up(given.dy, x.v.shape[-1]),
    exponent=gate + jnp.log2(given.inverse),
    discounted=given.inverse * jnp.exp2(gate),
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
    total = jnp.sum(speed * q * turning(dq), axis=(-2, -1)), jnp.sum(speed * k * turning(dk), axis=(-2, -1))
  # Euler: q . dq = p * (the sum of a query's pulls).
  return Pulls((jnp.sum(q * dq, axis=(-2, -1)), -jnp.sum(k * dk, axis=(-2, -1))), turns, total)


def unscaled(
  x: Operands, dq: Float[Array, "B T Hq d"], dk: Float[Array, "B T H d"], power: int
) -> tuple[Float[Array, "B T H g d"], Float[Array, "B T H d"]]:
  """From the gradients by kernels those of rotated queries and keys."""
  dq = dq.reshape(*x.q_exponent.shape, -1)
  return power * dq * power_of_two(-x.q_exponent), power * dk * power_of_two(-x.exponent)


def before_rotation(dtokens: Tokens, rotation: Rotation | None, dtypes: tuple[DTypeLike, DTypeLike]) -> Tokens:
  """From cotangents of rotated queries and keys those of what was rotated, of the queries' dtype and of all others'."""
  q, k = unrotated(*dtokens[:2], rotation)
  return dtokens._replace(q=q.astype(dtypes[0]), k=k.astype(dtypes[1]), v=dtokens.v.astype(dtypes[1]))


def finished(
  x: Operands,
  dq: Float[Array, "B T Hq d"],
  dk: Float[Array, "B T H d"],
  rotation: Rotation | None,
  dtypes: tuple[DTypeLike, DTypeLike],
  settings: Settings,
  by_pairs: attention_backward.Gradients | None = None,
) -> tuple[Float[Array, "B T H g d"], Float[Array, "B T H d"], Pulls]:
  """From the gradients by kernels those of queries and keys as they were given, and what is pulled by each.

  Those of heads without a state are what pairs of tokens have given, `by_pairs`.
  """
  power, (batch, time, heads, group) = settings.power, x.q_exponent.shape
  turned_by, speed = angles(rotation), None
  if rotation is not None:
    speed = jnp.repeat(power * rotation.rates, 2)

  without_state: list[gradients.WithoutState | None] = [None, None]
  if by_pairs is not None and x.has_state is not None:
    flags = [jnp.repeat(x.has_state, dx.shape[2] // heads, axis=1) for dx in by_pairs[:2]]
    without_state = list(map(gradients.WithoutState, by_pairs[:2], flags))

  def back(
    x: Array, dx: Array, exponent: Array, dtype: DTypeLike, without_state: gradients.WithoutState | None
  ) -> gradients.Gradients:
    exponent = jnp.where(exponent <= LEAST + 1, 0, exponent).reshape(batch, time, -1)  # of 0, whose gradient is 0
    factor = power * jnp.exp2(-exponent.astype(jnp.float32))
    how = {"angles": turned_by, "speed": speed, "without_state": without_state, "interpret": settings.interpret}
    return gradients.gradients(x, dx, by_head(factor), dtype, **how)

  def of_token(x: Float[Array, "B Hq T"]) -> Float[Array, "B T H"]:
    return jnp.sum(jnp.moveaxis(x, 1, 2).reshape(batch, time, heads, -1), axis=-1)

  found_q = back(x.q, dq, x.q_exponent, dtypes[0], without_state[0])
  found_k = back(x.keys.plain, dk, x.exponent, dtypes[1], without_state[1])
  dq, dk = (
    dx if other is None else jnp.where(other.has_state[:, None, :, None] > 0, dx, other.dx)
    for dx, other in zip((dq, dk), without_state, strict=True)
  )
  total = None
  if found_q.turned is not None and found_k.turned is not None:
    total = of_token(found_q.turned), of_token(found_k.turned)
  q, k = (power * rounded(a, BFLOAT16).reshape(batch, time, heads, -1, a.shape[-1]) for a in (x.q, x.keys.plain))
  by_pair = torque(q, dq.reshape(q.shape)), torque(k, dk.reshape(k.shape))
  found = Pulls((of_token(found_q.pulled), -of_token(found_k.pulled)), by_pair, total)
  return found_q.given.reshape(batch, time, heads, group, -1), found_k.given, found


def rounded(x: Array, bits: tuple[int, int]) -> Array:
  """X in float32, as a 16-bit type holds it: a conversion there and back XLA would leave out."""
  return lax.reduce_precision(x.astype(jnp.float32), *bits)


def power_of_two(exponent: Int[Array, "*lead"]) -> Float[Array, "*lead 1"]:
  """2 to the exponent, with an axis to multiply vectors by."""
  return jnp.exp2(exponent.astype(jnp.float32))[..., None]


def _exponent(x: Float[Array, "*lead d"]) -> Int[Array, "*lead"]:
  """The e with 2 ** (e - 1) <= the largest coordinate < 2 ** e."""
  bits = lax.bitcast_convert_type(jnp.max(jnp.abs(x), axis=-1).astype(jnp.float32), jnp.int32)
  return jnp.maximum((bits >> 23) - 126, LEAST)
