"""Rotations of queries and keys that are still to be done: by XLA's code, or by what kernels rotate by."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from csympow.forms.spans import by_head, for_each, in_spans
from csympow.prefix import Total, add
from csympow.rotation import Phases, halves, product_modulo_one, rotate
from kernels_pallas.gpu.angles import Angles
from kernels_pallas.gpu.gates import Turning
from kernels_pallas.gpu.tiles import ROWS


class Rotation(NamedTuple):
  """What queries and keys are to be rotated by: `turns`, which follow the total of the betas at these rates.

  The gradient of a beta is that of `total`, one number a token, of which nothing else is used; to it `turns` are
  constants. Only rates and states that are differentiated ask for the gradient of `turns`. Kernels that rotate have no
  use for `turns`, but for `phases`.
  """

  turns: Float[Array, "B T H r"]
  total: Float[Array, "B T H"]
  rates: Float[Array, "r"]  # radians
  phases: Phases


def padded(rotation: Rotation | None, more: int, width: int) -> Rotation | None:
  """A rotation of more tokens, and of heads of `width`, which does nothing to what was added."""
  if rotation is None:
    return None
  rest = (0, width // 2 - rotation.turns.shape[-1])
  tokens = ((0, 0), (0, more), (0, 0))
  total, cycles, start, run, beta = rotation.phases
  return Rotation(
    turns=jnp.pad(rotation.turns, (*tokens, rest)),
    total=jnp.pad(rotation.total, tokens),
    rates=jnp.pad(rotation.rates, (rest,)),
    phases=Phases(
      total=Total(*(jnp.pad(x, tokens) for x in total)),
      cycles=Total(*(jnp.pad(x, (rest,)) for x in cycles)),
      start=None if start is None else jnp.pad(start, ((0, 0), (0, 0), rest)),
      run=None if run is None else jnp.pad(run, tokens),
      beta=None if beta is None else jnp.pad(beta, tokens),
    ),
  )


def by_spans(rotation: Rotation | None, count: int) -> Rotation | None:
  """Those of as many equal spans of time, stacked along a new first axis."""
  if rotation is None:
    return None

  def cut(tree: Any) -> Any:
    return for_each(lambda x: in_spans(x, count), tree)

  def same(tree: Any) -> Any:
    return for_each(lambda x: jnp.broadcast_to(x, (count, *x.shape)), tree)

  turns, total, rates, phases = rotation
  spans = Phases(cut(phases.total), same(phases.cycles), same(phases.start), cut(phases.run), None)
  return Rotation(cut(turns), cut(total), same(rates), spans)


def rotated(
  q: Float[Array, "B T H g d"], k: Float[Array, "B T H d"], rotation: Rotation | None
) -> tuple[Float[Array, "B T H g d"], Float[Array, "B T H d"]]:
  """Queries and keys rotated."""
  return (q, k) if rotation is None else (rotate(q, rotation.turns[..., None, :]), rotate(k, rotation.turns))


def unrotated(
  q: Float[Array, "B T H g d"], k: Float[Array, "B T H d"], rotation: Rotation | None
) -> tuple[Float[Array, "B T H g d"], Float[Array, "B T H d"]]:
  """The inverse of `rotated`."""
  if rotation is not None:  # its sines are computed again: to keep them until now would take memory
    rotation = rotation._replace(turns=-lax.optimization_barrier(rotation.turns))
  return rotated(q, k, rotation)


def turns_of(phases: Phases) -> Float[Array, "B T H r"]:
  """What `phases` multiply out to: a rotation's turns."""
  total, cycles, start, run, _ = phases
  turns = product_modulo_one(Total(*(x[..., None] for x in total)), cycles).hi
  if start is None:
    return turns
  counts = 1.0 if run is None else (run == 0)[..., None]
  return turns + counts * start[:, None]


def angles(rotation: Rotation | None, turning: Turning | None = None) -> Angles | None:
  """What kernels rotate by; the betas may have been summed up already, where no run begins."""
  if rotation is None:
    return None
  if turning is not None:
    return _angles(rotation, Total(*turning.first), turning.since)
  total, _, _, run, _ = rotation.phases
  total, first = _with_first(total)
  before, same, counts = for_each(by_head, first), None, None
  if run is not None:
    runs, first_run = _with_first(run)
    same = (runs == first_run).astype(jnp.float32)
    first = for_each(lambda x: x * same, first)
    same, counts = by_head(same), by_head(first_run == 0)[..., None]
  more = add(total, for_each(jnp.negative, first))
  since, rest = halves(more.hi)
  return _angles(rotation, before, jnp.stack([by_head(since), by_head(rest + more.lo)]), same, counts)


def _angles(
  rotation: Rotation,
  first: Total,
  since: Float[Array, "2 B H T"],
  same: Float[Array, "B H T"] | None = None,
  counts: Bool[Array, "B H n 1"] | None = None,
) -> Angles:
  """From the total at each tile's first token; a state's phase comes to it, unless it does not count there."""
  cycles, start = rotation.phases.cycles, rotation.phases.start
  turns = product_modulo_one(Total(*(x[..., None] for x in first)), cycles).hi
  if start is not None:
    turns = turns + (1.0 if counts is None else counts) * start[:, :, None]
  whole, rest = halves(cycles.hi)
  return Angles(
    first=jnp.repeat(turns, 2, axis=-1),
    since=since,
    cycles=jnp.stack([twice(whole), twice(rest + cycles.lo)]),
    same=same,
  )


def twice(x: Float[Array, "r"]) -> Float[Array, "d"]:
  """For both coordinates of each pair, such that XLA computes it when it compiles, if it can."""
  return jnp.stack([x, x], axis=-1).reshape(-1)


def _with_first(x: Any) -> tuple[Any, Any]:
  """By tiles of ROWS tokens, and of each tile the first: B n t H, B n 1 H."""
  tiles = for_each(lambda a: a.reshape(a.shape[0], -1, ROWS, a.shape[-1]), x)
  return tiles, for_each(lambda a: a[:, :, :1], tiles)


def cotangent(rotation: Rotation, turns: Float[Array, "B T H r"], total: Float[Array, "B T H"]) -> Rotation:
  """That of a rotation, of which all else is constant."""
  return for_each(jnp.zeros_like, rotation)._replace(turns=turns, total=total)


def torque(x: Float[Array, "*lead g d"], dx: Float[Array, "*lead g d"]) -> Float[Array, "*lead r"]:
  """The cotangent of the turns by which all pairs of x are rotated together."""
  turned = x * turning(dx)
  return jnp.sum(turned.reshape(*x.shape[:-1], -1, 2), axis=(-3, -1))


def turning(dx: Float[Array, "*lead d"]) -> Float[Array, "*lead d"]:
  """The cotangent of the turns of each pair, of which each coordinate's share is what it is multiplied by."""
  pairs = dx.reshape(*dx.shape[:-1], -1, 2)
  return (pairs[..., ::-1] * jnp.array([2 * jnp.pi, -2 * jnp.pi], jnp.float32)).reshape(dx.shape)
