"""Which heads ask their states for what rounding has drowned, at p = 2.

A state is read as a sum over all products of two coordinates, and these are rounded, as its numbers are. Where queries
are nearly orthogonal to the keys in it the terms cancel, and what is left may be small beside their rounding,

    noise_i = ROUNDING b_i |q_i|^2 |S| / d          b_i: the discount since the chunk began; |S|: over all its numbers

in which |q_i|^2 / d stands for a product of two coordinates. That is compared with what queries have found, for some of
each head, and if it would be heard in y the head's queries had better read the keys themselves.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from csympow.forms.spans import exact_product, some_of
from kernels_pallas.gpu.state_read import Found

# Of coordinates, their products, values times these, and sums, all to bfloat16: emulated it was 0.7 to 1.4 times this.
ROUNDING = 2.0**-8
AUDIBLE = 4e-3  # of y
_UNIT = 2.0**-9  # of a value is what rounding it may lose


def faint(
  q: Float[Array, "B T Hq d"],
  found: Found,
  since_start: Float[Array, "B Hq T"],
  squares: Float[Array, "B H n"],
  centre: Float[Array, "B H"],
  own: Float[Array, "B H n d d"],
  head_dim: int,
) -> Bool[Array, "B H"]:
  """Heads whose y would be wrong by more than AUDIBLE.

  `squares` are those of the states that chunks find, summed, `centre` the size of what values are less in them, `own`
  the sums of k k^T over each chunk's own keys, as its end sees them; `head_dim` of q's coordinates can be other than 0.
  """
  batch, heads, count = squares.shape

  def some_vectors(x: Float[Array, "B T Hq _"]) -> Float[Array, "B n t H g _"]:
    return some_of(x, 1).astype(jnp.float32).reshape(batch, count, -1, heads, x.shape[2] // heads, x.shape[3])

  def some(x: Float[Array, "B Hq T"]) -> Float[Array, "B H g n t"]:
    return some_of(x, 2).reshape(batch, heads, x.shape[1] // heads, count, -1)

  def square(x: Float[Array, "B n t H g _"]) -> Float[Array, "B H g n t"]:
    return jnp.einsum("bnthgd,bnthgd->bhgnt", x, x)

  vectors = some_vectors(q)
  state = jnp.sqrt(squares)[:, :, None, :, None]
  noise = ROUNDING / head_dim * some(since_start) * square(vectors) * state
  # Whom the chunk's own keys tell more than the state does need not hear it well.
  far, near = some(found.normaliser), exact_product("bnthgd,bhnde,bnthge->bhgnt", vectors, own, vectors)
  share = jnp.clip(far / (far + jnp.maximum(near, 0.0)), 0.0, 1.0)
  # Values that are all but the same differ by their own rounding.
  floor = _UNIT * centre[:, :, None, None, None] * jnp.maximum(far, 0.0)
  error = jnp.minimum(share * noise / (jnp.sqrt(square(some_vectors(found.numerator))) + floor), 1.0)
  # The mean square of those who ask, and what it may be.
  excess = jnp.sum(jnp.where(noise > 0, error**2 - AUDIBLE**2, 0.0), axis=(-2, -1))
  return jnp.any(excess > 0, axis=-1)
