"""A call for whatever kind of chip it is compiled for.

It may be by other kernels, and in another form, on each. A call that runs at once is for the chip that its arrays are
bound to; else a mesh or `jax.default_device` may name one. A program that is only traced may be compiled for any chip,
whichever this machine has, so it takes all ways along, and `lax.platform_dependent` leaves the choice to its lowering.
XLA removes the residuals of branches that are not taken, so a gradient needs no more memory for the choice, unless its
two passes are programs of their own, as in `jax.vjp` of a jitted function: then the others' are kept, as zeros.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive, concrete_or_error
from jax.interpreters import mlir
from jaxtyping import Array

from csympow import cost
from csympow.cost import Implementation

CHIPS = ("cpu", "gpu", "tpu")  # the first one's way is that of all other platforms


class Way(NamedTuple):
  """How a call is done on one kind of chip."""

  implementation: Implementation
  run: Callable[..., Any]


type WayOn = Callable[[str, Implementation | None], Way]  # a kind of chip, and what was asked for


def run(way_on: WayOn, asked: Implementation | None, *arrays: Any) -> Any:
  """`way_on(chip, asked).run(*arrays)`, on the chip that this will be compiled for.

  `way_on` raises NotImplementedError, which says why, if what was asked for cannot be had. If only some chips have it,
  compiling for another one raises that.
  """
  chip = _chip_for(arrays)
  if chip is not None:
    return way_on(chip, asked).run(*arrays)
  ways = {chip: _way_or_refusal(way_on, chip, asked) for chip in CHIPS}
  if all(way.implementation == "xla" for way in ways.values()):  # right everywhere, so a likely chip's will do
    return way_on(cost.platform(), asked).run(*arrays)
  return lax.platform_dependent(*arrays, cuda=ways["gpu"].run, tpu=ways["tpu"].run, default=ways["cpu"].run)


def _way_or_refusal(way_on: WayOn, chip: str, asked: Implementation | None) -> Way:
  try:
    return way_on(chip, asked)
  except NotImplementedError as why:
    instead = way_on(chip, "xla")  # whose results have the same types
    return Way(instead.implementation, functools.partial(_refuse, str(why), instead))


def _refuse(why: str, instead: Way, first: Array, *arrays: Any) -> Any:
  return instead.run(first + refusal.bind(why=why).astype(first.dtype), *arrays)


def _chip_for(arrays: Any) -> str | None:
  """The one that a call runs on, or is traced for if that is named; or None."""
  at_hand = _at_hand(arrays)
  for x in at_hand or ():
    if isinstance(x, jax.Array) and x.committed:
      return cost.kind(next(iter(x.devices())))
  return cost.named() or (None if at_hand is None else cost.platform())


def _at_hand(arrays: Any) -> list[Any] | None:
  """The arrays of a call that runs at once; None of one that is being traced, even if it is of arrays closed over."""
  if isinstance(lax.iota(jnp.int32, 1), jax.core.Tracer):  # even what depends on no argument is traced here
    return None
  try:
    return [concrete_or_error(None, x) for x in jax.tree.leaves(arrays)]
  except jax.errors.ConcretizationTypeError:
    return None


def _raise(*_: Any, why: str) -> Any:
  raise NotImplementedError(why)


# A number that a program cannot be lowered with.
refusal = Primitive("refusal")
refusal.def_abstract_eval(lambda *, why: jax.core.ShapedArray((), jnp.dtype("float32")))
refusal.def_impl(_raise)
mlir.register_lowering(refusal, _raise)
