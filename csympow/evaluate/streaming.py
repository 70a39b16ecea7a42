"""The loss of every token of long texts, streamed through the state in memory that does not grow with their length."""

import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from csympow.data.loader import Windows
from csympow.evaluate.caches import Shape, shape_for
from csympow.evaluate.halfway import HalfWay
from csympow.evaluate.reading import read
from csympow.model import Transformer
from csympow.nn import Cache
from csympow.train.loss import token_losses

_LOGITS_AT_ONCE = 2**26  # numbers


def stream(
  model: Transformer,
  tokens: Int[np.ndarray, "b T"],
  targets: Int[np.ndarray, "b T"],
  shape: Shape,
  segments: Int[np.ndarray, "T"] | None = None,
  halfway: HalfWay | None = None,
) -> Iterator[tuple[int, Float[np.ndarray, "b t"]]]:
  """For each piece of some texts, at most `shape.rows`, its first position and the losses; NaN without a target.

  The state begins anew wherever `segments` changes.
  """
  texts, length = tokens.shape
  runs = np.broadcast_to(np.zeros(length, np.int32) if segments is None else segments, tokens.shape)
  for start, losses in read(advance, model, ((tokens, 0), (targets, -1), (runs, -1)), shape, halfway):
    yield start, losses[:texts, : length - start]


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
