"""Loss against context, four ways, from sums over buckets of positions: means over stretches and their standard errors.

Positions count from 1: the loss at position t is that of the token after t tokens.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

BUCKETS_PER_OCTAVE = 8
SCORED = 256  # tokens at a stretch's end that the window-matched loss is taken over


class Curve(NamedTuple):
  """A mean over stretches, in nats a token, at each of some contexts.

  Attributes:
    first: the first position that each value is a mean over.
    last: the last one, or the context.
    loss: the mean.
    error: its standard error; NaN for a single stretch.
  """

  first: list[int]
  last: list[int]
  loss: list[float]
  error: list[float]


def bucket_ends(length: int) -> Int[np.ndarray, "buckets"]:
  """The last position of each bucket: eight an octave, as far as there are as many; every power of two is one."""
  octaves = np.log2(length)
  ends = np.floor(2.0 ** (np.arange(int(np.floor(octaves * BUCKETS_PER_OCTAVE)) + 1) / BUCKETS_PER_OCTAVE))
  return np.unique([*ends.astype(np.int64), length])


def contexts(length: int) -> list[int]:
  """1, 2, 4, ... and the length."""
  return [*(2**n for n in range(length.bit_length()) if 2**n < length), length]


class BucketSums:
  """The losses of some stretches, added up by bucket as they come."""

  def __init__(self, stretches: int, length: int) -> None:
    self._ends = bucket_ends(length)
    self.sums = np.zeros((stretches, len(self._ends)))
    self.counts = np.zeros((stretches, len(self._ends)), np.int64)

  def add(self, start: int, losses: Float[np.ndarray, "b t"]) -> None:
    """Adds the losses from position `start` + 1 on; NaN does not count."""
    buckets = np.searchsorted(self._ends, start + 1 + np.arange(losses.shape[1]))
    for row, values in enumerate(losses):
      told = ~np.isnan(values)
      self.sums[row] += np.bincount(buckets[told], values[told], minlength=len(self._ends))
      self.counts[row] += np.bincount(buckets[told], minlength=len(self._ends))


def by_position(sums: Float[np.ndarray, "n b"], counts: Int[np.ndarray, "n b"], length: int) -> Curve:
  """The mean loss in each bucket of positions."""
  ends = bucket_ends(length).tolist()
  with np.errstate(invalid="ignore"):
    return _curve([1, *(end + 1 for end in ends[:-1])], ends, sums / counts)


def cumulative(sums: Float[np.ndarray, "n b"], counts: Int[np.ndarray, "n b"], length: int) -> Curve:
  """The mean loss over positions up to each context."""
  ends = bucket_ends(length)
  until = [int(np.searchsorted(ends, context)) for context in contexts(length)]
  with np.errstate(invalid="ignore"):
    return _curve(
      [1] * len(until), contexts(length), np.cumsum(sums, axis=1)[:, until] / np.cumsum(counts, axis=1)[:, until]
    )


def window_matched(losses: Float[np.ndarray, "n c"], length: int) -> Curve:
  """The loss of the same last tokens, given only the last C."""
  return _curve([length - min(SCORED, length) + 1] * losses.shape[1], contexts(length), losses)


def gain(losses: Float[np.ndarray, "n c"], length: int) -> Curve:
  """How much the window-matched loss at C lies above that at the whole length, paired by stretch."""
  with np.errstate(invalid="ignore"):
    return window_matched(losses - losses[:, -1:], length)


def standard_error(by_sample: Float[np.ndarray, "n *rest"]) -> Float[np.ndarray, "*rest"]:
  """Of the mean over the first axis; NaN for a single sample."""
  count = len(by_sample)
  if count < 2:
    return np.full(by_sample.shape[1:], np.nan)
  with np.errstate(invalid="ignore"):
    return np.asarray(by_sample.std(axis=0, ddof=1) / np.sqrt(count))


def _curve(first: list[int], last: list[int], by_stretch: Float[np.ndarray, "n k"]) -> Curve:
  """Means over stretches; what no stretch has a target for is left out, and what a model could not say is infinite."""
  mean, error = by_stretch.mean(axis=0), standard_error(by_stretch)
  told = [i for i, value in enumerate(mean) if not np.isnan(value)]
  return Curve([first[i] for i in told], [last[i] for i in told], mean[told].tolist(), error[told].tolist())
