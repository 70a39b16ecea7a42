"""The means by which public functions refuse what they cannot use: one line, as a ValueError, before any tracing."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def validated[**P, R](check: Callable[[Mapping[str, Any]], None]) -> Callable[[Callable[P, R]], Callable[P, R]]:
  """Runs `check` on a call's arguments, defaults filled in, before the function gets them as JAX arrays."""

  def decorate(function: Callable[P, R]) -> Callable[P, R]:
    signature = inspect.signature(function)

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
      bound = signature.bind(*args, **kwargs)
      bound.apply_defaults()
      check(bound.arguments)
      return function(*map(_as_jax, args), **{name: _as_jax(value) for name, value in kwargs.items()})

    return wrapper

  return decorate


def _as_jax(x: Any) -> Any:
  """NumPy arrays, alone or in a state, as JAX arrays; all else, and a module above all, as it is."""
  if isinstance(x, tuple):
    return jax.tree.map(_as_jax, x)
  return jnp.asarray(x) if isinstance(x, np.ndarray) else x


def require(condition: bool, message: str) -> None:
  """Raises the message as a ValueError unless the condition holds."""
  if not condition:
    raise ValueError(message)


def require_count(name: str, value: Any, kind: str = "positive integer") -> None:
  """A Python or NumPy integer of at least 1."""
  require(is_count(value), f"{name} must be a {kind}, got {came(value)}")


def require_array(name: str, array: Any, layout: str, shape: tuple[int, ...] | None = None) -> None:
  """An array of as many axes as the layout names, and of `shape` if that is known."""
  wanted = f"[{layout}]" if shape is None else f"[{layout}] = {shape}"
  require(is_array(array), f"{name} must be an array of shape {wanted}, got a {type(array).__name__}")
  fits = len(array.shape) == len(layout.split(",")) if shape is None else tuple(array.shape) == shape
  require(fits, f"{name} must have shape {wanted}, got {show(array)}")


def require_word(name: str, word: Any, words: tuple[str | None, ...]) -> None:
  """One of a few words."""
  known = word is None or isinstance(word, str)
  require(known and word in words, f"{name} must be one of {', '.join(map(repr, words))}, got {came(word)}")


def is_array(x: Any) -> bool:
  """Whether x has what the library asks of an array: jax.ShapeDtypeStruct does."""
  return hasattr(x, "shape") and hasattr(x, "dtype")


def is_count(x: Any) -> bool:
  """Whether x is a positive integer, and no boolean."""
  return isinstance(x, int | np.integer) and not isinstance(x, bool) and bool(x > 0)


def came(x: Any) -> str:
  """What a caller gave, in a few words."""
  if is_array(x):
    return f"an array {show(x)} of {x.dtype}"
  text = repr(x)
  return text if len(text) < 80 and "\n" not in text else f"a {type(x).__name__}"


def show(array: Any) -> str:
  """An array's shape as its owner would print it."""
  return str(tuple(array.shape))
