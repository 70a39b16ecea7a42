"""The loss, a block of positions at a time: all logits of a batch of 524,288 tokens would take 105 GB."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from csympow.model import Transformer
from csympow.sharding import Layout

_LOGITS_AT_ONCE = 2**26  # numbers, on each device


class Loss(NamedTuple):
  """Sums over the positions that have a target."""

  nll: Float[Array, ""]  # nats
  z: Float[Array, ""]  # squared log normalisers


def token_losses(
  logits: Float[Array, "*lead V"], targets: Int[Array, "*lead"]
) -> tuple[Float[Array, "*lead"], Float[Array, "*lead"]]:
  """-log p of each target in nats, 0 where it is negative, and the log normaliser there."""
  valid = targets >= 0
  log_normaliser = jax.nn.logsumexp(logits, axis=-1)
  found = jnp.take_along_axis(logits, jnp.maximum(targets, 0)[..., None], axis=-1)[..., 0]
  return jnp.where(valid, log_normaliser - found, 0.0), jnp.where(valid, log_normaliser, 0.0)


def cross_entropy(
  model: Transformer, hidden: Float[Array, "B T d_model"], targets: Int[Array, "B T"], layout: Layout | None
) -> Loss:
  """The summed loss of a batch; logits are recomputed in the backward pass.

  Positions are cut so that each block holds the same share of every device's part of the sequence.
  """
  batch, time = targets.shape
  shards = 1 if layout is None else layout.context_shards
  block = _block(batch, time // shards, model.config.padded_vocab_size, layout)

  def cut(x: Array) -> Array:
    return jnp.moveaxis(x.reshape(batch, shards, -1, block, *x.shape[2:]), 2, 0)

  @jax.checkpoint
  def one(total: Loss, x: tuple[Array, Array]) -> tuple[Loss, None]:
    logits = model.logits(x[0])
    if layout is not None:
      logits = layout.constrain(logits, "batch", "time", None, "vocab")
    nll, log_normaliser = token_losses(logits, x[1])
    return Loss(total.nll + nll.sum(), total.z + jnp.sum(log_normaliser**2)), None

  zero = jnp.zeros((), jnp.float32)
  return lax.scan(one, Loss(zero, zero), (cut(hidden), cut(targets)))[0]


def _block(batch: int, time: int, vocab: int, layout: Layout | None) -> int:
  """The longest block of positions that divides the time and whose logits fit."""
  if layout is not None:
    shape = layout.sharding("batch", None, "vocab").shard_shape((batch, 1, vocab))
    batch, vocab = shape[0], shape[2]
  most = max(1, _LOGITS_AT_ONCE // (batch * vocab))
  return max(n for n in range(1, min(time, most) + 1) if time % n == 0)
