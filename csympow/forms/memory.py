"""Reading and writing the state by whole spans of tokens: the work that makes the chunked form linear.

Features are expanded for one tile of tokens at a time and are gone when its products are done; the backward functions
expand them again.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from csympow.features import feature_dim, symmetric_power
from csympow.forms.spans import Settings, Sums, exact_product, for_each, merge, split


class Memory(NamedTuple):
  """The state without its phase, in float32. Z is to the constant 1 what S is to the values."""

  S: Float[Array, "*n B H D dv"]
  Z: Float[Array, "*n B H D 1"]


class Written(NamedTuple):
  """Keys and values as they enter the state, each discounted until the end of the span."""

  k: Float[Array, "B H T d"]
  v: Float[Array, "B H T dv"]
  discount: Float[Array, "B H T 1"]


def empty(k: Float[Array, "B T H d"], v: Float[Array, "B T H dv"], power: int) -> Memory:
  """A memory of zeros, made from the inputs so that it is sharded as they are."""
  (batch, _, heads, head_dim), value_dim = k.shape, v.shape[-1]
  lead, zero = (batch, heads, feature_dim(head_dim, power)), jnp.zeros_like(k[:, 0, :, :1])[..., None]
  return Memory(jnp.broadcast_to(zero, (*lead, value_dim)), jnp.broadcast_to(zero, (*lead, 1)))


def inner(a: Memory, b: Memory) -> Float[Array, "B H"]:
  """The inner product of a state and a cotangent, head by head."""
  return exact_product("bhfv,bhfv->bh", a.S, b.S) + exact_product("bhfu,bhfu->bh", a.Z, b.Z)


def discounted(memory: Memory, log_discount: Float[Array, "B H 1 1"]) -> Memory:
  """The memory after tokens whose log gates sum to `log_discount`.

  Near 1 the discount rounds to another one, and over the many steps that such a memory lasts the difference adds up:
  what fades is taken off instead, which is right whether or not a product and its sum are rounded at once. A reset
  leaves exactly 0.
  """
  is_near_one = log_discount > -0.5
  kept = jnp.where(is_near_one, 1.0, jnp.exp(log_discount))
  faded = jnp.where(is_near_one, jnp.expm1(log_discount), 0.0)
  return Memory(*(array * kept + array * faded for array in memory))


def without_noise(sums: Sums) -> Sums:
  """Drops what a query read from the state where the normaliser came out negative.

  In exact arithmetic it cannot: there the query is orthogonal to all keys in the state, and both sums are rounding.
  """
  return for_each(lambda x: jnp.where(sums.denominator < 0, 0.0, x), sums)


def read(memory: Memory, q: Float[Array, "B H g T d"], settings: Settings) -> Sums:
  """S^T phi(q) and Z . phi(q)."""

  def read_tile(q: Float[Array, "B H g t d"]) -> Sums:
    phi = symmetric_power(q, settings.power)
    sums = Sums(
      jnp.einsum("bhgtf,bhfv->bhgtv", phi, memory.S, precision=settings.precision),
      exact_product("bhgtf,bhfu->bhgtu", phi, memory.Z),
    )
    return without_noise(sums)

  return merge(lax.map(read_tile, split(q, settings.tile)))


def read_backward(
  memory: Memory, q: Float[Array, "B H g T d"], dsums: Sums, dmemory: Memory, settings: Settings
) -> tuple[Memory, Float[Array, "B H g T d"]]:
  """Adds the cotangent that reaches the memory through `read` to `dmemory`, and returns that of q."""

  def add_tile(total: Memory, x: tuple[Array, Sums]) -> tuple[Memory, Float[Array, "B H g t d"]]:
    q, dsum = x
    phi, transpose = jax.vjp(lambda q: symmetric_power(q, settings.power), q)
    noise = exact_product("bhgtf,bhfu->bhgtu", phi, memory.Z) < 0  # see without_noise
    dsum = for_each(lambda x: jnp.where(noise, 0.0, x), dsum)
    dphi = jnp.einsum("bhgtv,bhfv->bhgtf", dsum.numerator, memory.S, precision=settings.precision)
    dphi += dsum.denominator * jnp.swapaxes(memory.Z, -1, -2)[:, :, None]
    added = Memory(
      jnp.einsum("bhgtf,bhgtv->bhfv", phi, dsum.numerator, precision=settings.precision),
      exact_product("bhgtf,bhgtu->bhfu", phi, dsum.denominator),
    )
    return for_each(jnp.add, total, added), transpose(dphi)[0]

  dmemory, dq = lax.scan(add_tile, dmemory, split((q, dsums), settings.tile))
  return dmemory, merge(dq)


def write(memory: Memory, x: Written, settings: Settings) -> Memory:
  """Adds phi(k) v^T and phi(k), discounted, of all tokens."""

  def add_tile(total: Memory, x: Written) -> tuple[Memory, None]:
    phi = symmetric_power(x.k, settings.power)
    added = Memory(
      jnp.einsum("bhtf,bhtv->bhfv", phi, x.v * x.discount, precision=settings.precision),
      exact_product("bhtf,bhtu->bhfu", phi, x.discount),
    )
    return for_each(jnp.add, total, added), None

  return lax.scan(add_tile, memory, split(x, settings.tile))[0]


def write_backward(
  dmemory: Memory, x: Written, settings: Settings
) -> tuple[Float[Array, "B H T d"], Float[Array, "B H T dv"]]:
  """The cotangents of k and v through `write`; that of the discount follows from k's (see `chunked`)."""

  def transpose_tile(x: Written) -> tuple[Float[Array, "B H t d"], Float[Array, "B H t dv"]]:
    phi, transpose = jax.vjp(lambda k: symmetric_power(k, settings.power), x.k)
    dphi = jnp.einsum("bhtv,bhfv->bhtf", x.v * x.discount, dmemory.S, precision=settings.precision)
    dphi += x.discount * jnp.swapaxes(dmemory.Z, -1, -2)
    dv = jnp.einsum("bhtf,bhfv->bhtv", phi, dmemory.S, precision=settings.precision) * x.discount
    return transpose(dphi)[0], dv

  return merge(lax.map(transpose_tile, split(x, settings.tile)))
