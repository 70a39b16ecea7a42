"""States as the chunked kernels on Hopper have them, p = 2: all products of two coordinates, in pieces."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from csympow.features import pairs
from csympow.forms import near
from csympow.forms.memory import Memory
from kernels_pallas.gpu.pieces import Pieces
from kernels_pallas.gpu.tiles import STATE_WIDTH


class Full(NamedTuple):
  """A state as products of two coordinates."""

  S: Float[Array, "B H m w w w"]  # in pieces
  Z: Float[Array, "B H d d"]


def of_memory(memory: Memory, head_dim: int) -> Full:
  first, second, weight = pairs(head_dim)
  place = jnp.zeros((head_dim, head_dim), jnp.int32).at[first, second].set(jnp.arange(len(first), dtype=jnp.int32))
  place = jnp.maximum(place, place.T)

  def products(x: Float[Array, "B H D c"]) -> Float[Array, "B H d d c"]:
    x = (x / weight.astype(x.dtype)[:, None])[:, :, place]
    return jnp.pad(x, ((0, 0), (0, 0), *((0, -head_dim % STATE_WIDTH),) * 2, (0, 0)))

  S = jnp.swapaxes(widened(products(memory.S)), -1, -2)
  return Full(Pieces.of(S.shape[-1], S.shape[-2]).cut(S), products(memory.Z)[..., 0])


def to_memory(x: Full, head_dim: int, value_dim: int) -> Memory:
  """The inverse of `of_memory`."""
  first, second, weight = pairs(head_dim)

  def features(x: Float[Array, "B H d d c"]) -> Float[Array, "B H D c"]:
    return x[:, :, first, second] * weight.astype(x.dtype)[:, None]

  S = Pieces.of(x.Z.shape[-1], value_dim + -value_dim % STATE_WIDTH).joined(x.S)
  return Memory(features(jnp.swapaxes(S, -1, -2))[..., :value_dim], features(x.Z[..., None]))


def scaled(x: Full, factor: Float[Array, "B H 1 1"]) -> Full:
  """All numbers of a head times its factor."""
  return Full(x.S * factor[..., None, None], x.Z * factor)


def about(x: Full, middle: Float[Array, "B H dv"]) -> Full:
  """The state of values less `middle`."""
  common = x.Z[:, :, :, None] * middle.astype(jnp.float32)[:, :, None, :, None]
  return Full(x.S - Pieces.of(x.Z.shape[-1], middle.shape[-1]).cut(common), x.Z)


def transposed_about(dx: Full, middle: Float[Array, "B H dv"]) -> Full:
  """From the cotangent of `about`'s result that of its argument."""
  S = Pieces.of(dx.Z.shape[-1], middle.shape[-1]).joined(dx.S)
  return Full(dx.S, dx.Z - jnp.einsum("bhaud,bhu->bhad", S, middle.astype(jnp.float32), precision="highest"))


def widened(x: Float[Array, "*lead d"]) -> Float[Array, "*lead whole"]:
  """Filled up to whole 64s."""
  return near.filled_up(x, -(-x.shape[-1] // STATE_WIDTH) * STATE_WIDTH)
