"""Gradients of running totals, of gates and of a rotation, where a state is carried from chunk to chunk, or in and out.

They are sums over time whose rounding adds up. Between two chunks the sum is also known another way, from the state and
its cotangent, and what the sum over a chunk misses of the difference is shared out over its tokens.
"""

import functools
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from csympow.forms import backwards, rotating
from csympow.prefix import TotalsKernel, prefix_sum
from kernels_pallas.weights import SMALLEST


class Reach(NamedTuple):
  """How much of a query's pull can come through the state before its chunk, and of a key's through the one after it."""

  q: Float[Array, "B T H"]
  k: Float[Array, "B T H"]


class Ends(NamedTuple):
  """How strongly the state between two chunks, before the first and after the last is pulled, and turned."""

  pulled: Float[Array, "B ends H"]
  turned: Float[Array, "B ends H r"] | None  # if there is a rotation


def cotangents(
  pulls: backwards.Pulls,
  ends: Ends,
  rotation: rotating.Rotation | None,
  kernel: TotalsKernel | None = None,
  reach: Reach | None = None,
  has_state: Int[Array, "B H"] | None = None,
) -> tuple[Float[Array, "B T H"], rotating.Rotation | None]:
  """Those of the log gates, and of the rotation; `kernel` is what sums over time, if not XLA.

  Heads without a state carry nothing from chunk to chunk, and their sums are not known another way.
  """
  dlog_gate = of_gates(pulls.G, ends.pulled, kernel, reach, has_state)
  if rotation is None or ends.turned is None or pulls.turns is None or pulls.total is None:
    return dlog_gate, None
  along = jnp.sum(ends.turned * rotation.rates, axis=-1) / (2 * jnp.pi)
  turns, total = (
    _anchored(part, between, reach, has_state) for part, between in ((pulls.turns, ends.turned), (pulls.total, along))
  )
  return dlog_gate, rotating.cotangent(rotation, turns, total)


def of_gates(
  pulls: tuple[Float[Array, "B T H"], Float[Array, "B T H"]],
  pulled: Float[Array, "B ends H"],
  kernel: TotalsKernel | None = None,
  reach: Reach | None = None,
  has_state: Int[Array, "B H"] | None = None,
) -> Float[Array, "B T H"]:
  """Those of the log gates, from what queries and keys add and what is pulled at the ends of chunks."""
  return prefix_sum(_anchored(pulls, -pulled, reach, has_state), reverse=True, kernel=kernel).hi + pulled[:, -1:]


def _anchored(
  parts: tuple[Float[Array, "B T H *r"], ...],
  ends: Float[Array, "B ends H *r"],
  reach: Reach | None = None,
  has_state: Int[Array, "B H"] | None = None,
) -> Float[Array, "B T H *r"]:
  """The sum of the parts, such that over a chunk it is the difference of the `ends`.

  Sums over many chunks then keep no rounding but that of their last. What is missing is shared out as errors are likely
  to be: in proportion to the square of what was added, as far as it can have come through a state. Inside a chunk what
  queries and keys add cancels, for it is made of the same rounded numbers.
  """
  far = parts
  if reach is not None:
    wide = (by_token.reshape(*by_token.shape, *(1,) * (parts[0].ndim - 3)) for by_token in reach)
    far = tuple(part * by_token for part, by_token in zip(parts, wide, strict=True))

  def by_chunk(x: Float[Array, "B T H *r"]) -> Float[Array, "B n t H *r"]:
    return x.reshape(x.shape[0], ends.shape[1] - 1, -1, *x.shape[2:])

  x, far = by_chunk(sum(parts[1:], parts[0])), tuple(map(by_chunk, far))
  axes = (2,) if x.ndim == 4 else (2, 4)
  largest = functools.reduce(jnp.maximum, (jnp.max(jnp.abs(part), axis=axes, keepdims=True) for part in far))
  share = sum((part / jnp.maximum(largest, SMALLEST)) ** 2 for part in far)
  if x.ndim == 5:  # and to what a token's other pairs of coordinates added: the sum of one can be small by chance
    share = share + jnp.mean(share, axis=-1, keepdims=True)
  missing = (ends[:, 1:] - ends[:, :-1]) - jnp.sum(x, axis=2)
  if has_state is not None:
    missing = missing * has_state.reshape(has_state.shape[0], 1, -1, *(1,) * (missing.ndim - 3))
  x = x + missing[:, :, None] * share / jnp.maximum(jnp.sum(share, axis=2, keepdims=True), SMALLEST)
  return x.reshape(x.shape[0], -1, *x.shape[3:])
