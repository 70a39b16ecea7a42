"""The chunked form by Pallas kernels, p = 2: the same function as `chunked.attend`, for NVIDIA Hopper.

    y_i = (inside chunk + b_i sum_a q_ia S[a] q_i) / (inside chunk + b_i q_i . Z q_i)
    S[a] <- b S[a] + sum_j b_j k_ja v_j k_j^T            Z <- b Z + sum_j b_j k_j k_j^T

Here a state is not a vector of features but all products of two coordinates: a matrix dv x d for each coordinate a,
in pieces of 64 coordinates where heads are wider.
Attention inside chunks, states, and what is read of them are kernels, but for the normaliser of wide heads. Heads that
forget so soon that reading all they remember costs less have no state, but attention beyond their chunks, and so has
one whose queries ask for what rounding has drowned in it. **A call of which no head has a state is the attention
form**, forwards and backwards; which it is is known on the device. So is a pass without gradients, if no form was asked
for, of a sequence so short that only both passes together are faster in chunks. If a state is given or returned all
heads have one, and those whose queries ask too much of it are done again, `finely`.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, BFloat16, Bool, Float

from csympow.forms import finely, full, fused, near, rotating, scales
from csympow.forms.centring import NO_MORE, centre
from csympow.forms.faint import Read, faint
from csympow.forms.full import Full
from csympow.forms.fused_chunked_backward import Discounts, Saved, States, backward, discounted_keys, discounts_of
from csympow.forms.memory import Memory
from csympow.forms.once import differentiated_once, primals_of, turns_asked_for
from csympow.forms.spans import Settings, by_head
from csympow.forms.visible import Visible, anywhere, may_spare_states
from csympow.gates import RESET
from csympow.prefix import Total
from kernels_pallas.gpu import arrays, attention_forward, gram, scan, state_read, state_write, symmetric_write
from kernels_pallas.gpu.copies import Copy
from kernels_pallas.gpu.pieces import Pieces
from kernels_pallas.gpu.tiles import BLOCK, STATE_WIDTH, varying_as


class _Keys(NamedTuple):
  """As they enter states and read cotangents; `x`, time last, as its chunk's end sees them."""

  k: BFloat16[Array, "B T H d"]
  x: BFloat16[Array, "B H d T"]


class _Copied(NamedTuple):
  """What states are read by, and made of: of both factors, or of what is each of them."""

  queries: BFloat16[Array, "B Hq d T"]
  keys: _Keys | BFloat16[Array, "B H d T"]


class _Gathered(NamedTuple):
  """What queries gather, from which tiles of keys."""

  y: arrays.Outputs
  seen: Visible
  states: States
  drowned: Bool[Array, "B H"] | None = None  # heads that are to be done finely; None: none, ever


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
  if settings.attention_alone and initial is None and not return_final:
    return fused.attend(x, None, settings._replace(chunk=x.k.shape[1]), dtype, return_memory=False)[0], None
  return _forward(x, initial, settings, dtype, return_final, head_dim, save=False)[0]


def _forward(
  tokens: near.Tokens,
  initial: Full | None,
  settings: Settings,
  dtype: DTypeLike,
  return_final: bool,
  head_dim: int,
  save: bool = True,
) -> tuple[tuple[Float[Array, "B T H g dv"], Full | None], Saved]:
  tokens, initial = differentiated_once((tokens, initial))
  power, interpret = settings.power, settings.interpret
  q, rotation = tokens.q, tokens.rotation
  G, largest = near.survey(tokens, settings)
  exponents = near.exponents(tokens, largest)
  discounts = discounts_of(exponents, G, settings.chunk)
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
    given = x, copied, G, tokens.log_gate, discounts, initial
    return _by_states(*given, settings, head_dim, return_final, how)

  def by_keys() -> _Gathered:
    y = attention_forward.forward(x.q, x.keys, x.v, **how)
    return _Gathered(y, x.seen, _no_states(x, discounts.across.shape[2]))

  by_keys_alone = None if has_state is None else ~anywhere(has_state)
  y, seen, states, drowned = by_states() if by_keys_alone is None else lax.cond(by_keys_alone, by_keys, by_states)
  final = states.final
  result = final if halved or final is None else full.about(final, -states.centre)
  if drowned is not None:
    high = y.high.reshape(*q.shape[:-1], -1)
    high, result = finely.forward(drowned, (high, result), x, tokens.log_gate, initial, settings, head_dim)
    y = y._replace(high=high.reshape(y.high.shape))
  keys = copied.keys.x if isinstance(copied.keys, _Keys) else None
  log_gate = None if drowned is None else tokens.log_gate
  saved = Saved(x.reading(seen), log_gate, keys, G, rotation, states, y, by_keys_alone, drowned)
  result = None if result is None else full.scaled(result, scale)
  return (y.high.reshape(*q.shape[:-1], -1), result), saved


def _forward_for_gradients(
  x: Any, initial: Any, settings: Settings, dtype: DTypeLike, return_final: bool, head_dim: int
) -> tuple[tuple[Float[Array, "B T H g dv"], Full | None], Saved]:
  """`_forward` of arrays that are told whether they are differentiated."""
  asked = turns_asked_for(x.rotation)
  x, initial = primals_of((x, initial))
  results, saved = _forward(x, initial, settings, dtype, return_final, head_dim)
  return results, saved._replace(turns_asked_for=asked)


def _may_spare_states(time: int, initial: Full | None, return_final: bool, settings: Settings) -> bool:
  """Whether the call may turn out to be the attention form's, because no head is worth a state."""
  return initial is None and not return_final and may_spare_states(time, settings)


def _by_states(
  x: near.Operands,
  copied: _Copied,
  G: Total,
  log_gate: Float[Array, "B T H"],
  discounts: Discounts,
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
  of_states = S.found, Z.found, discounts.since_start
  far = state_read.read(copied.queries, x.q, *of_states, by_rows=right is None, dtype=wanted, **options)
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
    first=int(initial is None),
  )
  drowned, final = None, Full(S.final, Z.final) if return_final else None
  if read.first < across.shape[2]:
    heads = faint(read, interpret)
    if initial is None and not (return_final and save):
      x = near.read_without_states(x, heads)
    else:  # there are no keys, or gradients come through the state
      drowned = heads
  if final is not None:  # others will ask it, of whom nothing is known
    less_middle = full.about(final, middle) if right is None else final
    heads = faint(_after(less_middle, read, copied.queries, log_gate, interpret), interpret)
    drowned = heads if drowned is None else drowned | heads
  carried = arrays.Carried(*far, x.has_state, middle.astype(jnp.float32))
  y = attention_forward.forward(x.q, x.keys, x.v, carried, **how)
  return _Gathered(y, x.seen, States(middle, initial, S.found, Z.found, final, far.normaliser >= 0), drowned)


def _after(
  state: Full, read: Read, queries: BFloat16[Array, "B Hq d T"], log_gate: Float[Array, "B T H"], interpret: Any
) -> Read:
  """What would be read if some tokens came again, after the state, whose values are less the centre.

  They are a BLOCK in the middle, where padding at either end seldom is. Resets among them do not count, or the state
  would be hidden from all that are behind one.
  """
  (_, _, d, time), dv = queries.shape, read.found.numerator.shape[3]
  place = (time // BLOCK - 1) // 2
  some = slice(place * BLOCK, (place + 1) * BLOCK)
  kept = by_head(jnp.where(log_gate[:, some] <= RESET, 0.0, log_gate[:, some]))
  since_first = jnp.cumsum(kept, axis=-1)
  since_start = jnp.repeat(jnp.exp(since_first), queries.shape[1] // kept.shape[1], axis=1)
  Z, terms = state.Z, []
  for _ in range(scan.TERMS):
    terms.append(scales.rounded(Z, scales.BFLOAT16).astype(jnp.bfloat16))
    Z = Z - terms[-1].astype(jnp.float32)
  S, Z = state.S.astype(jnp.bfloat16)[:, :, :, None], jnp.stack(terms, axis=2)[:, :, None]
  q = read.q[:, some]
  return Read(
    q=q,
    k=read.k[:, some],
    k_scale=read.k_scale[..., some],
    log_gate=since_first[:, :, None],
    found=state_read.read(queries[..., some], q, S, Z, since_start, interpret=interpret),
    squares=jnp.sum(full.to_memory(state, d, dv).S ** 2, axis=(2, 3))[..., None],  # some have but half of a state
    centre_size=read.centre_size,
    head_dim=read.head_dim,
    first=0,
  )


def _no_states(x: near.Operands, chunks: int) -> States:
  """Memory for those that no head has."""
  (batch, _, heads, head_dim), value_dim = x.keys.plain.shape, x.v.shape[-1]

  def anything(*shape: int, dtype: DTypeLike = jnp.bfloat16) -> Array:
    found: Array = varying_as(x.q, lax.empty(shape, dtype))
    return found

  return States(
    centre=anything(batch, heads, value_dim),
    initial=None,
    found=anything(batch, heads, Pieces.of(head_dim, value_dim).total, chunks, *(STATE_WIDTH,) * 3),
    Z=anything(batch, heads, chunks, scan.TERMS, head_dim, head_dim),
    final=None,
    heard=anything(batch, x.q.shape[2], x.q.shape[1], dtype=jnp.bool_),
  )


_attend.defvjp(_forward_for_gradients, backward, symbolic_zeros=True)


def _centre(v: BFloat16[Array, "B T H dv"], initial: Full | None) -> BFloat16[Array, "B H dv"]:
  """What states are about: the mean of values, or 0 if the given one is not."""
  middle = centre(v)
  if initial is None:
    return middle
  before, after = (jnp.sum(x.S**2, axis=(2, 3, 4, 5)) for x in (initial, full.about(initial, middle)))
  return jnp.where((after <= NO_MORE * before)[..., None], middle, jnp.zeros_like(middle))


def _of_keys(discounts: Discounts) -> tuple[Copy, Copy]:
  return Copy(jnp.bfloat16, discounts.k_scale), discounted_keys(discounts)._replace(time_last=True)


def _root_of_keys(discounts: Discounts) -> Copy:
  """Of the discount each of a feature's two coordinates takes half."""
  return Copy(jnp.bfloat16, discounts.k_scale * jnp.sqrt(discounts.until_end), time_last=True)
