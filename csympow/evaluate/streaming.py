"""The loss of every token of long texts, streamed through the state in memory that does not grow with their length."""

import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from csympow.data.loader import Windows
from csympow.model import Transformer
from csympow.nn import Cache
from csympow.train.loss import token_losses

_PIECE = 512  # tokens that enter the state at once
_TOKENS_AT_ONCE = 2**18  # of all texts that are streamed side by side, so that none is long on its way
_CACHE_BYTES = 4 * 2**30  # that their states may take: at p=4 one of the 124M model is 28 GB
_SCORE_BYTES = 2**30  # that softmax's scores of one piece may take
_LOGITS_AT_ONCE = 2**26  # numbers


class Shape(NamedTuple):
  """What the one compiled program of a model takes, whatever the lengths of the texts."""

  rows: int  # texts side by side
  piece: int
  slots: int  # of a softmax model's cache


def shape_for(model: Transformer, length: int, texts: int) -> Shape:
  """How to stream this many texts of at most `length` tokens."""
  piece = min(_PIECE, length)
  per_score = 0
  if model.config.variant == "softmax":
    per_score = 4 * model.config.num_heads * length
    while piece > 16 and piece * per_score > _SCORE_BYTES:
      piece //= 2
  slots = -(-length // piece) * piece
  one = jax.tree.leaves(jax.eval_shape(lambda: model.init_cache(1, slots)))
  fitting = [_TOKENS_AT_ONCE // length, _CACHE_BYTES // sum(x.size * x.dtype.itemsize for x in one)]
  if per_score:
    fitting.append(_SCORE_BYTES // (piece * per_score))
  return Shape(max(1, min(texts, *fitting)), piece, slots)


def stream(
  model: Transformer,
  tokens: Int[np.ndarray, "b T"],
  targets: Int[np.ndarray, "b T"],
  shape: Shape,
  segments: Int[np.ndarray, "T"] | None = None,
) -> Iterator[tuple[int, Float[np.ndarray, "b t"]]]:
  """For each piece of some texts, at most `shape.rows`, its first position and the losses; NaN without a target.

  The state begins anew wherever `segments` changes.
  """
  texts, length = tokens.shape
  padding = ((0, shape.rows - texts), (0, -length % shape.piece))
  tokens = np.pad(tokens, padding)
  targets = np.pad(targets, padding, constant_values=-1)
  segments = np.zeros(length, np.int32) if segments is None else segments
  runs = np.broadcast_to(np.pad(segments, padding[1], constant_values=-1), tokens.shape)
  # Put where the model lies, as the caches that follow will be: one program serves the first piece and the rest.
  cache = jax.device_put(model.init_cache(shape.rows, shape.slots), model.embedding.embedding[...].sharding)
  waiting: tuple[int, Array] | None = None
  for start in range(0, tokens.shape[1], shape.piece):
    part = slice(start, start + shape.piece)
    losses, cache = advance(model, cache, tokens[:, part], targets[:, part], runs[:, part])
    # The piece before is looked at while the device is busy with this one.
    if waiting is not None:
      yield waiting[0], np.asarray(waiting[1])[:texts]
    waiting = start, losses
  if waiting is not None:
    yield waiting[0], np.asarray(waiting[1])[:texts, : length - waiting[0]]


@functools.partial(jax.jit, donate_argnums=1)
def advance(
  model: Transformer,
  cache: Cache,
  tokens: Int[Array, "B t"],
  targets: Int[Array, "B t"],
  segment_ids: Int[Array, "B t"],
) -> tuple[Float[Array, "B t"], Cache]:
  """The losses of the next piece, and the cache after it.

  NaN where there is no target; infinite where the model has no number to say.
  """
  hidden, cache = model.prefill_hidden(tokens, cache, segment_ids)
  (batch, time), vocab = tokens.shape, model.config.padded_vocab_size
  most = max(1, _LOGITS_AT_ONCE // (batch * vocab))
  block = max(n for n in range(1, min(time, most) + 1) if time % n == 0)

  def losses(x: tuple[Array, Array]) -> Array:
    return token_losses(model.logits(x[0]), x[1])[0]

  def cut(x: Array) -> Array:
    return jnp.moveaxis(x.reshape(batch, -1, block, *x.shape[2:]), 1, 0)

  nll = jnp.moveaxis(lax.map(losses, (cut(hidden), cut(targets))), 0, 1).reshape(batch, time)
  nll = jnp.where(jnp.isnan(nll), jnp.inf, nll)
  return jnp.where(targets >= 0, nll, jnp.nan), cache


def position_losses(
  model: Transformer, windows: Windows, indices: list[int], check: Callable[[int], None] = lambda done: None
) -> Float[np.ndarray, "documents length"]:
  """The loss of every position of some windows; NaN where there is nothing to predict.

  `check` is called after each piece with the tokens done.
  """
  shape = shape_for(model, windows.context, len(indices))
  rows = [windows[index] for index in indices]
  tokens, targets = np.stack([row[0] for row in rows]), np.stack([row[1] for row in rows])
  found = np.zeros(tokens.shape, np.float32)
  done = 0
  for first in range(0, len(indices), shape.rows):
    members = slice(first, first + shape.rows)
    for start, losses in stream(model, tokens[members], targets[members], shape):
      found[members, start : start + losses.shape[1]] = losses
      done += losses.size
      check(done)
  return found
