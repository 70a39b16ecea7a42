"""States of wide heads, in pieces of 64 coordinates.

    S[a, v, b], a and b < d, v < dv      (i, j, u): a in the i-th 64, b in the j-th, v in the u-th

A kernel works on one piece at a time, whatever the head's width.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from kernels_pallas.gpu.tiles import STATE_WIDTH


class Piece(NamedTuple):
  """Which 64 of the first coordinates, of the second, and of the values."""

  i: Any
  j: Any
  u: Any


class Pieces(NamedTuple):
  """How many there are of each."""

  first: int
  second: int
  values: int

  @classmethod
  def of(cls, head_dim: int, value_dim: int) -> "Pieces":
    """Those of heads of whole 64s."""
    assert head_dim % STATE_WIDTH == value_dim % STATE_WIDTH == 0
    return cls(head_dim // STATE_WIDTH, head_dim // STATE_WIDTH, value_dim // STATE_WIDTH)

  @property
  def total(self) -> int:
    """All of them."""
    return self.first * self.second * self.values

  def number(self, piece: Piece) -> int:
    """The place of a piece among all."""
    return (piece.i * self.second + piece.j) * self.values + piece.u

  def at(self, number: Any) -> Piece:
    """The inverse of `number`, in a kernel."""
    ij, u = (f(number, jnp.int32(self.values)) for f in (lax.div, lax.rem))
    return Piece(lax.div(ij, jnp.int32(self.second)), lax.rem(ij, jnp.int32(self.second)), u)

  def cut(self, S: Float[Array, "B H d dv d"]) -> Float[Array, "B H m w w w"]:
    """A state in pieces."""
    batch, heads, w = *S.shape[:2], STATE_WIDTH
    parts = S.reshape(batch, heads, self.first, w, self.values, w, self.second, w)
    return jnp.moveaxis(parts, (2, 6, 4), (2, 3, 4)).reshape(batch, heads, self.total, w, w, w)

  def joined(self, S: Float[Array, "B H m w w w"]) -> Float[Array, "B H d dv d"]:
    """The inverse of `cut`."""
    batch, heads, w = *S.shape[:2], STATE_WIDTH
    parts = jnp.moveaxis(S.reshape(batch, heads, *self, w, w, w), (2, 3, 4), (2, 6, 4))
    return parts.reshape(batch, heads, self.first * w, self.values * w, self.second * w)


def coordinates(n: Any) -> Any:
  """The n-th 64 coordinates."""
  return pl.ds(n * STATE_WIDTH, STATE_WIDTH)
