"""Prefix sums that keep more bits than float32 has.

Gates and phases are totals over up to a million tokens of which only *differences* matter: b_ij = exp(G_i - G_j), and
the angle between two positions. A float32 total near 1,000 has lost what an error of 1e-5 in a difference needs, so
every total here is an unevaluated sum of two float32s. The error-free additions are made of additions alone: a compiler
that contracts a * b + c into one rounding cannot change them.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float

from kernels_pallas import sums

_BLOCK = 128  # tokens summed by one matrix product
_TOTALS = 1024  # and totals of such blocks


class Total(NamedTuple):
  """The number hi + lo, with |lo| at most half a unit in the last place of hi."""

  hi: Float[Array, "..."]
  lo: Float[Array, "..."]

  def __sub__(self, other: "Total") -> Float[Array, "..."]:
    """The difference, rounded once: accurate to float32 however large the two totals are."""
    return (self.hi - other.hi) + (self.lo - other.lo)


type TotalsKernel = Callable[[Float[Array, "B H T"]], tuple[Float[Array, "B H T"], Float[Array, "B H T"]]]


def two_sum(a: Float[Array, "..."], b: Float[Array, "..."]) -> Total:
  """A + b without error: the rounded sum and what the rounding lost."""
  return Total(*sums.two_sum(a, b))


def prefix_sum(
  x: Float[Array, "B T H"],
  restarts: Bool[Array, "B T 1"] | None = None,
  *,
  reverse: bool = False,
  kernel: TotalsKernel | None = None,
) -> Total:
  """The inclusive sum over time, forwards or backwards, beginning anew at each token where `restarts` is true.

  Inside a block of tokens a product with a triangle of ones, and so on with the totals of blocks; if there are restarts
  these are joined by an associative scan. A `kernel` does all of that at once, unless there are restarts.
  """
  if x.shape[1] == 1:
    return Total(x, jnp.zeros_like(x))  # a step's, which should cost no launch
  if reverse:
    x, restarts = x[:, ::-1], None if restarts is None else restarts[:, ::-1]
  x = jnp.swapaxes(x, 1, 2)
  if restarts is not None:
    total = _restarting(x, restarts[..., 0])
  else:
    total = _running(x) if kernel is None else Total(*kernel(x))
  hi, lo = (jnp.swapaxes(array, 1, 2) for array in total)
  return Total(hi[:, ::-1], lo[:, ::-1]) if reverse else Total(hi, lo)


def _running(x: Float[Array, "B H n"], more: Float[Array, "B H n"] | None = None) -> Total:
  """The inclusive sum of x, or of x + more if these are totals, which those after them must not change."""
  count, size = x.shape[-1], _BLOCK if more is None else _TOTALS
  wrong = None
  if more is not None:
    wrong = ~jnp.isfinite(x + more)
    x, more = (jnp.where(wrong, 0.0, array) for array in (x, more))
  blocks = rest = _blocks(x, size)
  unit, parts = None, []
  for _ in range(1 if more is None else 3):
    part, rest, unit = _on_grid(rest, size, unit)
    parts.append(part)
  parts.append(rest if more is None else rest + _blocks(more, size))  # all sums but this one's are exact
  if wrong is not None:
    parts.append(_blocks(wrong.astype(jnp.float32), size))
  adds = jnp.tri(blocks.shape[-1], dtype=jnp.float32).T
  first, *others = (jnp.matmul(part, adds, precision="highest") for part in parts)
  until = others.pop() if wrong is not None else None
  total = Total(first, jnp.zeros_like(first))
  for other in others:
    total = add(total, Total(other, jnp.zeros_like(other)))
  if until is not None:
    total = total._replace(hi=jnp.where(until > 0, jnp.nan, total.hi))
  if blocks.shape[2] > 1:
    total = add(_before(_running(total.hi[..., -1], total.lo[..., -1])), total)
  return Total(*(array.reshape(*x.shape[:2], -1)[..., :count] for array in total))


def _restarting(x: Float[Array, "B H T"], restarts: Bool[Array, "B T"]) -> Total:
  """The same, anew at each restart."""
  time = x.shape[-1]
  adds, blocks = jnp.tri(min(_BLOCK, time), dtype=jnp.float32), _blocks(x, _BLOCK)
  # How many restarts there have been so far in the block.
  begins = _blocks(restarts.astype(jnp.float32)[:, None], _BLOCK)[:, 0]
  run = jnp.einsum("ij,bnj->bni", adds, begins, precision="highest")
  adds = jnp.where(run[..., :, None] == run[..., None, :], adds, 0.0)
  coarse, fine, _ = _on_grid(blocks, _BLOCK)
  total = two_sum(*(jnp.einsum("bnij,bhnj->bhni", adds, part, precision="highest") for part in (coarse, fine)))
  run = run[:, None]

  def join(left: tuple[Array, Total], right: tuple[Array, Total]) -> tuple[Array, Total]:
    both = add(left[1], right[1])
    return left[0] | right[0], jax.tree.map(lambda new, sum: jnp.where(right[0], new, sum), right[1], both)

  ends = Total(total.hi[..., -1], total.lo[..., -1])
  _, until = lax.associative_scan(join, (jnp.broadcast_to(run[..., -1] > 0, ends.hi.shape), ends), axis=2)
  # What each token goes on from: nothing once its own block has restarted.
  before = Total(*(jnp.where(run == 0, array, 0.0) for array in _before(until)))
  return Total(*(array.reshape(*x.shape[:2], -1)[..., :time] for array in add(before, total)))


def _blocks(x: Float[Array, "B H T"], size: int) -> Float[Array, "B H n t"]:
  """Filled up with zeros to whole blocks, or to one if that is shorter."""
  size = min(size, x.shape[-1])
  padded = jnp.pad(x, ((0, 0), (0, 0), (0, -x.shape[-1] % size)))
  return padded.reshape(*x.shape[:2], -1, size)


def _before(until: Total) -> Total:
  """From the sums at the ends of blocks those before them, B H n 1."""
  return Total(*(jnp.pad(array[..., :-1], ((0, 0), (0, 0), (1, 0)))[..., None] for array in until))


def add(left: Total, right: Total) -> Total:
  """The sum of two totals, to 48 bits."""
  return Total(*sums.add_pairs(left, right))


def _on_grid(
  x: Float[Array, "B H n t"], size: int, within: Float[Array, "B H n 1"] | None = None
) -> tuple[Float[Array, "B H n t"], Float[Array, "B H n t"], Float[Array, "B H n 1"]]:
  """X as a sum of two parts, the first such that its sums over `size` are exact in float32, in any order; and its unit.

  `within` is a power of two that no x exceeds, if one is known: the unit of the grid before.
  """
  if within is None:
    largest = jnp.maximum(jnp.max(jnp.abs(x), axis=-1, keepdims=True), 1e-20)  # so that no unit is 0
    exponent = lax.bitcast_convert_type(largest, jnp.uint32) & np.uint32(0x7F800000)
    half = lax.bitcast_convert_type(exponent, jnp.float32)
    unit = half * (2 * size / 2**24)
  else:
    unit = within * (size / 2**24)
  most = 2**24 // size - 1  # or the largest number would be rounded to infinity
  coarse = jnp.clip(jnp.round(x / unit), -most, most) * unit
  return coarse, x - coarse, unit
