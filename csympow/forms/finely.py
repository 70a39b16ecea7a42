"""The chunked form where states of 16 bits are too coarse and keys cannot be read instead, p = 2.

A state that is given has no keys, and gradients come through one that is returned. So if the queries of some head ask
such a state for what rounding has drowned in it (`csympow.forms.faint`) the call is done by XLA, in float32.
"""

import math

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from csympow.features import feature_dim
from csympow.forms import backwards, chunked, full, near, rotating, scales
from csympow.forms.full import Full
from csympow.forms.spans import Settings
from kernels_pallas.gpu.tiles import ROWS

_AT_ONCE = 2**26  # numbers, of scores or features: memory for them is set aside even if this is never done


def attend(
  x: near.Operands, log_gate: Float[Array, "B T H"], initial: Full | None, settings: Settings, return_final: bool
) -> tuple[Float[Array, "B T H g dv"], Full | None]:
  """`fused_chunked`'s y, in float32, and state, in the scale of its kernels, as `initial` is."""
  return _attend(*_vectors(x), log_gate, initial, settings, return_final)


def backward(
  x: near.Operands,
  log_gate: Float[Array, "B T H"],
  rotation: rotating.Rotation | None,
  initial: Full | None,
  cotangents: tuple[Float[Array, "B T H g dv"], Full | None],
  settings: Settings,
  dtypes: tuple[DTypeLike, DTypeLike],
) -> tuple[near.Tokens, Full | None]:
  """Cotangents of tokens as they were given, the queries' dtype and all others', and of the state as it is here."""
  (q, k, v), (dy, dfinal) = _vectors(x), cotangents

  def run(q: Array, k: Array, v: Array, log_gate: Array, initial: Full | None) -> tuple[Array, Full | None]:
    return _attend(q, k, v, log_gate, initial, settings, dfinal is not None)

  _, transpose = jax.vjp(run, q, k, v, log_gate, initial)
  dq, dk, dv, dlog_gate, dinitial = transpose((dy.astype(jnp.float32), dfinal))
  dturns = rotating.torque(q, dq) + rotating.torque(k[..., None, :], dk[..., None, :])
  dq *= scales.power_of_two(-x.q_exponent)
  dk *= scales.power_of_two(-x.top[:, None])
  dtokens = near.Tokens(dq, dk, dv, dlog_gate, backwards.by_turns(rotation, dturns))
  return backwards.before_rotation(dtokens, rotation, dtypes), dinitial


def _attend(
  q: Float[Array, "B T H g d"],
  k: Float[Array, "B T H d"],
  v: Float[Array, "B T H dv"],
  log_gate: Float[Array, "B T H"],
  initial: Full | None,
  settings: Settings,
  return_final: bool,
) -> tuple[Float[Array, "B T H g dv"], Full | None]:
  head_dim, value_dim = q.shape[-1], v.shape[-1]
  memory = None if initial is None else full.to_memory(initial, head_dim, value_dim)
  rows = _AT_ONCE // (q.shape[0] * math.prod(q.shape[2:4]))  # numbers of each
  block = _part(settings.chunk, math.isqrt(rows))
  tile = _part(settings.chunk, rows // feature_dim(head_dim, settings.power))
  settings = settings._replace(block=block, tile=tile, precision="highest")
  y, memory = chunked.attend(q, k, v, log_gate, memory, settings, return_final)
  return y, None if memory is None else full.of_memory(memory, head_dim)


def _part(chunk: int, most: int) -> int:
  """The tokens of a chunk that are taken at once."""
  return math.gcd(chunk, 1 << max(most, ROWS).bit_length() - 1)


def _vectors(
  x: near.Operands,
) -> tuple[Float[Array, "B T H g d"], Float[Array, "B T H d"], Float[Array, "B T H dv"]]:
  """Rotated queries, each in a scale of its own, which cancels, keys in one for each head, and values."""
  q = x.q.astype(jnp.float32).reshape(*x.q_exponent.shape, -1)
  k = x.keys.plain.astype(jnp.float32) * scales.power_of_two(x.exponent - x.top[:, None])
  return q, k, x.v.astype(jnp.float32)
