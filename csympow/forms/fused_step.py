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
from jaxtyping import Array, Float

from csympow import rotation
from csympow.features import multisets
from csympow.forms import recurrent
from csympow.forms.memory import Memory, without_noise
from csympow.forms.spans import Sums, normalised
from csympow.gates import effective_log_gate
from csympow.state import State
from kernels_pallas.gpu import step as kernel


class _Stored(NamedTuple):
  """S and Z as a state stores them."""

  S: Float[Array, "B H D dv"]
  Z: Float[Array, "B H D"]


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
  interpret: Any = None,
) -> tuple[Float[Array, "B Hq dv"], State]:
  """The output in q's dtype, and the state with the token in it, in the types that it had."""
  (batch, _, head_dim), heads, phase = q.shape, k.shape[1], state.phase
  turns = None
  if rates is not None:
    speed = jnp.ones((1, 1, 1), jnp.float32) if beta is None else beta[:, None]
    turns, phase = rotation.phases(speed, rates.astype(jnp.float32), initial=state.phase)
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
  stored, y = _advance(_Stored(state.S, state.Z), token, power, interpret)
  return y.reshape(*q.shape[:-1], -1).astype(q.dtype), State(*stored, phase)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _advance(
  stored: _Stored, token: kernel.Token, power: int, interpret: Any
) -> tuple[_Stored, Float[Array, "B H g dv"]]:
  indices, weight = multisets(2 * token.k[0].shape[-1], power)
  features = kernel.Features(jnp.asarray(indices, jnp.int32), jnp.asarray(weight, jnp.float32))
  S, Z, gathered = kernel.step(*stored, token, features, interpret=interpret)
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


def _forward(
  stored: _Stored, token: kernel.Token, power: int, interpret: Any
) -> tuple[tuple[_Stored, Float[Array, "B H g dv"]], tuple[_Stored, kernel.Token]]:
  return _advance(stored, token, power, interpret), (stored, token)


def _backward(
  power: int, interpret: Any, saved: tuple[_Stored, kernel.Token], cotangents: tuple[_Stored, Float[Array, "B H g dv"]]
) -> tuple[_Stored, kernel.Token]:
  del interpret
  gradients: tuple[_Stored, kernel.Token] = jax.vjp(functools.partial(_plain, power=power), *saved)[1](cotangents)
  return gradients


_advance.defvjp(_forward, _backward)


def _plain(stored: _Stored, token: kernel.Token, power: int) -> tuple[_Stored, Float[Array, "B H g dv"]]:
  """The kernel's twin."""
  q, k = (jnp.stack(pair, axis=-1).reshape(*pair[0].shape[:-1], -1) for pair in (token.q, token.k))
  largest = lax.stop_gradient(jnp.max(jnp.abs(q), axis=-1, keepdims=True))
  memory = Memory(stored.S.astype(jnp.float32), stored.Z.astype(jnp.float32)[..., None])
  v, log_gate = token.v.astype(jnp.float32), effective_log_gate(token.log_gate[:, None], None, None)[:, 0]
  new, y = recurrent.step(memory, q / jnp.where(largest == 0, 1.0, largest), k, v, log_gate, power)
  return _Stored(new.S.astype(stored.S.dtype), new.Z[..., 0].astype(stored.Z.dtype)), y
