"""Sums that lose nothing: numbers as unevaluated sums of two float32s, for kernels and for what surrounds them.

They are made of additions alone: a compiler that contracts a * b + c into one rounding cannot change them.
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

type Pair = Sequence[Array]  # a number's high and low half


def two_sum(a: Float[Array, "..."], b: Float[Array, "..."]) -> tuple[Array, Array]:
  """A + b without error: the rounded sum and what the rounding lost."""
  total = a + b
  b_kept = total - a
  return total, (a - (total - b_kept)) + (b - b_kept)


def add_pairs(left: Pair, right: Pair) -> tuple[Array, Array]:
  """The sum of two numbers, to 48 bits."""
  total, lost = two_sum(left[0], right[0])
  return two_sum(total, lost + (left[1] + right[1]))


def leading_bits(x: Float[Array, "..."]) -> Float[Array, "..."]:
  """X cut off after 12 significant bits: a product of two such numbers is exact."""
  return lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.int32) & np.int32(-(2**12)), jnp.float32)
