"""Several documents in one row: runs of equal segment ids, and padding."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int


def find_runs(segment_ids: Int[Array, "B T"]) -> tuple[Bool[Array, "B T"], Bool[Array, "B T"]]:
  """Which tokens are no padding, and which of them begin a run other than the row's first.

  Padding (id < 0) counts as absent: a run goes on behind it, and the first run begins behind leading padding. The first
  run is not marked because it may continue a state from before.
  """
  valid = segment_ids >= 0
  last_id = lax.associative_scan(lambda left, right: jnp.where(right >= 0, right, left), segment_ids, axis=1)
  previous = jnp.concatenate([jnp.full_like(last_id[:, :1], -1), last_id[:, :-1]], axis=1)
  return valid, valid & (previous >= 0) & (previous != segment_ids)
