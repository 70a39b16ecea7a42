"""What the attention functions accept. Every refusal is one line: the argument, what came, and what fits."""

import math
import numbers
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from csympow.checks import came, is_array, is_count, require, require_array, require_count, require_word, show
from csympow.features import feature_dim, require_countable
from csympow.state import State

FORMS = ("auto", "attention", "chunked", "recurrent")
IMPLEMENTATIONS = (None, "xla", "pallas")
DTYPES = ("float32", "bfloat16", "float16")
STATE_DTYPES = ("float32", "bfloat16")


def check_sequence(given: Mapping[str, Any]) -> None:
  """Arguments of `attention`, `prefill` and `explain`."""
  _check_tensors(given, ("B", "T"))
  require_word("form", given["form"], FORMS)
  check_implementation(given["implementation"])
  check_chunk_size(given["chunk_size"])
  if given["segment_ids"] is not None:
    _check_segment_ids(given["segment_ids"], given["q"].shape[:2])
  if given.get("device") is not None:
    require_word("device", given["device"], ("cpu", "gpu", "tpu"))
  if given.get("state") is not None:
    _check_state(given)


def check_token(given: Mapping[str, Any]) -> None:
  """Arguments of `step`."""
  _check_tensors(given, ("B",))
  check_implementation(given["implementation"])
  layer = given["layer"]
  scalar = is_array(layer) and layer.shape == () and jnp.issubdtype(layer.dtype, jnp.integer)
  require(layer is None or scalar, f"layer must be an integer array without axes or None, got {came(layer)}")
  _check_state(given)


def check_new_state(given: Mapping[str, Any]) -> None:
  """Arguments of `init_state`."""
  for name in ("batch", "heads", "head_dim", "value_dim"):
    require_count(name, given[name])
  check_power(given["power"])
  require_countable(given["head_dim"], given["power"])
  try:
    dtype = jnp.dtype(given["dtype"]).name
  except TypeError:
    dtype = repr(given["dtype"])
  require(dtype in STATE_DTYPES, f"dtype of a state must be one of {', '.join(STATE_DTYPES)}, got {dtype}")


def check_power(power: Any) -> None:
  """Odd powers would make weights negative."""
  require(is_count(power) and power % 2 == 0, f"power must be a positive even integer, got {came(power)}")


def check_chunk_size(chunk_size: Any) -> None:
  """A number of tokens, or None to choose one."""
  fits = chunk_size is None or is_count(chunk_size)
  require(fits, f"chunk_size must be a positive integer or None, got {came(chunk_size)}")


def check_implementation(implementation: Any) -> None:
  """A known word; whether a call can have it is for `csympow.implementations` to say."""
  require_word("implementation", implementation, IMPLEMENTATIONS)


def _check_tensors(given: Mapping[str, Any], lead: tuple[str, ...]) -> None:
  layouts = {"q": (*lead, "Hq", "d"), "k": (*lead, "H", "d"), "v": (*lead, "H", "dv")}
  sizes: dict[str, tuple[str, int]] = {}
  for name, layout in layouts.items():
    array, layout_text = given[name], ", ".join(layout)
    require_array(name, array, layout_text)
    only_shape = isinstance(array, jax.ShapeDtypeStruct) and "device" not in given
    require(not only_shape, f"{name} must be an array; a jax.ShapeDtypeStruct is for explain, got {show(array)}")
    for axis, size in zip(layout, array.shape, strict=True):
      require(size > 0, f"{name} [{layout_text}] must have at least 1 element along {axis}, got {show(array)}")
      owner, expected = sizes.setdefault(axis, (name, size))
      require(
        size == expected,
        f"{name} must be [{layout_text}] with {axis}={expected} as in {owner} {show(given[owner])}, got {show(array)}",
      )
    require(array.dtype.name in DTYPES, f"{name} must be one of {', '.join(DTYPES)}, got {array.dtype}")
    same = array.dtype == given["q"].dtype
    require(same, f"{name} must have the dtype of q, {given['q'].dtype}, got {array.dtype}")
  heads, query_heads, head_dim = (sizes[axis][1] for axis in ("H", "Hq", "d"))
  require(
    query_heads % heads == 0, f"q must have a multiple of k's {heads} heads (grouped queries), got {query_heads} heads"
  )
  check_power(given["power"])
  _check_scale(given["scale"])
  for name in ("log_gate", "beta"):
    if given[name] is not None:
      require_array(name, given[name], ", ".join((*lead, "H")), tuple(given["k"].shape[:-1]))
      dtype = given[name].dtype
      require(dtype == jnp.float32, f"{name} must be float32, for its sums run over all tokens, got {dtype}")
  _check_rates(given, head_dim)


def _check_rates(given: Mapping[str, Any], head_dim: int) -> None:
  rates = given["rates"]
  if rates is None:
    require(given["beta"] is None, "beta scales the rotation, so it needs rates, got rates=None; see rotary_rates")
    return
  require(head_dim % 2 == 0, f"rates turn pairs of coordinates, so q and k need an even head dim d, got d={head_dim}")
  require_array("rates", rates, "d/2", (head_dim // 2,))
  require(
    jnp.issubdtype(rates.dtype, jnp.floating), f"rates must be floating-point, such as float32, got {rates.dtype}"
  )


def _check_segment_ids(segment_ids: Any, shape: tuple[int, ...]) -> None:
  require_array("segment_ids", segment_ids, "B, T", tuple(shape))
  dtype = segment_ids.dtype
  require(jnp.issubdtype(dtype, jnp.integer), f"segment_ids must be integers, such as int32, got {dtype}")
  if isinstance(segment_ids, np.ndarray) and jax.dtypes.canonicalize_dtype(dtype) != dtype:
    kept = segment_ids.astype(jax.dtypes.canonicalize_dtype(dtype)) == segment_ids
    lost = segment_ids[~kept]
    require(lost.size == 0, f"segment_ids must fit int32 (jax_enable_x64 is off), got {lost[:1]}")


def _check_state(given: Mapping[str, Any]) -> None:
  state, k, v = given["state"], given["k"], given["v"]
  require(isinstance(state, State), f"state must be a csympow.State (see init_state), got {type(state).__name__}")
  features, lead, axes = feature_dim(k.shape[-1], given["power"]), (k.shape[0], k.shape[-2]), "B, H"
  if given.get("layer") is not None:
    lead, axes = (*state.S.shape[:1], *lead), "L, B, H"
  require_array("state.S", state.S, f"{axes}, D, dv", (*lead, features, v.shape[-1]))
  require_array("state.Z", state.Z, f"{axes}, D", (*lead, features))
  require_array("state.phase", state.phase, f"{axes}, d/2", (*lead, k.shape[-1] // 2))
  require(
    state.S.dtype.name in STATE_DTYPES and state.Z.dtype == state.S.dtype,
    f"state.S and state.Z must be both {' or both '.join(STATE_DTYPES)}, got {state.S.dtype} and {state.Z.dtype}",
  )
  require(state.phase.dtype == jnp.float32, f"state.phase must be float32, got {state.phase.dtype}")


def _check_scale(scale: Any) -> None:
  number = isinstance(scale, numbers.Real) and not isinstance(scale, bool)
  scalar = is_array(scale) and scale.shape == () and jnp.issubdtype(scale.dtype, jnp.floating)
  require(scale is None or number or scalar, f"scale must be a real number or None for 1/sqrt(d), got {came(scale)}")
  if number:
    require(math.isfinite(scale), f"scale must be finite, got {came(scale)}")
