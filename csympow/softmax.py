"""Softmax attention with rotary positions, the paper's baseline, and its cache of keys and values.

It is `jax.nn.dot_product_attention`: cuDNN's kernel where the program is compiled for an NVIDIA GPU, XLA's elsewhere.
"""

import functools
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Integer

from csympow import cost
from csympow.rotation import phases, rotate
from csympow.segments import find_runs

# Scores of a head below which XLA's attention is the faster: on an H200, forward and backward of 8 rows and 12 heads of
# 64 took XLA 47 us and cuDNN 152 us at T=128, 104 and 114 at 256, 356 and 130 at 512.
_CUDNN_MIN_SCORES = 256 * 256

type _Shaped = Array | jax.ShapeDtypeStruct


class KVCache(NamedTuple):
  """What softmax attention remembers: every key and value, in buffers of a fixed size.

  Attributes:
    k: the keys, rotated.
    v: the values.
    length: how many of the slots of each row are taken; rows may differ, since padding takes none.
  """

  k: Float[Array, "B S H d"]
  v: Float[Array, "B S H d"]
  length: Integer[Array, "B"]


def attention(
  q: Float[Array, "B T Hq d"],
  k: Float[Array, "B T H d"],
  v: Float[Array, "B T H d"],
  rates: Float[Array, "r"],
  segment_ids: Integer[Array, "B T"] | None,
  implementation: str | None,
) -> Float[Array, "B T Hq d"]:
  """Whole sequences; with segment ids, under a T x T mask."""
  if segment_ids is None:
    turns, _ = phases(jnp.ones((1, q.shape[1], 1), jnp.float32), rates)
    return _dot_product(rotate(q, turns), rotate(k, turns), v, None, implementation)
  valid, starts = find_runs(segment_ids)
  q, k, v = (jnp.where(valid[..., None, None], x, jnp.zeros_like(x)) for x in (q, k, v))
  turns, _ = phases(valid[..., None].astype(jnp.float32), rates, starts=starts)
  mask = _same_run(jnp.cumsum(starts, axis=1), valid)
  y = _dot_product(rotate(q, turns), rotate(k, turns), v, mask, implementation)
  return jnp.where(valid[..., None, None], y, 0)


def prefill(
  q: Float[Array, "B T Hq d"],
  k: Float[Array, "B T H d"],
  v: Float[Array, "B T H d"],
  cache: KVCache,
  rates: Float[Array, "r"],
  segment_ids: Integer[Array, "B T"] | None,
  implementation: str | None,
) -> tuple[Float[Array, "B T Hq d"], KVCache]:
  """The next tokens; the cache continues into their first run, and the one returned holds the last."""
  slots = cache.k.shape[1]
  if segment_ids is None:
    segment_ids = jnp.zeros(q.shape[:2], jnp.int32)
  valid, starts = find_runs(segment_ids)
  q, k, v = (jnp.where(valid[..., None, None], x, jnp.zeros_like(x)) for x in (q, k, v))
  run = jnp.cumsum(starts, axis=1)  # run 0 is the cache's own
  # Positions count on from the cache: as if its tokens had all been turned at the first one here.
  beta = valid.astype(jnp.float32).at[:, 0].add(cache.length.astype(jnp.float32))
  turns, _ = phases(beta[..., None], rates, starts=starts)
  q, k = rotate(q, turns), rotate(k, turns)

  taken = jnp.arange(slots) < cache.length[:, None]
  mask = jnp.concatenate([(run == 0)[:, :, None] & taken[:, None, :], _same_run(run, valid)[:, 0]], axis=2)[:, None]
  keys = jnp.concatenate([cache.k.astype(k.dtype), k], axis=1)
  values = jnp.concatenate([cache.v.astype(v.dtype), v], axis=1)
  y = jnp.where(valid[..., None, None], _dot_product(q, keys, values, mask, implementation), 0)

  # The last run stays: after what is there if it is the cache's own, from slot 0 if not.
  count = jnp.cumsum(valid, axis=1)
  place = count - 1 - lax.cummax(jnp.where(starts, count - 1, 0), axis=1)
  kept = valid & (run == run[:, -1:])
  base = jnp.where(run[:, -1] == 0, cache.length, 0)
  place = jnp.where(kept, base[:, None] + place, slots)
  length = base + kept.sum(axis=1, dtype=jnp.int32)
  cache = KVCache(k=place_tokens(cache.k, place, k), v=place_tokens(cache.v, place, v), length=length)
  return poisoned(y, cache.length, slots), cache


def step(
  q: Float[Array, "B Hq d"],
  k: Float[Array, "B H d"],
  v: Float[Array, "B H d"],
  cache: KVCache,
  rates: Float[Array, "r"],
) -> tuple[Float[Array, "B Hq d"], KVCache]:
  """The next token."""
  length = cache.length + 1
  turns, _ = phases(length.astype(jnp.float32)[:, None, None], rates)
  q, k, v = rotate(q[:, None], turns), rotate(k[:, None], turns), v[:, None]
  place = cache.length[:, None]
  cache = KVCache(k=place_tokens(cache.k, place, k), v=place_tokens(cache.v, place, v), length=length)
  mask = jnp.arange(cache.k.shape[1]) < length[:, None, None, None]
  # One query reads the cache once whatever computes it: XLA does that at the memory's speed, on every device.
  y = _dot_product(q, cache.k.astype(q.dtype), cache.v.astype(q.dtype), mask, "xla")
  return poisoned(y, length, cache.k.shape[1])[:, 0], cache


def _same_run(run: Integer[Array, "B T"], valid: Bool[Array, "B T"]) -> Bool[Array, "B 1 T T"]:
  causal = jnp.tri(run.shape[1], dtype=bool)
  return (causal & (run[:, :, None] == run[:, None, :]) & valid[:, None, :])[:, None]


def place_tokens(
  buffer: Float[Array, "B S *rest"], place: Integer[Array, "B T"], new: Float[Array, "B T *rest"]
) -> Float[Array, "B S *rest"]:
  """Puts each token in its slot; a place beyond the last slot is dropped."""
  rows = jnp.arange(buffer.shape[0])[:, None]
  return buffer.at[rows, place].set(new.astype(buffer.dtype), mode="drop")


def poisoned(y: Float[Array, "B T H d"], length: Integer[Array, "B"], slots: int) -> Float[Array, "B T H d"]:
  """The outputs, or NaN in rows that have more tokens than slots: a compiled program has no other way to refuse."""
  return jnp.where((length > slots)[:, None, None, None], jnp.nan, y)


def _dot_product(
  q: Float[Array, "B T Hq d"],
  k: Float[Array, "B S H d"],
  v: Float[Array, "B S H d"],
  mask: Bool[Array, "B 1 T S"] | None,
  implementation: str | None,
) -> Float[Array, "B T Hq d"]:
  """Softmax attention under a mask, or causal without one."""

  def by(implementation: Literal["xla", "cudnn"]) -> Callable[[Array, Array, Array], Array]:
    return functools.partial(
      jax.nn.dot_product_attention, mask=mask, is_causal=mask is None, implementation=implementation
    )

  if implementation == "cudnn":
    return by("cudnn")(q, k, v)
  few = q.shape[1] * k.shape[1] < _CUDNN_MIN_SCORES
  if implementation == "xla" or few or not _traces(by("cudnn"), q, k, v):
    return by("xla")(q, k, v)
  # Chosen when lowering, so that a program compiled here for another device is right. XLA removes the residuals of the
  # branch that is not taken: the backward pass needs no more memory for the choice.
  y: Array = lax.platform_dependent(q, k, v, cuda=by("cudnn"), default=by("xla"))
  return y


def has_kernel(q: _Shaped, k: _Shaped, v: _Shaped) -> bool:
  """Whether `attention` over whole sequences of these is cuDNN's where it runs, and takes no memory for scores."""
  causal = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn")
  return cost.platform() == "gpu" and _traces(causal, q, k, v)


def _traces(attend: Callable[[Array, Array, Array], Array], q: _Shaped, k: _Shaped, v: _Shaped) -> bool:
  """Whether cuDNN takes these: what it does not support, or not being installed, it says while tracing."""

  def both_passes(q: Array, k: Array, v: Array) -> tuple[Array, ...]:
    y, backward = jax.vjp(attend, q, k, v)
    return tuple(backward(y))

  try:
    jax.eval_shape(both_passes, q, k, v)
  except (NotImplementedError, RuntimeError):
    return False
  return True
