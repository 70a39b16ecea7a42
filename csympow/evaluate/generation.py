"""Text from a model, token by token: prompts enter the cache in pieces, then every step adds one token to each.

The cache is the state, or keys and values for as long as these are fewer bytes than the state, which they are then
folded into (`csympow.keys`).
"""

import functools
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from csympow.keys import KeyCache
from csympow.model import PADDED_LOGIT, Transformer
from csympow.nn import Cache

_PIECE = 512  # tokens of a prompt that enter the cache at once


class Sampling(NamedTuple):
  """How a token is drawn from its logits.

  Attributes:
    temperature: divides the logits; 0 takes the likeliest token.
    top_k: how many of the likeliest tokens are drawn from; 0: all.
    top_p: the share of probability, at the temperature, of the likeliest tokens that are drawn from; 1: all.
    seed: of the draws. Row i of a batch has draws of its own, whatever the other rows are.
  """

  temperature: float = 0.0
  top_k: int = 0
  top_p: float = 1.0
  seed: int = 0


class Drawn(NamedTuple):
  """One more token of every row."""

  tokens: Int[np.ndarray, "B"]
  log_p: Float[np.ndarray, "B"]  # by the model, before temperature, top_k and top_p


def generate(
  model: Transformer, prompts: list[Int[np.ndarray, "_"]], count: int, sampling: Sampling
) -> Iterator[Drawn]:
  """Continues each of some prompts, of any lengths from 1 on, by `count` tokens, which come as they are drawn."""
  rows, longest = len(prompts), max(map(len, prompts))
  # Put where the model lies, as the caches that follow will be: one program serves the first piece and the rest.
  cache = jax.device_put(_new_cache(model, rows, longest, longest + count), model.embedding.embedding[...].sharding)
  logits, cache = _read_prompts(model, prompts, cache)
  keys = jax.vmap(functools.partial(jax.random.fold_in, jax.random.key(sampling.seed)))(jnp.arange(rows))
  how = (jnp.float32(sampling.temperature), jnp.int32(sampling.top_k), jnp.float32(sampling.top_p))
  for number in range(count):
    token, log_p = _draw(logits, keys, number, *how)
    if number + 1 < count:
      if isinstance(cache, KeyCache) and longest + number == cache.k.shape[2]:
        cache = _fold(model, cache)
      logits, cache = _step(model, token, cache)  # under way while the token is looked at
    yield Drawn(np.asarray(token), np.asarray(log_p))


def continuation(model: Transformer, prompt: np.ndarray, count: int, temperature: float, seed: int) -> np.ndarray:
  """The tokens after one prompt."""
  drawn = generate(model, [np.asarray(prompt)], count, Sampling(temperature, seed=seed))
  return np.asarray([one.tokens[0] for one in drawn])


def folded_after(model: Transformer, prompt: int) -> int | None:
  """How many tokens are written after a prompt of this length before the state is the cheaper cache; None: none are."""
  if model.config.variant == "softmax":
    return None
  worth: int = model.layers.attention.tokens_of_a_state
  return worth - prompt if worth >= prompt else None


def _new_cache(model: Transformer, rows: int, prompt: int, total: int) -> Cache:
  """Keys and values for all tokens, or as many as a state is worth; a state if the prompt is longer than that."""
  slots = total
  if model.config.variant != "softmax":
    slots = min(total, model.layers.attention.tokens_of_a_state)
    if prompt > slots:
      return model.init_cache(rows)
  return model.init_cache(rows, slots, keep_keys=True)


def _read_prompts(
  model: Transformer, prompts: list[Int[np.ndarray, "_"]], cache: Cache
) -> tuple[Float[Array, "B V"], Cache]:
  """The logits after each prompt. Shorter ones are padded at their end, which leaves no trace in a cache."""
  lengths = np.asarray([len(prompt) for prompt in prompts])
  longest = int(lengths.max())
  piece = min(_PIECE, longest)
  tokens = np.zeros((len(prompts), -(-longest // piece) * piece), np.int32)
  for row, prompt in zip(tokens, prompts, strict=True):
    row[: len(prompt)] = prompt
  segments = np.where(np.arange(tokens.shape[1]) < lengths[:, None], 0, -1).astype(np.int32)
  hidden = jnp.zeros((len(prompts), model.config.d_model), jnp.dtype(model.config.dtype))
  for start in range(0, tokens.shape[1], piece):
    part = (slice(None), slice(start, start + piece))
    hidden, cache = _prefill(model, cache, tokens[part], segments[part], (lengths - 1 - start).astype(np.int32), hidden)
  return _logits(model, hidden), cache


@functools.partial(jax.jit, donate_argnums=1)
def _prefill(
  model: Transformer,
  cache: Cache,
  tokens: Int[Array, "B t"],
  segments: Int[Array, "B t"],
  last: Int[Array, "B"],
  hidden: Float[Array, "B d"],
) -> tuple[Float[Array, "B d"], Cache]:
  """Reads a piece; takes over the hidden state of the rows whose last token is in it."""
  found, cache = model.prefill_hidden(tokens, cache, segments)
  here = (last >= 0) & (last < tokens.shape[1])
  chosen = jnp.take_along_axis(found, jnp.clip(last, 0, tokens.shape[1] - 1)[:, None, None], axis=1)[:, 0]
  return jnp.where(here[:, None], chosen, hidden), cache


@jax.jit
def _logits(model: Transformer, hidden: Float[Array, "B d"]) -> Float[Array, "B V"]:
  return model.logits(hidden)


@functools.partial(jax.jit, donate_argnums=2)
def _step(model: Transformer, token: Int[Array, "B"], cache: Cache) -> tuple[Float[Array, "B V"], Cache]:
  return model.step(token, cache)


@jax.jit
def _fold(model: Transformer, cache: KeyCache) -> Cache:
  return model.fold(cache)


@jax.jit
def _draw(
  logits: Float[Array, "B V"],
  keys: Array,
  number: int | Array,
  temperature: Float[Array, ""],
  top_k: Int[Array, ""],
  top_p: Float[Array, ""],
) -> tuple[Int[Array, "B"], Float[Array, "B"]]:
  """Draws each row's token number `number`."""
  left = likeliest(logits / jnp.maximum(temperature, 1e-6), top_k, top_p)
  drawn = jax.vmap(lambda key, row: jax.random.categorical(jax.random.fold_in(key, number), row))(keys, left)
  token = jnp.where(temperature > 0, drawn, jnp.argmax(logits, axis=-1))
  return token, jnp.take_along_axis(jax.nn.log_softmax(logits), token[:, None], axis=-1)[:, 0]


def likeliest(logits: Float[Array, "B V"], top_k: Int[Array, ""], top_p: Float[Array, ""]) -> Float[Array, "B V"]:
  """The logits, with PADDED_LOGIT where a token is not among the `top_k`, or not in the first `top_p` of probability.

  The likeliest token is always among them, and so is every one that is exactly as likely as the last of them.
  """
  ordered = jnp.sort(logits, axis=-1, descending=True)
  size = logits.shape[-1]
  probability = jax.nn.softmax(jnp.where(jnp.arange(size) < jnp.where(top_k > 0, top_k, size), ordered, -jnp.inf))
  before = jnp.cumsum(probability, axis=-1) - probability
  kept = jnp.sum(((before < top_p) | (top_p >= 1)) & (probability > 0), axis=-1, keepdims=True)
  smallest = jnp.take_along_axis(ordered, jnp.maximum(kept - 1, 0), axis=-1)
  return jnp.where(logits >= smallest, logits, PADDED_LOGIT)
