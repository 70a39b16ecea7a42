"""Which held-out text an evaluation reads: stretches of one length, each of one document if there are such."""

import argparse
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from csympow.config import ConfigError
from csympow.data.documents import DataError, Documents
from csympow.data.loader import open_documents
from csympow.evaluate.flags import positive
from csympow.evaluate.runs import Run


class Part(NamedTuple):
  """Tokens [start, stop) of a row of the dataset, all of one document."""

  row: int
  start: int
  stop: int


class Stretches(NamedTuple):
  """Stretches of `length` tokens, and where there is one the token after them.

  Attributes:
    source: where they are from.
    length: tokens of each; less than was asked for if there are not as many in all.
    tokens: of each stretch.
    documents: how many documents they are from.
    joined: whether no document was long enough, and consecutive ones were joined without a boundary.
  """

  source: str
  length: int
  tokens: list[Int[np.ndarray, "_"]]
  documents: int
  joined: bool

  def describe(self) -> str:
    """In words."""
    whole = not self.joined and self.documents == len(self.tokens)
    found = f"{_count(len(self.tokens), 'document' if whole else 'stretch')} of {self.length:,} tokens"
    return found if whole else f"{found}, of {_count(self.documents, 'document')}{' joined' * self.joined}"

  def record(self) -> dict[str, Any]:
    """For JSON."""
    return {
      "length": self.length,
      "stretches": len(self.tokens),
      "documents": self.documents,
      "joined": self.joined,
      "data": self.source,
    }

  def rows(self, indices: list[int]) -> tuple[Int[np.ndarray, "B T"], Int[np.ndarray, "B T"]]:
    """Tokens and targets of some stretches; a target of -1 where there is none."""
    chosen = [self.tokens[index] for index in indices]
    tokens = np.stack([stretch[: self.length] for stretch in chosen])
    targets = np.full(tokens.shape, -1, np.int32)
    for row, stretch in zip(targets, chosen, strict=True):
      row[: len(stretch) - 1] = stretch[1:]
    return tokens, targets


def add_options(parser: argparse.ArgumentParser, task: str, documents: int) -> None:
  """The options of a task that reads held-out text."""
  group = parser.add_argument_group(task)
  told = "stretches of text, at most (%(default)s)"
  group.add_argument("--documents", type=positive, default=documents, metavar="N", help=told)
  group.add_argument("--heldout", metavar="DATA", help="a dataset, or embedded, in place of the runs' own held-out one")


def asked_for(args: argparse.Namespace, runs: list[Run], about: str) -> Stretches:
  """The stretches that a command line asks for, after a line that tells of them."""
  found = common_stretches(runs, args.heldout, args.max_context, args.documents)
  print(f"{about}: {found.describe()}, from {found.source}", flush=True)
  if found.length < args.max_context:
    print(f"--max_context={args.max_context:,} is more than there is: {found.length:,} tokens instead", flush=True)
  return found


def common_stretches(runs: list[Run], path: str | None, length: int, count: int) -> Stretches:
  """Held-out stretches for some runs to be compared on: of the data at `path`, or of what they were all held out on."""
  found: Stretches | None = None
  for run in runs:
    data = run.config.data
    place = path or data.heldout
    if place is None:
      raise ConfigError(f"{run.directory} has no held-out data (data.heldout is none); name some by --heldout")
    mine = choose(open_documents(place, "heldout", data, 1), length, count)
    if found is not None and not _same(found, mine):
      directories = f"{runs[0].directory} and {run.directory}"
      raise ConfigError(f"{directories} were held out on different data; evaluate them apart, or name one by --heldout")
    found = mine
    largest = max(int(tokens.max()) for tokens in mine.tokens)
    if largest >= run.config.model.vocab_size:
      of = f"{run.directory}'s vocabulary of {run.config.model.vocab_size:,}"
      raise DataError(f"{mine.source} has token {largest}, outside {of}")
  assert found is not None
  return found


def choose(documents: Documents, length: int, count: int) -> Stretches:
  """At most `count` stretches of `length` tokens.

  The first `length` tokens of documents that have as many; then later parts of the same documents; and if no document
  is long enough, consecutive ones joined.
  """
  long: list[Part] = []
  short: list[Part] = []
  for part in _documents(documents):
    if part.stop - part.start >= length:
      long.append(part)
      if len(long) == count:
        break
    else:
      short.append(part)
  if long:
    tokens = [_read(documents, [part]) for part in _cut(long, length, count)]
    return Stretches(documents.name, length, tokens, len(long), joined=False)
  total = sum(part.stop - part.start for part in short)
  if total < 2:
    raise DataError(f"{documents.name} has no text to evaluate on")
  if total < length:
    return choose(documents, 1 << (total.bit_length() - 1), count)
  groups = _joined(short, length, count)
  tokens = [_read(documents, group)[: length + 1] for group in groups]
  return Stretches(documents.name, length, tokens, sum(map(len, groups)), joined=True)


def _documents(documents: Documents) -> Iterator[Part]:
  """Every document: a row, or where several were packed into one each run of equal segment ids."""
  packed = documents.read(0, 0, 1)[1] is not None
  for row, length in enumerate(documents.lengths.tolist()):
    segments = documents.read(row, 0, length)[1] if packed and length else None
    if segments is None:
      yield Part(row, 0, length)
      continue
    borders = [0, *(np.flatnonzero(np.diff(segments)) + 1).tolist(), length]
    yield from (Part(row, a, b) for a, b in itertools.pairwise(borders) if segments[a] >= 0)


def _cut(parts: list[Part], length: int, count: int) -> list[Part]:
  """The first stretch of each document, then the second of each, until there are enough."""
  found: list[Part] = []
  offset = 0
  while len(found) < count:
    fitting = [part for part in parts if part.stop - part.start >= offset + length]
    if not fitting:
      break
    found += [Part(p.row, p.start + offset, min(p.start + offset + length + 1, p.stop)) for p in fitting]
    offset += length
  return found[:count]


def _joined(parts: list[Part], length: int, count: int) -> list[list[Part]]:
  """Consecutive documents until each group has `length` tokens, and one more if there is one."""
  groups: list[list[Part]] = []
  group: list[Part] = []
  for part in parts:
    group.append(part)
    if sum(p.stop - p.start for p in group) > length:
      groups.append(group)
      group = []
  if not groups:
    groups = [group]
  return groups[:count]


def _read(documents: Documents, parts: list[Part]) -> Int[np.ndarray, "n"]:
  return np.concatenate([documents.read(*part)[0] for part in parts])


def _count(number: int, thing: str) -> str:
  plural = "es" if thing.endswith("ch") else "s"
  return f"{number} {thing}{plural if number != 1 else ''}"


def _same(a: Stretches, b: Stretches) -> bool:
  return len(a.tokens) == len(b.tokens) and all(map(np.array_equal, a.tokens, b.tokens))
