"""The way back through `fused_chunked`: one write of states, backwards in time, and three reads.

Row scaling commutes with the products of a state, so cotangents are of the same form as what they belong to:

    dS[a] += sum_i (q_ia dy_i)^T q_i     dq_i += 2 sum_a (q_ia dy_i) S[a]^T     dk_j += 2 sum_a (k_ja v_j) dS[a]^T
"""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, BFloat16, Bool, Float

from csympow.features import symmetric
from csympow.forms import anchors, backwards, finely, full, near, near_backward, rotating
from csympow.forms.anchors import Ends
from csympow.forms.full import Full
from csympow.forms.once import differentiated_once, instantiated, is_asked
from csympow.forms.spans import Settings, by_head
from csympow.prefix import Total
from kernels_pallas.gpu import arrays, gram, scan, state_read, state_write
from kernels_pallas.gpu.angles import Angles
from kernels_pallas.gpu.copies import Copy, copies
from kernels_pallas.gpu.pieces import Pieces
from kernels_pallas.gpu.tiles import STATE_WIDTH


class Discounts(NamedTuple):
  """What keys, and what is read of states, are multiplied by in the kernels' scale."""

  k_scale: Float[Array, "B H T"]  # to the keys of attention inside chunks
  until_end: Float[Array, "B H T"]  # to the same
  since_start: Float[Array, "B Hq T"]
  across: Float[Array, "B H n"]


class _Queries(NamedTuple):
  """As they enter the states of cotangents; `x` stands time last, times the outputs' scale."""

  q: BFloat16[Array, "B T Hq d"]
  x: BFloat16[Array, "B Hq d T"]


class States(NamedTuple):
  """What the backward pass needs of them; anything if no head has one."""

  centre: BFloat16[Array, "B H dv"]  # they are of values less this
  initial: Full | None
  found: BFloat16[Array, "B H m n w w w"]  # the S that each chunk finds
  Z: BFloat16[Array, "B H n terms d d"]  # and its Z, in terms
  final: Full | None
  heard: Bool[Array, "B Hq T"]  # what was read is not drowned by rounding: see memory.without_noise


class Saved(NamedTuple):
  """What the backward pass needs."""

  operands: near.Operands
  log_gate: Float[Array, "B T H"] | None  # if heads may be done finely
  keys: BFloat16[Array, "B H d T"] | None  # time last, as their chunk's end sees them; none without gradients
  G: Total
  rotation: rotating.Rotation | None
  states: States
  y: arrays.Outputs
  by_keys_alone: Bool[Array, ""] | None  # no head has a state; None: that cannot be
  drowned: Bool[Array, "B H"] | None  # heads that were done finely; None: that cannot be
  turns_asked_for: Bool[Array, "n"] | None = None  # see csympow.forms.once


def backward(
  settings: Settings,
  dtype: DTypeLike,
  return_final: bool,
  head_dim: int,
  saved: Saved,
  cotangents: tuple[Any, Any],
) -> tuple[near.Tokens, Full | None]:
  """Cotangents of the tokens as they were given, and of the state."""
  del return_final
  x = saved.operands
  dy, dfinal = differentiated_once(instantiated(cotangents, saved.y.high, saved.states.final))
  # With what else is made of the same arrays, here or in the forward pass.
  given = backwards.cotangents(saved.y, dy)
  of_centre = _along(given.dy, saved.states.centre)
  discounts = discounts_of(near.Exponents(x.q_exponent, x.exponent, x.top), saved.G, settings.chunk)
  turned_by = rotating.angles(saved.rotation)  # here, where they are those of the forward pass
  scale = near.state_scale(x.top)
  dfinal = None if dfinal is None else full.scaled(dfinal, scale)

  def by_states() -> tuple[near.Tokens, Full | None]:
    return _backward_by_states(saved, discounts, given, of_centre, dfinal, turned_by, settings, dtype)

  def by_keys() -> tuple[near.Tokens, None]:
    way_back = None
    if not is_asked(saved.turns_asked_for):
      way_back = near_backward.way_back_of(x, saved.rotation, settings.power, turned_by)
    inside = near_backward.backward(x, given, settings.power, settings.interpret, way_back=way_back, dtype=dtype)
    dq, dk, pulls = near_backward.finished(x, inside, saved.rotation, (dtype, dtype), settings, turned_by)
    kernel = near.totals_kernel(settings)
    return backwards.without_state(dq, dk, inside.v.astype(dtype), pulls, saved.rotation, kernel), None

  if saved.by_keys_alone is not None:
    return lax.cond(saved.by_keys_alone, by_keys, by_states)
  found, initial = by_states(), saved.states.initial
  if saved.drowned is not None and saved.log_gate is not None:
    initial = None if initial is None else full.about(initial, -saved.states.centre)
    rest = x, saved.log_gate, saved.rotation, initial, (dy, dfinal), settings, head_dim
    found = finely.backward(saved.drowned, found, *rest)
  dtokens, dinitial = found
  return dtokens, None if dinitial is None else full.scaled(dinitial, 1 / scale)


def _backward_by_states(
  saved: Saved,
  discounts: Discounts,
  given: backwards.Cotangents,
  of_centre: Float[Array, "B Hq T"],
  dfinal: Full | None,
  turned_by: Angles | None,
  settings: Settings,
  dtype: DTypeLike,
) -> tuple[near.Tokens, Full | None]:
  """Where some head has a state; `of_centre` is `dy` along what the states' values are less."""
  x, states, interpret = saved.operands, saved.states, settings.interpret
  # Of what was read of the state: the numerator is divided by the normaliser, and discounted.
  inverse = jnp.where(states.heard, given.inverse, 0.0) * discounts.since_start
  group = x.q_exponent.shape[-1]
  by_query_head = None if x.has_state is None else jnp.repeat(x.has_state, group, axis=1)
  queries = _Queries(*copies(x.q, _of_queries(inverse), some=by_query_head, interpret=interpret))
  inside = near_backward.backward(x._replace(rounded_q=queries.q), given, settings.power, interpret)
  if dfinal is not None:
    pieces = Pieces.of(x.q.shape[-1], x.v.shape[-1])
    summed = pieces.cut(symmetric(pieces.joined(dfinal.S)))
    dfinal = full.transposed_about(Full(summed, symmetric(dfinal.Z)), -states.centre)

  across = discounts.across
  dS = state_write.write(
    queries.x,
    given.dy,
    queries.q,
    across,
    None if dfinal is None else dfinal.S,
    others=states.found,
    has_state=x.has_state,
    reverse=True,
    interpret=interpret,
  )
  # The very keys, discounted, that the states have, or queries' pulls and keys' would not cancel.
  of_keys = [discounted_keys(discounts)]
  (k_discounted,) = copies(x.keys.plain, of_keys, only=x.has_state, after=dS.final, interpret=interpret)
  keys = saved.keys
  assert keys is not None
  dnormaliser = (of_centre - given.delta) * inverse
  added = gram.gram(
    queries.q, queries.q, dnormaliser, *across.shape[1:], time_last=False, has_state=x.has_state, interpret=interpret
  )
  dZ = scan.scan(added, across, None if dfinal is None else dfinal.Z, reverse=True, interpret=interpret)

  transposed = functools.partial(state_read.read_transposed, has_state=x.has_state, interpret=interpret)
  dq = transposed(queries.x, given.dy, states.found, queries.q, states.Z, inside.q, w_scale=dnormaliser)
  found = dS.found, k_discounted, dZ.found
  dk = transposed(keys, x.v, *found, inside.k, scale=discounts.k_scale, centre=states.centre)
  of_values = keys, k_discounted, dS.found, inside.v, discounts.until_end
  dv = state_read.read_values(*of_values, has_state=x.has_state, interpret=interpret)

  assert dS.inner is not None
  dinitial = Full(dS.final, dZ.final)
  ends = _at_ends(x, states, dS.inner, dZ.found, dfinal, dinitial)
  dtypes = (dtype if states.initial is None else jnp.float32, dtype)
  dq, dk, pulls = near_backward.finished(x, inside._replace(q=dq, k=dk), saved.rotation, dtypes, settings, turned_by)
  dlog_gate, drotation = anchors.cotangents(
    pulls, ends, saved.rotation, near.totals_kernel(settings), has_state=x.has_state
  )
  dtokens = near.Tokens(dq, dk, dv.astype(dtype), dlog_gate, drotation)
  if states.initial is None:
    return dtokens, None
  return dtokens, full.transposed_about(dinitial, states.centre)


def _along(dy: Float[Array, "B T Hq dv"], middle: Float[Array, "B H dv"]) -> Float[Array, "B Hq T"]:
  """Inner products of rounded cotangents, those that the kernels have, and what values are less in states."""
  middle = jnp.repeat(middle.astype(jnp.float32), dy.shape[2] // middle.shape[1], axis=1)
  return jnp.moveaxis(jnp.sum(dy * middle[:, None], axis=-1), 1, 2)


def _of_queries(factor: Float[Array, "B Hq T"]) -> tuple[Copy, Copy]:
  return Copy(jnp.bfloat16), Copy(jnp.bfloat16, factor, time_last=True, of_some=True)


def discounted_keys(discounts: Discounts) -> Copy:
  return Copy(jnp.bfloat16, discounts.k_scale * discounts.until_end)


def discounts_of(exponents: near.Exponents, G: Total, chunk: int) -> Discounts:
  group = exponents.q.shape[-1]
  G, before, end = near.spans(G, chunk)
  k_scale = by_head(jnp.exp2((exponents.k - exponents.top[:, None]).astype(jnp.float32)))
  return Discounts(
    k_scale=k_scale,
    until_end=jnp.exp(end - G).reshape(k_scale.shape),
    since_start=jnp.repeat(jnp.exp(G - before).reshape(k_scale.shape), group, axis=1),
    across=jnp.exp(end - before)[..., 0],
  )


def _at_ends(
  x: near.Operands,
  states: States,
  inner: Float[Array, "B H m n w 2 w"],
  dZ: BFloat16[Array, "B H n terms d d"],
  dfinal: Full | None,
  dinitial: Full,
) -> Ends:
  """Inner products of the state and its cotangent, which all gates before it and after it share; and of the two with
  one rotated by a quarter turn of each pair of coordinates.
  """
  pieces = Pieces.of(x.q.shape[-1], x.v.shape[-1])

  def between(state: Array, dstate: Array) -> Float[Array, "B H n d 2"]:
    pairs = state.reshape(*state.shape[:3], state.shape[3] // 2, 2, *state.shape[4:])
    others, rest = jnp.flip(pairs, axis=4).reshape(state.shape), tuple(range(4, state.ndim))
    return jnp.stack([jnp.sum(dstate * state, axis=rest), jnp.sum(dstate * others, axis=rest)], axis=-1)

  def of_one(state: Full | None, dstate: Full | None) -> Float[Array, "B H 1 d 2"]:
    if state is None or dstate is None:
      return jnp.zeros_like(states.Z[:, :, :1, 0, :, :2], jnp.float32)
    S, dS = (pieces.joined(x)[:, :, None] for x in (state.S, dstate.S))
    return between(S, dS) + between(state.Z[:, :, None], dstate.Z[:, :, None])

  Z, dZ = (jnp.sum(terms, axis=3, dtype=jnp.float32) for terms in (states.Z[:, :, 1:], dZ[:, :, :-1]))
  between_Z = between(Z, dZ)
  has_state = x.has_state
  if has_state is not None:
    inner = jnp.where(has_state.reshape(*has_state.shape, *(1,) * (inner.ndim - 2)) > 0, inner, 0.0)
  of_S = jnp.sum(inner[:, :, :, :-1], axis=-1).reshape(*inner.shape[:2], *pieces, inner.shape[3] - 1, STATE_WIDTH, 2)
  found = jnp.moveaxis(jnp.sum(of_S, axis=(3, 4)), 2, 3).reshape(between_Z.shape) + between_Z
  first, last = of_one(states.initial, dinitial), of_one(states.final, dfinal)
  ends = jnp.moveaxis(jnp.concatenate([first, found, last], axis=2), 1, 2)
  even, odd = (ends[..., n::2, 1] for n in range(2))
  return Ends(jnp.sum(ends[..., 0], axis=-1), 4 * jnp.pi * (odd - even))
