"""The way out of the attention kernels on Hopper: gradients of queries and keys as they were given.

`near.py` is the way in.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, BFloat16, Float, Int

from csympow.forms import backwards, scales
from csympow.forms.near import Operands, filled_up
from csympow.forms.rotating import Rotation, angles, torque, twice
from csympow.forms.spans import Settings, by_head
from kernels_pallas.gpu import arrays, attention_backward, attention_backward_wide, gradients
from kernels_pallas.gpu.angles import Angles
from kernels_pallas.weights import LEAST


def backward(
  x: Operands,
  given: backwards.Cotangents,
  power: int,
  interpret: Any,
  way_back: attention_backward.WayBack | None = None,
  dtype: DTypeLike = jnp.bfloat16,
) -> attention_backward.Gradients:
  """By pairs inside chunks; p times those of `q` and `k` are cotangents of scaled and rotated queries and keys.

  If keys are not copies, or there is a `way_back` to what was given, dk is finished, in `dtype`: see
  `attention_backward.Gradients`.
  """
  group = x.q_exponent.shape[-1]
  gate = jnp.repeat(x.keys.gate, group, axis=1)
  rounded_q = x.rounded_q
  if rounded_q is None and x.keys.top is None:
    rounded_q = scales.rounded(x.q, scales.BFLOAT16).astype(jnp.bfloat16)
  rows = attention_backward.Rows(
    q=x.q,
    rounded=rounded_q,
    dy=filled_up(given.dy, x.v.shape[-1]),
    exponent=gate + jnp.log2(given.inverse),
    discounted=given.inverse * jnp.exp2(gate),
    delta=given.delta,
  )
  how: dict[str, Any] = {"power": power, "dtype": dtype, "interpret": interpret}
  # Under vmap one after another.
  kernel = jax.custom_batching.sequential_vmap(functools.partial(_by_kernel, **how))
  found: attention_backward.Gradients = kernel(rows, x.keys, x.last, x.v, way_back)
  return found


def _by_kernel(
  rows: attention_backward.Rows,
  keys: arrays.Keys,
  last: Int[Array, "B H tiles"],
  v: BFloat16[Array, "B T H dv"],
  way_back: attention_backward.WayBack | None,
  **how: Any,
) -> attention_backward.Gradients:
  """By the one for heads of that width; the one for wide heads has but one of queries and keys."""
  head_dim = rows.q.shape[-1]
  if not _wide(rows.q, v):
    return attention_backward.backward(rows, keys, last, v, way_back, **how)

  def filled(a: Array | None) -> Any:
    return None if a is None else filled_up(a, attention_backward_wide.WIDTH)

  rows = rows._replace(q=filled(rows.q), rounded=filled(rows.rounded))
  keys = keys._replace(plain=filled(keys.plain), folded=filled(keys.folded))
  if way_back is not None and way_back.angles is not None:
    turned_by = way_back.angles._replace(first=filled(way_back.angles.first), cycles=filled(way_back.angles.cycles))
    way_back = way_back._replace(angles=turned_by, speed=filled(way_back.speed))
  found = attention_backward_wide.backward(rows, keys, last, v, way_back, **how)
  return found._replace(q=found.q[..., :head_dim], k=found.k[..., :head_dim])


def _wide(q: Array, v: Array) -> bool:
  return max(q.shape[-1], v.shape[-1]) > 64


def way_back_of(
  x: Operands, rotation: Rotation | None, power: int, turned_by: Angles | None = None
) -> attention_backward.WayBack | None:
  """From the gradients of scaled and rotated keys to those of keys as they were given, if the kernel can take it.

  Keys as they were given need none. Beside folded ones there is no room for it, but in wide heads, where these take the
  others' place. The gradients of rotated keys are lost on it, and with them that of a rotation's turns.
  `turned_by`: the rotation's angles, where the caller has them already.
  """
  if x.keys.top is not None or not (x.keys.folded is None or _wide(x.q, x.v)):
    return None
  turned_by = _known_angles(x, rotation, turned_by)
  return attention_backward.WayBack(_factor(x.exponent, power), turned_by, _speed(rotation, power))


def _known_angles(x: Operands, rotation: Rotation | None, turned_by: Angles | None) -> Angles | None:
  """Those that the caller has, or the forward pass had."""
  known = x.angles if turned_by is None else turned_by
  return angles(rotation) if known is None else known


def _factor(exponent: Int[Array, "B T H"], power: int) -> Float[Array, "B H T"]:
  """From gradients by kernels to those of vectors that were divided by 2 to the exponent."""
  exponent = jnp.where(exponent <= LEAST + 1, 0, exponent)  # of 0, whose gradient is 0
  return by_head(power * jnp.exp2(-exponent.astype(jnp.float32)))


def _speed(rotation: Rotation | None, power: int) -> Float[Array, "d"] | None:
  """Of each coordinate, by which a beta turns it, times p."""
  return None if rotation is None else twice(power * rotation.rates)


def pulls(
  x: Operands, dq: Float[Array, "B T Hq d"], dk: Float[Array, "B T H d"], rotation: Rotation | None, power: int
) -> backwards.Pulls:
  """From the gradients by kernels, to which the factor p is missing."""
  shape = (*x.q_exponent.shape[:3], -1, dq.shape[-1])
  q, k, dq, dk = (
    a.reshape(shape)
    for a in (scales.rounded(x.q, scales.BFLOAT16), scales.rounded(x.keys.plain, scales.BFLOAT16), dq, dk)
  )
  return backwards.pulls_of(q, k, dq, dk, rotation, power)


def unscaled(
  x: Operands, dq: Float[Array, "B T Hq d"], dk: Float[Array, "B T H d"], power: int
) -> tuple[Float[Array, "B T H g d"], Float[Array, "B T H d"]]:
  """From the gradients by kernels those of rotated queries and keys."""
  dq = dq.reshape(*x.q_exponent.shape, -1)
  return power * dq * scales.power_of_two(-x.q_exponent), power * dk * scales.power_of_two(-x.exponent)


def finished(
  x: Operands,
  dx: attention_backward.Gradients,
  rotation: Rotation | None,
  dtypes: tuple[DTypeLike, DTypeLike],
  settings: Settings,
  turned_by: Angles | None = None,
) -> tuple[Float[Array, "B T H g d"], Float[Array, "B T H d"], backwards.Pulls]:
  """From the gradients by kernels those of queries and keys as they were given, and what is pulled by each.

  `turned_by`: the rotation's angles, where the caller has them already.
  """
  power, (batch, time, heads, group) = settings.power, x.q_exponent.shape
  turned_by, speed = _known_angles(x, rotation, turned_by), _speed(rotation, power)

  def back(
    x: Array,
    dx: Array,
    exponent: Array,
    dtype: DTypeLike,
    unit: Float[Array, "B H"] | None = None,
  ) -> gradients.Gradients:
    factor = _factor(exponent.reshape(batch, time, -1), power)
    how: dict[str, Any] = {"angles": turned_by, "speed": speed, "unit": unit}
    return gradients.gradients(x, dx, factor, dtype, **how, interpret=settings.interpret)

  def of_token(x: Float[Array, "B Hq T"]) -> Float[Array, "B T H"]:
    return jnp.sum(jnp.moveaxis(x, 1, 2).reshape(batch, time, heads, -1), axis=-1)

  dq, dk = dx.q, dx.k
  unit = None if x.keys.top is None else scales.power_of_two(-x.keys.top)[..., 0]
  found_q = back(x.q, dq, x.q_exponent, dtypes[0], unit)
  if dx.pulled is None:
    found_k = back(x.keys.plain, dk, x.exponent, dtypes[1])
  else:  # the kernel has finished it
    found_k = gradients.Gradients(dk, dx.pulled, dx.turned)
  pulled = of_token(found_q.pulled), -of_token(found_k.pulled)
  given = found_q.given.reshape(batch, time, heads, group, -1), found_k.given
  if rotation is None:
    return *given, backwards.Pulls(pulled, None, None)
  total = None
  if found_q.turned is not None and found_k.turned is not None:
    total = of_token(found_q.turned), of_token(found_k.turned)
  if dx.turned is not None:  # by the kernel, which has rotated dk back
    return *given, backwards.Pulls(pulled, None, total)
  q, k = (
    power * scales.rounded(a, scales.BFLOAT16).reshape(batch, time, heads, -1, a.shape[-1]) for a in (x.q, x.keys.plain)
  )
  by_pair = torque(q, dq.reshape(q.shape)), torque(k, dk.reshape(k.shape))
  return *given, backwards.Pulls(pulled, by_pair, total)
