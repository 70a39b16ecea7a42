"""Gates: the data-dependent scalar gamma that erases (section 3.1 of the paper).

b_ij, the product of gamma_m over m = j+1..i, is exp(G_i - G_j) with G the running total of log gamma. Only differences
that are <= 0 are ever exponentiated.

A new segment, and a gate of 0, forget everything before them. Both are written as one gate of RESET: exp of anything at
or below it is exactly 0 in float32, so no later stage needs a mask, and totals stay small enough for their differences
to be exact.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from csympow.prefix import Total

RESET = -128.0


def effective_log_gate(
  log_gate: Float[Array, "B T H"],
  valid: Bool[Array, "B T"] | None,
  starts: Bool[Array, "B T"] | None,
) -> Float[Array, "B T H"]:
  """The log gates with resets at new segments, none at padding, and nothing below RESET."""
  if starts is not None:
    log_gate = jnp.where(starts[..., None], RESET, log_gate)
  if valid is not None:
    log_gate = jnp.where(valid[..., None], log_gate, 0.0)
  return jnp.maximum(log_gate, RESET)


def memory_length(mean_log_gate: Float[Array, "..."]) -> Float[Array, "..."]:
  """The tokens after which a memory has faded to 1/e, at a gate that is constant: -1 / log gamma."""
  return 1 / jnp.maximum(-mean_log_gate, 1e-9)


class Decay(NamedTuple):
  """The discounts of a span of tokens, and the logarithm of the one over the whole span."""

  since_start: Float[Array, "*n B H T 1"]  # from the token before the span to each token
  until_end: Float[Array, "*n B H T 1"]  # from each token to the span's last
  log_across: Float[Array, "*n B H 1 1"]


def decay(G: Total, before: Total) -> Decay:
  """The discounts within a span, from the totals at its tokens (*n B H T 1) and the one just before it (*n B H 1 1)."""
  end = last(G)
  return Decay(jnp.exp(G - before), jnp.exp(end - G), end - before)


def last(G: Total) -> Total:
  """The total at a span's last token."""
  return Total(G.hi[..., -1:, :], G.lo[..., -1:, :])
