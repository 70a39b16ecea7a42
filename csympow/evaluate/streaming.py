"""The loss of every token of long texts: streamed through the state in memory that does not grow with their length.

Where keys are kept in place of a state, memory grows with the length anyway, and a piece meets every slot, taken or
not. Texts are then read at once if a kernel attends to them: of 65,536 tokens at p=4 that is a third of the scores, in
bfloat16 on the chip instead of float32 through its memory.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

import csympow
from csympow import softmax
from csympow.data.loader import Windows
from csympow.evaluate import caches
from csympow.evaluate.caches import Shape
from csympow.evaluate.halfway import HalfWay
from csympow.evaluate.reading import read
from csympow.model import Transformer
from csympow.nn import Cache
from csympow.train.loss import token_losses

_LOGITS_AT_ONCE = 2**26  # numbers
_BYTES_AT_ONCE = 4 * 2**30  # of activations, for texts that are read at once
_SIZES_APART = 4  # texts are filled up to a length that is this much below the next one, and has a program of its own


def shape_for(model: Transformer, length: int, texts: int) -> Shape:
  """How to read this many texts of at most `length` tokens for their losses."""
  shape = caches.shape_for(model, length, texts)
  config = model.config
  # Before and after the activation of the MLP, and queries, keys, values and outputs in float32.
  wide = 4 * config.mlp_ratio * config.d_model + 16 * config.num_heads * config.head_dim
  rows = min(texts, max(1, caches.TOKENS_AT_ONCE // length), _BYTES_AT_ONCE // (wide * length))
  quadratic = shape.keep_keys or config.variant == "softmax"
  return shape._replace(rows=rows, at_once=True) if rows and quadratic and _has_kernel(model, length) else shape


def stream(
  model: Transformer,
  tokens: Int[np.ndarray, "b T"],
  targets: Int[np.ndarray, "b T"],
  shape: Shape,
  segments: Int[np.ndarray, "T"] | None = None,
  halfway: HalfWay | None = None,
) -> Iterator[tuple[int, Float[np.ndarray, "b t"]]]:
  """For each piece of some texts, at most `shape.rows`, its first position and the losses; NaN without a target.

  The state begins anew wherever `segments` changes, which needs a mask of T x T for softmax where all is read at once.
  """
  texts, length = tokens.shape
  if shape.at_once:
    yield 0, _read_at_once(model, tokens, targets, shape, segments)
    return
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
  return _losses(model, hidden, targets), cache


@jax.jit
def at_once(
  model: Transformer, tokens: Int[Array, "B T"], targets: Int[Array, "B T"], segment_ids: Int[Array, "B T"] | None
) -> Float[Array, "B T"]:
  """The losses of whole texts, as `advance` gives them."""
  return _losses(model, model.hidden(tokens, segment_ids), targets)


def _losses(model: Transformer, hidden: Float[Array, "B t d"], targets: Int[Array, "B t"]) -> Float[Array, "B t"]:
  (batch, time), vocab = targets.shape, model.config.padded_vocab_size
  most = max(1, _LOGITS_AT_ONCE // (batch * vocab))
  block = max(n for n in range(1, min(time, most) + 1) if time % n == 0)

  def losses(x: tuple[Array, Array]) -> Array:
    return token_losses(model.logits(x[0]), x[1])[0]

  def cut(x: Array) -> Array:
    return jnp.moveaxis(x.reshape(batch, -1, block, *x.shape[2:]), 1, 0)

  nll = jnp.moveaxis(lax.map(losses, (cut(hidden), cut(targets))), 0, 1).reshape(batch, time)
  nll = jnp.where(jnp.isnan(nll), jnp.inf, nll)
  return jnp.where(targets >= 0, nll, jnp.nan)


def _read_at_once(
  model: Transformer,
  tokens: Int[np.ndarray, "b T"],
  targets: Int[np.ndarray, "b T"],
  shape: Shape,
  segments: Int[np.ndarray, "T"] | None,
) -> Float[np.ndarray, "b T"]:
  """The losses of some texts, in a program for texts of a few times their length at most."""
  texts, length = tokens.shape
  size = shape.slots
  while (smaller := -(-size // _SIZES_APART // shape.piece) * shape.piece) >= length and smaller < size:
    size = smaller
  padding = ((0, shape.rows - texts), (0, size - length))  # behind the text, where no token of it looks
  runs = None
  if segments is not None and np.any(segments != segments[0]):
    runs = np.pad(np.broadcast_to(segments, tokens.shape), padding, constant_values=-1)
  tokens, targets = (np.pad(x, padding, constant_values=fill) for x, fill in ((tokens, 0), (targets, -1)))
  return np.asarray(at_once(model, tokens, targets, runs))[:texts, :length]


def _has_kernel(model: Transformer, length: int) -> bool:
  """Whether the device at hand attends to a whole text by a kernel, which needs no memory for its scores."""
  config = model.config
  heads, few = config.num_heads, config.num_kv_heads or config.num_heads
  q, k = (jax.ShapeDtypeStruct((1, length, n, config.head_dim), jnp.dtype(config.dtype)) for n in (heads, few))
  if config.variant == "softmax":
    return config.implementation != "xla" and softmax.has_kernel(q, k, k)
  how: Any = {"form": config.form, "chunk_size": config.chunk_size, "implementation": config.implementation}
  try:
    return csympow.explain(q, k, k, power=config.power, **how).implementation == "pallas"
  except NotImplementedError:
    return False


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
