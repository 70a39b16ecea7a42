"""The chunked form by Pallas kernels, p = 2: the same function as `chunked.attend`, for NVIDIA Hopper.

    y_i = (inside chunk + b_i sum_a q_ia S[a] q_i) / (inside chunk + b_i q_i . Z q_i)
    S[a] <- b S[a] + sum_j b_j k_ja v_j k_j^T            Z <- b Z + sum_j b_j k_j k_j^T

Here a state is not a vector of features but all products of two coordinates: a matrix dv x d for each coordinate a,
in pieces of 64 coordinates where heads are wider.
Attention inside chunks, states, and what is read of them are kernels, but for the normaliser of wide heads. Heads that
forget so soon that reading all they remember costs less have no state, but attention beyond their chunks, and so has
one whose queries ask for what rounding has drowned in it; where there are no keys to read instead the call is done
`finely`. **A call of which no head has a state is the attention form**, forwards and backwards; which it is is known on
the device.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, BFloat16, Bool, Float

from csympow.features import symmetric
from csympow.forms import anchors, backwards, finely, full, near, near_backward, rotating
from csympow.forms.anchors import Ends
from csympow.forms.centring import NO_MORE, centre
from csympow.forms.faint import Read, faint
from csympow.forms.full import Full
from csympow.forms.memory import Memory
from csympow.forms.once import differentiated_once
from csympow.forms.spans import Settings, by_head
from csympow.forms.visible import Visible, anywhere, may_spare_states
from csympow.prefix import Total
from kernels_pallas.gpu import arrays, attention_forward, gram, scan, state_read, state_write, symmetric_write
from kernels_pallas.gpu.angles import Angles
from kernels_pallas.gpu.copies import Copy, copies
from kernels_pallas.gpu.pieces import Pieces
from kernels_pallas.gpu.tiles import STATE_WIDTH, varying_as


class _Discounts(NamedTuple):
  """What keys, and what is read of states, are multiplied by in the kernels' scale."""

  k_scale: Float[Array, "B H T"]  # to the keys of attention inside chunks
  until_end: Float[Array, "B H T"]  # to the same
  since_start: Float[Array, "B Hq T"]
  across: Float[Array, "B H n"]


class _Queries(NamedTuple):
  """As they enter the states of cotangents; `x` stands time last, times the outputs' scale."""

  q: BFloat16[Array, "B T Hq d"]
  x: BFloat16[Array, "B Hq d T"]


class _Keys(NamedTuple):
  """As they enter states and read cotangents; `x`, time last, as its chunk's end sees them."""

  k: BFloat16[Array, "B T H d"]
  x: BFloat16[Array, "B H d T"]


class _Copied(NamedTuple):
  """What states are read by, and made of: of both factors, or of what is each of them."""

  queries: BFloat16[Array, "B Hq d T"]
  keys: _Keys | BFloat16[Array, "B H d T"]


class _States(NamedTuple):
  """What the backward pass needs of them; anything if no head has one."""

  centre: BFloat16[Array, "B H dv"]  # they are of values less this
  initial: Full | None
  found: BFloat16[Array, "B H m n w w w"]  # the S that each chunk finds
  Z: BFloat16[Array, "B H n terms d d"]  # and its Z, in terms
  final: Full | None
  heard: Bool[Array, "B Hq T"]  # what was read is not drowned by rounding: see memory.without_noise


class _Gathered(NamedTuple):
  """What queries gather, from which tiles of keys."""

  y: arrays.Outputs
  seen: Visible
  states: _States
  drowned: Bool[Array, "B H"] | None = None  # heads whose states are too coarse, but have to do


class _Saved(NamedTuple):
  """What the backward pass needs."""

  operands: near.Operands
  log_gate: Float[Array, "B T H"]
  keys: BFloat16[Array, "B H d T"] | None  # time last, as their chunk's end sees them; none without gradients
  G: Total
  rotation: rotating.Rotation | None
  states: _States
  y: arrays.Outputs
  otherwise: Bool[Array, ""] | None  # whether it was not done by states of 16 bits; None: that cannot be


def attend(
  x: near.Tokens,
  memory: Memory | None,
  settings: Settings,
  dtype: DTypeLike,
  return_memory: bool,
) -> tuple[Float[Array, "B T H g dv"], Memory | None]:
  """`chunked.attend` with y in `dtype`. Chunks are whole BLOCKs."""
  assert settings.power == 2
  head_dim, value_dim = x.k.shape[-1], x.v.shape[-1]
  q, k, v = map(full.widened, x[:3])
  rotation = rotating.padded(x.rotation, 0, k.shape[-1])
  state = None if memory is None else full.of_memory(memory, head_dim)
  y, state = _attend(near.Tokens(q, k, v, x.log_gate, rotation), state, settings, dtype, return_memory, head_dim)
  return y[..., :value_dim], None if state is None else full.to_memory(state, head_dim, value_dim)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4, 5))
def _attend(
  x: near.Tokens, initial: Full | None, settings: Settings, dtype: DTypeLike, return_final: bool, head_dim: int
) -> tuple[Float[Array, "B T H g dv"], Full | None]:
  return _forward(x, initial, settings, dtype, return_final, head_dim, save=False)[0]


def _forward(
  tokens: near.Tokens,
  initial: Full | None,
  settings: Settings,
  dtype: DTypeLike,
  return_final: bool,
  head_dim: int,
  save: bool = True,
) -> tuple[tuple[Float[Array, "B T H g dv"], Full | None], _Saved]:
  tokens, initial = differentiated_once((tokens, initial))
  power, interpret = settings.power, settings.interpret
  q, rotation = tokens.q, tokens.rotation
  G, largest = near.survey(tokens, settings)
  exponents = near.exponents(tokens, largest)
  discounts = _discounts(exponents, G, settings.chunk)
  # What is symmetric in a state is needed twice by gradients only: neither queries nor `full.to_memory` read it twice.
  halved = not save and Pieces.of(q.shape[-1], tokens.v.shape[-1]).total == 1
  of_k = (_root_of_keys(discounts),) if halved else _of_keys(discounts)
  of_q = [Copy(jnp.bfloat16, time_last=True)]
  may_spare = _may_spare_states(q.shape[1], initial, return_final, settings)
  has_state = near.states_of(tokens, G, settings, save) if may_spare else None
  x, (time_last,), k_copies = near.operands_and_copies(tokens, G, exponents, of_q, of_k, settings, has_state)
  scale = near.state_scale(x.top)
  if initial is not None:
    initial = full.scaled(initial, 1 / scale)
  copied = _Copied(time_last, k_copies[0] if halved else _Keys(*k_copies))
  how: dict[str, Any] = {"power": power, "dtype": dtype, "save_low": save, "interpret": interpret}

  def by_states() -> _Gathered:
    return _by_states(x, copied, G, discounts, initial, settings, head_dim, return_final, how)

  def by_keys() -> _Gathered:
    y = attention_forward.forward(x.q, x.keys, x.v, **how)
    return _Gathered(y, x.seen, _no_states(x, discounts.across.shape[2]))

  otherwise = None if has_state is None else ~anywhere(has_state)
  y, seen, states, drowned = by_states() if otherwise is None else lax.cond(otherwise, by_keys, by_states)
  final = states.final
  result = final if halved or final is None else full.about(final, -states.centre)
  high = y.high.reshape(*q.shape[:-1], -1)

  def by_states_in_16_bits() -> tuple[Float[Array, "B T H g dv"], Full | None]:
    return high, result

  def finely_done() -> tuple[Float[Array, "B T H g dv"], Full | None]:
    y, final = finely.attend(x, tokens.log_gate, initial, settings, return_final)
    return y.astype(high.dtype), final

  if drowned is not None:
    otherwise = anywhere(drowned.astype(jnp.int32))
    high, result = lax.cond(otherwise, finely_done, by_states_in_16_bits)
  result = None if result is None else full.scaled(result, scale)
  keys = copied.keys.x if isinstance(copied.keys, _Keys) else None
  saved = _Saved(x.reading(seen), tokens.log_gate, keys, G, rotation, states, y, otherwise)
  return (high, result), saved


def _may_spare_states(time: int, initial: Full | None, return_final: bool, settings: Settings) -> bool:
  """Whether the call may turn out to be the attention form's, because no head is worth a state."""
  return initial is None and not return_final and may_spare_states(time, settings)


def _by_states(
  x: near.Operands,
  copied: _Copied,
  G: Total,
  discounts: _Discounts,
  initial: Full | None,
  settings: Settings,
  head_dim: int,
  return_final: bool,
  how: dict[str, Any],
) -> _Gathered:
  """What queries gather inside their chunks and from states, of which some head has one; `how` for the former."""
  keys, across, interpret, save = copied.keys, discounts.across, settings.interpret, how["save_low"]
  options: dict[str, Any] = {"has_state": x.has_state, "interpret": interpret}
  middle = _centre(x.v, initial)
  left, right = (keys.x, keys.k) if isinstance(keys, _Keys) else (keys, None)
  added = gram.gram(left, right, None, *across.shape[1:], time_last=True, **options)
  Z = scan.scan(added, across, None if initial is None else initial.Z, interpret=interpret)
  if right is not None and initial is not None:
    initial = full.about(initial, middle)
  start = None if initial is None else initial.S
  if right is None:
    of_sums = symmetric_write.Centre(middle.astype(jnp.float32), jnp.sum(Z.found, axis=3, dtype=jnp.float32))
    S = symmetric_write.write(left, x.v, across, of_sums, start, **options)
  else:
    S = state_write.write(left, x.v, right, across, start, centre=middle, **options)

  # Gradients need what rounding to 16 bits would lose.
  wanted = jnp.float32 if save else jnp.bfloat16
  found = S.found, Z.found, discounts.since_start
  far = state_read.read(copied.queries, x.q, *found, by_rows=right is None, dtype=wanted, **options)
  first, drowned = int(initial is None), None
  if first < across.shape[2]:
    assert S.squares is not None
    of_chunks = near.spans(G, settings.chunk)
    read = Read(
      q=x.q,
      k=x.keys.plain,
      k_scale=discounts.k_scale,
      log_gate=of_chunks.G - of_chunks.before,
      found=far,
      squares=S.squares,
      centre_size=jnp.linalg.norm(middle.astype(jnp.float32), axis=-1),
      head_dim=head_dim,
      first=first,
    )
    if initial is not None or (return_final and save):  # there are no keys, or gradients come through the state
      drowned = faint(read, interpret)
    else:
      x = near.read_without_states(x, faint(read, interpret))
  carried = arrays.Carried(*far, x.has_state, middle.astype(jnp.float32))
  y = attention_forward.forward(x.q, x.keys, x.v, carried, **how)
  final = Full(S.final, Z.final) if return_final else None
  return _Gathered(y, x.seen, _States(middle, initial, S.found, Z.found, final, far.normaliser >= 0), drowned)


def _no_states(x: near.Operands, chunks: int) -> _States:
  """Memory for those that no head has."""
  (batch, _, heads, head_dim), value_dim = x.keys.plain.shape, x.v.shape[-1]

  def anything(*shape: int, dtype: DTypeLike = jnp.bfloat16) -> Array:
    found: Array = varying_as(x.q, lax.empty(shape, dtype))
    return found

  return _States(
    centre=anything(batch, heads, value_dim),
    initial=None,
    found=anything(batch, heads, Pieces.of(head_dim, value_dim).total, chunks, *(STATE_WIDTH,) * 3),
    Z=anything(batch, heads, chunks, scan.TERMS, head_dim, head_dim),
    final=None,
    heard=anything(batch, x.q.shape[2], x.q.shape[1], dtype=jnp.bool_),
  )


def _backward(
  settings: Settings,
  dtype: DTypeLike,
  return_final: bool,
  head_dim: int,
  saved: _Saved,
  cotangents: tuple[Float[Array, "B T H g dv"], Full | None],
) -> tuple[near.Tokens, Full | None]:
  del return_final, head_dim
  (dy, dfinal), x = differentiated_once(cotangents), saved.operands
  # With what else is made of the same arrays, here or in the forward pass.
  given = backwards.cotangents(saved.y, dy)
  of_centre = _along(given.dy, saved.states.centre)
  discounts = _discounts(near.Exponents(x.q_exponent, x.exponent, x.top), saved.G, settings.chunk)
  turned_by = rotating.angles(saved.rotation)  # here, where they are those of the forward pass

  def by_states() -> tuple[near.Tokens, Full | None]:
    return _backward_by_states(saved, discounts, given, of_centre, dfinal, turned_by, settings, dtype)

  def by_keys() -> tuple[near.Tokens, None]:
    inside = near_backward.backward(x, given, settings.power, settings.interpret)
    dq, dk, pulls = near_backward.finished(x, inside, saved.rotation, (dtype, dtype), settings, turned_by)
    kernel = near.totals_kernel(settings)
    return backwards.without_state(dq, dk, inside.v.astype(dtype), pulls, saved.rotation, kernel), None

  def finely_done() -> tuple[near.Tokens, Full | None]:
    return _backward_finely(saved, dy, dfinal, settings, dtype)

  if saved.otherwise is None:
    return by_states()
  return lax.cond(saved.otherwise, finely_done if x.has_state is None else by_keys, by_states)


def _backward_finely(
  saved: _Saved, dy: Float[Array, "B T H g dv"], dfinal: Full | None, settings: Settings, dtype: DTypeLike
) -> tuple[near.Tokens, Full | None]:
  """Where some head's state is too coarse."""
  x, states, scale = saved.operands, saved.states, near.state_scale(saved.operands.top)
  initial = None if states.initial is None else full.about(states.initial, -states.centre)
  dfinal = None if dfinal is None else full.scaled(dfinal, scale)
  dtypes = (dtype if initial is None else jnp.float32, dtype)
  given = x, saved.log_gate, saved.rotation, initial, (dy, dfinal)
  dtokens, dinitial = finely.backward(*given, settings, dtypes)
  return dtokens, None if dinitial is None else full.scaled(dinitial, 1 / scale)


def _backward_by_states(
  saved: _Saved,
  discounts: _Discounts,
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
  inside = near_backward.backward(x, given, settings.power, interpret, queries.q)
  scale = near.state_scale(x.top)
  if dfinal is not None:
    pieces = Pieces.of(x.q.shape[-1], x.v.shape[-1])
    summed = pieces.cut(symmetric(pieces.joined(dfinal.S)))
    dfinal = full.transposed_about(full.scaled(Full(summed, symmetric(dfinal.Z)), scale), -states.centre)

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
  of_keys = [_discounted_keys(discounts)]
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
  dinitial = full.transposed_about(dinitial, states.centre)
  return dtokens, full.scaled(dinitial, 1 / scale)


_attend.defvjp(_forward, _backward)


def _centre(v: BFloat16[Array, "B T H dv"], initial: Full | None) -> BFloat16[Array, "B H dv"]:
  """What states are about: the mean of values, or 0 if the given one is not."""
  middle = centre(v)
  if initial is None:
    return middle
  before, after = (jnp.sum(x.S**2, axis=(2, 3, 4, 5)) for x in (initial, full.about(initial, middle)))
  return jnp.where((after <= NO_MORE * before)[..., None], middle, jnp.zeros_like(middle))


def _along(dy: Float[Array, "B T Hq dv"], middle: Float[Array, "B H dv"]) -> Float[Array, "B Hq T"]:
  """Inner products of rounded cotangents, those that the kernels have, and what values are less in states."""
  middle = jnp.repeat(middle.astype(jnp.float32), dy.shape[2] // middle.shape[1], axis=1)
  return jnp.moveaxis(jnp.sum(dy * middle[:, None], axis=-1), 1, 2)


def _of_queries(factor: Float[Array, "B Hq T"]) -> tuple[Copy, Copy]:
  return Copy(jnp.bfloat16), Copy(jnp.bfloat16, factor, time_last=True, of_some=True)


def _of_keys(discounts: _Discounts) -> tuple[Copy, Copy]:
  return Copy(jnp.bfloat16, discounts.k_scale), _discounted_keys(discounts)._replace(time_last=True)


def _discounted_keys(discounts: _Discounts) -> Copy:
  return Copy(jnp.bfloat16, discounts.k_scale * discounts.until_end)


def _root_of_keys(discounts: _Discounts) -> Copy:
  """Of the discount each of a feature's two coordinates takes half."""
  return Copy(jnp.bfloat16, discounts.k_scale * jnp.sqrt(discounts.until_end), time_last=True)


def _discounts(exponents: near.Exponents, G: Total, chunk: int) -> _Discounts:
  group = exponents.q.shape[-1]
  G, before, end = near.spans(G, chunk)
  k_scale = by_head(jnp.exp2((exponents.k - exponents.top[:, None]).astype(jnp.float32)))
  return _Discounts(
    k_scale=k_scale,
    until_end=jnp.exp(end - G).reshape(k_scale.shape),
    since_start=jnp.repeat(jnp.exp(G - before).reshape(k_scale.shape), group, axis=1),
    across=jnp.exp(end - before)[..., 0],
  )


def _at_ends(
  x: near.Operands,
  states: _States,
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
