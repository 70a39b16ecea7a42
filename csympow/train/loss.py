"""The loss, a block of positions at a time: all logits of a batch of 524,288 tokens would take 105 GB.

    nll = log sum_w exp(l_w) - l_target          dl = softmax(l) - [w = target]

A block's gradient is made while its logits are there, so that none is computed twice: the backward pass has but a
number to multiply it by.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from csympow.model import PADDED_LOGIT, Transformer
from csympow.sharding import Layout

_LOGITS_AT_ONCE = 2**26  # numbers, on each device


class Loss(NamedTuple):
  """Sums over the positions that have a target."""

  objective: Float[Array, ""]  # nll, and the weighted squares of the log normalisers
  nll: Float[Array, ""]  # nats; to be looked at, for it has no gradient


def token_losses(
  logits: Float[Array, "*lead V"], targets: Int[Array, "*lead"]
) -> tuple[Float[Array, "*lead"], Float[Array, "*lead"]]:
  """-log p of each target in nats, 0 where it is negative, and the log normaliser there."""
  valid = targets >= 0
  log_normaliser = jax.nn.logsumexp(logits, axis=-1)
  nll = log_normaliser - _of_targets(logits, targets)
  return jnp.where(valid, nll, 0.0), jnp.where(valid, log_normaliser, 0.0)


def _of_targets(logits: Float[Array, "*lead V"], targets: Int[Array, "*lead"]) -> Float[Array, "*lead"]:
  return jnp.take_along_axis(logits, jnp.maximum(targets, 0)[..., None], axis=-1)[..., 0]


def cross_entropy(
  model: Transformer,
  hidden: Float[Array, "B T d_model"],
  targets: Int[Array, "B T"],
  layout: Layout | None,
  z_loss: float = 0.0,
) -> Loss:
  """The summed loss of a batch.

  Positions are cut so that each block holds the same share of every device's part of the sequence.
  """
  batch, time = targets.shape
  shards = 1 if layout is None else layout.context_shards
  block = _block(batch, time // shards, model.config.padded_vocab_size, layout)

  def cut(x: Array) -> Array:
    return jnp.moveaxis(x.reshape(batch, shards, -1, block, *x.shape[2:]), 2, 0)

  table = model.embedding.embedding[...]
  how = _How(model.config.vocab_size, z_loss, layout, table.dtype)
  loss = _summed(cut(hidden), table, cut(targets), how)
  return loss._replace(nll=lax.stop_gradient(loss.nll))


class _How(NamedTuple):
  """What the loss depends on beside arrays."""

  vocab_size: int  # without padding
  z_loss: float
  layout: Layout | None
  dtype: DTypeLike  # of the embedding


class _Gradients(NamedTuple):
  """Of the objective; the embedding's is not rounded before it is scaled."""

  hidden: Float[Array, "n B s t d"]
  embedding: Float[Array, "V d"]


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _summed(
  hidden: Float[Array, "n B s t d"], embedding: Float[Array, "V d"], targets: Int[Array, "n B s t"], how: _How
) -> Loss:
  return _forward(hidden, embedding, targets, how, save=False)[0]


def _forward(
  hidden: Float[Array, "n B s t d"],
  embedding: Float[Array, "V d"],
  targets: Int[Array, "n B s t"],
  how: _How,
  save: bool = True,
) -> tuple[Loss, _Gradients | None]:
  table, token = embedding.astype(hidden.dtype), jnp.arange(len(embedding))
  real = token < how.vocab_size
  sums = _Sums(how.layout, hidden.shape[1])

  def add(
    total: tuple[Loss, Array | None], x: tuple[Array, Array]
  ) -> tuple[tuple[Loss, Array | None], Float[Array, "B s t d"] | None]:
    (loss, dembedding), (hidden, targets) = total, x
    logits = jnp.einsum("...d,vd->...v", hidden, table, preferred_element_type=jnp.float32)
    if how.layout is not None:
      logits = how.layout.constrain(logits, "batch", "time", None, "vocab")
    valid, chosen = targets >= 0, token == targets[..., None]
    log_normaliser = jax.nn.logsumexp(logits, axis=-1, where=real)
    target = jnp.where(targets < how.vocab_size, _of_targets(logits, targets), PADDED_LOGIT)
    nll = jnp.where(valid, log_normaliser - target, 0.0)
    z = jnp.where(valid, how.z_loss * log_normaliser**2, 0.0)
    loss = Loss(loss.objective + jnp.sum(nll + z), loss.nll + jnp.sum(nll))
    if dembedding is None:
      return (loss, None), None
    slope = 1 + 2 * how.z_loss * log_normaliser[..., None]
    dlogits = slope * jnp.exp(logits - log_normaliser[..., None]) - chosen
    # Rounded, for left in float32 it would make both products float32 ones.
    dlogits = jnp.where(real & valid[..., None], dlogits, 0.0).astype(hidden.dtype)
    return (loss, sums.add(dembedding, dlogits, hidden)), jnp.einsum("...v,vd->...d", dlogits, table)

  zero = jnp.zeros((), jnp.float32)
  start = Loss(zero, zero), sums.empty(embedding) if save else None
  (loss, dembedding), dhidden = lax.scan(add, start, (hidden, targets))
  if dembedding is None or dhidden is None:
    return loss, None
  return loss, _Gradients(dhidden, sums.total(dembedding))


def _backward(how: _How, gradients: _Gradients, cotangent: Loss) -> tuple[Array, Array, None]:
  dhidden, dembedding = (cotangent.objective * x for x in gradients)
  return dhidden.astype(gradients.hidden.dtype), dembedding.astype(how.dtype), None


_summed.defvjp(_forward, _backward)


class _Sums(NamedTuple):
  """The embedding's gradient while it is added up, in float32: on a mesh each part of the batch and of the sequence for
  itself, r s V d, so that they meet once and not with every block.
  """

  layout: Layout | None
  rows: int

  def empty(self, embedding: Float[Array, "V d"]) -> Float[Array, "*parts V d"]:
    """Nothing yet."""
    if self.layout is None:
      return jnp.zeros(embedding.shape, jnp.float32)
    return self._laid_out(jnp.zeros((self._parts, self.layout.context_shards, *embedding.shape), jnp.float32))

  def add(
    self, total: Float[Array, "*parts V d"], dlogits: Float[Array, "B s t V"], hidden: Float[Array, "B s t d"]
  ) -> Float[Array, "*parts V d"]:
    """What another block gives, too."""
    if self.layout is None:
      return total + jnp.einsum("bstv,bstd->vd", dlogits, hidden, preferred_element_type=jnp.float32)
    dlogits, hidden = (x.reshape(self._parts, -1, *x.shape[1:]) for x in (dlogits, hidden))
    added = jnp.einsum("rbstv,rbstd->rsvd", dlogits, hidden, preferred_element_type=jnp.float32)
    return self._laid_out(total + added)

  def total(self, parts: Float[Array, "*parts V d"]) -> Float[Array, "V d"]:
    """All of it."""
    return parts if self.layout is None else jnp.sum(parts, axis=(0, 1))

  @property
  def _parts(self) -> int:
    assert self.layout is not None
    return self.rows // self.layout.sharding("batch").shard_shape((self.rows,))[0]

  def _laid_out(self, parts: Float[Array, "r s V d"]) -> Float[Array, "r s V d"]:
    assert self.layout is not None
    return self.layout.constrain(parts, "batch", "time", "vocab", None)


def _block(batch: int, time: int, vocab: int, layout: Layout | None) -> int:
  """The longest block of positions that divides the time and whose logits fit."""
  if layout is not None:
    shape = layout.sharding("batch", None, "vocab").shard_shape((batch, 1, vocab))
    batch, vocab = shape[0], shape[2]
  most = max(1, _LOGITS_AT_ONCE // (batch * vocab))
  return max(n for n in range(1, min(time, most) + 1) if time % n == 0)
