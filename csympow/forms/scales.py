"""Powers of two that vectors are divided by, so that their coordinates fit 16 bits, and roundings to those."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from csympow.forms.spans import by_head
from kernels_pallas.weights import LEAST, MOST

FLOAT16, BFLOAT16 = (5, 10), (8, 7)  # bits of exponent and mantissa
LARGEST = 128  # the exponent of the largest number


def of_queries(largest: Float[Array, "*lead"], room: int) -> Int[Array, "*lead"]:
  """Exponents by their largest coordinates, as `tiles.power_of_two` has them: of 0 and what is as small, 0.

  No more than MOST, or 2 to less than minus that would be no normal number; 16 bits have room for the rest.
  """
  found = exponent(largest)
  return jnp.minimum(jnp.where(found == LEAST, 0, found + room), MOST)


def of_keys(largest: Float[Array, "B T H"], room: int) -> tuple[Int[Array, "B T H"], Int[Array, "B H"]]:
  """The same of keys, and of the longest: of no key there is no length, nor of one that is no number.

  What is as small as 0 weighs as little beside any other key: copies that find their own scales have 0 for it.
  """
  found = exponent(largest)
  top = jnp.max(jnp.where(found > LARGEST, LEAST, found), axis=1)
  return jnp.minimum(found + room, MOST), jnp.minimum(jnp.where(top == LEAST, 0, top + room), MOST)


def log_scale(exponent: Int[Array, "B T H"], top: Int[Array, "B H"], power: int) -> Float[Array, "B H T"]:
  """The logarithm of what scaled keys' weights are to be multiplied by."""
  return power * by_head(exponent - top[:, None]).astype(jnp.float32)


def rounded(x: Array, bits: tuple[int, int]) -> Array:
  """X in float32, as a 16-bit type holds it: a conversion there and back XLA would leave out."""
  return lax.reduce_precision(x.astype(jnp.float32), *bits)


def power_of_two(exponent: Int[Array, "*lead"]) -> Float[Array, "*lead 1"]:
  """2 to the exponent, to the last bit, with an axis to multiply vectors by: 0 and inf beyond normal numbers.

  Made of its bits: a longer computation XLA would put in a launch of its own.
  """
  biased = jnp.clip(exponent.astype(jnp.int32) + 127, 0, 255)
  return lax.bitcast_convert_type(biased << 23, jnp.float32)[..., None]


def largest(x: Float[Array, "*lead d"]) -> Float[Array, "*lead"]:
  """Coordinate, without its sign."""
  return jnp.max(jnp.abs(x), axis=-1).astype(jnp.float32)


def exponent(largest: Float[Array, "*lead"]) -> Int[Array, "*lead"]:
  """The e with 2 ** (e - 1) <= the largest coordinate < 2 ** e."""
  return jnp.maximum((lax.bitcast_convert_type(largest, jnp.int32) >> 23) - 126, LEAST)


def unit(q: Float[Array, "*lead d"]) -> Float[Array, "*lead d"]:
  """Queries scaled to about unit length, which the normalisation cancels: no power of a score can over- or underflow.

  By a power of two, so that they fit 16 bits if they did; as to gradients, as if by their length, which leaves none
  along a query.
  """
  largest = lax.stop_gradient(jnp.max(jnp.abs(q), axis=-1, keepdims=True))
  found = largest != 0  # NaN is found too, and stays
  q = jnp.where(found, q / jnp.where(found, largest, 1.0), 0.0)
  squared = jnp.where(found, jnp.sum(q * q, axis=-1, keepdims=True), 1.0)
  # A query of the length 2 ** (a + b) r s, where its largest coordinate is 2 ** a r, is divided by 2 ** (a + b - 1).
  r, s = (jnp.frexp(x)[0] for x in (largest, jnp.sqrt(lax.stop_gradient(squared))))
  return q * lax.rsqrt(squared) * (2 * r * s)
