"""Rotations: where in the state a token is stored (section 3.2 of the paper).

phase_i = phase_{i-1} + beta_i theta turns queries and keys, a pair of coordinates for each rate in theta. The rates are
the same at every step, so phase_i = theta * (beta_1 + ... + beta_i): one running total per head, kept in 48 bits, and a
product reduced modulo a turn. Phases are in turns, not radians, for then the reduction is exact.
"""

import functools
import numbers
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float

from csympow.checks import came, is_count, require, validated
from csympow.prefix import Total, TotalsKernel, prefix_sum, two_sum
from kernels_pallas.sums import leading_bits


def _check(given: Mapping[str, Any]) -> None:
  head_dim, max_length = given["head_dim"], given["max_length"]
  require(is_count(head_dim) and head_dim % 2 == 0, f"head_dim must be a positive even integer, got {came(head_dim)}")
  number = isinstance(max_length, numbers.Real) and not isinstance(max_length, bool)
  fits = number and 1 <= max_length < 2**63
  require(fits, f"max_length must be a number of tokens from 1 to 2**63, got {came(max_length)}")


@validated(_check)
def rotary_rates(head_dim: int, max_length: int) -> Float[Array, "r"]:
  """The rates theta_j = 2 pi / N ** (2 (j - 1) / d), in radians per unit of beta.

  `max_length` is N, a constant of the model (its longest document) and not the length at hand: a model whose
  rates follow the length is another model at every length.
  """
  return jnp.asarray(2 * np.pi * float(max_length) ** (-np.arange(0, head_dim, 2) / head_dim), jnp.float32)


def rotate(x: Float[Array, "*lead d"], turns: Float[Array, "*#lead r"]) -> Float[Array, "*lead d"]:
  """R(phase) x: each pair of adjacent coordinates turned by its own phase, computed in float32."""
  turned = jnp.stack(rotated_pairs(x, turns), axis=-1)
  return turned.reshape(x.shape).astype(x.dtype)


def rotated_pairs(
  x: Float[Array, "*lead d"], turns: Float[Array, "*#lead r"] | None
) -> tuple[Float[Array, "*lead r"], Float[Array, "*lead r"]]:
  """The first and the second coordinates of all pairs of R(phase) x, in float32; of x where there are no turns."""
  x32 = x.astype(jnp.float32)
  even, odd = x32[..., 0::2], x32[..., 1::2]
  if turns is None:
    return even, odd
  angle = 2 * jnp.pi * turns
  cos, sin = jnp.cos(angle), jnp.sin(angle)
  return even * cos - odd * sin, even * sin + odd * cos


def totals(
  beta: Float[Array, "#B T #H"], starts: Bool[Array, "#B T"] | None = None, kernel: TotalsKernel | None = None
) -> Total:
  """Of the betas of the run so far: constants. A `kernel` is what sums over time, if not XLA."""
  beta, restarts = _by_runs(lax.stop_gradient(beta), starts)
  return prefix_sum(beta, restarts, kernel=kernel)


def _by_runs(
  beta: Float[Array, "#B T #H"], starts: Bool[Array, "#B T"] | None
) -> tuple[Float[Array, "_ T _"], Bool[Array, "_ T 1"] | None]:
  """Betas for every sequence whose runs are told, and where these begin as `prefix_sum` wants to know it."""
  if starts is None:
    return beta, None
  return jnp.broadcast_to(beta, starts.shape + beta.shape[2:]), starts[..., None]


def phases(
  beta: Float[Array, "#B T #H"],
  rates: Float[Array, "r"],
  *,
  starts: Bool[Array, "#B T"] | None = None,
  initial: Float[Array, "b h r"] | None = None,
  known: Total | None = None,
  kernel: TotalsKernel | None = None,
) -> tuple[Float[Array, "_ T _ r"], Float[Array, "_ _ r"]]:
  """The phase at every token, in turns, given the exact float32 values of beta and the rates; and that to carry over.

  A run that begins at a token in `starts` begins at phase 0; the first run continues from `initial`. The second result
  is the last token's phase as a state holds it, in [0, 1). Beside a `kernel`, which sums over time backwards, the
  betas' totals have to be `known`: it has no derivative.
  """
  beta, restarts = _by_runs(beta, starts)
  known = prefix_sum(beta, restarts) if known is None else known  # which is no constant to a second derivative
  turned = _turns(beta, rates, restarts, known, kernel)
  start = jnp.zeros_like(turned.hi[:, :1]) if initial is None else initial[:, None]
  if restarts is not None:
    start = jnp.where((jnp.cumsum(restarts, axis=1) == 0)[..., None], start, 0.0)
  turns = start + turned.hi
  last = turns[:, -1]
  carried = _carried_over(*lax.stop_gradient((start[:, -1], Total(turned.hi[:, -1], turned.lo[:, -1]))))
  return turns, carried + (last - lax.stop_gradient(last))  # the value of one, the gradient of the other


class Phases(NamedTuple):
  """Those of every token, not yet multiplied out: total * cycles, modulo 1, and in the first run + start. Constants."""

  total: Total  # of the betas of the run so far, B T H
  cycles: Total  # turns per unit of beta, r
  start: Float[Array, "B H r"] | None
  run: Float[Array, "B T H"] | None  # how often a run has begun; None: never
  beta: Float[Array, "B T H"] | None  # of which total_i is the sum from the first token on; None: it is not


def factors(
  beta: Float[Array, "#B T #H"],
  rates: Float[Array, "r"],
  shape: tuple[int, int, int],
  *,
  starts: Bool[Array, "B T"] | None = None,
  initial: Float[Array, "B H r"] | None = None,
  known: Total | None = None,
  kernel: TotalsKernel | None = None,
) -> Phases:
  """What `phases` multiplies out, of B, T and H tokens and heads."""
  beta, rates, initial = lax.stop_gradient((beta, rates, initial))
  known = totals(beta, starts, kernel) if known is None else known
  total = Total(*(jnp.broadcast_to(x, shape) for x in known))
  if starts is None:
    return Phases(total, _cycles(rates), initial, None, jnp.broadcast_to(beta, shape))
  run = jnp.broadcast_to(jnp.cumsum(starts[..., None], axis=1, dtype=jnp.float32), shape)
  return Phases(total, _cycles(rates), initial, run, None)


_GRID = 2.0**24  # a float32 in [0, 1) holds every multiple of 1 / _GRID


def _carried_over(start: Float[Array, "#B #H r"], turned: Total) -> Float[Array, "B H r"]:
  """The sum modulo 1, rounded to the grid up or down at random, in proportion to the distance.

  Rounding to the nearest would drift: a decoder adds the same small step again and again, and loses the same part of
  it each time, a hundredth of a radian over 65,536 tokens. The randomness is a hash of the phases themselves.
  """
  total = two_sum(start, turned.hi)
  units = (total.hi - jnp.floor(total.hi)) * _GRID
  whole = jnp.floor(units)
  rounded = whole + jnp.floor((units - whole) + (total.lo + turned.lo) * _GRID + _hashed(whole))
  return jnp.where(turned.hi == 0, start, (rounded - _GRID * jnp.floor(rounded / _GRID)) / _GRID)


def _hashed(units: Float[Array, "B H r"]) -> Float[Array, "B H r"]:
  """Numbers in [0, 1) that differ from pair to pair and change when a pair's own phase does, the first's or the last's.

  A pair that turns too slowly for its own phase to change must still get another number at every step. Rates rise or
  fall from pair to pair, so one of the two ends is the fastest; should it turn by exactly whole turns, and so seem to
  stand still, there is the other. (A sum over all pairs would be one more launch of every step.)
  """
  own, place = units.astype(jnp.uint32), jnp.arange(units.shape[-1], dtype=jnp.uint32)
  ends = own[..., :1] * np.uint32(0xC2B2AE35) + own[..., -1:] * np.uint32(0x27D4EB2F)
  bits = own + ends + place * np.uint32(0x9E3779B9)
  for factor in (0x7FEB352D, 0x846CA68B):
    bits = (bits ^ (bits >> 16)) * np.uint32(factor)
  return (bits >> 8).astype(jnp.float32) / _GRID


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _turns(
  beta: Float[Array, "B T H"],
  rates: Float[Array, "r"],
  restarts: Bool[Array, "B T 1"] | None,
  total: Total,
  kernel: TotalsKernel | None,
) -> Total:
  """The phase turned through since the run's start, modulo 1, B T H r; `total` is that of the betas."""
  del beta, restarts, kernel
  return product_modulo_one(Total(total.hi[..., None], total.lo[..., None]), _cycles(rates))


type _Saved = tuple[Total, Float[Array, "r"], Bool[Array, "B T 1"] | None]


def _turns_forward(
  beta: Float[Array, "B T H"],
  rates: Float[Array, "r"],
  restarts: Bool[Array, "B T 1"] | None,
  total: Total,
  kernel: TotalsKernel | None,
) -> tuple[Total, _Saved]:
  return _turns(beta, rates, restarts, total, kernel), (total, rates, restarts)


def _turns_backward(
  kernel: TotalsKernel | None, saved: _Saved, cotangents: Total
) -> tuple[Float[Array, "B T H"], Float[Array, "r"], None, None]:
  """The phase at i depends on beta_j for j <= i in the same run: a sum backwards that begins anew where a run ends."""
  total, rates, restarts = saved
  dturns = cotangents.hi
  ends = None if restarts is None else jnp.roll(restarts, -1, axis=1).at[:, -1].set(False)
  dtotal = jnp.einsum("bthr,r->bth", dturns, rates, precision="highest") / (2 * jnp.pi)
  dbeta = prefix_sum(dtotal, ends, reverse=True, kernel=kernel).hi
  drates = jnp.sum(dturns * total.hi[..., None], axis=(0, 1, 2)) / (2 * jnp.pi)
  return dbeta, drates, None, None


_turns.defvjp(_turns_forward, _turns_backward)


def halves(x: Float[Array, "..."]) -> Total:
  """X as a sum of two float32s of 12 significant bits: the product of two such halves is exact."""
  hi = leading_bits(x)
  return Total(hi, x - hi)


_PER_RADIAN = 1 / (2 * np.pi)
_PER_RADIAN_HI = np.float32(_PER_RADIAN)
_PER_RADIAN_LO = np.float32(_PER_RADIAN - np.float64(_PER_RADIAN_HI))


def _cycles(rates: Float[Array, "r"]) -> Total:
  """Rates / (2 pi), in turns per unit of beta, to 48 bits."""
  x, y = halves(rates), halves(jnp.asarray(_PER_RADIAN_HI))
  head = two_sum(x.hi * y.hi, x.hi * y.lo)
  whole = two_sum(head.hi, x.lo * y.hi)
  return two_sum(whole.hi, whole.lo + head.lo + x.lo * y.lo + rates * _PER_RADIAN_LO)


def product_modulo_one(x: Total, y: Total) -> Total:
  """X * y modulo 1, within (-2, 2).

  Each product of halves is exact in float32, so its whole turns drop out without error, fused multiply-add or not.
  """
  a, b = halves(x.hi), halves(y.hi)

  def fraction(product: Float[Array, "..."]) -> Float[Array, "..."]:
    return product - jnp.round(product)

  small = x.hi * y.lo + x.lo * y.hi
  return two_sum(fraction(a.hi * b.hi), fraction(a.hi * b.lo) + (fraction(a.lo * b.hi) + (a.lo * b.lo + small)))
