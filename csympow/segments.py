"""Several documents in one row: runs of equal segment ids, and padding."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Integer


def find_runs(segment_ids: Integer[Array, "B T"]) -> tuple[Bool[Array, "B T"], Bool[Array, "B T"]]:
  """Which tokens are no padding, and which of them begin a run other than the row's first.

  Padding (id < 0) counts as absent: a run goes on behind it, and the first run begins behind leading padding. The first
  run is not marked because it may continue a state from before.
  """
  valid = segment_ids >= 0

  def later(left: tuple[Array, Array], right: tuple[Array, Array]) -> tuple[Array, Array]:
    return left[0] | right[0], jnp.where(right[0], right[1], left[1])

  last_valid = lax.associative_scan(later, (valid, segment_ids), axis=1)
  seen, previous = jax.tree.map(lambda x: jnp.pad(x[:, :-1], ((0, 0), (1, 0))), last_valid)
  return valid, valid & seen & (previous != segment_ids)
