"""One small model of the recall experiment: trained at all learning rates at once, then asked.

The rates are a mapped axis: one program for all of them, and one for each length of sequence there is.
"""

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from csympow.config import Config, OptimizerConfig
from csympow.evaluate.curves import standard_error
from csympow.evaluate.mqar import Examples, Setting, examples
from csympow.evaluate.recall_config import RecallConfig
from csympow.model import ModelConfig, Transformer
from csympow.train.loss import token_losses
from csympow.train.optimizer import make_optimizer

TRAIN, TEST, ORDER = range(3)  # random streams
_TOKENS_AT_ONCE = 2**16  # of a test batch, over all rates
_B2 = 0.95  # of Adam: few steps, whose gradients soon change


class Answers(NamedTuple):
  """What the models of all rates made of the test sequences of one setting.

  Attributes:
    accuracy: the share of queries answered rightly.
    error: its standard error over sequences.
    returned: the accuracy of the keys that had another value before; NaN where there are none.
  """

  accuracy: Float[np.ndarray, "rates"]
  error: Float[np.ndarray, "rates"]
  returned: Float[np.ndarray, "rates"]


class Batch(NamedTuple):
  """Sequences of one length, with room for the queries of any setting of that length."""

  tokens: Int[np.ndarray, "B T"]
  positions: Int[np.ndarray, "B K"]
  values: Int[np.ndarray, "B K"]  # -1 where nothing is asked

  @property
  def real_tokens(self) -> int:
    """Tokens, of rows that are no padding."""
    return int(np.sum(self.values[:, 0] >= 0)) * self.tokens.shape[1]


class Learner:
  """The models of one shape at all learning rates.

  `check` is called between steps with the tokens done since the last time; what it raises ends the work.
  """

  def __init__(self, shape: ModelConfig, config: RecallConfig, seed: int, check: Callable[[int], None]) -> None:
    self.config, self._seed, self._check = config, seed, check
    settings = OptimizerConfig(name="adamw", b2=_B2, weight_decay=config.weight_decay, clip_norm=config.clip_norm)
    self._directions = make_optimizer(Config(optimizer=settings))
    self._graphdef = nnx.split(nnx.eval_shape(lambda: Transformer(shape, rngs=nnx.Rngs(0))))[0]
    self._parameters, self._optimizer = jax.jit(functools.partial(self._init, shape))()
    self._step = jax.jit(jax.vmap(self._update, in_axes=(0, 0, 0, None)), donate_argnums=(0, 1))
    self._answer = jax.jit(jax.vmap(self._right, in_axes=(0, None)))

  def train(self) -> Float[np.ndarray, "rates"]:
    """Trains to the end; returns the mean loss of the last tenth of the steps, for each rate."""
    config = self.config
    mix = config.settings(config.train)
    sets = [examples(setting, config.vocab_size, (self._seed, TRAIN, i)) for i, setting in enumerate(mix)]
    total = config.epochs * sum(-(-setting.examples // config.batch) for setting in mix)
    room = _room(mix)
    last: list[Array] = []
    order = np.random.default_rng((self._seed, ORDER))
    batches = (batch for _ in range(config.epochs) for batch in _epoch(sets, config.batch, room, order))
    for step, batch in enumerate(batches):
      rates = np.array(config.rates, np.float32) * _schedule(step, total, config.warmup)
      self._parameters, self._optimizer, loss = self._step(self._parameters, self._optimizer, rates, batch)
      if step >= min(0.9 * total, total - 1):
        last.append(loss)
      if step % 16 == 0:
        jax.block_until_ready(loss)  # no more than a few steps ahead of the device
      self._check(batch.real_tokens)
    return np.mean(jax.device_get(last), axis=0)

  def test(self) -> list[Answers]:
    """What the trained models know, setting by setting of the test list."""
    config = self.config
    mix = config.settings(config.test)
    room = _room(mix)
    found = []
    for i, setting in enumerate(mix):
      asked = examples(setting, config.vocab_size, (self._seed, TEST, i))
      most = max(other.examples for other in mix if other.length == setting.length)
      rows = min(most, max(1, _TOKENS_AT_ONCE // (setting.length * len(config.rates))))
      right = []
      for batch in _batches(asked, np.arange(setting.examples), rows, room[setting.length]):
        right.append(np.asarray(self._answer(self._parameters, batch)))
        self._check(batch.real_tokens)
      by_query = np.concatenate(right, axis=1)[:, : setting.examples, : setting.keys]
      found.append(_summary(by_query, asked.returned))
    return found

  def _init(self, shape: ModelConfig) -> tuple[Any, Any]:
    one = nnx.to_pure_dict(nnx.split(Transformer(shape, rngs=nnx.Rngs(self._seed)))[1])
    parameters = jax.tree.map(lambda x: jnp.repeat(x[None], len(self.config.rates), axis=0), one)
    return parameters, jax.vmap(self._directions.init)(parameters)

  def _update(self, parameters: Any, optimizer: Any, rate: Array, batch: Batch) -> tuple[Any, Any, Array]:
    def mean_loss(parameters: Any) -> Array:
      nll, _ = token_losses(self._logits(parameters, batch), jnp.asarray(batch.values))
      return nll.sum() / jnp.maximum(jnp.sum(batch.values >= 0), 1)

    loss, gradients = jax.value_and_grad(mean_loss)(parameters)
    directions, optimizer = self._directions.update(gradients, optimizer, parameters)
    return jax.tree.map(lambda x, d: x - rate * d, parameters, directions), optimizer, loss

  def _right(self, parameters: Any, batch: Batch) -> Bool[Array, "B K"]:
    return jnp.argmax(self._logits(parameters, batch), axis=-1) == batch.values

  def _logits(self, parameters: Any, batch: Batch) -> Float[Array, "B K V"]:
    """At the queries only: they are few, and the vocabulary is most of a small model's work."""
    model = nnx.merge(self._graphdef, parameters)
    hidden = model.hidden(jnp.asarray(batch.tokens))
    return model.logits(jnp.take_along_axis(hidden, batch.positions[..., None], axis=1))


def tokens_of(config: RecallConfig) -> int:
  """How many tokens pass through a model, in training and test."""
  return sum(
    times * length * count
    for times, mix in ((config.epochs, config.train), (1, config.test))
    for length, _, count in mix
  )


def _schedule(step: int, total: int, warmup: float) -> float:
  """Up in a line, down to 0 by a cosine."""
  rise = max(1.0, warmup * total)
  fall = max(0.0, (step - rise) / max(1.0, total - rise))
  return min(1.0, (step + 1) / rise) * 0.5 * (1 + math.cos(math.pi * fall))


def _room(mix: list[Setting]) -> dict[int, int]:
  """For each length, the most queries that any of its settings asks: one program serves them all."""
  return {s.length: max(other.keys for other in mix if other.length == s.length) for s in mix}


def _epoch(sets: list[Examples], rows: int, room: dict[int, int], order: np.random.Generator) -> Iterator[Batch]:
  """Every example once, in batches of one setting each, all in random order."""
  waiting = [_batches(part, order.permutation(len(part.tokens)), rows, room[part.tokens.shape[1]]) for part in sets]
  turns = np.repeat(np.arange(len(sets)), [-(-len(part.tokens) // rows) for part in sets])
  for turn in order.permutation(turns):
    yield next(waiting[turn])


def _batches(part: Examples, order: Int[np.ndarray, "N"], rows: int, room: int) -> Iterator[Batch]:
  for first in range(0, len(order), rows):
    chosen = order[first : first + rows]
    missing = (0, rows - len(chosen))
    queries = (missing, (0, room - part.values.shape[1]))
    yield Batch(
      np.pad(part.tokens[chosen], (missing, (0, 0))),
      np.pad(part.positions[chosen], queries),
      np.pad(part.values[chosen], queries, constant_values=-1),
    )


def _summary(right: Bool[np.ndarray, "rates N keys"], returned: Bool[np.ndarray, "N keys"]) -> Answers:
  by_sequence = right.mean(axis=2)
  of_returned = right[:, returned].mean(axis=1) if returned.any() else np.full(len(right), np.nan)
  return Answers(by_sequence.mean(axis=1), standard_error(by_sequence.T), of_returned)
