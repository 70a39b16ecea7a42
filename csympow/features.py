"""The symmetric power: the feature map phi with phi(x) . phi(y) = (x . y) ** p (section 2.1 of the paper)."""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from csympow.checks import is_array, require, require_count, show, validated


def feature_dim(head_dim: int, power: int) -> int:
  """D = C(d + p - 1, p), the number of multisets of p indices out of d."""
  return math.comb(head_dim + power - 1, power)


def require_countable(head_dim: int, power: int) -> None:
  """Raises a ValueError if there are more features than an index can count."""
  fits = feature_dim(head_dim, power) < 2**31
  require(fits, f"power must leave fewer than 2^31 features of d={head_dim}, got {power}")


def _check(given: Mapping[str, Any]) -> None:
  x = given["x"]
  fits = is_array(x) and len(x.shape) > 0 and x.shape[-1] > 0 and jnp.issubdtype(x.dtype, jnp.floating)
  came = f"{show(x)} of {x.dtype}" if is_array(x) else type(x).__name__
  require(fits, f"x must be a floating-point array [..., d] with d at least 1, got {came}")
  require_count("power", given["power"])
  require_countable(x.shape[-1], given["power"])


@validated(_check)
def symmetric_power(x: Float[Array, "*lead d"], power: int) -> Float[Array, "*lead D"]:
  """The feature map phi with phi(x) . phi(y) = (x . y) ** power.

  One feature per multiset of `power` indices, weighted by the square root of its multinomial coefficient, so that
  D = C(d + power - 1, power) instead of d ** power. The multisets stand in lexicographic order.
  """
  return _symmetric_power(x, power)


class _Multisets(NamedTuple):
  """All multisets of one size out of range(d), in lexicographic order: each is its first index and a rest."""

  first: np.ndarray  # (D,): the smallest index
  rest: np.ndarray  # (D,): where the other indices stand among the multisets of one size less
  weight: np.ndarray  # (D,): the square root of the multinomial coefficient


@functools.lru_cache(maxsize=64)
def _multisets(d: int, size: int) -> _Multisets:
  if size == 1:
    return _Multisets(np.arange(d, dtype=np.int32), np.zeros(d, np.int32), np.ones(d))
  smaller = _multisets(d, size - 1)
  # The multisets whose indices are all >= a are the tail of the list that begins with the first such one.
  tails = [np.arange(np.searchsorted(smaller.first, a), len(smaller.first), dtype=np.int32) for a in range(d)]
  rest = np.concatenate(tails)
  first = np.repeat(np.arange(d, dtype=np.int32), [len(tail) for tail in tails])
  # How often `first` occurs: the multinomial coefficient grows by size / multiplicity.
  multiplicity = np.ones(len(first))
  node, level = rest, size - 1
  same = np.ones(len(first), bool)
  while level >= 1:
    table = _multisets(d, level)
    same &= table.first[node] == first
    multiplicity += same
    node, level = table.rest[node], level - 1
  return _Multisets(first, rest, smaller.weight[rest] * np.sqrt(size / multiplicity))


def pairs(d: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Of each feature at p = 2: its two indices, and its weight."""
  table = _multisets(d, 2)
  return table.first, table.rest, table.weight


def multisets(d: int, power: int) -> tuple[np.ndarray, np.ndarray]:
  """Of each feature its indices, (p, D), and its weight."""
  indices, node = np.empty((power, feature_dim(d, power)), np.int64), np.arange(feature_dim(d, power))
  for row, size in enumerate(range(power, 0, -1)):
    table = _multisets(d, size)
    indices[row], node = table.first[node], table.rest[node]
  return indices, _multisets(d, power).weight


@functools.lru_cache(maxsize=16)
def _derivative_table(d: int, power: int) -> tuple[np.ndarray, np.ndarray]:
  """For each multiset r of power - 1 indices and each index a: where r + {a} stands, its derivative by x_a over x^r.

  With it the transpose of the feature map is a gather and a sum; the transpose of its own gathers would be a scatter.
  """
  rest_size = feature_dim(d, power - 1)
  by_row, weight = multisets(d, power)
  indices = by_row.T
  position = np.empty((rest_size, d), np.int32)
  coefficient = np.empty((rest_size, d), np.float32)
  rank = _ranker(d, power - 1)
  for column in range(power):
    others = rank(np.delete(indices, column, axis=1))
    a = indices[:, column]
    position[others, a] = np.arange(len(indices))
    coefficient[others, a] = weight * (indices == a[:, None]).sum(1)
  return position, coefficient


def _ranker(d: int, size: int) -> Callable[[np.ndarray], np.ndarray]:
  """The place of a sorted multiset in lexicographic order: counts, index by index, the multisets before it."""
  before = np.array([[feature_dim(d, k) - math.comb(d - a + k - 1, k) for a in range(d)] for k in range(size + 1)])

  def rank(indices: np.ndarray) -> np.ndarray:
    place = np.zeros(len(indices), np.int64)
    low = np.zeros(len(indices), np.int64)
    for column in range(size):
      left = size - column
      place += before[left][indices[:, column]] - before[left][low]
      low = indices[:, column]
    return place

  return rank


def _monomials(x: Float[Array, "*lead d"], power: int) -> Float[Array, "*lead D"]:
  monomials = x if power else jnp.ones_like(x[..., :1])
  for size in range(2, power + 1):
    table = _multisets(x.shape[-1], size)
    monomials = x[..., table.first] * monomials[..., table.rest]
  return monomials


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _symmetric_power(x: Float[Array, "*lead d"], power: int) -> Float[Array, "*lead D"]:
  return _monomials(x, power) * _multisets(x.shape[-1], power).weight.astype(x.dtype)


def _forward(x: Float[Array, "*lead d"], power: int) -> tuple[Float[Array, "*lead D"], Float[Array, "*lead d"]]:
  return _symmetric_power(x, power), x


def _backward(power: int, x: Float[Array, "*lead d"], dphi: Float[Array, "*lead D"]) -> tuple[Float[Array, "*lead d"]]:
  position, coefficient = _derivative_table(x.shape[-1], power)
  rests = _monomials(x, power - 1)
  return (jnp.sum(dphi[..., position] * coefficient.astype(x.dtype) * rests[..., None], axis=-2),)


_symmetric_power.defvjp(_forward, _backward)


def symmetric(x: Float[Array, "B H d *dv d"]) -> Float[Array, "B H d *dv d"]:
  """The symmetric part of products of two coordinates."""
  return (x + jnp.swapaxes(x, 2, -1)) / 2
