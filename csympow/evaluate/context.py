"""Held-out loss against context: `--task=context`.

Each stretch of held-out text is streamed once through the state for the loss at every position, and its last part
again and again, from ever nearer to the end, for the window-matched loss. Below the number of scored tokens, these are
cut into blocks of C that each begin anew: at every C no scored token sees more than C tokens.
"""

import argparse
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from csympow.config import ConfigError
from csympow.data.progress import Progress
from csympow.evaluate import context_report, curves
from csympow.evaluate.kept import Kept, digest
from csympow.evaluate.runs import Run, open_runs
from csympow.evaluate.streaming import Shape, shape_for, stream
from csympow.evaluate.stretches import Stretches, common_stretches

_FORMAT = 1  # of what is kept


class Losses(NamedTuple):
  """The losses of one run.

  Attributes:
    sums: over each bucket of positions of each stretch.
    counts: of the tokens in each sum.
    windows: the window-matched loss of each stretch at each of `curves.contexts`.
  """

  sums: Float[np.ndarray, "n b"]
  counts: Int[np.ndarray, "n b"]
  windows: Float[np.ndarray, "n c"]


def add_options(parser: argparse.ArgumentParser) -> None:
  """The task's own options."""
  group = parser.add_argument_group("context")
  group.add_argument("--documents", type=int, default=32, metavar="N", help="stretches of text, at most (%(default)s)")
  group.add_argument("--heldout", metavar="DATA", help="a dataset, or embedded, in place of the runs' own held-out one")


def run(args: argparse.Namespace) -> None:
  """The task."""
  if args.documents < 1:
    raise ConfigError(f"--documents must be at least 1, got {args.documents}")
  runs = open_runs(args)
  stretches = common_stretches(runs, args.heldout, args.max_context, args.documents)
  print(f"held-out loss against context: {stretches.describe()}, from {stretches.source}", flush=True)
  if stretches.length < args.max_context:
    print(f"--max_context={args.max_context:,} is more than there is: {stretches.length:,} tokens instead", flush=True)
  kept = Kept(args.out, "context")
  passes = [max(context, min(curves.SCORED, stretches.length)) for context in curves.contexts(stretches.length)]
  work = sum(passes) * len(stretches.tokens) * len(runs)
  progress = Progress(work)
  losses = [measure(each, stretches, kept, progress) for each in runs]
  progress.end(f"read {work:,} tokens")
  print(context_report.write(args.out, runs, stretches, losses), flush=True)


def measure(run: Run, stretches: Stretches, kept: Kept, progress: Progress) -> Losses:
  """The losses of a run, of which those that are kept already are not computed again."""
  length, count = stretches.length, len(stretches.tokens)
  shape = shape_for(run.model, length, count)
  contexts = curves.contexts(length)
  found: dict[tuple[int, int], Any] = {}
  # The longest pass first: it is also the one of all positions.
  for context in reversed(contexts):
    keys = [_key(run, tokens, context, length) for tokens in stretches.tokens]
    for index in range(count):
      result = kept.get(keys[index])
      if result is not None:
        found[index, context] = result
        progress.add(max(context, min(curves.SCORED, length)), fresh=False)
    missing = [index for index in range(count) if (index, context) not in found]
    for first in range(0, len(missing), shape.rows):
      group = missing[first : first + shape.rows]
      for index, result in zip(group, _pass(run, stretches, group, context, shape, progress), strict=True):
        kept.put(keys[index], result)
        found[index, context] = result
  whole = [found[index, length] for index in range(count)]
  return Losses(
    sums=np.asarray([result["sums"] for result in whole]),
    counts=np.asarray([result["counts"] for result in whole]),
    windows=np.asarray([[found[index, context]["window"] for context in contexts] for index in range(count)]),
  )


def _pass(
  run: Run, stretches: Stretches, group: list[int], context: int, shape: Shape, progress: Progress
) -> Iterator[dict[str, Any]]:
  """Streams the last `context` tokens of some stretches; for each the loss of its very last, and sums by position."""
  length = stretches.length
  scored = min(curves.SCORED, length)
  read = max(context, scored)
  tokens, targets = (rows[:, length - read :] for rows in stretches.rows(group))
  blocks = (np.arange(read, dtype=np.int32) - read) // context + read  # whole ones at the end
  last = np.full((len(group), scored), np.nan)
  buckets = curves.BucketSums(len(group), length)
  for start, losses in stream(run.model, tokens, targets, shape, blocks):
    if context == length:
      buckets.add(start, losses)
    offset = start - (read - scored)  # of the piece in the scored tokens
    inside = losses[:, max(0, -offset) :]
    last[:, max(0, offset) : max(0, offset) + inside.shape[1]] = inside
    progress.add(losses.size)
    progress.show(f"{run.label}: the last {context:,} tokens, {start + losses.shape[1]:,} read")
  for row in range(len(group)):
    result: dict[str, Any] = {"window": float(np.nanmean(last[row]))}
    if context == length:
      result |= {"sums": buckets.sums[row].tolist(), "counts": buckets.counts[row].tolist()}
    yield result


def _key(run: Run, tokens: Int[np.ndarray, "n"], context: int, length: int) -> str:
  whole, scored = context == length, min(curves.SCORED, length)
  return digest(_FORMAT, run.identity, run.config.model, context, whole, tokens[length - max(context, scored) :])
