"""Prefix sums that keep 48 bits.

Gates and phases are totals over up to a million tokens of which only *differences* matter: b_ij = exp(G_i - G_j), and
the angle between two positions. A float32 total near 1,000 has lost what an error of 1e-5 in a difference needs, so
every total here is an unevaluated sum of two float32s. The error-free additions are made of additions alone: a compiler
that contracts a * b + c into one rounding cannot change them.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float


class Total(NamedTuple):
  """The number hi + lo, with |lo| at most half a unit in the last place of hi."""

  hi: Float[Array, "..."]
  lo: Float[Array, "..."]

  def __sub__(self, other: "Total") -> Float[Array, "..."]:
    """The difference, rounded once: accurate to float32 however large the two totals are."""
    return (self.hi - other.hi) + (self.lo - other.lo)


def two_sum(a: Float[Array, "..."], b: Float[Array, "..."]) -> Total:
  """A + b without error: the rounded sum and what the rounding lost."""
  total = a + b
  b_kept = total - a
  return Total(total, (a - (total - b_kept)) + (b - b_kept))


def _add(left: Total, right: Total) -> Total:
  total, lost = two_sum(left.hi, right.hi)
  return two_sum(total, lost + (left.lo + right.lo))


def prefix_sum(
  x: Float[Array, "B T H"], restarts: Bool[Array, "B T 1"] | None = None, *, reverse: bool = False
) -> Total:
  """The inclusive sum over time, beginning anew at each token where `restarts` is true."""
  start = Total(x, jnp.zeros_like(x))
  if restarts is None:
    return Total(*lax.associative_scan(_add, start, axis=1, reverse=reverse))

  def add_unless_restarted(
    left: tuple[Bool[Array, "..."], Total], right: tuple[Bool[Array, "..."], Total]
  ) -> tuple[Bool[Array, "..."], Total]:
    total = jax.tree.map(lambda new, both: jnp.where(right[0], new, both), right[1], _add(left[1], right[1]))
    return left[0] | right[0], total

  return lax.associative_scan(add_unless_restarted, (restarts, start), axis=1, reverse=reverse)[1]
