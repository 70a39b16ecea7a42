"""Kernels are differentiated once, by rules of their own, which are told what is asked for."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Bool

from csympow.forms.spans import for_each


@jax.custom_jvp
def differentiated_once(x: Any) -> Any:
  """The same arrays, which a rule's passes are of, so that differentiating these again is refused in words."""
  return x


@differentiated_once.defjvp
def _refuse(primals: Any, tangents: Any) -> Any:
  del primals, tangents
  raise NotImplementedError("the kernels have no second derivative; implementation='xla' has")


def primals_of(x: Any) -> Any:
  """The arrays, of a rule's arguments that say whether they are differentiated."""
  return jax.tree.map(lambda primal: primal.value, x)


def turns_asked_for(rotation: Any) -> Bool[Array, "n"]:
  """Of no number if nobody asks for the gradient of a rotation's turns.

  A shape belongs to one differentiation, where the structure of residuals is, to JAX, that of whichever traced the same
  call last.
  """
  return jnp.ones(int(rotation is not None and rotation.turns.perturbed), bool)


def is_asked(asked: Bool[Array, "n"] | None) -> bool:
  """What `turns_asked_for` found, which only a pass without gradients has not saved."""
  assert asked is not None
  return asked.size > 0


def instantiated(cotangents: tuple[Any, Any], y: Array, final: Any) -> tuple[Array, Any]:
  """With numbers for y, even if it was not used, and none at all for a state that was not: like those found."""

  def unused(x: Any) -> bool:
    return isinstance(x, SymbolicZero)

  dy, dfinal = cotangents
  if unused(dy):
    dy = jnp.zeros_like(y, dy.dtype).reshape(dy.shape)
  if dfinal is None or all(map(unused, dfinal)):
    return dy, None
  return dy, for_each(lambda x, like: jnp.zeros_like(like) if unused(x) else x, dfinal, final)
