"""The chunked form by Pallas kernels for TPUs, p = 2: the same function as `chunked.attend`.

A kernel carries the state from chunk to chunk in the chip's own memory, where features stand by series of cyclic
shifts: the same products of two coordinates as in `csympow.features`, in another order and without their weights.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from csympow.features import pairs, symmetric
from csympow.forms import anchors, backwards, near, near_tpu, rotating, scales
from csympow.forms.memory import Memory
from csympow.forms.near_tpu import time_first, vectors
from csympow.forms.once import differentiated_once
from csympow.forms.spans import Settings
from kernels_pallas.tpu import chunked_backward, chunked_forward
from kernels_pallas.tpu.features import coordinates
from kernels_pallas.tpu.shifts import Chunks, State, as_one_batch

_STRETCHES = 8  # into which time is cut for the sums that gradients must come to, at most


class _Scales(NamedTuple):
  """What queries and keys were divided by, as powers of two."""

  q: Int[Array, "B T H g"]
  top: Int[Array, "B H"]


class _Saved(NamedTuple):
  """What the backward pass needs."""

  chunks: Chunks
  scales: _Scales
  rotation: rotating.Rotation | None
  initial: State | None
  final: State | None
  y: chunked_forward.Outputs


def attend(
  x: near.Tokens,
  memory: Memory | None,
  settings: Settings,
  dtype: DTypeLike,
  return_memory: bool,
) -> tuple[Float[Array, "B T H g dv"], Memory | None]:
  """`chunked.attend` with y in `dtype`. Chunks are whole tiles, d and dv are 64 or 128."""
  assert settings.power == 2
  initial = None if memory is None else _by_shifts(memory, x.k.shape[-1])
  y, final = _attend(x, initial, settings, dtype, return_memory)
  return y, None if final is None else _features(final)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _attend(
  x: near.Tokens, initial: State | None, settings: Settings, dtype: DTypeLike, return_final: bool
) -> tuple[Float[Array, "B T H g dv"], State | None]:
  return _forward(x, initial, settings, dtype, return_final)[0]


def _forward(
  tokens: near.Tokens, initial: State | None, settings: Settings, dtype: DTypeLike, return_final: bool
) -> tuple[tuple[Float[Array, "B T H g dv"], State | None], _Saved]:
  tokens, initial = differentiated_once((tokens, initial))
  G = near_tpu.running(tokens.log_gate, settings)
  chunks, *exponents = near_tpu.chunks(tokens, G, settings.chunk)
  divided_by = _Scales(*exponents)
  scale = near.state_scale(divided_by.top)
  if initial is not None:
    initial = State(initial.S / scale, initial.Z / scale)
  forward = functools.partial(chunked_forward.forward, return_final=return_final, interpret=settings.interpret)
  y, final = as_one_batch(forward, chunks, initial)
  result = None if final is None else State(final.S * scale, final.Z * scale)
  saved = _Saved(chunks, divided_by, tokens.rotation, initial, final, y)
  return (time_first(y.y).astype(dtype), result), saved


def _backward(
  settings: Settings,
  dtype: DTypeLike,
  return_final: bool,
  saved: _Saved,
  cotangents: tuple[Float[Array, "B T H g dv"], State | None],
) -> tuple[near.Tokens, State | None]:
  del return_final
  (dy, dfinal), x = differentiated_once(cotangents), saved.chunks
  scale = near.state_scale(saved.scales.top)
  rows = _rows(saved, dy)
  weight = _weights(x.k.shape[2])
  if dfinal is not None:
    dfinal = State(dfinal.S * scale / weight, symmetric(dfinal.Z) * scale)
  count = x.across.shape[-1]
  stretch = next(n for n in range(-(-count // _STRETCHES), count + 1) if count % n == 0)

  queries, keys = (
    functools.partial(walk, stretch=stretch, interpret=settings.interpret)
    for walk in (chunked_backward.queries, chunked_backward.keys)
  )
  q_far, found = as_one_batch(queries, x, rows, saved.initial)
  inside, dfound, dinitial = as_one_batch(keys, x, rows, dfinal)

  dq, dk = time_first(inside.q + q_far) / 2, time_first(inside.k[:, :, None]) / 2  # without the factor p
  dv = time_first(inside.v[:, :, None])[..., 0, :]
  ends = _joined(saved, found, dfound, dfinal, dinitial)
  pulls = backwards.pulls_of(*vectors(x), dq, dk, saved.rotation, power=2)
  turned = None if saved.rotation is None else _turned(ends, x.k.shape[2])
  by_state = anchors.Ends(_pulled(ends, weight), turned)
  dlog_gate, drotation = anchors.cotangents(pulls, by_state, saved.rotation, reach=_reach(x))

  dq = 2 * dq * scales.power_of_two(-saved.scales.q)
  dk = 2 * dk[..., 0, :] * scales.power_of_two(-saved.scales.top)[:, None]
  dtokens = near.Tokens(dq, dk, dv, dlog_gate, drotation)
  dinitial = None if saved.initial is None else State(dinitial.S * weight / scale, dinitial.Z / scale)
  dtypes = (dtype if dinitial is None else jnp.float32, dtype)
  return backwards.before_rotation(dtokens, saved.rotation, dtypes), dinitial


_attend.defvjp(_forward, _backward)


def _rows(saved: _Saved, dy: Float[Array, "B T H g dv"]) -> chunked_backward.Rows:
  y, normaliser, heard = saved.y
  inverse = backwards.inverse(normaliser)
  rounded = scales.rounded(jnp.moveaxis(dy, 1, -1), scales.BFLOAT16)
  return chunked_backward.Rows(
    dy=rounded.astype(jnp.bfloat16),
    inverse=inverse,
    far=inverse * heard * jnp.exp2(saved.chunks.gate)[:, :, None],
    delta=jnp.sum(rounded * y, axis=3, keepdims=True),
  )


def _reach(x: Chunks) -> anchors.Reach:
  """Discounts: what a gate or a new document cuts off from a state gets nothing of it."""
  return anchors.Reach(*(jnp.moveaxis(row[:, :, 0], 1, 2) for row in (jnp.exp2(x.gate), x.until)))


class _Joined(NamedTuple):
  """Before the first stretch of time, between two, and after the last: the state and its cotangent."""

  state: State  # B H ends ...
  dstate: State


def _joined(saved: _Saved, found: State, dfound: State, dfinal: State | None, dinitial: State) -> _Joined:
  def ends(first: State, between: State, last: State | None) -> State:
    none = jax.tree.map(jnp.zeros_like, first)
    parts = zip(first, between, none if last is None else last, strict=True)
    return State(*(jnp.concatenate([a[:, :, None], b, c[:, :, None]], axis=2) for a, b, c in parts))

  first = State(*(x[:, :, 0] for x in found))
  return _Joined(
    ends(first, State(*(x[:, :, 1:] for x in found)), saved.final),
    ends(dinitial, State(*(x[:, :, :-1] for x in dfound)), dfinal),
  )


def _pulled(x: _Joined, weight: Float[Array, "D 1"]) -> Float[Array, "B ends H"]:
  """How strongly all gates on one side of a state are pulled: the inner product with its cotangent."""
  pulls = jnp.sum(x.state.S * x.dstate.S * weight, axis=(-2, -1)) + jnp.sum(x.state.Z * x.dstate.Z, axis=(-2, -1))
  return jnp.moveaxis(pulls, 1, 2)


def _turned(x: _Joined, head_dim: int) -> Float[Array, "B ends H r"]:
  """The same inner product with the state rotated by the turns of each pair of coordinates."""
  place = _place(head_dim)

  def at_one(x: _Joined) -> Float[Array, "B H r"]:
    def turned(a: Array, b: Array) -> Float[Array, "B H r"]:
      return jnp.sum(a[:, :, 0::2] * b[:, :, 1::2] - a[:, :, 1::2] * b[:, :, 0::2], axis=tuple(range(3, a.ndim)))

    return turned(x.state.S[:, :, place], x.dstate.S[:, :, place]) + turned(x.state.Z, x.dstate.Z)

  by_end = lax.map(at_one, jax.tree.map(lambda a: jnp.moveaxis(a, 2, 0), x))  # all of one state's products at a time
  return 4 * jnp.pi * jnp.moveaxis(by_end, 0, 1)


@functools.cache
def _place(head_dim: int) -> np.ndarray:
  """Where the product of two coordinates stands in a kernel's state."""
  place = np.empty((head_dim, head_dim), np.int32)
  first, second = coordinates(head_dim)
  place[first, second] = place[second, first] = np.arange(len(first))
  return place


def _weights(head_dim: int) -> Float[Array, "D 1"]:
  """How often each product occurs in (q . k) ** 2."""
  first, second = coordinates(head_dim)
  return jnp.where(first == second, 1.0, 2.0)[:, None]


def _by_shifts(memory: Memory, head_dim: int) -> State:
  first, second, weight = pairs(head_dim)
  place = _place(head_dim)
  order = np.argsort(place[first, second])
  S, Z = (x / weight.astype(np.float32)[:, None] for x in memory)
  return State(S[:, :, order], Z[:, :, order][:, :, place, 0])


def _features(state: State) -> Memory:
  """The inverse of `_by_shifts`."""
  first, second, weight = pairs(state.Z.shape[-1])
  weight = weight.astype(np.float32)[:, None]
  S = state.S[:, :, _place(state.Z.shape[-1])[first, second]]
  return Memory(S * weight, state.Z[:, :, first, second][..., None] * weight)
