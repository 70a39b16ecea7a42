"""The attention form by Pallas kernels: the same function as `chunked.attend` with one chunk, for NVIDIA Hopper.

Here is what surrounds the kernels, in plain jax.numpy: gates folded into keys, and everything scaled to fit 16 bits, on
the way in; the part that a state plays, and the gates' gradient, on the way out.

Queries are scaled by a power of two so that their largest coordinate is between 1/2 and 1, which the normalisation
cancels, and so are keys, whose weights are scaled by the p-th power of that, relative to the longest key of the head.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, BFloat16, Float, Float16, Int

from csympow import gates
from csympow.forms import attention
from csympow.forms.chunked import Sequence, finish, inputs_of, normalised_backward
from csympow.forms.memory import Memory, Written, discounted, empty, inner, read, read_backward, write, write_backward
from csympow.forms.spans import Inputs, Settings, Sums, for_each, heads_first, over_normaliser, time_first
from csympow.prefix import Total, prefix_sum
from kernels_pallas.gpu import attention_backward, attention_forward
from kernels_pallas.gpu.tiles import FRAME, LOG2E, SMALLEST

_FLOAT16, _BFLOAT16 = (5, 10), (8, 7)  # bits of exponent and mantissa
_LEAST = -125  # the exponent of 0
_INVISIBLE = -126.0  # a discount of 2 to this or less is exactly 0 in the kernels' arithmetic


class _Operands(NamedTuple):
  """What the kernels are given, and how it was scaled."""

  q: Float16[Array, "B T Hq d"]
  keys: attention_forward.Keys
  ends: attention_backward.Ends
  v: BFloat16[Array, "B T H dv"]
  q_exponent: Int[Array, "B T H g"]  # queries were divided by 2 to this
  exponent: Int[Array, "B T H"]  # keys were divided by 2 to this
  top: Int[Array, "B H"]  # the largest of them: weights are divided by 2 to p times this


class _Saved(NamedTuple):
  """What the backward pass needs."""

  sequence: Sequence | None  # only where there is a state
  operands: _Operands
  twist: Float[Array, "B T H r"] | None
  memory: Memory | None
  final: Memory | None
  high: Float[Array, "B T Hq dv"]  # y = high + low
  low: Float[Array, "B T Hq dv"] | None
  normaliser: Float[Array, "B Hq T"]  # in the kernels' scale


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7, 8))
def attend(
  q: Float[Array, "B T H g d"],
  k: Float[Array, "B T H d"],
  v: Float[Array, "B T H dv"],
  log_gate: Float[Array, "B T H"],
  twist: Float[Array, "B T H r"] | None,
  memory: Memory | None,
  settings: Settings,
  dtype: DTypeLike,
  return_memory: bool,
) -> tuple[Float[Array, "B T H g dv"], Memory | None]:
  """`chunked.attend` with y in `dtype`; T is a multiple of FRAME, d and dv are 32, 64 or 128.

  `twist` is 0: turns by which queries and keys might be rotated further, there for its gradient. Taken through q and k
  themselves, that gradient would be a difference of large sums whose rounding does not cancel.
  """
  return _forward(q, k, v, log_gate, twist, memory, settings, dtype, return_memory, save=False)[0]


def _forward(
  q: Float[Array, "B T H g d"],
  k: Float[Array, "B T H d"],
  v: Float[Array, "B T H dv"],
  log_gate: Float[Array, "B T H"],
  twist: Float[Array, "B T H r"] | None,
  memory: Memory | None,
  settings: Settings,
  dtype: DTypeLike,
  return_memory: bool,
  save: bool = True,
) -> tuple[tuple[Float[Array, "B T H g dv"], Memory | None], _Saved]:
  G = lax.optimization_barrier(prefix_sum(log_gate))
  x = _operands(q, k, v, G, settings.power)
  stateful = memory is not None or return_memory
  high, low, normaliser = attention_forward.forward(
    x.q,
    x.keys,
    x.v,
    power=settings.power,
    dtype=jnp.float32 if stateful else dtype,
    save_low=save and not stateful,
    interpret=settings.interpret,
  )
  shape = (*q.shape[:-1], v.shape[-1])
  if not stateful:
    return (high.reshape(shape), None), _Saved(None, x, twist, None, None, high, low, normaliser)

  sequence = Sequence(q, k, v, G)
  inputs, decay = _span(sequence)
  if memory is not None:
    carried = read(memory, inputs.q, settings)
    weight = _in_full(normaliser, x, settings.power)
    sums = Sums(heads_first(high.reshape(shape)) * weight, weight)
    sums = for_each(lambda near, far: near + decay.since_start[:, :, None] * far, sums, carried)
    high = time_first(over_normaliser(*sums)).reshape(high.shape)
    normaliser = _in_kernels_scale(sums.denominator, x, settings.power)
  final = None
  if return_memory:
    initial = empty(k, v, settings.power) if memory is None else memory
    written = Written(inputs.k, inputs.v, decay.until_end)
    final = write(discounted(initial, decay.log_across), written, settings)
  return (high.reshape(shape).astype(dtype), final), _Saved(sequence, x, twist, memory, final, high, None, normaliser)


def _backward(
  settings: Settings,
  dtype: DTypeLike,
  return_memory: bool,
  saved: _Saved,
  cotangents: tuple[Float[Array, "B T H g dv"], Memory | None],
) -> tuple[Array, Array, Array, Array, Array | None, Memory | None]:
  del return_memory
  (dy, dfinal), x, power = cotangents, saved.operands, settings.power
  batch, time, heads, group, _ = dy.shape
  y = saved.high.astype(jnp.float32) + (0.0 if saved.low is None else saved.low.astype(jnp.float32))
  found = ~(saved.normaliser <= SMALLEST)
  inverse = jnp.where(found, 1 / jnp.where(found, saved.normaliser, 1.0), 0.0)
  rounded_dy = dy.reshape(y.shape) if dy.dtype == jnp.bfloat16 else _rounded(dy.reshape(y.shape), _BFLOAT16)
  rounded_q, rounded_k = (_rounded(a, _BFLOAT16) for a in (x.q, x.keys.plain))
  rows = attention_backward.Rows(
    q=x.q,
    rounded=rounded_q.astype(jnp.bfloat16),
    dy=rounded_dy.astype(jnp.bfloat16),
    inverse=inverse,
    discounted=inverse * jnp.exp2(jnp.repeat(x.keys.gate, group, axis=1)),
    delta=jnp.moveaxis(jnp.sum(rounded_dy * y, axis=-1), 1, 2),
  )
  by_kernel = attention_backward.backward(rows, x.keys, x.ends, x.v, power=power, interpret=settings.interpret)
  rounded_q, rounded_k, dq, dk = (
    a.reshape(batch, time, heads, -1, a.shape[-1]) for a in (rounded_q, rounded_k, by_kernel.q, by_kernel.k)
  )
  # Euler: q . dq = p * (the sum of a query's pulls), and the factor p is not in the kernel's gradients yet.
  dG = jnp.sum(rounded_q * dq, axis=(-2, -1)) - jnp.sum(rounded_k * dk, axis=(-2, -1))
  dtwist = None if saved.twist is None else power * (_torque(rounded_q, dq) + _torque(rounded_k, dk))
  dq, dk = power * dq * _power_of_two(-x.q_exponent), power * dk[..., 0, :] * _power_of_two(-x.exponent)
  dv = by_kernel.v.astype(jnp.float32)
  if saved.sequence is None:
    if saved.twist is None:  # nothing but a conversion follows, and in this way XLA does it here
      dq, dk = (a.astype(dtype).astype(jnp.float32) for a in (dq, dk))
    return dq, dk, dv, prefix_sum(dG, reverse=True).hi, dtwist, None

  inputs, decay = _span(saved.sequence)
  near = attention.Gradients(
    q_far=jnp.zeros_like(inputs.q),
    q_near=heads_first(dq),
    k_far=jnp.zeros_like(inputs.k),
    k_near=heads_first(dk),
    v=heads_first(dv),
    G_near=heads_first(dG[..., None]),
  )
  pull, dmemory = jnp.zeros_like(dG[:, 0]), None
  if dfinal is not None and saved.final is not None:
    pull = inner(dfinal, saved.final)
    k_far, v_far = write_backward(dfinal, Written(inputs.k, inputs.v, decay.until_end), settings)
    near = near._replace(k_far=k_far, v=near.v + v_far)
    dmemory = discounted(dfinal, decay.log_across)
  if saved.memory is not None:
    dmemory = for_each(jnp.zeros_like, saved.memory) if dmemory is None else dmemory
    denominator = time_first(_in_full(saved.normaliser, x, power))
    dsums = normalised_backward(dy.astype(jnp.float32), y.reshape(dy.shape), denominator)
    dsums = for_each(lambda x: heads_first(x) * decay.since_start[:, :, None], dsums)
    dmemory, q_far = read_backward(saved.memory, inputs.q, dsums, dmemory, settings)
    near = near._replace(q_far=q_far)
  if dtwist is not None:
    q, k = saved.sequence.q, saved.sequence.k[..., None, :]
    dtwist += _torque(q, time_first(near.q_far)) + _torque(k, time_first(near.k_far)[..., None, :])
  return *finish(inputs, near, pull, power), dtwist, dmemory if saved.memory is not None else None


attend.defvjp(_forward, _backward)


def _torque(x: Float[Array, "B T H g d"], dx: Float[Array, "B T H g d"]) -> Float[Array, "B T H r"]:
  """The cotangent of the turns by which all pairs of x are rotated together."""
  turned = x[..., 0::2] * dx[..., 1::2] - x[..., 1::2] * dx[..., 0::2]
  return 2 * jnp.pi * jnp.sum(turned, axis=-2)


def _operands(
  q: Float[Array, "B T H g d"], k: Float[Array, "B T H d"], v: Float[Array, "B T H dv"], G: Total, power: int
) -> _Operands:
  batch, time, heads, head_dim = k.shape
  q_exponent, exponent = _exponent(q), _exponent(k)
  q_exponent = jnp.where(q_exponent == _LEAST, 0, q_exponent)  # of no query
  top = jnp.max(exponent, axis=1)
  log_scale = (power * (exponent - top[:, None])).astype(jnp.float32)
  plain = _rounded(k * _power_of_two(-exponent), _FLOAT16)

  def frames(x: Float[Array, "B T H"]) -> Float[Array, "B n t H"]:
    return x.reshape(batch, -1, FRAME, heads)

  def by_head(x: Array) -> Array:
    return jnp.moveaxis(x.reshape(batch, -1, heads), 1, 2)

  G = Total(*map(frames, G))
  end = Total(*(x[:, :, -1:] for x in G))
  before = Total(*(jnp.concatenate([jnp.zeros_like(x[:, :1]), x[:, :-1]], axis=1) for x in end))
  since_start, until_end = (G - before) * LOG2E, (end - G) * LOG2E
  fold = jnp.exp2((until_end + frames(log_scale)) / power).reshape(batch, time, heads)
  # Between the end of one frame and the start of a later one, B query frame, key frame, H.
  between = (Total(*before) - Total(*(jnp.swapaxes(x, 1, 2) for x in end))) * LOG2E
  count = between.shape[1]
  invisible = (between < _INVISIBLE) & jnp.tri(count, k=-1, dtype=bool)[:, :, None]
  return _Operands(
    q=_rounded(q * _power_of_two(-q_exponent), _FLOAT16).astype(jnp.float16).reshape(batch, time, -1, head_dim),
    keys=attention_forward.Keys(
      folded=(plain * fold[..., None]).astype(jnp.float16),
      plain=plain.astype(jnp.float16),
      gate=by_head(since_start),
      pull=by_head(since_start.reshape(batch, time, heads) - log_scale),
      decay=by_head(jnp.exp2(since_start[:, :, -1])),
      first=by_head(jnp.sum(invisible, axis=2, dtype=jnp.int32)),
    ),
    ends=attention_backward.Ends(
      fold=by_head(fold),
      total=jnp.stack([by_head(x[:, :, 0]) for x in end]),
      last=by_head(count - 1 - jnp.sum(invisible, axis=1, dtype=jnp.int32)),
    ),
    v=v.astype(jnp.bfloat16),
    q_exponent=q_exponent,
    exponent=exponent,
    top=top,
  )


def _rounded(x: Array, bits: tuple[int, int]) -> Array:
  """X in float32, as a 16-bit type holds it: a conversion there and back XLA would leave out."""
  return lax.reduce_precision(x.astype(jnp.float32), *bits)


def _power_of_two(exponent: Int[Array, "*lead"]) -> Float[Array, "*lead 1"]:
  return jnp.exp2(exponent.astype(jnp.float32))[..., None]


def _exponent(x: Float[Array, "*lead d"]) -> Int[Array, "*lead"]:
  """The e with 2 ** (e - 1) <= the largest coordinate < 2 ** e."""
  bits = lax.bitcast_convert_type(jnp.max(jnp.abs(x), axis=-1), jnp.int32)
  return jnp.maximum((bits >> 23) - 126, _LEAST)


def _span(x: Sequence) -> tuple[Inputs, gates.Decay]:
  inputs = inputs_of(x)
  return inputs, gates.decay(inputs.G, Total(*(jnp.zeros_like(x[..., :1, :]) for x in inputs.G)))


def _in_full(normaliser: Float[Array, "B Hq T"], x: _Operands, power: int) -> Float[Array, "B H g T 1"]:
  """The normaliser as the state counts it."""
  scale = _scale(x, power)
  return normaliser.reshape(scale.shape) * scale


def _in_kernels_scale(normaliser: Float[Array, "B H g T 1"], x: _Operands, power: int) -> Float[Array, "B Hq T"]:
  """The inverse of `_in_full`."""
  return (normaliser / _scale(x, power)).reshape(normaliser.shape[0], -1, normaliser.shape[-2])


def _scale(x: _Operands, power: int) -> Float[Array, "B H g T 1"]:
  """What the kernels' weights were divided by."""
  return heads_first(_power_of_two(power * (x.q_exponent + x.top[:, None, :, None])))
