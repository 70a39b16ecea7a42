"""Gradients of attention by kernels, on any chip: what goes into their backward passes, and what tokens pull at."""

from typing import NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, BFloat16, Float

from csympow.forms import scales
from csympow.forms.near import Tokens
from csympow.forms.rotating import Rotation, cotangent, torque, turning, unrotated
from csympow.prefix import TotalsKernel, prefix_sum
from kernels_pallas.gpu import arrays
from kernels_pallas.weights import SMALLEST


class Cotangents(NamedTuple):
  """Of queries' outputs, as the kernels take them."""

  dy: BFloat16[Array, "B T Hq dv"]
  delta: Float[Array, "B Hq T"]  # dy . y
  inverse: Float[Array, "B Hq T"]  # 1 / normaliser, over all keys that a query sees


def cotangents(y: arrays.Outputs, dy: Float[Array, "B T H g dv"]) -> Cotangents:
  """From queries' outputs and normalisers."""
  exact = y.high.astype(jnp.float32) + (0.0 if y.low is None else y.low.astype(jnp.float32))
  dy = dy.reshape(exact.shape)
  rounded_dy = dy if dy.dtype == jnp.bfloat16 else scales.rounded(dy, scales.BFLOAT16)
  delta = jnp.moveaxis(jnp.sum(rounded_dy * exact, axis=-1), 1, 2)
  return Cotangents(rounded_dy.astype(jnp.bfloat16), delta, inverse(y.normaliser))


def inverse(normaliser: Float[Array, "..."]) -> Float[Array, "..."]:
  """1 / normaliser, and 0 for an empty row."""
  found = ~(normaliser <= SMALLEST)  # NaN is no empty row
  return jnp.where(found, 1 / jnp.where(found, normaliser, 1.0), 0.0)


class Pulls(NamedTuple):
  """What each token's query, and its key, adds to the cotangents of running totals: of gates, and of a rotation.

  They are sums of large terms that cancel, and do so only if the queries and keys are those that the kernels had.
  """

  G: tuple[Float[Array, "B T H"], Float[Array, "B T H"]]
  turns: tuple[Float[Array, "B T H r"], Float[Array, "B T H r"]] | None  # None: nothing is rotated, or nobody asks
  total: tuple[Float[Array, "B T H"], Float[Array, "B T H"]] | None  # of the betas


def pulls_of(
  q: Float[Array, "B T H g d"],
  k: Float[Array, "B T H 1 d"],
  dq: Float[Array, "B T H g d"],
  dk: Float[Array, "B T H 1 d"],
  rotation: Rotation | None,
  power: int,
) -> Pulls:
  """From queries and keys as the kernels had them, and their gradients but for the factor p."""
  turns, total = (torque(power * q, dq), torque(power * k, dk)), None
  if rotation is not None:  # sums of the same form as the gates', which XLA can do together with them
    speed = jnp.repeat(rotation.rates * (power / (2 * jnp.pi)), 2)
    total = jnp.sum(speed * q * turning(dq), axis=(-2, -1)), jnp.sum(speed * k * turning(dk), axis=(-2, -1))
  # Euler: q . dq = p * (the sum of a query's pulls).
  return Pulls((jnp.sum(q * dq, axis=(-2, -1)), -jnp.sum(k * dk, axis=(-2, -1))), turns, total)


def without_state(
  dq: Float[Array, "B T H g d"],
  dk: Float[Array, "B T H d"],
  dv: Float[Array, "B T H dv"],
  pulls: Pulls,
  rotation: Rotation | None,
  kernel: TotalsKernel | None,
) -> Tokens:
  """Cotangents of tokens that are all that there is, from those of their vectors; `kernel` is what sums over time."""
  dlog_gate = prefix_sum(jnp.add(*pulls.G), reverse=True, kernel=kernel).hi
  dturns = None if pulls.turns is None else jnp.add(*pulls.turns)
  return Tokens(dq, dk, dv, dlog_gate, by_turns(rotation, dturns, pulls.total))


def by_turns(
  rotation: Rotation | None,
  dturns: Float[Array, "B T H r"] | None,
  parts: tuple[Float[Array, "B T H"], Float[Array, "B T H"]] | None = None,
) -> Rotation | None:
  """The cotangent of a rotation from that of its turns; `parts` of the total's are the same in another order."""
  if rotation is None:
    return None
  if dturns is None:  # nobody asks for it
    dturns = jnp.zeros_like(rotation.turns)
  dtotal = jnp.add(*parts) if parts else jnp.sum(dturns * rotation.rates, axis=-1) / (2 * jnp.pi)
  return cotangent(rotation, dturns, dtotal)


def before_rotation(dtokens: Tokens, rotation: Rotation | None, dtypes: tuple[DTypeLike, DTypeLike]) -> Tokens:
  """From cotangents of rotated queries and keys those of what was rotated, of the queries' dtype and of all others'."""
  q, k = unrotated(*dtokens[:2], rotation)
  return dtokens._replace(q=q.astype(dtypes[0]), k=k.astype(dtypes[1]), v=dtokens.v.astype(dtypes[1]))
