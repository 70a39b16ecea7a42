"""Features of a state at p = 2 on TPU, by cyclic shifts, turn by turn of a loop: see `kernels_pallas.tpu.shifts`.

A register holds 16 coordinates in bfloat16, and shifts that differ by 16 meet in the same registers. A series is two of
these, r and r + 16, in heads of 64 four, with r + 8 and r + 24, which meet them in float32. It stands together in a
state, in blocks of 16 coordinates i by its shifts: from one block to the next one register of each two shifts' partners
i + s goes and one comes, and two of sums to them, which are float32.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, BFloat16, Float, Int, UInt32

from kernels_pallas.tpu.shifts import LANES, NT, PART, ROWS, dot, scratch_of_vectors, side_by_side

PACKED = 16  # coordinates of a tile's vectors in one register of bfloat16s
SPAN = 2 * PACKED  # so many shifts in a row make up whole series


def _offsets(head_dim: int) -> tuple[int, ...]:
  """The shifts of a series less the least of them: in twos that differ by 16, all even.

  In wide heads sums to more than two fit no registers.
  """
  two = (0, PACKED)
  return (*two, *(PACKED // 2 + offset for offset in two)) if head_dim <= 64 else two


def coordinates(head_dim: int) -> tuple[Int[np.ndarray, "D"], Int[np.ndarray, "D"]]:
  """Whose products a state's features are: series by series, of the first 32 shifts and then the next, and the last."""
  of_series = np.array(_offsets(head_dim))
  leasts = SPAN // of_series.size
  counts = (head_dim // 2 // SPAN, leasts, head_dim // PACKED, of_series.size, PACKED)
  span, least, block, number, row = np.indices(counts).reshape(len(counts), -1)
  last = np.arange(head_dim // 2)
  first = np.concatenate([block * PACKED + row, last])
  shift = np.concatenate([span * SPAN + least + of_series[number], np.full_like(last, head_dim // 2)])
  return first, (first + shift) % head_dim


class Shifts(NamedTuple):
  """The features of one turn of the loop, or some blocks of them; or, of no block, the half of the last shift.

  A block is the products of 16 coordinates by the shifts of a series. Whatever makes features of vectors takes them as
  `shifts.write_factors` wrote them, and what adds cotangents to them as `shifts.double` did.
  """

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
    return pl.ds(pl.multiple_of(self.turn * ROWS + self.first * self.block, LANES), self.size)

  @property
  def size(self) -> int:
    """How many features these are."""
    return self.blocks * self.block or self.head_dim // 2

  @property
  def block(self) -> int:
    """How many features a block has."""
    return len(_offsets(self.head_dim)) * PACKED

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
    in_series, found = self.head_dim // PACKED, []
    leasts, many = SPAN // len(_offsets(self.head_dim)), ROWS // self.block // in_series
    for n in range(many):
      first, last = (min(max(block - n * in_series, 0), in_series) for block in (self.first, self.first + self.blocks))
      if first < last:
        number = self.turn * many + n
        more = self.head_dim // 2 > SPAN  # then later series have the next 32 shifts
        passed = lax.div(number, jnp.int32(leasts)) * (SPAN - leasts) if more else 0
        found.append(Series(number + passed, _offsets(self.head_dim), first, last - first))
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

  def features(self, x: Any, n: Any) -> BFloat16[Array, "f t"]:
    """Products of two coordinates of a tile of vectors, without their weight."""
    return jnp.concatenate(list(self._products(x, n)), axis=0)

  def expand(self, out: Any, x: Any, n: Any, at: int) -> None:
    """Writes the features of the n-th tile to memory, where they wait for the matrix units: registers are too few."""
    first = 0
    for product in self._products(x, n):
      out[at, first : first + product.shape[0]] = product
      first += product.shape[0]

  def _products(self, x: Any, n: Any) -> Iterator[BFloat16[Array, "some t"]]:
    """The same whichever way the factors were written: a product is exact before it is rounded, once."""
    return self._of_pairs(x, n) if x.dtype == jnp.uint32 else self._of_vectors(x, n)

  def _of_vectors(self, x: Any, n: Any) -> Iterator[BFloat16[Array, "some t"]]:
    if self.is_last:
      half = self.head_dim // 2
      yield (x[n, :half] * x[n, half : 2 * half]).astype(jnp.bfloat16)
      return
    for series in self.series():
      plain, shifted = series.windows()
      vectors, partners = x[n, plain], x[n, shifted]
      for _, i, j in series.by_sixteens():
        yield (vectors[i : i + PACKED] * partners[j : j + PACKED]).astype(jnp.bfloat16)

  def _of_pairs(self, x: Any, n: Any) -> Iterator[BFloat16[Array, "some t"]]:
    if self.is_last:
      quarter = self.head_dim // 4
      yield _unpaired(x[n, 0, :quarter]) * _unpaired(x[n, 0, quarter : 2 * quarter])
      return
    for series in self.series():
      plain, *shifted = series.paired_windows()
      vectors, partners = _unpaired(x[n, 0, plain]), [_unpaired(x[n, series.parity, rows]) for rows in shifted]
      for first in range(0, series.blocks * PACKED, PACKED):
        ones = jnp.concatenate([vectors[first : first + PACKED]] * 2)
        for others in partners:
          yield ones * others[first : first + 2 * PACKED]

  def weighted(self, state: Float[Array, "f dv"]) -> Float[Array, "f dv"]:
    """Each product as often as it occurs in (q . k) ** 2."""
    if self.is_last:
      return 2.0 * state
    row = self.first * self.block + lax.broadcasted_iota(jnp.int32, (state.shape[0], 1), 0)
    in_first_series = (row < self.head_dim // PACKED * self.block) & (self.turn == 0)
    square = in_first_series & (lax.rem(row, jnp.int32(self.block)) < PACKED)
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
    begin = self.first * self.block
    for series in self.series():
      plain, shifted = series.windows()
      dphi = dot(found[pl.ds(begin, series.blocks * self.block)], y)
      begin += series.blocks * self.block
      for n, at in zip(tiles, columns, strict=True):
        vectors, partners = x[n, plain], x[n, shifted]
        to_plain, to_shifted = jnp.zeros_like(vectors), jnp.zeros_like(partners)
        for row, i, j in series.by_sixteens():
          mine = dphi[row : row + PACKED, at]
          to_plain = _added(to_plain, i, mine * partners[j : j + PACKED])
          to_shifted = _added(to_shifted, j, mine * vectors[i : i + PACKED])
        sums.plain[n, plain] += to_plain
        sums.shifted[n, shifted] += to_shifted


class Series(NamedTuple):
  """Features of shifts that differ by whole registers of float32s, from the first-th block of coordinates on."""

  shift: Any  # the least of them
  offsets: tuple[int, ...]  # of all of them
  first: int
  blocks: int

  @property
  def parity(self) -> Any:
    """Which of two copies of coordinates in pairs has partners that begin with a pair."""
    return lax.rem(self.shift, jnp.int32(2))

  def windows(self) -> tuple[Any, Any]:
    """The rows of all coordinates that come first in a product, and of their partners."""
    first, size = self.first * PACKED, self.blocks * PACKED
    return pl.ds(first, size), pl.ds(self.shift + first, size + max(self.offsets))

  def paired_windows(self) -> list[Any]:
    """The same of coordinates in pairs, and partners by each two shifts that differ by 16."""
    first, size = self.first * PACKED // 2, self.blocks * PACKED // 2
    starts = [lax.div(self.shift, jnp.int32(2)) + offset // 2 + first for offset in self.offsets[::2]]
    return [pl.ds(first, size), *(pl.ds(start, size + PACKED // 2) for start in starts)]

  def by_sixteens(self) -> Iterator[tuple[int, int, int]]:
    """Where 16 features stand, and in the windows both their coordinates."""
    for block in range(self.blocks):
      for number, offset in enumerate(self.offsets):
        yield (block * len(self.offsets) + number) * PACKED, block * PACKED, block * PACKED + offset


def _unpaired(x: UInt32[Array, "pairs t"]) -> BFloat16[Array, "rows t"]:
  """Coordinates that lie in pairs: the same registers."""
  return pltpu.bitcast(x, jnp.bfloat16)


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
    visit(Shifts(n, 0, ROWS // PACKED // len(_offsets(head_dim)), head_dim))
    return none

  lax.fori_loop(jnp.int32(0), jnp.int32(head_dim**2 // 2 // ROWS), turn, None)
  visit(Shifts(None, 0, 0, head_dim))
