"""Documents into rows: a long one fills rows of its own, short ones share."""

from collections.abc import Iterable
from typing import NamedTuple

OPEN_ROWS = 64  # a document is tried in so many rows before a new one is begun


class Piece(NamedTuple):
  """Tokens [start, stop) of a document: one segment of a row."""

  document: int
  start: int
  stop: int


Row = list[Piece]


def whole_rows(lengths: Iterable[int], row_length: int) -> list[Row]:
  """The rows, in order, that documents of these lengths fill alone: what is left of a document is in none."""
  return [
    [Piece(document, stop - row_length, stop)]
    for document, length in enumerate(lengths)
    for stop in range(row_length, length + 1, row_length)
  ]


def pack(lengths: Iterable[int], row_length: int) -> list[Row]:
  """The rows, in order, of documents of these lengths; each token of each document is in exactly one.

  A document of at least a row is cut into rows of its own, one after the other. What is left of it, and every shorter
  document, goes into the first open row with room (first fit); when too many are open, the fullest is closed.
  """
  rows: list[Row] = []
  open_rows: list[tuple[Row, int]] = []  # with the tokens in each
  for document, length in enumerate(lengths):
    whole = length - length % row_length
    rows.extend([Piece(document, start, start + row_length)] for start in range(0, whole, row_length))
    if whole == length:
      continue
    piece = Piece(document, whole, length)
    size = length - whole
    place = next((i for i, (_, used) in enumerate(open_rows) if used + size <= row_length), None)
    if place is None:
      if len(open_rows) == OPEN_ROWS:
        fullest = max(range(OPEN_ROWS), key=lambda i: open_rows[i][1])
        rows.append(open_rows.pop(fullest)[0])
      open_rows.append(([piece], size))
      continue
    row, used = open_rows[place]
    row.append(piece)
    open_rows[place] = (row, used + size)
    if used + size == row_length:
      rows.append(open_rows.pop(place)[0])
  return rows + [row for row, _ in open_rows]
