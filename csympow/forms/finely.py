"""The chunked form where states of 16 bits are too coarse and keys cannot be read instead, p = 2.

A state that is given has no keys, and of one that is returned others will ask, or want gradients. So where the queries
of a head ask a state for what rounding has drowned in it (`csympow.forms.faint`) XLA does the head again, in float32,
from the operands of the kernels: one head of a sequence after another, and none if there is none to be done.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from csympow.features import feature_dim
from csympow.forms import chunked, full, near, rotating, scales
from csympow.forms.full import Full
from csympow.forms.spans import Settings, for_each
from csympow.forms.visible import anywhere
from csympow.rotation import Phases, rotate

_AT_ONCE = 2**26  # numbers, of scores or features: memory for them is set aside even if nothing is done here

type _Place = tuple[Int[Array, ""], Int[Array, ""]]  # the sequence, and the head


class _Given(NamedTuple):
  """What is given of all heads, or of one of a sequence."""

  q: Float[Array, "B T H g d"]
  k: Float[Array, "B T H d"]
  v: Float[Array, "B T H dv"]
  log_gate: Float[Array, "B T H"]
  q_exponent: Int[Array, "B T H g"]  # rotated queries were divided by 2 to this
  k_exponent: Int[Array, "B T H"]  # and keys
  top: Int[Array, "B T H"]  # but are to be divided by 2 to this, the same of all tokens

  @classmethod
  def of(cls, x: near.Operands, log_gate: Float[Array, "B T H"], head_dim: int) -> "_Given":
    q = x.q.reshape(*x.q_exponent.shape, -1)[..., :head_dim]
    top = jnp.broadcast_to(x.top[:, None], x.exponent.shape)
    return cls(q, x.keys.plain[..., :head_dim], x.v, log_gate, x.q_exponent, x.exponent, top)

  def vectors(self) -> tuple[Float[Array, "B T H g d"], Float[Array, "B T H d"], Float[Array, "B T H dv"]]:
    """Queries, each in a scale of its own, which cancels, keys in one for each head, and values."""
    k = self.k.astype(jnp.float32) * scales.power_of_two(self.k_exponent - self.top)
    return self.q.astype(jnp.float32), k, self.v.astype(jnp.float32)


class _Parts(NamedTuple):
  """Of a result, or of what is given: arrays whose heads are axis 2, after time, and others whose heads are axis 1."""

  tokens: Any
  states: Any


def forward(
  heads: Bool[Array, "B H"],
  found: tuple[Float[Array, "B T H g dv"], Full | None],
  x: near.Operands,
  log_gate: Float[Array, "B T H"],
  initial: Full | None,
  settings: Settings,
  head_dim: int,
) -> tuple[Float[Array, "B T H g dv"], Full | None]:
  """What the kernels `found`, y and the state, which like `initial` is in their scale; but of some heads anew."""
  given = _Parts(_Given.of(x, log_gate, head_dim), initial)

  def attend(place: _Place) -> _Parts:
    row, initial = _taken(given, place)
    q, k, v = row.vectors()
    return _Parts(*_attend(q, k, v, row.log_gate, initial, settings, found[1] is not None))

  y, final = _instead(heads, _Parts(*found), attend)
  return y, final


def backward(
  heads: Bool[Array, "B H"],
  found: tuple[near.Tokens, Full | None],
  x: near.Operands,
  log_gate: Float[Array, "B T H"],
  rotation: rotating.Rotation | None,
  initial: Full | None,
  cotangents: tuple[Float[Array, "B T H g dv"], Full | None],
  settings: Settings,
  head_dim: int,
) -> tuple[near.Tokens, Full | None]:
  """The cotangents that the kernels `found`, of tokens as they were given and of `initial`; but of some heads anew.

  Both states' are in the scale of the kernels, about 0.
  """
  dtokens, dinitial = found
  total, _, start, run, _ = (None,) * 5 if rotation is None else rotation.phases
  given = _Parts((_Given.of(x, log_gate, head_dim), cotangents[0], total, run), (initial, cotangents[1], start))

  def attend_backwards(place: _Place) -> _Parts:
    (row, dy, total, run), (initial, dfinal, start) = _taken(given, place)

    def attend(q: Array, k: Array, v: Array, log_gate: Array, initial: Full | None) -> tuple[Array, Full | None]:
      return _attend(q, k, v, log_gate, initial, settings, dfinal is not None)

    q, k, v = row.vectors()
    _, transpose = jax.vjp(attend, q, k, v, row.log_gate, initial)
    dq, dk, dv, dlog_gate, dinitial = transpose((dy.astype(jnp.float32), dfinal))
    of_rotation = None
    if rotation is not None:
      dturns = rotating.torque(q, dq) + rotating.torque(k[..., None, :], dk[..., None, :])
      along = rotation.rates[: head_dim // 2] / (2 * jnp.pi)
      of_rotation = dturns, jnp.sum(dturns * along, axis=-1)
      turns = rotating.turns_of(Phases(total, rotation.phases.cycles, start, run, None))[..., : head_dim // 2]
      dq, dk = rotate(dq, -turns[..., None, :]), rotate(dk, -turns)
    dq, dk = dq * scales.power_of_two(-row.q_exponent), dk * scales.power_of_two(-row.top)
    return _Parts((dq, dk, dv, dlog_gate, of_rotation), dinitial)

  drotation = dtokens.rotation
  of_rotation = None if drotation is None else (drotation.turns, drotation.total)
  parts = _Parts((*dtokens[:4], of_rotation), dinitial)
  (dq, dk, dv, dlog_gate, of_rotation), dinitial = _instead(heads, parts, attend_backwards)
  if drotation is not None:
    drotation = rotating.cotangent(drotation, *of_rotation)
  return near.Tokens(dq, dk, dv, dlog_gate, drotation), dinitial


def _instead(heads: Bool[Array, "B H"], found: _Parts, redo: Callable[[_Place], _Parts]) -> _Parts:
  """`found`, but of these heads what `redo` finds, which may be of fewer coordinates."""
  batch, count = heads.shape

  def each(n: Int[Array, ""], found: _Parts) -> _Parts:
    n = n.astype(jnp.int32)  # in 64 bits it is not
    place = lax.div(n, jnp.int32(count)), lax.rem(n, jnp.int32(count))
    flag = lax.dynamic_slice(heads.astype(jnp.int32), place, (1, 1))
    return lax.cond(anywhere(flag), lambda found: _put(found, redo(place), place), lambda found: found, found)

  def one_after_another(found: _Parts) -> _Parts:
    done: _Parts = lax.fori_loop(0, batch * count, each, found)
    return done

  some: _Parts = lax.cond(anywhere(heads.astype(jnp.int32)), one_after_another, lambda found: found, found)
  return some


def _taken(x: _Parts, place: _Place) -> _Parts:
  """One head of one sequence, as if there were no others."""

  def of(axis: int) -> Callable[[Array], Array]:
    def take(x: Array) -> Array:
      sizes = [1 if n in (0, axis) else size for n, size in enumerate(x.shape)]
      return lax.dynamic_slice(x, _start(x, place, axis), sizes)

    return take

  return _Parts(for_each(of(2), x.tokens), for_each(of(1), x.states))


def _put(x: _Parts, row: _Parts, place: _Place) -> _Parts:
  """The inverse."""

  def of(axis: int) -> Callable[[Array, Array], Array]:
    return lambda x, row: lax.dynamic_update_slice(x, row.astype(x.dtype), _start(x, place, axis))

  return _Parts(for_each(of(2), x.tokens, row.tokens), for_each(of(1), x.states, row.states))


def _start(x: Array, place: _Place, axis: int) -> list[Int[Array, ""]]:
  b, head = place
  return [{0: b, axis: head}.get(n, jnp.int32(0)) for n in range(x.ndim)]


def _attend(
  q: Float[Array, "B T H g d"],
  k: Float[Array, "B T H d"],
  v: Float[Array, "B T H dv"],
  log_gate: Float[Array, "B T H"],
  initial: Full | None,
  settings: Settings,
  return_final: bool,
) -> tuple[Float[Array, "B T H g dv"], Full | None]:
  head_dim, value_dim, group = q.shape[-1], v.shape[-1], q.shape[3]
  memory = None if initial is None else full.to_memory(initial, head_dim, value_dim)
  block = _part(settings.chunk, math.isqrt(_AT_ONCE // group))
  tile = _part(settings.chunk, _AT_ONCE // (group * feature_dim(head_dim, settings.power)))
  settings = settings._replace(block=block, tile=tile, precision="highest")
  y, memory = chunked.attend(q, k, v, log_gate, memory, settings, return_final)
  return y, None if memory is None else full.of_memory(memory, head_dim)


def _part(chunk: int, most: int) -> int:
  """The tokens of a chunk that are taken at once: a power of two, and a part of it."""
  return math.gcd(chunk, 1 << max(most, 1).bit_length() - 1)
