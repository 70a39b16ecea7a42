"""One token of the recurrent form by a Pallas kernel, which changes the state in its place.

The same function as `recurrent.step`, from a token as the op is given it. What surrounds the kernel is elementwise and
without sums, so that XLA can make one program of it on either side: beside 12 MB of state a launch counts.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int, Integer

from csympow import rotation
from csympow.features import multisets
from csympow.forms import recurrent
from csympow.forms.memory import Memory, without_noise
from csympow.forms.spans import Sums, normalised
from csympow.gates import effective_log_gate
from csympow.state import State
from kernels_pallas.gpu import step as kernel


class _Stored(NamedTuple):
  """S and Z as states store them, of one or of more layers."""

  S: Float[Array, "L B H D dv"]
  Z: Float[Array, "L B H D"]


def step(
  q: Float[Array, "B Hq d"],
  k: Float[Array, "B H d"],
  v: Float[Array, "B H dv"],
  state: State,
  power: int,
  log_gate: Float[Array, "B H"] | None,
  beta: Float[Array, "B H"] | None,
  rates: Float[Array, "r"] | None,
  scale: ArrayLike | None,
  layer: Integer[Array, ""] | None,
  interpret: Any = None,
) -> tuple[Float[Array, "B Hq dv"], State]:
  """The output in q's dtype, and the state with the token in it, in the types that it had.

  With a layer, the state is a stack of such, along a first axis.
  """
  (batch, _, head_dim), heads, turns = q.shape, k.shape[1], None
  phase = start = state.phase if layer is None else lax.dynamic_index_in_dim(state.phase, layer, keepdims=False)
  if rates is not None:
    speed = jnp.ones((1, 1, 1), jnp.float32) if beta is None else beta[:, None]
    turns, phase = rotation.phases(speed, rates.astype(jnp.float32), initial=start)
    turns = turns[:, 0]
  queries = q.reshape(batch, heads, -1, head_dim)
  if scale is not None:
    queries = queries * jnp.where(scale == 0, 0, 1).astype(q.dtype)  # the normalisation cancels all else
  token = kernel.Token(
    q=rotation.rotated_pairs(queries, None if turns is None else turns[:, :, None]),
    k=rotation.rotated_pairs(k, turns),
    v=v,
    log_gate=jnp.zeros_like(k[..., 0], jnp.float32) if log_gate is None else log_gate,
  )
  stored = _Stored(state.S, state.Z)
  if layer is None:
    stored, y = _advance(_Stored(*(x[None] for x in stored)), token, None, power, interpret)
    stored = _Stored(*(x.reshape(x.shape[1:]) for x in stored))
  else:
    stored, y = _advance(stored, token, layer.astype(jnp.int32), power, interpret)
    phase = lax.dynamic_update_index_in_dim(state.phase, phase, layer, 0)
  return y.reshape(*q.shape[:-1], -1).astype(q.dtype), State(*stored, phase)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _advance(
  stored: _Stored, token: kernel.Token, layer: Int[Array, ""] | None, power: int, interpret: Any
) -> tuple[_Stored, Float[Array, "B H g dv"]]:
  indices, weight = multisets(2 * token.k[0].shape[-1], power)
  features = kernel.Features(jnp.asarray(indices, jnp.int32), jnp.asarray(weight, jnp.float32))
  place = None if layer is None else layer.reshape(1)
  S, Z, gathered = kernel.step(*stored, place, token, features, interpret=interpret)
  # Each column has a normaliser of its own: shapes that are alike make one program.
  older = Sums(*(_over_slices(x)[..., None] for x in (gathered.older_S, gathered.older_Z)))
  carried, own = without_noise(older), gathered.own_weight[..., :1, None]
  values = token.v.astype(jnp.float32)[:, :, None, :, None]
  y = normalised(Sums(carried.numerator + own * values, carried.denominator + own))
  return _Stored(S, Z), y[..., 0]


def _over_slices(parts: Float[Array, "B H n g dv"]) -> Float[Array, "B H g dv"]:
  """In a fixed order; one by one, XLA adds a few of them together with what follows."""
  if parts.shape[2] > kernel.SLICES:
    return jnp.sum(parts, axis=2)
  return functools.reduce(jnp.add, (parts[:, :, n] for n in range(parts.shape[2])))


type _Saved = tuple[_Stored, kernel.Token, Int[Array, ""] | None]


def _forward(
  stored: _Stored, token: kernel.Token, layer: Int[Array, ""] | None, power: int, interpret: Any
) -> tuple[tuple[_Stored, Float[Array, "B H g dv"]], _Saved]:
  return _advance(stored, token, layer, power, interpret), (stored, token, layer)


def _backward(
  power: int, interpret: Any, saved: _Saved, cotangents: tuple[_Stored, Float[Array, "B H g dv"]]
) -> tuple[_Stored, kernel.Token, None]:
  del interpret
  stored, token, layer = saved
  stored, token = jax.vjp(functools.partial(_plain, layer=layer, power=power), stored, token)[1](cotangents)
  return stored, token, None


_advance.defvjp(_forward, _backward)


def _plain(
  stored: _Stored, token: kernel.Token, layer: Int[Array, ""] | None, power: int
) -> tuple[_Stored, Float[Array, "B H g dv"]]:
  """The kernel's twin."""
  q, k = (jnp.stack(pair, axis=-1).reshape(*pair[0].shape[:-1], -1) for pair in (token.q, token.k))
  largest = lax.stop_gradient(jnp.max(jnp.abs(q), axis=-1, keepdims=True))
  index = 0 if layer is None else layer
  S, Z = (lax.dynamic_index_in_dim(x, index, keepdims=False).astype(jnp.float32) for x in stored)
  v, log_gate = token.v.astype(jnp.float32), effective_log_gate(token.log_gate[:, None], None, None)[:, 0]
  scaled = q / jnp.where(largest == 0, 1.0, largest)
  new, y = recurrent.step(Memory(S, Z[..., None]), scaled, k, v, log_gate, power)
  changed = zip(stored, (new.S, new.Z[..., 0]), strict=True)
  return _Stored(*(lax.dynamic_update_index_in_dim(x, part.astype(x.dtype), index, 0) for x, part in changed)), y
