"""What the forms share: spans of tokens, cut into blocks and put together again, and the products between them.

Inside the forms heads stand before time and every array keeps time second to last, gates and normalisers with a last
axis of size 1: matrix products then need no transposed copies, and discounts multiply whatever they discount.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from csympow.prefix import Total


class Inputs(NamedTuple):
  """A span of tokens, or with a leading axis n a stack of spans."""

  q: Float[Array, "*n B H g T d"]
  k: Float[Array, "*n B H T d"]
  v: Float[Array, "*n B H T dv"]
  G: Total  # the running total of the log gates, *n B H T 1


class Settings(NamedTuple):
  """How a form computes: constants of the compiled program. A chunk is whole blocks and whole tiles."""

  power: int
  chunk: int  # tokens between two states
  block: int  # tokens in a block of scores
  tile: int  # tokens whose features are expanded at once
  precision: str | None  # of matrix products, as jax.lax.Precision names it; None for the caller's default
  chip: str = "gpu"  # whose kernels, if any
  states: str = "memory"  # the module by which the attention form's kernels read and write them
  gated: bool = True  # whether anything is forgotten but by resets
  attention_alone: bool = False  # the chunked form's pass without gradients is the attention form's
  attention_share: float = 0.0  # and so are both, beyond p=2, if gates leave less than that of all pairs
  interpret: Any = None  # how to run kernels where there is no chip for them, as Pallas takes it


class Sums(NamedTuple):
  """What each query gathers: sum_j B_ij v_j and sum_j B_ij."""

  numerator: Float[Array, "*n B H g T dv"]
  denominator: Float[Array, "*n B H g T 1"]


def for_each(function: Callable[..., Array], *trees: Any) -> Any:
  """jax.tree.map, typed as what it is."""
  return jax.tree.map(function, *trees)


def by_head(x: Array) -> Array:
  """From B T H, or B n t H, to B H T."""
  return jnp.moveaxis(x.reshape(x.shape[0], -1, x.shape[-1]), 1, 2)


def in_spans(x: Array, count: int) -> Array:
  """From B T ... to n B t ...: as many equal spans of time."""
  return jnp.moveaxis(x.reshape(x.shape[0], count, -1, *x.shape[2:]), 1, 0)


def scattered(many: int, wanted: int) -> Int[np.ndarray, "wanted"]:
  """So many of `many` places, in order: one in each of nearly equal spans, but not always the same of a span."""
  ends = np.arange(wanted + 1) * many // wanted
  return (ends[:-1] + np.floor(np.diff(ends) * (np.arange(wanted) * 0.6180339887 % 1))).astype(np.int32)


def heads_first(x: Float[Array, "B T H *g d"]) -> Float[Array, "B H *g T d"]:
  """From the op's layout to that of a span."""
  return jnp.moveaxis(x, 1, -2)


def time_first(x: Float[Array, "B H *g T d"]) -> Float[Array, "B T H *g d"]:
  """The inverse of `heads_first`."""
  return jnp.moveaxis(x, -2, 1)


def split(tree: Any, size: int) -> Any:
  """Cuts time into spans of `size` tokens, stacked along a new leading axis."""
  return for_each(lambda x: jnp.moveaxis(x.reshape(*x.shape[:-2], -1, size, x.shape[-1]), -3, 0), tree)


def merge(tree: Any) -> Any:
  """The inverse of `split`."""
  return for_each(lambda x: jnp.moveaxis(x, 0, -3).reshape(*x.shape[1:-2], -1, x.shape[-1]), tree)


def item(tree: Any, index: int | Array) -> Any:
  """One span of a stack."""
  return for_each(lambda x: x[index], tree)


def exact_product(subscripts: str, *operands: Array) -> Float[Array, "..."]:
  """A product in full float32 on every device: the normaliser is a sum with cancellation."""
  return jnp.einsum(subscripts, *operands, precision="highest")


# A normaliser at or below this counts as 0: one over it, times any cotangent, must stay finite.
SMALLEST = 1e-30


def over_normaliser(x: Float[Array, "*lead v"], denominator: Float[Array, "*lead 1"]) -> Float[Array, "*lead v"]:
  """X / denominator, and 0, with no gradient, for a row whose weights sum to 0."""
  found = ~(denominator <= SMALLEST)  # NaN is no empty row
  denominator = jnp.where(found, denominator, 1.0)
  # Both are scaled by the same constant first: the derivative of a quotient squares its denominator.
  unit = lax.stop_gradient(1 / denominator)
  return jnp.where(found, (x * unit) / (denominator * unit), 0.0)


def normalised(sums: Sums) -> Float[Array, "*lead dv"]:
  """The outputs y."""
  return over_normaliser(sums.numerator, sums.denominator)
