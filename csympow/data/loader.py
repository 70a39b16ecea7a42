"""Batches as a function of (seed, step), read ahead by Grain.

A window is one training sequence: `context` tokens of a document and the token that follows each. The windows of an
epoch stand in an order that the seed decides, epochs follow one another, and the rows of step s are windows
s * rows ... (s + 1) * rows - 1 of that endless list. Neither processes nor devices nor restarts enter: every process
takes from the same list the rows that its own devices hold.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import grain
import jax
import numpy as np
from jaxtyping import Int

from csympow.config import Config, DataConfig
from csympow.data.documents import DataError, Documents, Joined, Zarr
from csympow.data.embedded import embedded


class Batch(NamedTuple):
  """Rows of windows.

  Attributes:
    tokens: what the model reads.
    targets: the token after each, or -1 where there is none to predict.
    segment_ids: the run that each token belongs to, -1 for padding; None where every row is one document.
  """

  tokens: Int[jax.Array, "B T"]
  targets: Int[jax.Array, "B T"]
  segment_ids: Int[jax.Array, "B T"] | None


def open_documents(path: str, split: str, data: DataConfig, length: int) -> Documents:
  """The documents at a path, joined where single ones are shorter than `length` and joining is allowed."""
  documents: Documents = (
    embedded("train" if split == "train" else "heldout") if path == "embedded" else Zarr(path, data.cache_mb)
  )
  if not len(documents.lengths):
    raise DataError(f"data.{split}: {documents.name} is empty")
  longest = int(documents.lengths.max())
  if longest < length and data.join:
    if documents.read(0, 0, 1)[1] is not None:
      hint = f"prepare them with --row_length={length} instead"
      raise DataError(f"data.{split}: rows of {documents.name} are packed and padded and cannot be joined; {hint}")
    documents = Joined(documents, -(-length // max(1, int(documents.lengths.min()))))
    longest = int(documents.lengths.max(initial=0))
  if longest < length:
    hint = "" if data.join else "; data.join=true joins consecutive ones"
    found = f"its longest document has {longest}" if longest else "its documents joined have fewer"
    raise DataError(f"data.{split}: {documents.name} is too short for {length} tokens: {found}{hint}")
  return documents


class Windows:
  """The windows of some documents: a source for Grain."""

  def __init__(self, documents: Documents, context: int, vocab_size: int, first_only: bool = False) -> None:
    self._documents, self.context, self._vocab_size = documents, context, vocab_size
    # A document of exactly `context` tokens makes a window too: its last token has no target.
    counts = documents.lengths // context
    self._ends = np.cumsum(np.minimum(counts, 1) if first_only else counts)

  def __len__(self) -> int:
    return int(self._ends[-1]) if len(self._ends) else 0

  @property
  def has_segments(self) -> bool:
    """Whether documents were packed together."""
    return self._documents.read(0, 0, 1)[1] is not None

  def of_length(self, context: int) -> "Windows":
    """Windows of another length into the same documents."""
    return Windows(self._documents, context, self._vocab_size)

  def is_one_document(self, index: int) -> bool:
    """Whether a window has no border of documents and no padding in it."""
    segments = self[index][2]
    return segments is None or bool(segments[0] >= 0 and (segments == segments[0]).all())

  def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Tokens, targets and segment ids of a window."""
    document = int(np.searchsorted(self._ends, index, side="right"))
    start = (index - (int(self._ends[document - 1]) if document else 0)) * self.context
    tokens, segments = self._documents.read(
      document, start, min(start + self.context + 1, int(self._documents.lengths[document]))
    )
    if tokens.max() >= self._vocab_size:
      at = int(np.argmax(tokens))
      place = f"{self._documents.name}: document {document}, token {start + at}"
      raise DataError(f"{place} has id {tokens[at]}, outside the vocabulary of model.vocab_size={self._vocab_size}")
    targets = np.full(self.context, -1, np.int32)
    targets[: len(tokens) - 1] = tokens[1:]
    if segments is None:
      return tokens[: self.context], targets, None
    ends = segments[1:] != segments[:-1]
    targets[: len(ends)][ends | (segments[:-1] < 0)] = -1
    return tokens[: self.context], targets, segments[: self.context]


class Steps:
  """The rows that this process needs of each step: a source for Grain, indexed by step."""

  def __init__(self, windows: Windows, config: Config, rows: np.ndarray) -> None:
    dataset = grain.MapDataset.source(windows).seed(config.seed)
    self._windows = (dataset.shuffle() if config.data.shuffle else dataset).repeat()
    self._batch, self._rows, self._steps = config.rows, rows, config.steps

  def __len__(self) -> int:
    return self._steps

  def __getitem__(self, step: int) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    found = [self._windows[step * self._batch + int(row)] for row in self._rows]
    tokens, targets, segments = zip(*found, strict=True)
    return np.stack(tokens), np.stack(targets), None if segments[0] is None else np.stack(segments)


def batches(
  windows: Windows, config: Config, sharding: jax.sharding.Sharding | None, first_step: int = 0
) -> Iterator[Batch]:
  """The batches of all steps from `first_step` on, as arrays over the sharding's devices, or on the one device."""
  if len(windows) == 0:
    raise DataError("the dataset has no window")
  shape = (config.rows, config.context)
  rows = np.arange(config.rows) if sharding is None else rows_here(sharding, shape)
  source = grain.MapDataset.source(Steps(windows, config, rows))
  options = grain.ReadOptions(num_threads=config.data.threads, prefetch_buffer_size=max(config.data.prefetch, 1))
  place = {int(row): i for i, row in enumerate(rows)}

  def spread(local: np.ndarray) -> jax.Array:
    if sharding is None:
      return jax.device_put(local)

    def part(index: Any) -> np.ndarray:
      wanted = [place[row] for row in range(*index[0].indices(shape[0]))]
      return local[wanted][:, index[1]]

    return jax.make_array_from_callback(shape, sharding, part)

  for tokens, targets, segment_ids in source[first_step:].to_iter_dataset(options):
    yield Batch(spread(tokens), spread(targets), None if segment_ids is None else spread(segment_ids))


def rows_here(sharding: jax.sharding.Sharding, shape: tuple[int, int]) -> np.ndarray:
  """The rows of which this process's devices hold a part."""
  slices = sharding.addressable_devices_indices_map(shape).values()
  return np.unique(np.concatenate([np.arange(shape[0])[index[0]] for index in slices if index is not None]))
