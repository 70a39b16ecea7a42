"""Prefix sums that keep 48 bits.

Gates and phases are totals over up to a million tokens of which only *differences* matter: b_ij = exp(G_i - G_j), and
the angle between two positions. A float32 total near 1,000 has lost what an error of 1e-5 in a difference needs, so
every total here is an unevaluated sum of two float32s. The error-free additions are made of additions alone: a compiler
that contracts a * b + c into one rounding cannot change them.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float

_BLOCK = 128  # tokens summed by one matrix product


class Total(NamedTuple):
  """The number hi + lo, with |lo| at most half a unit in the last place of hi."""

  hi: Float[Array, "..."]
  lo: Float[Array, "..."]

  def __sub__(self, other: "Total") -> Float[Array, "..."]:
    """The difference, rounded once: accurate to float32 however large the two totals are."""
    return (self.hi - other.hi) + (self.lo - other.lo)


def two_sum(a: Float[Array, "..."], b: Float[Array, "..."]) -> Total:
  """A + b without error: the rounded sum and what the rounding lost."""
  total = a + b
  b_kept = total - a
  return Total(total, (a - (total - b_kept)) + (b - b_kept))


def prefix_sum(
  x: Float[Array, "B T H"], restarts: Bool[Array, "B T 1"] | None = None, *, reverse: bool = False
) -> Total:
  """The inclusive sum over time, forwards or backwards, beginning anew at each token where `restarts` is true.

  Inside a block of tokens a product with a triangle of ones; across blocks an associative scan of their totals.
  """
  (batch, time, heads), size = x.shape, min(_BLOCK, x.shape[1])
  if reverse:
    x, restarts = x[:, ::-1], None if restarts is None else restarts[:, ::-1]

  def blocks(array: Array) -> Array:
    padded = jnp.pad(array, ((0, 0), (0, -time % size), (0, 0)))
    return padded.reshape(batch, -1, size, array.shape[-1])

  x = blocks(x)
  adds, run = jnp.tri(size, dtype=jnp.float32), None
  if restarts is not None:
    run = _exact(adds, blocks(restarts).astype(jnp.float32))  # how many restarts so far in the block
    adds = jnp.where(run == jnp.swapaxes(run, -1, -2), adds, 0.0)
  coarse, fine = _on_grid(x)
  total = two_sum(_exact(adds, coarse), _exact(adds, fine))
  if x.shape[1] > 1:
    total = add(_total_before(total, run), total)
  hi, lo = (array.reshape(batch, -1, heads)[:, :time] for array in total)
  return Total(hi[:, ::-1], lo[:, ::-1]) if reverse else Total(hi, lo)


def _total_before(totals: Total, run: Float[Array, "B n t 1"] | None) -> Total:
  """The sum of earlier blocks that each token goes on from: none once its own block has restarted."""
  by_block = Total(totals.hi[:, :, -1], totals.lo[:, :, -1])
  if run is None:
    until = _running(by_block)
  else:

    def join(left: tuple[Array, Total], right: tuple[Array, Total]) -> tuple[Array, Total]:
      both = add(left[1], right[1])
      return left[0] | right[0], jax.tree.map(lambda new, sum: jnp.where(right[0], new, sum), right[1], both)

    _, until = lax.associative_scan(join, (run[:, :, -1] > 0, by_block), axis=1)
  before = (jnp.pad(array[:, :-1], ((0, 0), (1, 0), (0, 0)))[:, :, None] for array in until)
  return Total(*(array if run is None else jnp.where(run == 0, array, 0.0) for array in before))


def _running(x: Total) -> Total:
  """The inclusive sum of many totals, B n H: by blocks, too, for a scan over all would be slow on a GPU."""
  (batch, count, heads), size = x.hi.shape, _BLOCK
  if count <= size:
    return lax.associative_scan(add, x, axis=1)
  hi, lo = (jnp.pad(a, ((0, 0), (0, -count % size), (0, 0))).reshape(batch, -1, size, heads) for a in x)
  adds = jnp.tri(size, dtype=jnp.float32)
  coarse, rest = _on_grid(hi)
  fine, finest = _on_grid(rest)  # the first two sums are exact, and the third need not be
  inside = two_sum(_exact(adds, coarse), _exact(adds, fine))
  inside = add(inside, Total(_exact(adds, finest + lo), jnp.zeros_like(lo)))
  before = lax.associative_scan(add, Total(inside.hi[:, :, -1], inside.lo[:, :, -1]), axis=1)
  earlier = Total(*(jnp.pad(a[:, :-1], ((0, 0), (1, 0), (0, 0)))[:, :, None] for a in before))
  return Total(*(a.reshape(batch, -1, heads)[:, :count] for a in add(earlier, inside)))


def add(left: Total, right: Total) -> Total:
  """The sum of two totals, to 48 bits."""
  total, lost = two_sum(left.hi, right.hi)
  return two_sum(total, lost + (left.lo + right.lo))


def _on_grid(x: Float[Array, "B n t H"]) -> tuple[Float[Array, "B n t H"], Float[Array, "B n t H"]]:
  """X as a sum of two parts, the first such that its sums over a block are exact in float32, in any order."""
  largest = jnp.maximum(jnp.max(jnp.abs(x), axis=2, keepdims=True), 1e-30)
  exponent = lax.bitcast_convert_type(largest, jnp.uint32) & np.uint32(0x7F800000)
  unit = lax.bitcast_convert_type(exponent, jnp.float32) * (2.0 * _BLOCK / 2**24)
  coarse = jnp.round(x / unit) * unit
  return coarse, x - coarse


def _exact(adds: Float[Array, "..."], x: Float[Array, "B n t H"]) -> Float[Array, "B n t H"]:
  return jnp.matmul(adds, x, precision="highest")
