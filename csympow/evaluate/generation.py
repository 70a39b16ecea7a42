"""Text from a model, token by token: prompts enter the cache in pieces, then every step adds one token to each.

The cache is the state, or keys and values for as long as these are fewer bytes than the state, which they are then
folded into (`csympow.keys`).
"""

import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from csympow.evaluate.caches import Shape, empty_cache, shape_for
from csympow.evaluate.reading import read_prompts
from csympow.keys import KeyCache
from csympow.model import PADDED_LOGIT, Transformer
from csympow.nn import Cache

_LOGIT_BYTES = 2**28  # of a step, of which sorting takes several times as many


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


class Room(NamedTuple):
  """What the programs are compiled for: so many prompts, of at most so many tokens."""

  rows: int
  prompt: int


class Drawn(NamedTuple):
  """One more token of every row."""

  tokens: Int[np.ndarray, "B"]
  log_p: Float[np.ndarray, "B"]  # by the model, before temperature, top_k and top_p


def generate(
  model: Transformer,
  prompts: list[Int[np.ndarray, "_"]],
  count: int,
  sampling: Sampling,
  *,
  room: Room | None = None,
  first_row: int = 0,
  written: Int[np.ndarray, "n B"] | None = None,
  check: Callable[[int], None] = lambda done: None,
) -> Iterator[Drawn]:
  """Continues each of some prompts, of any lengths from 1 on, by `count` tokens, which come as they are drawn.

  Args:
    model: the model.
    prompts: what to continue.
    count: tokens for each.
    sampling: how they are drawn.
    room: what to compile for, so that other calls find it compiled; None: just these prompts.
    first_row: the number of the first prompt among all that draw by this seed.
    written: tokens of each prompt that were drawn before, and are not drawn again.
    check: called before each piece of the prompts with the tokens that it has.
  """
  done = 0 if written is None else len(written)
  if written is not None and done:
    prompts = [np.concatenate([prompt, more]) for prompt, more in zip(prompts, written.T, strict=True)]
  longest = max(map(len, prompts))
  rows, most = room or Room(len(prompts), longest - done)
  shape = _shape(model, rows, most + done, most + count)
  logits, cache = read_prompts(model, prompts, empty_cache(model, shape), shape, check)
  keys = jax.vmap(functools.partial(jax.random.fold_in, jax.random.key(sampling.seed)))(first_row + jnp.arange(rows))
  how = (
    jnp.float32(sampling.temperature),
    jnp.int32(min(sampling.top_k, model.config.vocab_size)),
    jnp.float32(sampling.top_p),
  )
  for number in range(done, count):
    token, log_p = _draw(logits, keys, number, *how)
    if number + 1 < count:
      if isinstance(cache, KeyCache) and longest + number - done == cache.k.shape[2]:
        cache = _fold(model, cache)
      logits, cache = _step(model, token, cache)  # under way while the token is looked at
    yield Drawn(np.asarray(token)[: len(prompts)], np.asarray(log_p)[: len(prompts)])


def room_for(model: Transformer, prompts: list[Int[np.ndarray, "_"]], count: int) -> Room:
  """How many of some prompts are best continued side by side, by so many tokens."""
  logits = max(1, _LOGIT_BYTES // (4 * model.config.padded_vocab_size))
  longest = max(map(len, prompts))
  return Room(shape_for(model, longest, min(len(prompts), logits), count).rows, longest)


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


def _shape(model: Transformer, rows: int, prompt: int, total: int) -> Shape:
  """Keys and values for all tokens, or as many as a state is worth; a state if the prompt is longer than that."""
  shape = shape_for(model, prompt, 1)._replace(rows=rows, slots=total, keep_keys=True)
  if model.config.variant != "softmax":
    slots = min(total, model.layers.attention.tokens_of_a_state)
    shape = shape._replace(slots=slots, keep_keys=prompt <= slots)
  return shape


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
