"""Rotations inside the Hopper kernels, whose angles are multiplied out there and never written to memory.

A rotation takes a vector, and the vector with every pair of coordinates turned by a quarter: its product with a matrix
of ones and minus ones, which is exact.
"""

from typing import Any, NamedTuple

import numpy as np
from jax import lax
from jaxtyping import Array, Float

from kernels_pallas.gpu.tiles import ROWS, WIDTH, TokenTile, across, by_coordinate, down

_WHOLE = 1.5 * 2**24  # added to a number and taken away again it leaves a whole one, whatever the number


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

  first: list[Array] | None  # by parts; None: not yet, for a loop's part is no place in a list
  since: Array
  rest: Array
  same: Array | None


def along(angles: Any, tile: TokenTile, parts: int | None = None) -> Along:
  """From references to `Angles`, with `first` of all `parts` of a head, if they are known."""
  place = tile.b, tile.source
  first = None
  if parts is not None:
    first = [by_coordinate(angles.first.at[*place, tile.number], part) for part in range(parts)]
  since, rest = (tile.by_token(angles.since.at[*place, n]) for n in range(2))
  return Along(first, since, rest, None if angles.same is None else tile.by_token(angles.same.at[*place]))


def radians(angles: Any, at: Along, tile: TokenTile, part: Any) -> Float[Array, "rows columns"]:
  """The angles of a part of a tile."""
  shape = (ROWS, WIDTH)
  since, rest = down(at.since, shape), down(at.rest, shape)
  cycles, of_cycles = (across(by_coordinate(angles.cycles.at[n], part), shape) for n in range(2))
  whole = since * cycles
  if at.first is None:
    first = across(by_coordinate(angles.first.at[tile.b, tile.source, tile.number], part), shape)
  else:
    first = across(at.first[part], shape)
  if at.same is not None:
    first = first * down(at.same, shape)
  # Less any whole number near it: by additions, for a rounding takes a unit as slow as that of sines and cosines.
  part_of_turn = whole - (lax.optimization_barrier(whole + _WHOLE) - _WHOLE)
  return (part_of_turn + (since * of_cycles + rest * (cycles + of_cycles) + first)) * (2 * np.pi)


def quarter_turn() -> np.ndarray:
  """Times it, every pair (x, y) of WIDTH coordinates is (-y, x)."""
  return np.kron(np.eye(WIDTH // 2), np.array([[0, 1], [-1, 0]]))
