"""Rotations inside the Hopper kernels, whose angles are multiplied out there and never written to memory.

A rotation takes a vector, and the vector with every pair of coordinates turned by a quarter: its product with a matrix
of ones and minus ones, which is exact.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

WIDTH = 32  # coordinates at a time, so that registers are left for other blocks of the grid


class Angles(NamedTuple):
  """Those of every token and coordinate, in turns: start + total * cycles, modulo 1.

  Totals and cycles come as sums of three: two of 12 significant bits, whose products are exact, and what is left.
  """

  total: Float[Array, "B H 3 T"]
  cycles: Float[Array, "3 d"]
  start: Float[Array, "B H d"] | None
  kept: Float[Array, "B H T"] | None  # 1 where `start` counts, and 0 elsewhere


def radians(
  angles: Any, b: Any, head: Any, by_token: Callable[[Any], Array], by_coordinate: Callable[[Any], Array]
) -> Float[Array, "rows columns"]:
  """The angles of a tile, from references to `Angles`."""

  def fraction(turns: Array) -> Array:
    return turns - jnp.round(turns)

  total = [by_token(angles.total.at[b, head, n]) for n in range(3)]
  cycles = [by_coordinate(angles.cycles.at[n]) for n in range(3)]
  turns = fraction(total[0] * cycles[0]) + (fraction(total[0] * cycles[1]) + fraction(total[1] * cycles[0]))
  turns = turns + (total[1] * cycles[1] + (total[0] + total[1]) * cycles[2] + total[2] * cycles[0])
  if angles.start is not None:
    turns = turns + by_coordinate(angles.start.at[b, head]) * by_token(angles.kept.at[b, head])
  return fraction(turns) * (2 * np.pi)


def quarter_turn() -> np.ndarray:
  """Times it, every pair (x, y) of WIDTH coordinates is (-y, x)."""
  return np.kron(np.eye(WIDTH // 2), np.array([[0, 1], [-1, 0]]))
