"""Features of a state at p = 2 on TPU, by cyclic shifts, turn by turn of a loop: see `kernels_pallas.tpu.shifts`.

A register holds 8 rows, and shifts that differ by 8 meet in the same registers. Four of them make a series, r, r + 8,
r + 16 and r + 24, which stands together in a state, in blocks of 8 coordinates i by its shifts: from one block to the
next a single register of partners i + s goes and one comes, and so do sums to them.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, BFloat16, Float, Int

from kernels_pallas.tpu.shifts import LANES, NT, PART, ROWS, dot, scratch_of_vectors, side_by_side

SUBLANES = 8  # coordinates of a tile's vectors in one register
BLOCK = 4 * SUBLANES  # features of so many coordinates: their products by the shifts of a series


def coordinates(head_dim: int) -> tuple[Int[np.ndarray, "D"], Int[np.ndarray, "D"]]:
  """Whose products a state's features are: series by series, of the first 32 shifts and then the next, and the last."""
  counts = (head_dim // 2 // BLOCK, SUBLANES, head_dim // SUBLANES, BLOCK // SUBLANES, SUBLANES)
  thirty_twos, least, block, number, row = np.indices(counts).reshape(len(counts), -1)
  last = np.arange(head_dim // 2)
  first = np.concatenate([block * SUBLANES + row, last])
  shift = np.concatenate([thirty_twos * BLOCK + least + number * SUBLANES, np.full_like(last, head_dim // 2)])
  return first, (first + shift) % head_dim


class Shifts(NamedTuple):
  """The features of one turn of the loop, or some blocks of them; or, of no block, the half of the last shift."""

  turn: Any
  first: int
  blocks: int
  head_dim: int

  @property
  def is_last(self) -> bool:
    """Whether these are half the products of the shift by d/2."""
    return self.blocks == 0

  @property
  def rows(self) -> Any:
    """Where they stand in a state."""
    d = self.head_dim
    if self.is_last:
      return pl.ds(d * d // 2, d // 2)
    return pl.ds(pl.multiple_of(self.turn * ROWS + self.first * BLOCK, LANES), self.size)

  @property
  def size(self) -> int:
    """How many features these are."""
    return self.blocks * BLOCK or self.head_dim // 2

  def room_in(self, transposed: Sequence[Any]) -> Any:
    """That of `scratch_of_transposed` which is as large as these."""
    many, last = transposed
    return last if self.is_last else many

  def pieces(self, count: int) -> list["Shifts"]:
    """The same in so many pieces, or whole if it is the last shift."""
    many, rest = divmod(self.blocks, count)
    assert rest == 0
    return [self._replace(first=self.first + n * many, blocks=many) for n in range(count)] if many else [self]

  def series(self) -> list["Series"]:
    """The same by series."""
    in_series, found = self.head_dim // SUBLANES, []
    for n in range(ROWS // BLOCK // in_series):
      first, last = (min(max(block - n * in_series, 0), in_series) for block in (self.first, self.first + self.blocks))
      if first < last:
        number = self.turn * (ROWS // BLOCK // in_series) + n
        more = self.head_dim // 2 > BLOCK  # then the series from the eighth on have the next 32 shifts
        passed = lax.div(number, jnp.int32(SUBLANES)) * (BLOCK - SUBLANES) if more else 0
        found.append(Series(number + passed, first, last - first))
    return found

  def add_to_state(
    self,
    state: Any,
    x: Any,
    tiles: Sequence[Any],
    y: Callable[[], BFloat16[Array, "v T"]],
    *,
    decay: Any = None,
    room: Any = None,
  ) -> None:
    """S <- decay S + phi(x) y^T over several tiles: the sum over all their tokens is the matrix unit's.

    By parts, each of which loads y for itself: a part's sums, and what they are made of, must fit the registers. With
    `room` for the features of two parts in memory a third part's are not made before the first part's have been taken.
    """
    for number, part in enumerate(self.pieces(max(self.size // PART, 1))):
      if room is None:
        features = [part.features(x, n) for n in tiles]
      else:
        mine = room.at[:, pl.ds(number % 2 * PART, part.size)]
        for place, n in enumerate(tiles):
          part.expand(mine, x, n, place)
        features = [mine[place] for place in range(len(tiles))]
      kept = state[part.rows] if decay is None else state[part.rows] * decay
      state[part.rows] = kept + dot(side_by_side(features), y(), NT)

  def features(self, x: Any, n: int) -> BFloat16[Array, "f t"]:
    """Products of two coordinates of a tile of vectors, without their weight."""
    return jnp.concatenate(list(self._products(x, n)), axis=0)

  def expand(self, out: Any, x: Any, n: Any, at: int) -> None:
    """Writes the features of the n-th tile to memory, where they wait for the matrix units: registers are too few."""
    first = 0
    for product in self._products(x, n):
      out[at, first : first + product.shape[0]] = product
      first += product.shape[0]

  def _products(self, x: Any, n: Any) -> Iterator[BFloat16[Array, "some t"]]:
    half = self.head_dim // 2
    if self.is_last:
      yield (x[n, :half] * x[n, half : 2 * half]).astype(jnp.bfloat16)
      return
    for series in self.series():
      vectors, partners = (x[n, rows] for rows in series.windows())
      for one, others in series.by_block(vectors, partners):
        yield (one * others).astype(jnp.bfloat16)

  def weighted(self, state: Float[Array, "f dv"]) -> Float[Array, "f dv"]:
    """Each product as often as it occurs in (q . k) ** 2."""
    if self.is_last:
      return 2.0 * state
    row = self.first * BLOCK + lax.broadcasted_iota(jnp.int32, (state.shape[0], 1), 0)
    in_first_series = (row < self.head_dim // SUBLANES * BLOCK) & (self.turn == 0)
    square = in_first_series & (lax.rem(row, jnp.int32(BLOCK)) < SUBLANES)
    return jnp.where(square, 1.0, 2.0) * state

  def add_transposed(self, sums: "Sums", x: Any, tiles: Sequence[Any], found: Any, y: BFloat16[Array, "v T"]) -> None:
    """Adds what tiles of vectors get of the cotangents of their features, which are `found` times y."""
    d, columns = self.head_dim, [slice(at * LANES, (at + 1) * LANES) for at in range(len(tiles))]
    if self.is_last:
      dphi, half = dot(found[: self.size], y), d // 2
      for n, at in zip(tiles, columns, strict=True):
        sums.plain[n, :half] += dphi[:, at] * x[n, half:d]
        sums.plain[n, half:] += dphi[:, at] * x[n, :half]
      return
    begin = self.first * BLOCK
    for series in self.series():
      plain, shifted = series.windows()
      dphi = dot(found[pl.ds(begin, series.blocks * BLOCK)], y)
      begin += series.blocks * BLOCK
      for n, at in zip(tiles, columns, strict=True):
        vectors, partners = x[n, plain], x[n, shifted]
        to_plain, to_shifted = [], jnp.zeros_like(partners)
        for b, (one, others) in enumerate(series.by_block(vectors, partners)):
          mine = dphi[b * BLOCK : (b + 1) * BLOCK, at]
          to_plain.append((mine * others).reshape(-1, SUBLANES, LANES).sum(axis=0))
          to_shifted = _added(to_shifted, b * SUBLANES, mine * one)
        sums.plain[n, plain] += jnp.concatenate(to_plain)
        sums.shifted[n, shifted] += to_shifted


class Series(NamedTuple):
  """Features of four shifts that differ by whole registers, from the first-th block of coordinates on."""

  shift: Any  # the least of the four
  first: int
  blocks: int

  def windows(self) -> tuple[Any, Any]:
    """The rows of all coordinates that come first in a product, and of their partners."""
    first, size = self.first * SUBLANES, self.blocks * SUBLANES
    return pl.ds(first, size), pl.ds(self.shift + first, size + BLOCK - SUBLANES)

  def by_block(self, vectors: Array, partners: Array) -> Iterator[tuple[Array, Array]]:
    """Block by block: 8 coordinates, once for each shift, and their partners."""
    for first in range(0, self.blocks * SUBLANES, SUBLANES):
      coordinates = vectors[first : first + SUBLANES]
      yield jnp.concatenate([coordinates] * (BLOCK // SUBLANES)), partners[first : first + BLOCK]


def _added(total: Float[Array, "rows t"], first: int, x: Float[Array, "some t"]) -> Float[Array, "rows t"]:
  """The total with x added to some of its rows."""
  last = first + x.shape[0]
  before, after = [total[:first]] if first else [], [total[last:]] if last < total.shape[0] else []
  return jnp.concatenate([*before, total[first:last] + x, *after])


class Sums(NamedTuple):
  """What vectors get of the cotangents of their features: as the first of two coordinates, and as the shifted one.

  Two arrays, for of one the compiler cannot see that a shift, known only when it runs, never meets the plain rows. The
  last shift's are all in the first.
  """

  plain: Any
  shifted: Any

  @classmethod
  def scratch(cls, tiles: int, head_dim: int) -> "Sums":
    """The memory to ask for."""
    return cls(pltpu.VMEM((tiles, head_dim, LANES), jnp.float32), scratch_of_vectors(tiles, head_dim))

  def clear(self, n: Any) -> None:
    """Begins the sums of a tile."""
    for ref in self:
      ref[n] = jnp.zeros(ref.shape[1:], jnp.float32)

  def total(self, n: Any) -> Float[Array, "d t"]:
    """The sums of a tile; a shift may have gone beyond the last coordinate."""
    head_dim = self.plain.shape[1]
    half, shifted = head_dim // 2, self.shifted[n]
    return self.plain[n] + jnp.concatenate([shifted[:half] + shifted[head_dim:], shifted[half:head_dim]])


def for_all_shifts(head_dim: int, visit: Callable[[Shifts], None]) -> None:
  """Visits every feature once."""

  def turn(n: Array, none: None) -> None:
    visit(Shifts(n, 0, ROWS // BLOCK, head_dim))
    return none

  lax.fori_loop(jnp.int32(0), jnp.int32(head_dim**2 // 2 // ROWS), turn, None)
  visit(Shifts(None, 0, 0, head_dim))
