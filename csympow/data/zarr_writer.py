"""Rows of tokens and of segment ids as zarr v2 arrays, in LongCrawl64's format; whatever stops it, it can go on."""

import collections
import dataclasses
import hashlib
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

from csympow.data.packing import Row

PADDING = -1  # the segment id where a row holds no token
_LONGEST_CHUNK = 65_536  # tokens of a row: LongCrawl64's
_WRITES_IN_FLIGHT = 8

# By name: LongCrawl64's, quick to write and to read; and one that is slow to write and takes half the room, where many
# rows share a chunk.
COMPRESSORS: dict[str, dict[str, Any]] = {
  "lz4": {"id": "blosc", "cname": "lz4", "clevel": 5, "shuffle": 1},
  "zstd": {"id": "zstd", "level": 22},
}


@dataclasses.dataclass(frozen=True)
class Written:
  """What the arrays hold: sha256 is of their elements, row by row."""

  rows: int
  tokens: int
  tokens_sha256: str
  segments_sha256: str | None


def write_rows(
  tokens_path: Path,
  segments_path: Path | None,
  rows: Sequence[Row],
  row_length: int,
  rows_per_chunk: int,
  read: Callable[[int], np.ndarray],
  on_progress: Callable[[int], None],
  compression: str = "lz4",
) -> Written:
  """Writes the arrays of one split, less the chunks that are there: TensorStore puts chunks in place by renaming.

  Args:
    tokens_path: the array of tokens.
    segments_path: the array of their segment ids; None: none, for rows that are each of one document, and full.
    rows: what each row is made of.
    row_length: tokens of a row.
    rows_per_chunk: rows of a chunk.
    read: gives the tokens of a document by its number.
    on_progress: told the number of rows done.
    compression: a name in COMPRESSORS.
  """
  most_segments = max(map(len, rows))
  segment_type = np.dtype("<i2" if most_segments <= np.iinfo(np.int16).max + 1 else "<i4")
  chunks = (rows_per_chunk, min(row_length, _LONGEST_CHUNK))
  shape = (len(rows), row_length)
  compressor = COMPRESSORS[compression]
  arrays = [_Array(tokens_path, shape, chunks, np.dtype("<u2"), 0, compressor)]
  if segments_path is not None:
    arrays.append(_Array(segments_path, shape, chunks, segment_type, PADDING, compressor))
  count = 0
  for first in range(0, len(rows), rows_per_chunk):
    group = rows[first : first + rows_per_chunk]
    tokens = np.zeros((len(group), row_length), "<u2")
    segments = np.full((len(group), row_length), PADDING, segment_type)
    for i, row in enumerate(group):
      at = 0
      for segment, (document, start, stop) in enumerate(row):
        end = at + stop - start
        tokens[i, at:end] = read(document)[start:stop]
        segments[i, at:end] = segment
        at = end
      count += at
    for array, values in zip(arrays, (tokens, segments), strict=False):
      array.write(first, values)
    on_progress(first + len(group))
  checksums = [array.finish() for array in arrays]
  return Written(len(rows), count, checksums[0], checksums[1] if len(checksums) > 1 else None)


class _Array:
  """One array, written from its first row to its last."""

  def __init__(
    self,
    path: Path,
    shape: tuple[int, int],
    chunks: tuple[int, int],
    dtype: np.dtype[Any],
    fill: int,
    compressor: dict[str, Any],
  ):
    self._path, self._shape, self._chunks = path, shape, chunks
    self._digest = hashlib.sha256()
    self._writes: collections.deque[Any] = collections.deque()
    spec = {
      "driver": "zarr",
      "kvstore": {"driver": "file", "path": f"{os.path.abspath(path)}/"},
      # Chunks of nothing but the fill value are written too: readers take an absent chunk for a lost one.
      "store_data_equal_to_fill_value": True,
      "metadata": {
        "zarr_format": 2,
        "shape": shape,
        "chunks": chunks,
        "dtype": dtype.str,
        "compressor": compressor,
        "fill_value": fill,
        "order": "C",
        "filters": None,
        "dimension_separator": ".",
      },
    }
    self._array = _result(ts.open(spec, open=True, create=True))

  def write(self, first: int, values: np.ndarray) -> None:
    self._digest.update(values)
    columns = range(-(-self._shape[1] // self._chunks[1]))
    if all((self._path / f"{first // self._chunks[0]}.{column}").exists() for column in columns):
      return
    self._writes.append(self._array[first : first + len(values)].write(values))
    if len(self._writes) > _WRITES_IN_FLIGHT:
      _result(self._writes.popleft())

  def finish(self) -> str:
    while self._writes:
      _result(self._writes.popleft())
    for left_behind in self._path.glob("*.__lock"):  # by a run that was killed
      left_behind.unlink()
    return self._digest.hexdigest()


def _result(future: Any) -> Any:
  """What a future holds; a failure of the file system as an OSError, which TensorStore has as text only."""
  try:
    return future.result()
  except ValueError as error:
    code = re.search(r"os_error_code='(\d+)'", str(error))
    if not code:
      raise
    path = re.search(r'file "([^"]+)"', str(error))
    raise OSError(int(code[1]), os.strerror(int(code[1])), path[1] if path else None) from error
