"""The state of a run, and the step that moves it."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from csympow.config import Config
from csympow.data.loader import Batch
from csympow.model import Transformer
from csympow.sharding import Layout
from csympow.train.loss import Loss, cross_entropy
from csympow.train.optimizer import learning_rate, make_optimizer

_MEMORY_OF_LOSS = 0.98  # of the running mean that spikes are measured by


class Guard(NamedTuple):
  """What watches over the updates. Once halted, no step changes anything: the host may notice late."""

  halted: Bool[Array, ""]
  skipped: Int[Array, ""]  # in all
  in_a_row: Int[Array, ""]
  mean_loss: Float[Array, ""]


class TrainState(NamedTuple):
  """Everything that a checkpoint holds. The order of the data is a function of the step."""

  step: Int[Array, ""]
  parameters: Any
  optimizer: Any
  guard: Guard


class Metrics(NamedTuple):
  """What a step tells; scalars."""

  loss: Array
  grad_norm: Array
  lr: Array
  bad: Array  # whether this step was not taken
  spike: Array  # whether that was for a spike of the loss
  skipped: Array
  halted: Array
  stop: Array  # whether any process was asked to stop when it began


class Program:
  """The functions of one config on one layout: `init`, `step`, `losses`, each pure and ready to compile."""

  def __init__(self, config: Config, layout: Layout | None) -> None:
    self.config, self.layout = config, layout
    self.optimizer = make_optimizer(config)
    self.learning_rate = learning_rate(config)
    make = functools.partial(Transformer, config.model, layout=layout)
    self.graphdef = nnx.split(nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0))))[0]
    self._make = make

  def init(self) -> TrainState:
    """The state before the first step."""
    parameters = nnx.to_pure_dict(nnx.split(self._make(rngs=nnx.Rngs(self.config.seed)))[1])
    guard = Guard(jnp.zeros((), bool), jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32), jnp.zeros((), jnp.float32))
    return TrainState(jnp.zeros((), jnp.int32), parameters, self.optimizer.init(parameters), guard)

  def abstract_state(self) -> TrainState:
    """Shapes, types and shardings of the state."""
    state: TrainState = jax.eval_shape(self.init)
    if self.layout is None:
      device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
      shardings = jax.tree.map(lambda _: device, state)
    else:
      shardings = self.layout.parameter_shardings(state)
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, shardings)

  def model(self, parameters: Any) -> Transformer:
    """The model with these parameters."""
    return nnx.merge(self.graphdef, parameters)

  def summed_loss(self, parameters: Any, batch: Batch) -> Loss:
    """The loss summed over a batch's targets."""
    if self.layout is not None:
      # Gathered here, once, and not for every block of the loss.
      table = self.layout.constrain(parameters["embedding"]["embedding"], "vocab", None)
      parameters = parameters | {"embedding": {"embedding": table}}
    model = self.model(parameters)
    hidden = model.hidden(batch.tokens, batch.segment_ids)
    return cross_entropy(model, hidden, batch.targets, self.layout, self.config.optimizer.z_loss)

  def step(self, state: TrainState, batch: Batch, stop: Int[Array, "devices"]) -> tuple[TrainState, Metrics]:
    """One update, or none if the loss or the gradient is bad."""
    config = self.config
    loss, gradients = self._gradients(state.parameters, batch)
    grad_norm = optax.tree.norm(gradients)
    rate = jnp.asarray(self.learning_rate(state.step), jnp.float32)
    directions, optimizer = self.optimizer.update(gradients, state.optimizer, state.parameters)
    parameters = jax.tree.map(lambda x, d: (x - rate * d).astype(x.dtype), state.parameters, directions)

    finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
    spike = jnp.zeros((), bool)
    if config.guard.spike is not None:
      spike = (state.step >= config.guard.spike_warmup) & (loss > config.guard.spike * state.guard.mean_loss)
      spike &= state.guard.mean_loss > 0
    bad = ~finite | spike
    in_a_row = jnp.where(bad, state.guard.in_a_row + 1, 0)
    halted = state.guard.halted | (in_a_row > config.guard.skip_limit)
    accepted = ~bad & ~halted
    before = jnp.where(state.guard.mean_loss > 0, state.guard.mean_loss, loss)
    mean = _MEMORY_OF_LOSS * before + (1 - _MEMORY_OF_LOSS) * loss
    new = TrainState(
      step=jnp.where(halted, state.step, state.step + 1),
      parameters=_where(accepted, parameters, state.parameters),
      optimizer=_where(accepted, optimizer, state.optimizer),
      guard=Guard(
        halted=halted,
        # A step that was not taken because the run had halted is no skip.
        skipped=state.guard.skipped + (bad & ~state.guard.halted),
        in_a_row=jnp.where(state.guard.halted, state.guard.in_a_row, in_a_row),
        mean_loss=jnp.where(accepted, mean, state.guard.mean_loss),
      ),
    )
    return new, Metrics(loss, grad_norm, rate, bad, spike & finite, new.guard.skipped, halted, jnp.max(stop))

  def _gradients(self, parameters: Any, batch: Batch) -> tuple[Float[Array, ""], Any]:
    """The mean loss over the batch's targets and its gradient, part after part of the batch."""
    count = jnp.maximum(jnp.sum(batch.targets >= 0), 1).astype(jnp.float32)

    def loss_of(parameters: Any, part: Batch) -> tuple[Float[Array, ""], Float[Array, ""]]:
      loss = self.summed_loss(parameters, part)
      return loss.objective / count, loss.nll / count

    differentiate = jax.grad(loss_of, has_aux=True)
    if self.config.accumulation == 1:
      gradients, loss = differentiate(parameters, batch)
      return loss, gradients

    def add(total: tuple[Array, Any], part: Batch) -> tuple[tuple[Array, Any], None]:
      gradients, loss = differentiate(parameters, part)
      return (total[0] + loss, jax.tree.map(jnp.add, total[1], gradients)), None

    zeros = (jnp.zeros((), jnp.float32), jax.tree.map(jnp.zeros_like, parameters))
    (loss, gradients), _ = lax.scan(add, zeros, jax.tree.map(self._parts, batch))
    return loss, gradients

  def _parts(self, x: Int[Array, "B T"]) -> Int[Array, "n b T"]:
    """Every n-th row makes a part, so that each device's rows are in all parts and none has to move."""
    parts = jnp.moveaxis(x.reshape(-1, self.config.accumulation, x.shape[-1]), 1, 0)
    return parts if self.layout is None else self.layout.constrain(parts, None, "batch", "time")


def _where(condition: Bool[Array, ""], new: Any, old: Any) -> Any:
  return jax.tree.map(lambda a, b: jnp.where(condition, a, b), new, old)
