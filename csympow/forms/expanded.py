"""Reading and writing the state by whole spans of tokens, for NVIDIA Hopper: the functions of `memory`.

Features are expanded by a kernel and lie in memory for a tile of tokens at a time. They, and all that they meet in
XLA's products, are sums of two bfloat16s: where a query is nearly orthogonal to all keys its features all but cancel.
"""

import math
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, BFloat16, Float

from csympow.features import multisets
from csympow.forms.memory import Memory, Written, without_noise
from csympow.forms.spans import Settings, Sums, for_each, merge, split
from kernels_pallas.gpu import expand

COLUMNS = 8  # beside the values: the normaliser's, and zeros so that rows are aligned


class _Pair(NamedTuple):
  """A number as a sum of two."""

  high: BFloat16[Array, "*lead"]
  low: BFloat16[Array, "*lead"]


def read(memory: Memory, q: Float[Array, "B H g T d"], settings: Settings) -> Sums:
  """S^T phi(q) and Z . phi(q)."""
  state = _state(memory, q, settings)

  def read_tile(q: Float[Array, "B H g t d"]) -> Sums:
    return without_noise(_gathered(state, _expanded(q, settings)))

  return merge(lax.map(read_tile, split(q, settings.tile)))


def read_backward(
  memory: Memory, q: Float[Array, "B H g T d"], dsums: Sums, dmemory: Memory, settings: Settings
) -> tuple[Memory, Float[Array, "B H g T d"]]:
  """Adds the cotangent that reaches the memory through `read` to `dmemory`, and returns that of q."""
  state = _state(memory, q, settings)

  def add_tile(total: Memory, x: tuple[Array, Sums]) -> tuple[Memory, Float[Array, "B H g t d"]]:
    q, dsum = x
    phi = _expanded(q, settings)
    noise = _gathered(state, phi).denominator < 0  # see memory.without_noise
    given = _joined(*for_each(lambda x: jnp.where(noise, 0.0, x), dsum))
    added = _added(phi, given, memory)
    return for_each(jnp.add, total, added), _contracted(q, _met(given, state), settings)

  dmemory, dq = lax.scan(add_tile, dmemory, split((q, dsums), settings.tile))
  return dmemory, merge(dq)


def write(memory: Memory, x: Written, settings: Settings) -> Memory:
  """Adds phi(k) v^T and phi(k), discounted, of all tokens."""

  def add_tile(total: Memory, x: Written) -> tuple[Memory, None]:
    keys, values = x.k[:, :, None], _joined(*_values(x))
    return for_each(jnp.add, total, _added(_expanded(keys, settings), values, memory)), None

  return lax.scan(add_tile, memory, split(x, settings.tile))[0]


def write_backward(
  dmemory: Memory, x: Written, settings: Settings
) -> tuple[Float[Array, "B H T d"], Float[Array, "B H T dv"]]:
  """The cotangents of k and v through `write`; that of the discount follows from k's (see `chunked`)."""
  dstate = _state(dmemory, x.k[:, :, None], settings)

  def transpose_tile(x: Written) -> tuple[Float[Array, "B H t d"], Float[Array, "B H t dv"]]:
    keys = x.k[:, :, None]
    dv = _gathered(dstate, _expanded(keys, settings)).numerator[:, :, 0] * x.discount
    return _contracted(keys, _met(_joined(*_values(x)), dstate), settings)[:, :, 0], dv

  return merge(lax.map(transpose_tile, split(x, settings.tile)))


def _values(x: Written) -> tuple[Float[Array, "B H 1 t dv"], Float[Array, "B H 1 t 1"]]:
  """What goes with the features of keys."""
  return (x.v * x.discount)[:, :, None], x.discount[:, :, None]


def _joined(values: Float[Array, "*lead dv"], normaliser: Float[Array, "*lead 1"]) -> _Pair:
  """As columns of one matrix."""
  rest = jnp.zeros((*normaliser.shape[:-1], COLUMNS - 1), normaliser.dtype)
  return _halves(jnp.concatenate([values, normaliser, rest], axis=-1))


def _parted(x: Float[Array, "*lead c"]) -> tuple[Float[Array, "*lead dv"], Float[Array, "*lead 1"]]:
  """The inverse."""
  value_dim = x.shape[-1] - COLUMNS
  return x[..., :value_dim], x[..., value_dim : value_dim + 1]


def _halves(x: Float[Array, "*lead"]) -> _Pair:
  high = lax.reduce_precision(x, 8, 7)  # a conversion there and back XLA would leave out
  return _Pair(high.astype(jnp.bfloat16), (x - high).astype(jnp.bfloat16))


def _state(memory: Memory, tokens: Float[Array, "B H g T d"], settings: Settings) -> _Pair:
  """With as many features as `_expanded` makes of a tile of such tokens."""
  rows = math.prod(tokens.shape[:3])
  more = expand.padded_features(_table(tokens, settings), rows, settings.tile) - memory.S.shape[2]
  return _joined(*(jnp.pad(x, ((0, 0), (0, 0), (0, more), (0, 0))) for x in memory))


def _gathered(state: _Pair, phi: _Pair) -> Sums:
  """What queries find in a state."""
  return Sums(*_parted(_product("bhgft,bhfc->bhgtc", phi, state)))


def _added(phi: _Pair, tokens: _Pair, like: Memory) -> Memory:
  """What tokens add to a state."""
  return Memory(*_parted(_product("bhgft,bhgtc->bhfc", phi, tokens)[:, :, : like.S.shape[2]]))


def _product(subscripts: str, phi: _Pair, x: _Pair) -> Float[Array, "*lead c"]:
  """Features are read as seldom as can be."""
  high = _einsum(subscripts, phi.high, jnp.concatenate(x, axis=-1))
  return jnp.add(*jnp.split(high, 2, axis=-1)) + _einsum(subscripts, phi.low, x.high)


def _met(tokens: _Pair, state: _Pair) -> Float[Array, "B H g F t"]:
  """What each token's columns find in those of each feature: the cotangents of features."""
  left, right = (tokens.high, tokens.high, tokens.low), (state.high, state.low, state.high)
  return _einsum("bhgtc,bhfc->bhgft", jnp.concatenate(left, axis=-1), jnp.concatenate(right, axis=-1))


def _einsum(subscripts: str, *operands: BFloat16[Array, "..."]) -> Float[Array, "..."]:
  return jnp.einsum(subscripts, *operands, preferred_element_type=jnp.float32)


def _table(x: Float[Array, "*lead d"], settings: Settings) -> expand.Table:
  return expand.Table(*multisets(x.shape[-1], settings.power))


def _expanded(x: Float[Array, "B H g t d"], settings: Settings) -> _Pair:
  """The features, time last: B H g F t."""
  found = expand.expanded(_time_last(x), _table(x, settings), interpret=settings.interpret)
  return _Pair(*(phi.reshape(*x.shape[:3], *phi.shape[1:]) for phi in found))


def _contracted(
  x: Float[Array, "B H g t d"], dphi: Float[Array, "B H g F t"], settings: Settings
) -> Float[Array, "B H g t d"]:
  dphi = dphi.reshape(-1, *dphi.shape[3:])
  dx = expand.contracted(_time_last(x), dphi, _table(x, settings), interpret=settings.interpret)
  return jnp.swapaxes(dx, -1, -2).reshape(x.shape)


def _time_last(x: Float[Array, "B H g t d"]) -> Float[Array, "N d t"]:
  return jnp.swapaxes(x.reshape(-1, *x.shape[3:]), -1, -2)
