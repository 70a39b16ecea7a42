"""What a caller may pass. Every refusal is one line: the argument, what came, and what fits."""

import functools
import inspect
import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from csympow.features import feature_dim
from csympow.state import State

FORMS = ("auto", "attention", "chunked", "recurrent")
IMPLEMENTATIONS = (None, "xla", "pallas")
DTYPES = ("float32", "bfloat16", "float16")
STATE_DTYPES = ("float32", "bfloat16")


def validated[**P, R](check: Callable[[Mapping[str, Any]], None]) -> Callable[[Callable[P, R]], Callable[P, R]]:
  """Runs `check` on a call's arguments, defaults filled in, before the function gets them as JAX arrays."""

  def decorate(function: Callable[P, R]) -> Callable[P, R]:
    signature = inspect.signature(function)

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
      bound = signature.bind(*args, **kwargs)
      bound.apply_defaults()
      check(bound.arguments)
      args, kwargs = jax.tree.map(lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x, (args, kwargs))
      return function(*args, **kwargs)

    return wrapper

  return decorate


def check_sequence(given: Mapping[str, Any]) -> None:
  """Arguments of `attention`, `prefill` and `explain`."""
  _check_tensors(given, ("B", "T"))
  _check_word("form", given["form"], FORMS)
  check_implementation(given["implementation"])
  check_chunk_size(given["chunk_size"])
  _check_segment_ids(given)
  if given.get("device") is not None:
    _check_word("device", given["device"], ("cpu", "gpu", "tpu"))
  if given.get("state") is not None:
    _check_state(given)


def check_token(given: Mapping[str, Any]) -> None:
  """Arguments of `step`."""
  _check_tensors(given, ("B",))
  _check_state(given)


def check_new_state(given: Mapping[str, Any]) -> None:
  """Arguments of `init_state`."""
  for name in ("batch", "heads", "head_dim", "value_dim"):
    _require(_is_count(given[name]), f"{name} must be a positive integer, got {given[name]!r}")
  check_power(given["power"])
  try:
    dtype = jnp.dtype(given["dtype"]).name
  except TypeError:
    dtype = repr(given["dtype"])
  _require(dtype in STATE_DTYPES, f"dtype of a state must be one of {', '.join(STATE_DTYPES)}, got {dtype}")


def check_power(power: Any) -> None:
  """Odd powers would make weights negative."""
  _require(_is_count(power) and power % 2 == 0, f"power must be a positive even integer, got {power!r}")


def check_chunk_size(chunk_size: Any) -> None:
  """A number of tokens, or None to choose one."""
  valid = chunk_size is None or _is_count(chunk_size)
  _require(valid, f"chunk_size must be a positive integer or None, got {chunk_size!r}")


def check_implementation(implementation: Any) -> None:
  """Obeyed or refused."""
  _check_word("implementation", implementation, IMPLEMENTATIONS)
  if implementation == "pallas":
    raise NotImplementedError(
      "implementation='pallas' has no kernel for this form yet; implementation='xla' or None runs everywhere"
    )


def _check_tensors(given: Mapping[str, Any], lead: tuple[str, ...]) -> None:
  layouts = {"q": (*lead, "Hq", "d"), "k": (*lead, "H", "d"), "v": (*lead, "H", "dv")}
  sizes: dict[str, tuple[str, int]] = {}
  for name, layout in layouts.items():
    array = given[name]
    _check_array(name, array, layout)
    for axis, size in zip(layout, array.shape, strict=True):
      _require(size > 0, f"{name} has no elements along {axis}: its shape is {_show(array)}, and every axis needs one")
      owner, expected = sizes.setdefault(axis, (name, size))
      _require(
        size == expected,
        f"{name} must be [{', '.join(layout)}] with {axis}={expected} as in {owner} {_show(given[owner])}, "
        f"got {_show(array)}",
      )
    _require(
      array.dtype.name in DTYPES and array.dtype == given["q"].dtype,
      f"{name} must have q's dtype, one of {', '.join(DTYPES)}; got {name} {array.dtype} and q {given['q'].dtype}",
    )
  heads, query_heads, head_dim = (sizes[axis][1] for axis in ("H", "Hq", "d"))
  _require(
    query_heads % heads == 0, f"q must have a multiple of k's {heads} heads (grouped queries), got {query_heads} heads"
  )
  check_power(given["power"])
  _check_scale(given["scale"])
  gate_layout = (*lead, "H")
  for name in ("log_gate", "beta"):
    if given[name] is not None:
      _check_gate(name, given[name], gate_layout, given["k"].shape[: len(gate_layout)])
  _check_rates(given, head_dim)


def _check_gate(name: str, array: Any, layout: tuple[str, ...], shape: tuple[int, ...]) -> None:
  _check_array(name, array, layout)
  _require(
    array.shape == shape,
    f"{name} must be [{', '.join(layout)}] = {shape}, one number per token and key head, got {_show(array)}",
  )
  _require(array.dtype == jnp.float32, f"{name} must be float32, for its sums run over all tokens; got {array.dtype}")


def _check_rates(given: Mapping[str, Any], head_dim: int) -> None:
  rates = given["rates"]
  if rates is None:
    _require(given["beta"] is None, "beta scales the rotation, so it needs rates, got rates=None; see rotary_rates")
    return
  _require(head_dim % 2 == 0, f"rates turn pairs of coordinates, so q and k need an even head dim d, got d={head_dim}")
  _check_array("rates", rates, ("d/2",))
  fits = rates.shape == (head_dim // 2,) and jnp.issubdtype(rates.dtype, jnp.floating)
  _require(
    fits, f"rates must be [d/2] = ({head_dim // 2},) floating-point numbers, got {_show(rates)} of {rates.dtype}"
  )


def _check_segment_ids(given: Mapping[str, Any]) -> None:
  segment_ids = given["segment_ids"]
  if segment_ids is None:
    return
  _check_array("segment_ids", segment_ids, ("B", "T"))
  fits = segment_ids.shape == given["q"].shape[:2] and jnp.issubdtype(segment_ids.dtype, jnp.signedinteger)
  _require(
    fits,
    f"segment_ids must be [B, T] = {given['q'].shape[:2]} signed integers, got {_show(segment_ids)} "
    f"of {segment_ids.dtype}",
  )


def _check_state(given: Mapping[str, Any]) -> None:
  state, k, v = given["state"], given["k"], given["v"]
  _require(isinstance(state, State), f"state must be a csympow.State, got {type(state).__name__}; see init_state")
  features = feature_dim(k.shape[-1], given["power"])
  lead = (k.shape[0], k.shape[-2])
  shapes = {"S": (*lead, features, v.shape[-1]), "Z": (*lead, features), "phase": (*lead, k.shape[-1] // 2)}
  for name, shape in shapes.items():
    array = getattr(state, name)
    _check_array(f"state.{name}", array, ("B", "H", "D", "dv")[: len(shape)])
    _require(
      array.shape == shape,
      f"state.{name} must be {shape} for these k and v at power {given['power']}, got {_show(array)}",
    )
    allowed = ("float32",) if name == "phase" else STATE_DTYPES
    _require(
      array.dtype.name in allowed, f"state.{name} must be of dtype {' or '.join(allowed)}, got {array.dtype}"
    )


def _check_scale(scale: Any) -> None:
  numeric = scale is None or (isinstance(scale, numbers.Real) and not isinstance(scale, bool))
  scalar = numeric or (_is_array(scale) and scale.shape == () and jnp.issubdtype(scale.dtype, jnp.floating))
  _require(scalar, f"scale must be a real number or None for 1/sqrt(d), got {scale!r}")
  if isinstance(scale, numbers.Real):
    _require(math.isfinite(scale), f"scale must be finite, got {scale!r}")


def _check_array(name: str, array: Any, layout: tuple[str, ...]) -> None:
  wanted = f"[{', '.join(layout)}]"
  _require(_is_array(array), f"{name} must be an array of shape {wanted}, got {type(array).__name__}")
  _require(len(array.shape) == len(layout), f"{name} must have shape {wanted}, got {_show(array)}")


def _check_word(name: str, word: Any, words: tuple[str | None, ...]) -> None:
  known = any(word is each or (isinstance(word, str) and word == each) for each in words)
  _require(known, f"{name} must be one of {', '.join(map(repr, words))}, got {word!r}")


def _is_array(x: Any) -> bool:
  return hasattr(x, "shape") and hasattr(x, "dtype")


def _is_count(x: Any) -> bool:
  return isinstance(x, int) and not isinstance(x, bool) and x > 0


def _show(array: Any) -> str:
  return str(tuple(array.shape))


def _require(condition: bool, message: str) -> None:
  if not condition:
    raise ValueError(message)
