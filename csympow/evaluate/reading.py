"""Texts on their way into a model's cache, piece by piece, in memory that does not grow with their length."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from csympow.evaluate.caches import Shape, empty_cache
from csympow.evaluate.halfway import HalfWay
from csympow.model import Transformer
from csympow.nn import Cache


def read(
  advance: Callable[..., tuple[Any, Cache]],
  model: Transformer,
  inputs: Sequence[tuple[Int[np.ndarray, "b T"], int]],
  shape: Shape,
  halfway: HalfWay | None = None,
) -> Iterator[tuple[int, Any]]:
  """For each piece of some texts, at most `shape.rows`, its first position and what `advance` makes of it.

  Args:
    advance: of the model, the cache and the piece of each input, gives what is wanted and the next cache.
    model: the model.
    inputs: arrays of the texts, each with the value that pads it to whole rows and pieces.
    shape: of the program.
    halfway: where the pass is kept now and then, and taken up again if it was cut off.
  """
  texts, length = inputs[0][0].shape
  padding = ((0, shape.rows - texts), (0, -length % shape.piece))
  padded = [np.pad(x, padding, constant_values=fill) for x, fill in inputs]
  cache = empty_cache(model, shape)
  first, cache = (0, cache) if halfway is None else halfway.resume(cache)
  waiting: tuple[int, Any] | None = None
  for start in range(first, padded[0].shape[1], shape.piece):
    found, cache = advance(model, cache, *(x[:, start : start + shape.piece] for x in padded))
    # The piece before is looked at while the device is busy with this one.
    if waiting is not None:
      yield waiting[0], jax.device_get(waiting[1])
    waiting = start, found
    if halfway is not None and halfway.due:
      yield start, jax.device_get(found)
      waiting = None
      halfway.keep(start + shape.piece, cache)
  if waiting is not None:
    yield waiting[0], jax.device_get(waiting[1])
    if halfway is not None and halfway.to_the_end:
      halfway.keep(padded[0].shape[1], cache)


def read_prompts(
  model: Transformer,
  prompts: Sequence[Int[np.ndarray, "_"]],
  cache: Cache,
  shape: Shape,
  check: Callable[[int], None] = lambda done: None,
) -> tuple[Float[Array, "B V"], Cache]:
  """The logits after each prompt, and the cache. Shorter ones are padded in front, which leaves no trace in a cache.

  `check` is called before each piece with the tokens that it has.
  """
  length = max(len(prompt) for prompt in prompts)
  length += -length % shape.piece
  tokens = np.full((shape.rows, length), -1, np.int32)
  for row, prompt in zip(tokens, prompts, strict=False):
    row[length - len(prompt) :] = prompt
  logits: Array = jnp.zeros((shape.rows, model.config.padded_vocab_size))
  for start in range(0, length, shape.piece):
    part = tokens[:, start : start + shape.piece]
    check(int(np.sum(part >= 0)))
    logits, cache = _advance(model, cache, part)
  return logits, cache


@functools.partial(jax.jit, donate_argnums=1)
def _advance(model: Transformer, cache: Cache, tokens: Int[Array, "B t"]) -> tuple[Float[Array, "B V"], Cache]:
  hidden, cache = prefill_padded(model, cache, tokens)
  return model.logits(hidden[:, -1]), cache


def prefill_padded(
  model: Transformer, cache: Cache, tokens: Int[Array, "B t"]
) -> tuple[Float[Array, "B t d_model"], Cache]:
  """`Transformer.prefill_hidden`, where -1 is padding: no effect on a cache, and an output that nobody may use."""
  return model.prefill_hidden(jnp.maximum(tokens, 0), cache, jnp.where(tokens >= 0, 0, -1))
