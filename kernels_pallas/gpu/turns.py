"""Who does what in a grid of few blocks, each of which takes several places by turns.

A place is one or two tiles of queries of one sequence and head, a row. It takes the longer the later it is, so a block
takes a late one and an early one of the same row, which together are as much in any row if all keys are read. Where
some heads are read less far back than others, blocks have as much to do only if each takes pairs of about all heads.
"""

import functools
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int

from kernels_pallas.gpu.tiles import place_in_grid

_EVEN = 1.05  # times the average is what a block may have to do
_FORGOTTEN = 0.8  # of the keys, by heads that forget


class Turns(NamedTuple):
  """Of all blocks of a grid."""

  rows: int
  places: int  # of each
  blocks: int
  paired: bool = False  # late ones by turns with early ones
  by_head: bool = False  # rows are in the order of their heads, and then of sequences

  @classmethod
  def of_few_blocks(cls, rows: int, places: int, at_once: int, alike: bool, heads: int | None = None) -> "Turns":
    """So many as run at once if all rows are `alike`, or can be shared out evenly whichever `heads` forget.

    Else one for each pair: who has little to do makes room for the next. One for each place, if there would be fewer
    than run at once, or an odd number in a row, which do not make pairs.
    """
    paired = places % 2 == 0
    items = rows * places // (2 if paired else 1)
    if items < at_once or (places > 1 and not paired):
      return cls(rows, places, rows * places)
    if alike:
      return cls(rows, places, at_once, paired)
    even = paired and heads is not None and _even(rows, places // 2, heads, at_once)
    return cls(rows, places, at_once if even else items, paired, even)

  @property
  def several(self) -> bool:
    """Whether a block has more than one."""
    return self.blocks < self.rows * self.places

  @property
  def each(self) -> int | None:
    """How many every block has, if that is one or a pair."""
    together = 2 if self.paired else 1
    return together if self.blocks * together == self.rows * self.places else None

  def many(self, block: Int[Array, ""]) -> Int[Array, ""]:
    """How many this block has."""
    if self.each is not None:
      return jnp.int32(self.each)
    together = 2 if self.paired else 1
    return together * lax.div(self.rows * self.places // together - block + self.blocks - 1, jnp.int32(self.blocks))

  def place(self, block: Int[Array, ""], turn: Int[Array, ""]) -> tuple[Int[Array, ""], Int[Array, ""]]:
    """(the row, the place in it) of one of its turns."""
    if not self.paired:
      return place_in_grid(block + turn * self.blocks, self.rows, self.places)
    pair, early = (f(turn, jnp.int32(2)) for f in (lax.div, lax.rem))
    row, n = place_in_grid(block + pair * self.blocks, self.rows, self.places // 2)
    return row, jnp.where(early > 0, n, self.places - 1 - n)


@functools.cache
def _even(rows: int, pairs: int, heads: int, blocks: int) -> bool:
  """Whether blocks have as much to do where any head forgets or all others do, or many; rows are in their order."""
  place, items = np.arange(heads), np.arange(rows * pairs)
  some = np.stack([place % 2 == 0, place % 3 == 0, place % 4 == 0, place < heads // 2, *np.eye(heads, dtype=bool)])
  reads = 1 - _FORGOTTEN * np.concatenate([some, ~some])
  row, _ = place_in_grid(items, rows, pairs, by=(np.floor_divide, np.remainder))
  work = np.pad(reads[:, row // (rows // heads)], ((0, 0), (0, -len(items) % blocks)))
  of_blocks = work.reshape(len(work), -1, blocks).sum(axis=1)
  return bool(np.all(of_blocks <= _EVEN * of_blocks.mean(axis=1, keepdims=True)))
