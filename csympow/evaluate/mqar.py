"""Multi-query associative recall (MQAR): pairs of a key and a value, then some of the keys again, in noise.

    k1 v1 k2 v2 ... kn vn  . . k7 . k2 . . . . . . . k9 . . . .        the context, then the queries among fill tokens
                               v7   v2               v9                what is to be predicted; nothing else is

Keys are distinct and from the lower half of the vocabulary (0 is none), values distinct and from the upper half.
Queries stand at even distances from the context, near ones far more often than distant ones, by a power law. In the
forgetting variant some keys return later in the context with a new value, and the newest is right: what came before
must go.

The task and its constants are those of Arora et al., "Zoology: Measuring and Improving Recall in Efficient Language
Models", 2023.
"""

import dataclasses
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from csympow.config import ConfigError

_EXPONENT = 0.01  # a, of the power law of gaps
_ROWS_AT_ONCE = 1024  # that are drawn side by side


@dataclasses.dataclass(frozen=True)
class Setting:
  """One difficulty.

  Attributes:
    length: tokens of a sequence, T.
    pairs: pairs of the context, n.
    examples: sequences.
    returning: how many of the pairs are keys that return with a new value: there are `pairs - returning` keys.
    passes: how often the whole context stands there, P.
  """

  length: int
  pairs: int
  examples: int
  returning: int = 0
  passes: int = 1

  def __post_init__(self) -> None:
    for name in ("length", "pairs", "examples", "passes"):
      _require(getattr(self, name) >= 1, f"{name} must be at least 1, got {getattr(self, name)}")
    _require(self.length % 2 == 0, f"length must be even, got {self.length}")
    needed = 2 * self.pairs * self.passes + 2 * self.keys
    _require(
      needed <= self.length, f"{self.pairs} pairs and their queries need a length of {needed}, got {self.length}"
    )
    most = self.pairs // 2
    _require(0 <= self.returning <= most, f"at most {most} of {self.pairs} pairs can return, got {self.returning}")

  @property
  def keys(self) -> int:
    """Distinct keys, each asked for once."""
    return self.pairs - self.returning

  def check_vocabulary(self, size: int) -> None:
    """Raises a ConfigError unless there are tokens enough: T < V, and n distinct keys and values."""
    most = min(size // 2 - 1, size - size // 2)
    _require(
      self.length < size and self.pairs <= most,
      f"a vocabulary of {size} is too small for {self.pairs} pairs in {self.length} tokens",
    )


class Examples(NamedTuple):
  """Sequences and what is asked of them.

  Attributes:
    tokens: the sequences.
    positions: where the query of each key stands.
    values: what must be predicted there.
    returned: whether that key has had another value before.
  """

  tokens: Int[np.ndarray, "N T"]
  positions: Int[np.ndarray, "N keys"]
  values: Int[np.ndarray, "N keys"]
  returned: Bool[np.ndarray, "N keys"]


def examples(setting: Setting, vocab_size: int, seed: int | tuple[int, ...]) -> Examples:
  """The examples of a setting, a function of the seed."""
  setting.check_vocabulary(vocab_size)
  rng = np.random.default_rng(seed)
  rows = [min(_ROWS_AT_ONCE, setting.examples - done) for done in range(0, setting.examples, _ROWS_AT_ONCE)]
  blocks = [_block(setting, vocab_size, count, rng) for count in rows]
  return Examples(*(np.concatenate(part) for part in zip(*blocks, strict=True)))


def position_rule(made: Examples, setting: Setting) -> float:
  """The accuracy of who reads no key: the best guess at the pair of a query from where the query stands.

  Near gaps are drawn first, and go to the first keys, so that this is well above 1 / n. What is above it is recall.
  The rule is found on one half of the examples and scored on the other.
  """
  told = made.tokens[:, 1 : 2 * setting.pairs : 2]
  pair = np.argmax(told[:, None, :] == made.values[:, :, None], axis=2)
  half = -(-len(pair) // 2)
  seen = np.zeros((setting.length, setting.pairs), np.int64)
  np.add.at(seen, (made.positions[:half], pair[:half]), 1)
  return float(np.mean(seen.argmax(axis=1)[made.positions[-half:]] == pair[-half:]))


def _block(setting: Setting, vocab_size: int, rows: int, rng: np.random.Generator) -> Examples:
  half = vocab_size // 2
  pairs, keys, length = setting.pairs, setting.keys, setting.length
  key_tokens = 1 + _distinct(rng, rows, half - 1, keys)
  value_tokens = half + _distinct(rng, rows, vocab_size - half, pairs)

  # Which key stands in which pair: 0, 1, 2, ... and those that return, at any place after their first.
  which = np.broadcast_to(np.r_[:keys, : setting.returning], (rows, pairs))
  which = rng.permuted(which, axis=1) if setting.returning else which
  newest = pairs - 1 - np.argmax(which[:, None, ::-1] == np.arange(keys)[:, None], axis=2)
  context = np.stack([np.take_along_axis(key_tokens, which, 1), value_tokens], axis=2).reshape(rows, -1)
  context = np.tile(context, setting.passes)

  tokens = rng.integers(0, vocab_size, (rows, length))
  tokens[:, : context.shape[1]] = context
  gaps = _gaps(rng, rows, (length - context.shape[1]) // 2, keys)
  positions = context.shape[1] + 2 * gaps
  np.put_along_axis(tokens, positions, key_tokens, axis=1)
  returned = np.broadcast_to(np.arange(keys) < setting.returning, (rows, keys))
  values = np.take_along_axis(value_tokens, newest, axis=1)
  return Examples(tokens.astype(np.int32), positions.astype(np.int32), values.astype(np.int32), returned)


def _distinct(rng: np.random.Generator, rows: int, of: int, count: int) -> Int[np.ndarray, "rows count"]:
  """Distinct numbers below `of`, in random order: the beginning of a Fisher-Yates shuffle, of all rows side by side."""
  deck = np.tile(np.arange(of, dtype=np.int32), (rows, 1))
  every = np.arange(rows)
  for i in range(count):
    drawn = rng.integers(i, of, rows)
    deck[every, drawn], deck[:, i] = deck[:, i].copy(), deck[every, drawn]
  return deck[:, :count]


def _gaps(rng: np.random.Generator, rows: int, space: int, count: int) -> Int[np.ndarray, "rows count"]:
  """Distinct slots below `space`, slot i drawn (from those left) in proportion to a (i + 1)^(a - 1).

  The largest of log p plus Gumbel noise are such draws, in order.
  """
  log_weights = (_EXPONENT - 1) * np.log(np.arange(1, space + 1))
  return np.argsort(-(log_weights + rng.gumbel(size=(rows, space))), axis=1)[:, :count]


def _require(condition: bool, message: str) -> None:
  if not condition:
    raise ConfigError(f"recall: {message}")
