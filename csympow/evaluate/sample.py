"""Text from a model: the prompt enters the state at once, then one token at a time."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int

from csympow.model import Transformer
from csympow.nn import Cache


@functools.partial(jax.jit, static_argnames=("count",))
def generate(
  model: Transformer, prompt: Int[Array, "B T"], count: int, temperature: float | Array, key: Array
) -> Int[Array, "B count"]:
  """Continues each prompt by `count` tokens; a temperature of 0 takes the likeliest."""
  cache = model.init_cache(prompt.shape[0], prompt.shape[1] + count)
  hidden, cache = model.prefill_hidden(prompt, cache)
  logits = model.logits(hidden[:, -1])

  def pick(logits: Array, key: Array) -> Array:
    drawn = jax.random.categorical(key, logits / jnp.maximum(temperature, 1e-6))
    return jnp.where(temperature > 0, drawn, jnp.argmax(logits, axis=-1))

  def advance(carry: tuple[Array, Cache], key: Array) -> tuple[tuple[Array, Cache], Array]:
    logits, cache = carry
    token = pick(logits, key)
    logits, cache = model.step(token, cache)
    return (logits, cache), token

  _, tokens = lax.scan(advance, (logits, cache), jax.random.split(key, count))
  return jnp.swapaxes(tokens, 0, 1)


def continuation(model: Transformer, prompt: np.ndarray, count: int, temperature: float, seed: int) -> np.ndarray:
  """The tokens after one prompt."""
  tokens = generate(model, jnp.asarray(prompt, jnp.int32)[None], count, temperature, jax.random.key(seed))
  return np.asarray(tokens[0])
