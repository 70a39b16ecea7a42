"""The attention form by Pallas kernels: the same function as `chunked.attend` with one chunk.

The products with a state are XLA's.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from csympow import gates
from csympow.forms import anchors, backwards, expanded, memory, near, near_backward, near_tpu, rotating, scales
from csympow.forms.chunked import Sequence, inputs_of, normalised_backward
from csympow.forms.memory import Memory, Written, discounted, empty, inner
from csympow.forms.once import differentiated_once, instantiated, is_asked, primals_of, turns_asked_for
from csympow.forms.spans import SMALLEST, Inputs, Settings, Sums, for_each, heads_first, over_normaliser, time_first
from csympow.prefix import Total
from kernels_pallas.gpu import arrays

_FORWARD: dict[str, Any] = {"gpu": near, "tpu": near_tpu}
_BACKWARD: dict[str, Any] = {"gpu": near_backward, "tpu": near_tpu}
_STATES: dict[str, Any] = {"memory": memory, "expanded": expanded}


class _Saved(NamedTuple):
  """What the backward pass needs."""

  sequence: Sequence | None  # only where there is a state
  operands: Any  # of the chip's kernels
  rotation: rotating.Rotation | None
  memory: Memory | None
  final: Memory | None
  y: arrays.Outputs
  denominator: Float[Array, "B H g T 1"] | None = None  # the normaliser as the state counts it
  turns_asked_for: Bool[Array, "n"] | None = None  # see csympow.forms.once


def attend(
  x: near.Tokens,
  memory: Memory | None,
  settings: Settings,
  dtype: DTypeLike,
  return_memory: bool,
) -> tuple[Float[Array, "B T H g dv"], Memory | None]:
  """`chunked.attend` with y in `dtype`; T is whole blocks, as the chip's kernels have them."""
  value_dim = x.v.shape[-1]
  if memory is None and not return_memory:  # a state must not be one of wider heads
    x = _as_wide_as_kernels(x, settings)
  y, memory = _attend(x, memory, settings, dtype, return_memory)
  return y[..., :value_dim], memory


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _attend(
  x: near.Tokens, memory: Memory | None, settings: Settings, dtype: DTypeLike, return_memory: bool
) -> tuple[Float[Array, "B T H g dv"], Memory | None]:
  return _forward(x, memory, settings, dtype, return_memory, save=False)[0]


def _as_wide_as_kernels(x: near.Tokens, settings: Settings) -> near.Tokens:
  return near.as_wide_as_kernels(x) if settings.chip == "gpu" else x


def _forward(
  tokens: near.Tokens,
  memory: Memory | None,
  settings: Settings,
  dtype: DTypeLike,
  return_memory: bool,
  save: bool = True,
) -> tuple[tuple[Float[Array, "B T H g dv"], Memory | None], _Saved]:
  tokens, memory = differentiated_once((tokens, memory))
  q, k, v, _, rotation = tokens
  kernels, value_dim = _FORWARD[settings.chip], v.shape[-1]
  stateful, denominator = memory is not None or return_memory, None
  wide = _as_wide_as_kernels(tokens, settings)
  operands, G = kernels.operands(wide, settings, with_state=stateful, save=save)
  found, x = kernels.forward(
    operands,
    power=settings.power,
    dtype=jnp.float32 if stateful else dtype,
    save_low=save and not stateful,
    interpret=settings.interpret,
  )
  high, normaliser = found.high[..., :value_dim], found.normaliser
  shape = (*q.shape[:-1], value_dim)
  if not stateful:
    return (high.reshape(shape), None), _Saved(None, x, rotation, None, None, found._replace(high=high))

  states = _STATES[settings.states]
  assert G is not None
  q, k, v = (a.astype(jnp.float32) for a in (q, k, v))
  sequence = Sequence(*rotating.rotated(q, k, rotation), v, G)
  inputs, decay = _span(sequence)
  if memory is not None:
    carried = states.read(memory, inputs.q, settings)
    weight = _in_full(normaliser, x, settings.power)
    sums = Sums(heads_first(high.reshape(shape)) * weight, weight)
    sums = for_each(lambda near, far: near + decay.since_start[:, :, None] * far, sums, carried)
    high = time_first(over_normaliser(*sums)).reshape(high.shape)
    # What counts as empty must do so in the kernels' scale, too, where it is larger.
    empty_row = (sums.denominator <= SMALLEST).reshape(normaliser.shape)
    normaliser = jnp.where(empty_row, 0.0, _in_kernels_scale(sums.denominator, x, settings.power))
    denominator = sums.denominator
  final = None
  if return_memory:
    initial = empty(k, v, settings.power) if memory is None else memory
    written = Written(inputs.k, inputs.v, decay.until_end)
    final = states.write(discounted(initial, decay.log_across), written, settings)
  y = arrays.Outputs(high, None, normaliser)
  return (high.reshape(shape).astype(dtype), final), _Saved(sequence, x, rotation, memory, final, y, denominator)


def _forward_for_gradients(
  x: Any, memory: Any, settings: Settings, dtype: DTypeLike, return_memory: bool
) -> tuple[tuple[Float[Array, "B T H g dv"], Memory | None], _Saved]:
  """`_forward` of arrays that are told whether they are differentiated."""
  asked = turns_asked_for(x.rotation)
  x, memory = primals_of((x, memory))
  results, saved = _forward(x, memory, settings, dtype, return_memory)
  return results, saved._replace(turns_asked_for=asked)


def _backward(
  settings: Settings,
  dtype: DTypeLike,
  return_memory: bool,
  saved: _Saved,
  cotangents: tuple[Any, Memory | None],
) -> tuple[near.Tokens, Memory | None]:
  del return_memory
  dy, dfinal = differentiated_once(instantiated(cotangents, saved.y.high, saved.final))
  x, power = saved.operands, settings.power
  kernels, rotation = _BACKWARD[settings.chip], saved.rotation
  how: dict[str, Any] = {}
  if settings.chip == "gpu" and saved.sequence is None and not is_asked(saved.turns_asked_for):
    how = {"way_back": near_backward.way_back_of(x, rotation, power), "dtype": dtype}
  inside = kernels.backward(x, backwards.cotangents(saved.y, dy), power, settings.interpret, **how)
  dv = inside.v
  if saved.sequence is None:
    dq, dk, pulls = kernels.finished(x, inside, rotation, (dtype, dtype), settings)
    kernel = near.totals_kernel(settings)
    return backwards.without_state(dq, dk, dv.astype(dtype), pulls, rotation, kernel), None

  states = _STATES[settings.states]
  head_dim, dv = saved.sequence.k.shape[-1], dv[..., : dy.shape[-1]]
  dq, dk = (dx[..., :head_dim] for dx in kernels.unscaled(x, inside.q, inside.k, power))
  pulls = kernels.pulls(x, inside.q, inside.k, None, power)
  dturns = jnp.add(*pulls.turns)[..., : head_dim // 2]
  inputs, decay = _span(saved.sequence)
  nothing = jnp.zeros_like(dq[:, 0, :, 0, 0])
  first, last, q_far, k_far, dmemory = nothing, nothing, jnp.zeros_like(inputs.q), jnp.zeros_like(inputs.k), None
  if dfinal is not None and saved.final is not None:
    last = inner(dfinal, saved.final)
    k_far, v_far = states.write_backward(dfinal, Written(inputs.k, inputs.v, decay.until_end), settings)
    dv = dv + time_first(v_far)
    dmemory = discounted(dfinal, decay.log_across)
  if saved.memory is not None and saved.denominator is not None:
    dmemory = for_each(jnp.zeros_like, saved.memory) if dmemory is None else dmemory
    dsums = normalised_backward(dy.astype(jnp.float32), saved.y.high.reshape(dy.shape), time_first(saved.denominator))
    dsums = for_each(lambda x: heads_first(x) * decay.since_start[:, :, None], dsums)
    dmemory, q_far = states.read_backward(saved.memory, inputs.q, dsums, dmemory, settings)
    first = inner(dmemory, saved.memory)
  q, k, dq_far, dk_far = saved.sequence.q, saved.sequence.k, time_first(q_far), time_first(k_far)
  by_query = pulls.G[0] + jnp.sum(q * dq_far, axis=(-2, -1)) / power  # Euler, as in the kernels' part
  by_key = pulls.G[1] - jnp.sum(k * dk_far, axis=-1) / power
  dturns += rotating.torque(q, dq_far) + rotating.torque(k[..., None, :], dk_far[..., None, :])
  dtokens = near.Tokens(
    dq + dq_far,
    dk + dk_far,
    dv,
    anchors.of_gates((by_query, by_key), jnp.stack([first, last], axis=1), near.totals_kernel(settings)),
    backwards.by_turns(rotation, dturns),
  )
  dtypes = (dtype if saved.memory is None else jnp.float32, dtype)
  return backwards.before_rotation(dtokens, rotation, dtypes), None if saved.memory is None else dmemory


_attend.defvjp(_forward_for_gradients, _backward, symbolic_zeros=True)


def _span(x: Sequence) -> tuple[Inputs, gates.Decay]:
  inputs = inputs_of(x)
  return inputs, gates.decay(inputs.G, Total(*(jnp.zeros_like(x[..., :1, :]) for x in inputs.G)))


def _in_full(normaliser: Float[Array, "B Hq T"], x: Any, power: int) -> Float[Array, "B H g T 1"]:
  """The normaliser as the state counts it."""
  scale = _scale(x, power)
  return normaliser.reshape(scale.shape) * scale


def _in_kernels_scale(normaliser: Float[Array, "B H g T 1"], x: Any, power: int) -> Float[Array, "B Hq T"]:
  """The inverse of `_in_full`."""
  return (normaliser / _scale(x, power)).reshape(normaliser.shape[0], -1, normaliser.shape[-2])


def _scale(x: Any, power: int) -> Float[Array, "B H g T 1"]:
  """What the kernels' weights were divided by; 0 where that would be too small for a normal number."""
  return heads_first(scales.power_of_two(power * (x.q_exponent + x.top[:, None, :, None])))
