"""Rotations inside the Hopper kernels, whose angles are multiplied out there and never written to memory.

A rotation takes a vector, and the vector with every pair of coordinates turned by a quarter: its product with a matrix
of ones and minus ones, which is exact.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from kernels_pallas.gpu.tiles import ROWS, WIDTH, TokenTile, across, by_coordinate, down


class Angles(NamedTuple):
  """Those of every token and coordinate, in turns: first + since * cycles, modulo 1.

  `since` and `cycles` are sums of two, the first of 12 significant bits: then the product of these two is exact, and
  its whole turns drop out without error.
  """

  first: Float[Array, "B H n d"]  # of each tile of ROWS tokens, modulo 1
  since: Float[Array, "B H 2 T"]  # the total of betas since then
  cycles: Float[Array, "2 d"]
  same: Float[Array, "B H T"] | None  # 1, and 0 where another run has begun since: there `first` does not count


class Along(NamedTuple):
  """What of `Angles` belongs to the tokens of a tile, loaded."""

  since: Array
  rest: Array
  same: Array | None


def along(angles: Any, tile: TokenTile) -> Along:
  """From references to `Angles`."""
  place = tile.b, tile.source
  since, rest = (tile.by_token(angles.since.at[*place, n]) for n in range(2))
  return Along(since, rest, None if angles.same is None else tile.by_token(angles.same.at[*place]))


def radians(angles: Any, at: Along, tile: TokenTile, part: Any) -> Float[Array, "rows columns"]:
  """The angles of a part of a tile."""
  shape = (ROWS, WIDTH)
  since, rest = down(at.since, shape), down(at.rest, shape)
  cycles, of_cycles = (across(by_coordinate(angles.cycles.at[n], part), shape) for n in range(2))
  whole = since * cycles
  first = across(by_coordinate(angles.first.at[tile.b, tile.source, tile.number], part), shape)
  if at.same is not None:
    first = first * down(at.same, shape)
  return ((whole - jnp.round(whole)) + (since * of_cycles + rest * (cycles + of_cycles) + first)) * (2 * np.pi)


def quarter_turn() -> np.ndarray:
  """Times it, every pair (x, y) of WIDTH coordinates is (-y, x)."""
  return np.kron(np.eye(WIDTH // 2), np.array([[0, 1], [-1, 0]]))
