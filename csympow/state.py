"""The state of the recurrence: everything that the past leaves to the future, of one size whatever the length."""

from typing import Any, NamedTuple

import jax
from jax import lax
from jaxtyping import Array, Float, Integer


class State(NamedTuple):
  """What a call of `prefill` or `step` hands to the next.

  Attributes:
    S: the sum of phi(k) v^T, discounted by the gates; features in the order of `symmetric_power`.
    Z: the sum of phi(k), discounted likewise: the normaliser.
    phase: the rotation reached, in turns, in [0, 1).
  """

  S: Float[Array, "B H D dv"]
  Z: Float[Array, "B H D"]
  phase: Float[Array, "B H r"]


def of_layer(cache: Any, layer: Integer[Array, ""]) -> Any:
  """One layer's part of states, or of caches of another kind, stacked along a first axis.

  The barrier makes it a copy of its own: without it XLA plans to read the part after its update as well, and copies the
  whole stack to be able to.
  """
  part = jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, layer, keepdims=False), cache)
  return lax.optimization_barrier(part)


def with_layer(cache: Any, part: Any, layer: Integer[Array, ""]) -> Any:
  """The stack with another part for that layer."""
  return jax.tree.map(lambda a, b: lax.dynamic_update_index_in_dim(a, b.astype(a.dtype), layer, 0), cache, part)
