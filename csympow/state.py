"""The state of the recurrence: everything that the past leaves to the future, of one size whatever the length."""

from typing import NamedTuple

from jaxtyping import Array, Float


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
