"""Which heads ask their states for what rounding has drowned, at p = 2.

A state is read as a sum over all products of two coordinates, and these are rounded, as its numbers are. Where queries
are nearly orthogonal to the keys in it the terms cancel, and what is left may be small beside their rounding,

    noise_i = ROUNDING b_i |q_i|^2 |S| / d          b_i: the discount since the chunk began; |S|: over all its numbers

in which |q_i|^2 / d stands for a product of two coordinates. That is compared with what queries have found, for some of
each head, and if it would be heard in y the head's queries had better read the keys themselves.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from csympow.forms.spans import exact_product, scattered
from kernels_pallas.gpu.state_read import Found

# Of coordinates, their products, values times these, and sums, all to bfloat16: emulated it was 0.7 to 1.4 times this.
ROUNDING = 2.0**-8
AUDIBLE = 4e-3  # of what y is beside the values' centre
_UNIT = 2.0**-9  # of a value is what rounding it may lose
_CHUNKS, _QUERIES = 8, 256  # of so many chunks, and so many queries, or about, a head is judged


class Heard(NamedTuple):
  """What is known of a sequence when its states have been read. Keys are k times scale; gates are counted by chunk."""

  q: Float[Array, "B T Hq d"]
  k: Float[Array, "B T H d"]
  k_scale: Float[Array, "B H T"]
  log_gate: Float[Array, "B H n t"]  # since the chunk began
  found: Found
  squares: Float[Array, "B H n"]  # of all numbers of the states that chunks find, summed
  centre_size: Float[Array, "B H"]  # of the vector that values are less in them
  head_dim: int  # so many of q's coordinates can be other than 0


def faint(x: Heard) -> Bool[Array, "B H"]:
  """Heads whose y, less the centre, would be wrong by more than AUDIBLE."""
  batch, heads, count, chunk = x.log_gate.shape
  group = x.q.shape[2] // heads
  chunks = np.unique(np.linspace(1, count - 1, _CHUNKS).round().astype(np.int32))  # the first one finds no state
  places = scattered(chunk, min(chunk, -(-_QUERIES // len(chunks))))

  def vectors(x: Float[Array, "B T Hx _"]) -> Float[Array, "B m t Hx _"]:
    return x.reshape(batch, count, chunk, *x.shape[2:])[:, chunks].astype(jnp.float32)

  def some_vectors(x: Float[Array, "B T Hq _"]) -> Float[Array, "B m s H g _"]:
    return vectors(x)[:, :, places].reshape(batch, len(chunks), len(places), heads, group, -1)

  def numbers(x: Float[Array, "B Hx T"]) -> Float[Array, "B H gx m t"]:
    return x.reshape(batch, heads, -1, count, chunk)[:, :, :, chunks]

  def square(x: Float[Array, "B m s H g _"]) -> Float[Array, "B H g m s"]:
    return jnp.einsum("bmshgd,bmshgd->bhgms", x, x)

  q, log_gate = some_vectors(x.q), x.log_gate[:, :, None, chunks]
  since_start = jnp.exp(log_gate[..., places])
  state = jnp.sqrt(x.squares[:, :, None, chunks, None])
  noise = ROUNDING / x.head_dim * since_start * square(q) * state

  # Whom the chunk's own keys tell more than the state does need not hear it well.
  scores = exact_product("bmshgd,bmthd->bhgmst", q, vectors(x.k)) * numbers(x.k_scale)[..., None, :]
  between = log_gate[..., places, None] - log_gate[..., None, :]
  discount = jnp.where(np.arange(chunk) <= places[:, None], jnp.exp(jnp.minimum(between, 0.0)), 0.0)
  near = jnp.sum(scores**2 * discount, axis=-1)
  far = jnp.abs(numbers(x.found.normaliser)[..., places])  # negative if it is drowned itself
  share = far / jnp.maximum(far + near, 2.0**-120)

  # Values that are all but the same differ by their own rounding.
  size = jnp.sqrt(square(some_vectors(x.found.numerator))) + _UNIT * x.centre_size[:, :, None, None, None] * far
  error = jnp.minimum(share * noise / jnp.maximum(size, 2.0**-120), 1.0)
  # The mean square of those who ask, and what it may be; of numbers, whatever else there is in the sequence.
  excess = jnp.where((noise > 0) & jnp.isfinite(error), error**2 - AUDIBLE**2, 0.0)
  return jnp.any(jnp.sum(excess, axis=(-2, -1)) > 0, axis=-1)
