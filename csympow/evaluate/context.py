"""Held-out loss against context: `--task=context`.

Each stretch of held-out text is streamed once through the state for the loss at every position, and its last part
again and again, from ever nearer to the end, for the window-matched loss. Below the number of scored tokens, these are
cut into blocks of C that each begin anew: at every C no scored token sees more than C tokens.
"""

import argparse
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from csympow.command import NotFiniteError
from csympow.data.progress import Progress
from csympow.evaluate import context_report, curves, stretches
from csympow.evaluate.caches import Shape
from csympow.evaluate.halfway import HalfWay
from csympow.evaluate.kept import Kept, digest
from csympow.evaluate.runs import Run, open_runs
from csympow.evaluate.streaming import shape_for, stream
from csympow.evaluate.stretches import Stretches


class Losses(NamedTuple):
  """The losses of one run.

  Attributes:
    sums: over each bucket of positions of each stretch.
    counts: of the tokens in each sum.
    windows: the window-matched loss of each stretch at each of `curves.contexts`.
    not_finite_from: the first position of any stretch at which the model has no number to say; None: there is none.
  """

  sums: Float[np.ndarray, "n b"]
  counts: Int[np.ndarray, "n b"]
  windows: Float[np.ndarray, "n c"]
  not_finite_from: int | None


READS_RUNS = True


def add_options(parser: argparse.ArgumentParser) -> None:
  """The task's own options."""
  stretches.add_options(parser, "context", documents=32)


def run(args: argparse.Namespace) -> None:
  """The task."""
  runs = open_runs(args)
  text = stretches.asked_for(args, runs, "held-out loss against context")
  kept = Kept(args.out, "context")
  work = sum(max(context, _scored(text)) for context in curves.contexts(text.length)) * len(text.tokens) * len(runs)
  progress = Progress(work)
  losses = [measure(each, text, kept, progress) for each in runs]
  progress.end(f"read {work:,} tokens")
  print(context_report.write(args.out, runs, text, losses), flush=True)
  lost = [
    context_report.not_finite(each, found) for each, found in zip(runs, losses, strict=True) if found.not_finite_from
  ]
  if lost:
    raise NotFiniteError("; ".join(lost))


def measure(run: Run, text: Stretches, kept: Kept, progress: Progress) -> Losses:
  """The losses of a run, of which those that are kept already are not computed again."""
  length, count = text.length, len(text.tokens)
  shape = shape_for(run.model, length, count)
  contexts = curves.contexts(length)
  found: dict[tuple[int, int], Any] = {}
  # The longest pass first: it is also the one of all positions.
  for context in reversed(contexts):
    keys = [_key(run, tokens, context, length) for tokens in text.tokens]
    for index in range(count):
      result = kept.get(keys[index])
      if result is not None:
        found[index, context] = result
        progress.add(max(context, _scored(text)), fresh=False)
    missing = [index for index in range(count) if (index, context) not in found]
    for first in range(0, len(missing), shape.rows):
      group = missing[first : first + shape.rows]
      one = Pass(run, text, group, context, shape, kept, digest(*(keys[index] for index in group)), progress)
      for index, result in zip(group, one.results(), strict=True):
        kept.put(keys[index], result)
        found[index, context] = result
      one.halfway.end()
  whole = [found[index, length] for index in range(count)]
  return Losses(
    sums=np.asarray([result["sums"] for result in whole]),
    counts=np.asarray([result["counts"] for result in whole]),
    windows=np.asarray([[found[index, context]["window"] for context in contexts] for index in range(count)]),
    not_finite_from=min((result["not_finite_from"] for result in whole if result["not_finite_from"]), default=None),
  )


class Pass:
  """The last `context` tokens of some stretches, side by side through the state."""

  def __init__(
    self,
    run: Run,
    text: Stretches,
    group: list[int],
    context: int,
    shape: Shape,
    kept: Kept,
    key: str,
    progress: Progress,
  ) -> None:
    self._run, self._text, self._group, self._context, self._shape = run, text, group, context, shape
    self._progress = progress
    self._last = np.full((len(group), _scored(text)), np.nan)
    self._buckets = curves.BucketSums(len(group), text.length)
    self._not_finite_from = np.zeros(len(group), np.int64)  # 0: nowhere
    found: dict[str, np.ndarray] = {"last": self._last, "sums": self._buckets.sums, "counts": self._buckets.counts}
    found |= {"not_finite_from": self._not_finite_from}
    self.halfway = HalfWay(kept, key, found, lambda done: progress.add(len(group) * done, fresh=False))

  def results(self) -> list[dict[str, Any]]:
    """For each stretch the loss of its very last tokens and, of the whole length, sums by position."""
    context, length, scored = self._context, self._text.length, _scored(self._text)
    read = max(context, scored)
    tokens, targets = (rows[:, length - read :] for rows in self._text.rows(self._group))
    blocks = (np.arange(read, dtype=np.int32) - read) // context + read  # whole ones at the end
    for start, losses in stream(self._run.model, tokens, targets, self._shape, blocks, self.halfway):
      if context == length:
        self._buckets.add(start, losses)
        self._look(start, losses)
      offset = start - (read - scored)  # of the piece in the scored tokens
      inside = losses[:, max(0, -offset) :]
      self._last[:, max(0, offset) : max(0, offset) + inside.shape[1]] = inside
      self._progress.add(losses.size)
      self._progress.show(f"{self._run.label}: the last {context:,} tokens, {start + losses.shape[1]:,} read")
    results: list[dict[str, Any]] = [{"window": float(np.nanmean(row))} for row in self._last]
    if context == length:
      for row, result in enumerate(results):
        result |= {"sums": self._buckets.sums[row].tolist(), "counts": self._buckets.counts[row].tolist()}
        result |= {"not_finite_from": int(self._not_finite_from[row]) or None}
    return results

  def _look(self, start: int, losses: Float[np.ndarray, "b t"]) -> None:
    infinite = np.isinf(losses)
    here = np.where(infinite.any(axis=1), start + 1 + np.argmax(infinite, axis=1), 0)
    np.copyto(self._not_finite_from, here, where=self._not_finite_from == 0)


def _scored(text: Stretches) -> int:
  return min(curves.SCORED, text.length)


def _key(run: Run, tokens: Int[np.ndarray, "n"], context: int, length: int) -> str:
  whole, scored = context == length, min(curves.SCORED, length)
  return digest(run.identity, run.config.model, context, whole, tokens[length - max(context, scored) :])
