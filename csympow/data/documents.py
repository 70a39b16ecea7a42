"""Documents of tokens: what the loader and the evaluation read from, whatever lies beneath.

| class      | documents                                             |
|------------|-------------------------------------------------------|
| `Zarr`     | the rows of a zarr array, local or in a bucket        |
| `InMemory` | arrays; the embedded corpus is one (`csympow.data.embedded`) |
| `Joined`   | consecutive documents of another as one               |
"""

import hashlib
import json
import os
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import tensorstore as ts

from csympow.config import ConfigError

_SCANNED = 2**28  # tokens up to which all segment ids are looked at when a dataset is opened


class DataError(ConfigError):
  """The data cannot be used; the message names the place."""


@runtime_checkable
class Documents(Protocol):
  """A sequence of documents."""

  name: str

  @property
  def lengths(self) -> np.ndarray:
    """Tokens of each document."""

  @property
  def fingerprint(self) -> str:
    """Changes when the data do."""

  def read(self, document: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray | None]:
    """Tokens [start, stop) of a document as int32, and their segment ids where documents were packed together."""


class InMemory:
  """Documents held as arrays."""

  def __init__(self, name: str, documents: Sequence[np.ndarray]) -> None:
    self.name = name
    self._documents = list(documents)
    self.lengths = np.asarray([len(tokens) for tokens in self._documents], np.int64)

  @property
  def fingerprint(self) -> str:
    """Of every token."""
    digest = hashlib.sha256(self.lengths.tobytes())
    for tokens in self._documents:
      digest.update(np.ascontiguousarray(tokens))
    return digest.hexdigest()[:16]

  def read(self, document: int, start: int, stop: int) -> tuple[np.ndarray, None]:
    """A slice."""
    return self._documents[document][start:stop].astype(np.int32), None


class Zarr:
  """The rows of a zarr v2 array of documents x tokens, read through TensorStore; LongCrawl64's format.

  Where `X.segments.zarr` lies beside `X.zarr`, it holds the segment id of every token, and -1 for padding. A chunk that
  is absent is an error: zarr would have it read as zeros, and partial mirrors look just like that.
  """

  def __init__(self, path: str, cache_mb: int = 256) -> None:
    self.name = path
    context = ts.Context({"cache_pool": {"total_bytes_limit": cache_mb * 2**20}})
    self._tokens = _open(path, context)
    if self._tokens.ndim != 2:
      raise DataError(f"{path} must be documents x tokens, got an array of shape {tuple(self._tokens.shape)}")
    if not np.issubdtype(self._tokens.dtype.numpy_dtype, np.integer):
      raise DataError(f"{path} must hold integers, got {self._tokens.dtype.name}")
    segments = path.rstrip("/").removesuffix(".zarr") + ".segments.zarr"
    self._segments = _open(segments, context) if path.rstrip("/").endswith(".zarr") and _exists(segments) else None
    if self._segments is not None and self._segments.shape != self._tokens.shape:
      shapes = f"{tuple(self._segments.shape)}, and {path} {tuple(self._tokens.shape)}"
      raise DataError(f"{segments} must have the shape of its tokens, got {shapes}")
    rows, length = self._tokens.shape
    self.lengths = np.full(rows, length, np.int64)
    if self._segments is not None and rows * length <= _SCANNED:
      # Padding stands at the end of a row: without it no window is all padding.
      ids = self._segments.read().result()
      self.lengths = np.where((ids >= 0).any(1), length - np.argmax(ids[:, ::-1] >= 0, axis=1), 0).astype(np.int64)

  @property
  def fingerprint(self) -> str:
    """Of the shape, the type and a token here and there: reading all would take as long as an epoch."""
    rows, length = self._tokens.shape
    digest = hashlib.sha256(json.dumps([rows, length, self._tokens.dtype.name]).encode())
    for row in sorted({0, rows // 2, rows - 1}):
      digest.update(self.read(row, 0, min(length, 1024))[0])
    return digest.hexdigest()[:16]

  def read(self, document: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray | None]:
    """Both arrays at once."""
    place = f"row {document}, tokens {start} to {stop}"
    futures = [array[document, start:stop].read() for array in (self._tokens, self._segments) if array is not None]
    try:
      arrays = [future.result() for future in futures]
    except ValueError as error:
      cause = "a chunk is absent" if "NOT_FOUND" in str(error) else _first_line(error)
      raise DataError(f"{self.name}: {place} cannot be read: {cause}") from error
    tokens = arrays[0].astype(np.int64)
    if tokens.size and not 0 <= tokens.min() <= tokens.max() < 2**31:
      raise DataError(f"{self.name}: {place} has the token {tokens.min()} or {tokens.max()}, which no vocabulary has")
    return tokens.astype(np.int32), arrays[1].astype(np.int32) if len(arrays) > 1 else None


class Joined:
  """Each `count` consecutive documents as one, without a boundary between them; too few at the end are left out."""

  def __init__(self, documents: Documents, count: int) -> None:
    self.name = f"{documents.name} (each {count} documents joined)"
    self._documents, self._count = documents, count
    self.lengths = documents.lengths[: len(documents.lengths) // count * count].reshape(-1, count).sum(1)

  @property
  def fingerprint(self) -> str:
    """Of the documents within."""
    return f"{self._documents.fingerprint}x{self._count}"

  def read(self, document: int, start: int, stop: int) -> tuple[np.ndarray, None]:
    """The parts, one after the other."""
    parts = []
    for inner in range(document * self._count, (document + 1) * self._count):
      length = int(self._documents.lengths[inner])
      if start < length and stop > 0:
        parts.append(self._documents.read(inner, max(0, start), min(length, stop))[0])
      start, stop = start - length, stop - length
    return np.concatenate(parts) if parts else np.zeros(0, np.int32), None


def spec(path: str) -> dict[str, Any]:
  """TensorStore's description of a zarr v2 array at a local path, `gs://` or `s3://`."""
  if "://" in path:
    kvstore: Any = path if path.endswith("/") else path + "/"
  else:
    kvstore = {"driver": "file", "path": os.path.abspath(path) + "/"}
  return {"driver": "zarr", "kvstore": kvstore}


def _open(path: str, context: ts.Context) -> ts.TensorStore:
  if "://" not in path and not os.path.exists(path):
    raise DataError(f"there is no dataset at {path}; `python -m csympow.data.prepare` makes one from text files")
  description = spec(path) | {"fill_missing_data_reads": False, "recheck_cached_data": False}
  try:
    array = ts.open(description, read=True, context=context).result()
  except ValueError as error:
    raise DataError(f"{path} is no zarr v2 array that can be opened: {_first_line(error)}") from error
  return array


def _exists(path: str) -> bool:
  if "://" not in path:
    return os.path.exists(path)
  store = ts.KvStore.open(path + "/").result()
  return store.read(".zarray").result().state == "value"


def _first_line(error: Exception) -> str:
  return str(error).splitlines()[0][:200]
