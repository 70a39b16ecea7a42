"""What the kernels of all chips share: powers of scores, and a few constants."""

import functools

import jax.numpy as jnp
from jaxtyping import Array, Float

LOG2E = 1.4426950408889634
SMALLEST = 1e-30  # a normaliser at or below this counts as 0
INVISIBLE = -126.0  # a discount of 2 to this or less is 0 in the arithmetic of the kernels
LEAST, MOST = -125, 125  # exponents: of 0 and what is as small, and of the largest that vectors are divided by


def raised(x: Float[Array, "*shape"], times: int) -> Float[Array, "*shape"]:
  """X ** times by multiplications."""
  return functools.reduce(jnp.multiply, [x] * times) if times else jnp.ones_like(x)


def even_power(s: Float[Array, "rows columns"], power: int) -> Float[Array, "rows columns"]:
  """S ** power by multiplications."""
  return raised(s * s, power // 2)


def slope(s: Float[Array, "rows columns"], scale: Float[Array, "..."], power: int) -> Float[Array, "rows columns"]:
  """Scale * s ** (power - 1)."""
  result = scale * s
  for _ in range(power // 2 - 1):
    result = result * (s * s)
  return result
