"""Reading and writing the state by whole spans of tokens, for NVIDIA Hopper: the functions of `memory` in 16 bits.

Features are expanded by a kernel and lie in memory as bfloat16, for a tile of tokens at a time; the products with them
are XLA's. What belongs to the normaliser has the bits of two bfloat16s.
"""

import math

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, BFloat16, Float

from csympow.features import multisets
from csympow.forms.memory import Memory, Written, without_noise
from csympow.forms.spans import Settings, Sums, for_each, merge, split
from kernels_pallas.gpu import expand

_MORE = 8  # columns beside the values: three of them for the normaliser, the others so that rows are aligned


def read(memory: Memory, q: Float[Array, "B H g T d"], settings: Settings) -> Sums:
  """S^T phi(q) and Z . phi(q)."""

  def read_tile(q: Float[Array, "B H g t d"]) -> Sums:
    return without_noise(_gathered(_state(memory, q, settings), _expanded(q, settings)))

  return merge(lax.map(read_tile, split(q, settings.tile)))


def read_backward(
  memory: Memory, q: Float[Array, "B H g T d"], dsums: Sums, dmemory: Memory, settings: Settings
) -> tuple[Memory, Float[Array, "B H g T d"]]:
  """Adds the cotangent that reaches the memory through `read` to `dmemory`, and returns that of q."""

  def add_tile(total: Memory, x: tuple[Array, Sums]) -> tuple[Memory, Float[Array, "B H g t d"]]:
    q, dsum = x
    phi, state = _expanded(q, settings), _state(memory, q, settings)
    noise = _gathered(state, phi).denominator < 0  # see memory.without_noise
    given = _tokens(*for_each(lambda x: jnp.where(noise, 0.0, x), dsum))
    dphi = jnp.einsum("bhgtc,bhfc->bhgft", given, state)
    return for_each(jnp.add, total, _added(phi, given, memory)), _contracted(q, dphi, settings)

  dmemory, dq = lax.scan(add_tile, dmemory, split((q, dsums), settings.tile))
  return dmemory, merge(dq)


def write(memory: Memory, x: Written, settings: Settings) -> Memory:
  """Adds phi(k) v^T and phi(k), discounted, of all tokens."""

  def add_tile(total: Memory, x: Written) -> tuple[Memory, None]:
    keys, values = x.k[:, :, None], _tokens(x.v * x.discount, x.discount)[:, :, None]
    return for_each(jnp.add, total, _added(_expanded(keys, settings), values, memory)), None

  return lax.scan(add_tile, memory, split(x, settings.tile))[0]


def write_backward(
  dmemory: Memory, x: Written, settings: Settings
) -> tuple[Float[Array, "B H T d"], Float[Array, "B H T dv"]]:
  """The cotangents of k and v through `write`; that of the discount follows from k's (see `chunked`)."""

  def transpose_tile(x: Written) -> tuple[Float[Array, "B H t d"], Float[Array, "B H t dv"]]:
    keys = x.k[:, :, None]
    dstate = _state(dmemory, keys, settings)
    dphi = jnp.einsum("bhtc,bhfc->bhft", _tokens(x.v * x.discount, x.discount), dstate)
    dv = _product("bhgft,bhfc->bhgtc", _expanded(keys, settings), dstate)[:, :, 0, :, : x.v.shape[-1]]
    return _contracted(keys, dphi[:, :, None], settings)[:, :, 0], dv * x.discount

  return merge(lax.map(transpose_tile, split(x, settings.tile)))


def _gathered(state: BFloat16[Array, "B H F c"], phi: BFloat16[Array, "B H g F t"]) -> Sums:
  """What queries find in a state."""
  values, high, low, _ = _parted(_product("bhgft,bhfc->bhgtc", phi, state))
  return Sums(values, high + low)


def _added(phi: BFloat16[Array, "B H g F t"], tokens: BFloat16[Array, "B H g t c"], like: Memory) -> Memory:
  """What tokens add to a state."""
  total = _product("bhgft,bhgtc->bhfc", phi, tokens)[:, :, : like.S.shape[2]]
  values, high, _, low = _parted(total)
  return Memory(values, high + low)


def _tokens(x: Float[Array, "*lead t dv"], z: Float[Array, "*lead t 1"]) -> BFloat16[Array, "*lead t c"]:
  """What goes with the features of tokens, of which a state is a sum."""
  high, low = _halves(z)
  return _joined(x, high, high, low)


def _state(memory: Memory, tokens: Float[Array, "B H g t d"], settings: Settings) -> BFloat16[Array, "B H F c"]:
  """What meets `_tokens`: the products of their last columns add up to that of two float32s, or nearly."""
  rows, time = math.prod(tokens.shape[:3]), tokens.shape[-2]
  count = expand.padded_features(_table(tokens, settings), rows, time)
  S, Z = (jnp.pad(x, ((0, 0), (0, 0), (0, count - x.shape[2]), (0, 0))) for x in memory)
  high, low = _halves(Z)
  return _joined(S, high, low, high)


def _joined(values: Float[Array, "*lead dv"], *normalisers: Float[Array, "*lead 1"]) -> BFloat16[Array, "*lead c"]:
  rest = jnp.zeros_like(values[..., : _MORE - len(normalisers)])
  return jnp.concatenate([values, *normalisers, rest], axis=-1).astype(jnp.bfloat16)


def _parted(x: Float[Array, "*lead c"]) -> tuple[Array, Array, Array, Array]:
  """The columns of values, and the three of normalisers."""
  value_dim = x.shape[-1] - _MORE
  first, second, third = (x[..., value_dim + n : value_dim + n + 1] for n in range(3))
  return x[..., :value_dim], first, second, third


def _halves(x: Float[Array, "*lead"]) -> tuple[Float[Array, "*lead"], Float[Array, "*lead"]]:
  """X as a sum of two numbers, of which bfloat16 holds the first, and nearly all of the second."""
  high = lax.reduce_precision(x, 8, 7)
  return high, x - high


def _product(subscripts: str, *operands: BFloat16[Array, "..."]) -> Float[Array, "..."]:
  return jnp.einsum(subscripts, *operands, preferred_element_type=jnp.float32)


def _table(x: Float[Array, "*lead d"], settings: Settings) -> expand.Table:
  return expand.Table(*multisets(x.shape[-1], settings.power))


def _expanded(x: Float[Array, "B H g t d"], settings: Settings) -> BFloat16[Array, "B H g F t"]:
  phi = expand.expanded(_time_last(x), _table(x, settings), interpret=settings.interpret)
  return phi.reshape(*x.shape[:3], *phi.shape[1:])


def _contracted(
  x: Float[Array, "B H g t d"], dphi: BFloat16[Array, "B H g F t"], settings: Settings
) -> Float[Array, "B H g t d"]:
  dphi = dphi.reshape(-1, *dphi.shape[3:])
  dx = expand.contracted(_time_last(x), dphi, _table(x, settings), interpret=settings.interpret)
  return jnp.swapaxes(dx, -1, -2).reshape(x.shape)


def _time_last(x: Float[Array, "B H g t d"]) -> Float[Array, "N d t"]:
  return jnp.swapaxes(x.reshape(-1, *x.shape[3:]), -1, -2)
