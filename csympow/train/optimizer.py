"""The optimizer of a config, by optax."""

from typing import Any

import jax
import optax

from csympow.config import Config


def learning_rate(config: Config) -> optax.Schedule:
  """The learning rate as a function of the step."""
  settings = config.optimizer
  peak, last = settings.learning_rate, settings.learning_rate * settings.final_share
  after = config.steps - settings.warmup_steps
  if settings.schedule == "cosine":
    main = optax.cosine_decay_schedule(peak, max(1, after), alpha=settings.final_share)
  elif settings.schedule == "wsd":
    decay = optax.linear_schedule(peak, last, settings.decay_steps)
    main = optax.join_schedules([optax.constant_schedule(peak), decay], [after - settings.decay_steps])
  else:
    main = optax.constant_schedule(peak)
  if not settings.warmup_steps:
    return main
  # The first step already moves: a rate of 0 would waste it.
  warmup = optax.linear_schedule(peak / settings.warmup_steps, peak, settings.warmup_steps - 1)
  return optax.join_schedules([warmup, main], [settings.warmup_steps])


def make_optimizer(config: Config) -> optax.GradientTransformation:
  """Clipping, then Adam's direction and weight decay, all but the learning rate.

  The rate is a function of the step, like the data; a count of optax's own would fall behind where steps are skipped.
  """
  settings = config.optimizer
  parts = [] if settings.clip_norm is None else [optax.clip_by_global_norm(settings.clip_norm)]
  parts.append(optax.scale_by_adam(settings.b1, settings.b2, settings.eps))
  if settings.weight_decay:
    parts.append(optax.add_decayed_weights(settings.weight_decay, mask=_matrices))
  return optax.chain(*parts)


def _matrices(parameters: Any) -> Any:
  """What decays: the scales of norms do not."""
  return jax.tree_util.tree_map_with_path(
    lambda path, _: not jax.tree_util.keystr(path, simple=True, separator="/").endswith("scale"), parameters
  )
