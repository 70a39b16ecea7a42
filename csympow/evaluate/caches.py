"""The cache that texts are read into: its bytes, how many texts it is read into side by side, and in what pieces.

One shape serves all texts of a task, whatever their lengths, so that one compiled program does.
"""

from typing import Any, NamedTuple

import jax

from csympow.model import Transformer
from csympow.nn import Cache
from csympow.train.metrics import size

PIECE = 512  # tokens of a text that enter the cache at once
_ROWS = 64  # texts side by side, at most
TOKENS_AT_ONCE = 2**18  # of their whole length, so that none is long on its way
_CACHE_BYTES = 4 * 2**30  # that their caches may take
_SCORE_BYTES = 2**30  # that the scores of one piece may take, where keys are kept
_SLOTS_OF_SCORES = 2**20  # scores of a row and head that `csympow.keys` makes at once


class Shape(NamedTuple):
  """What the one compiled program of a model takes.

  Attributes:
    rows: texts side by side.
    piece: tokens of each that enter at once.
    slots: of a cache of keys and values.
    keep_keys: whether keys and values are kept though the model has a state: they are the fewer bytes.
    at_once: whether texts are read without a cache, all their tokens at once.
  """

  rows: int
  piece: int
  slots: int
  keep_keys: bool
  at_once: bool = False


def shape_for(model: Transformer, length: int, texts: int, more: int = 0) -> Shape:
  """How to read this many texts of at most `length` tokens, after each of which `more` may come."""
  softmax = model.config.variant == "softmax"
  heads, piece = model.config.num_heads, min(PIECE, length)
  while softmax and piece > 16 and 4 * heads * piece * (length + more) > _SCORE_BYTES:
    piece //= 2
  slots = -(-length // piece) * piece + more
  keep_keys = not softmax and slots < model.layers.attention.tokens_of_a_state
  fitting = [_ROWS, TOKENS_AT_ONCE // length, _CACHE_BYTES // cache_bytes(model, slots, keep_keys=keep_keys)]
  if softmax or keep_keys:
    scores = piece * slots if softmax else min(piece * slots, _SLOTS_OF_SCORES)
    fitting.append(_SCORE_BYTES // (4 * heads * scores))
  return Shape(max(1, min(texts, *fitting)), piece, slots, keep_keys)


def empty_cache(model: Transformer, shape: Shape) -> Cache:
  """The cache to begin with.

  It is put where the model lies, as the caches that follow will be: one program serves the first piece and the rest.
  """
  cache = model.init_cache(shape.rows, shape.slots, keep_keys=shape.keep_keys)
  return jax.device_put(cache, model.embedding.embedding[...].sharding)


def memory_of(model: Transformer, length: int) -> str:
  """What a model remembers of a text of so many tokens, for people."""
  told = size(cache_bytes(model, length))
  return f"keys and values, {told} at {length:,}" if model.config.variant == "softmax" else f"state {told}"


def cache_bytes(model: Any, length: int, *, keep_keys: bool = False) -> int:
  """What a model remembers of one text of so many tokens, over all layers: its state, or all keys and values."""
  cache = jax.eval_shape(lambda: model.init_cache(1, length, keep_keys=keep_keys))
  return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))
