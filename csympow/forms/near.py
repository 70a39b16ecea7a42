"""The way into the attention kernels on Hopper: operands that fit 16 bits. `near_backward.py` is the way out.

Queries are scaled by a power of two so that their largest coordinate is between 1/2 and 1, which the normalisation
cancels, and so are keys, whose weights are scaled by the p-th power of that, relative to the longest key of the head.
Where there is no state, queries of short sequences are not copied if they are rotated, for the forward kernel scales
and rotates them itself. Nor are they if nothing is rotated, in bfloat16, and then keys are not either: the kernel reads
them as they are, and scales queries by the longest key of the head, too. So it does in longer sequences of wide heads
if gradients are wanted.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, BFloat16, Bool, Float, Float16, Int

from csympow.forms import scales
from csympow.forms.rotating import Rotation, angles, padded
from csympow.forms.spans import Settings, by_head, for_each
from csympow.forms.visible import Tiles, Visible, all_alike, visible, without_states, worth_a_state
from csympow.prefix import Total, TotalsKernel
from kernels_pallas.gpu import arrays, attention_forward, gates, running
from kernels_pallas.gpu.angles import Angles
from kernels_pallas.gpu.copies import Copy, copies
from kernels_pallas.gpu.tiles import TILE, attention_widths
from kernels_pallas.weights import LOG2E

# Queries times 2 to minus more would lose small coordinates. Float32 has room for scores of longer keys, to the fourth
# power at least; to higher ones for keys up to 2 ** 115.
_MOST_AS_GIVEN = 110
SHORT = 4_096  # tokens up to which a copy of discounted keys takes longer to make than it saves


class Tokens(NamedTuple):
  """What a form by kernels is a function of: 16 bits, but for gates, and queries that are scaled to go with a state."""

  q: Float[Array, "B T H g d"]
  k: Float[Array, "B T H d"]
  v: Float[Array, "B T H dv"]
  log_gate: Float[Array, "B T H"]
  rotation: Rotation | None


def as_wide_as_kernels(x: Tokens) -> Tokens:
  """Filled up with zeros to heads that the attention kernels have."""
  head_dim, value_dim = attention_widths(x.k.shape[-1], x.v.shape[-1])
  q, k, v = (filled_up(a, width) for a, width in zip(x[:3], (head_dim, head_dim, value_dim), strict=True))
  return Tokens(q, k, v, x.log_gate, padded(x.rotation, 0, head_dim))


def filled_up(x: Float[Array, "*lead d"], width: int) -> Float[Array, "*lead width"]:
  """Vectors with zeros after them."""
  return jnp.pad(x, ((0, 0),) * (x.ndim - 1) + ((0, width - x.shape[-1]),))


class Spans(NamedTuple):
  """The running totals of the log gates, cut into equal spans: at each token, just before the span, at its end."""

  G: Total  # B H n t
  before: Total  # B H n 1
  end: Total


class Operands(NamedTuple):
  """What the kernels are given, and how it was scaled."""

  q: Float[Array, "B T Hq d"]
  keys: arrays.Keys
  last: Int[Array, "B H tiles"]  # the latest tile whose queries read a tile's keys
  v: BFloat16[Array, "B T H dv"]
  q_exponent: Int[Array, "B T H g"]  # queries were divided by 2 to this, or will be by the kernel
  exponent: Int[Array, "B T H"]  # keys were divided by 2 to this: 0 as they were given
  top: Int[Array, "B H"]  # that of the longest key: weights are divided by 2 to p times this
  has_state: Int[Array, "B H"] | None = None  # 1 or 0: see visible.Visible
  rounded_q: BFloat16[Array, "B T Hq d"] | None = None  # as products with dS take them, where a kernel has left them
  angles: Angles | None = None  # by which the forward kernel rotates queries, and their gradients are rotated back

  @property
  def seen(self) -> Visible:
    return Visible(self.keys.first, self.last, self.has_state)

  def reading(self, seen: Visible) -> "Operands":
    """The same, but that queries read other keys."""
    return self._replace(keys=self.keys._replace(first=seen.first), last=seen.last, has_state=seen.has_state)


def totals_kernel(settings: Settings) -> TotalsKernel | None:
  """What sums over time, if not XLA."""
  return functools.partial(running.totals, interpret=settings.interpret) if settings.chip == "gpu" else None


def survey(x: Tokens, settings: Settings) -> tuple[Total, Float[Array, "B T H"]]:
  """The running totals of the log gates, and the largest coordinate of each key, from one launch."""
  found = running.totals_and_sizes(by_head(x.log_gate), x.k, interpret=settings.interpret)
  high, low, largest = (jnp.swapaxes(a, 1, 2) for a in found)
  return Total(high, low), largest


def spans(G: Total, size: int) -> Spans:
  """Spans of `size` tokens, of which there are whole ones."""
  batch, _, heads = G.hi.shape
  G = Total(*(by_head(x).reshape(batch, heads, -1, size) for x in G))
  end = Total(*(x[..., -1:] for x in G))
  return Spans(G, Total(*(jnp.pad(x[:, :, :-1], ((0, 0), (0, 0), (1, 0), (0, 0))) for x in end)), end)


class Exponents(NamedTuple):
  """Of queries, of keys, and of the longest key of each head: they are divided by 2 to these."""

  q: Int[Array, "B T H g"]
  k: Int[Array, "B T H"]
  top: Int[Array, "B H"]


class _Gates(NamedTuple):
  """Of tiles; there may be further ones than the sequence has."""

  since_start: Float[Array, "B H T"]  # logarithms to base 2
  decay: Float[Array, "B H n"]  # discounts
  totals: Float[Array, "4 B H n"]  # before each tile and at its end, high and low each


def _gates(G: Total) -> tuple[_Gates, Float[Array, "B H T"]]:
  """And what each token is discounted by until its tile ends, as since it began."""
  batch, time, heads = G.hi.shape
  G, before, end = spans(G, TILE)
  since_start, until_end = ((x * LOG2E).reshape(batch, heads, time) for x in (G - before, end - G))
  totals = jnp.stack([half[..., 0] for half in (*before, *end)])
  return _Gates(since_start, jnp.exp(end - before)[..., 0], totals), until_end


def _gates_of_keys(x: Tokens, settings: Settings) -> tuple[_Gates, Float[Array, "B H T"], Float[Array, "B H T"]]:
  """Of keys as they were given: gates, what folds them into keys, and the largest coordinate of each."""
  power, interpret = settings.power, settings.interpret
  if x.k.shape[1] <= gates.LONGEST:
    found = gates.gates(by_head(x.log_gate), x.k, power, interpret=interpret)
    assert found.largest is not None
    return _Gates(found.since_start, found.decay, found.totals), found.until_end, found.largest
  G, largest = survey(x, settings)
  known, until_end = _gates(G)
  return known, jnp.exp2(until_end / power), by_head(largest)


def _tiles(
  known: _Gates,
  vectors: Callable[..., tuple[Array, Array]],
  v: Array,
  has_state: Array | None = None,
) -> Tiles:
  count = v.shape[1] // TILE
  before, end = (for_each(lambda half: half[..., :count], total) for total in _ends(known))
  return Tiles(before, end, known.decay[..., :count], vectors, v, has_state)


def _ends(known: _Gates) -> tuple[Total, Total]:
  """The totals before tiles and at their ends."""
  return Total(*known.totals[:2]), Total(*known.totals[2:])


def operands(x: Tokens, settings: Settings, *, with_state: bool, save: bool) -> tuple[Operands, Total | None]:
  """Operands of attention over whole BLOCKs, beside a state or alone, and for gradients or without.

  And the running totals of the gates, but for tokens that are read as they were given.
  """
  short, wide = x.k.shape[1] <= SHORT, x.k.shape[-1] > 64
  fit = short
  if x.rotation is None:
    fit = all(a.dtype == jnp.bfloat16 for a in x[:3]) and (short or (wide and save))
  if fit and not with_state:
    return _with_given_queries(x, settings), None
  G, largest = survey(x, settings)
  found = exponents(x, largest)
  return operands_and_copies(x, G, found, (), (), settings, folding=not short)[0], G


def _with_given_queries(x: Tokens, settings: Settings) -> Operands:
  """Of queries that are not copied, whose exponents the forward pass finds, and keys with one copy if rotated."""
  batch, time, heads, head_dim = x.k.shape
  room, power, interpret = _room(x.rotation), settings.power, settings.interpret
  turned: Angles | None = None
  if x.rotation is None:
    known, fold, largest = _gates_of_keys(x, settings)
    # As `scales.of_keys` has it but for keys that are all 0, whose queries may be anything below 2 ** 125 then.
    largest = jnp.where(largest < jnp.inf, largest, 0.0)
    plain, top = x.k, jnp.minimum(scales.exponent(jnp.max(largest, axis=-1)), _MOST_AS_GIVEN)
    exponent, of_all = jnp.zeros(x.k.shape[:-1], jnp.int32), top
    log_scale = jnp.zeros_like(known.since_start)
  else:
    beta = x.rotation.phases.beta
    found = gates.gates(by_head(x.log_gate), beta=None if beta is None else by_head(beta), interpret=interpret)
    turned = angles(x.rotation, found.turning)
    known = _Gates(found.since_start, found.decay, found.totals)
    plain, largest = copies(x.k, [Copy(jnp.float16)], room=room, angles=turned, interpret=interpret)
    exponent, top = scales.of_keys(jnp.swapaxes(largest, 1, 2), room)
    of_all, log_scale = None, scales.log_scale(exponent, top, power)
    fold = jnp.exp2((found.until_end + log_scale) / power)
  q, v = x.q.reshape(batch, time, -1, head_dim), x.v.astype(jnp.bfloat16)

  def vectors(fades: Int[Array, "B H"]) -> tuple[Float16[Array, "B T Hq d"], Float16[Array, "B T H d"]]:
    of_queries = jnp.repeat(fades, q.shape[2] // heads, axis=1)
    scaled, _ = copies(q, [Copy(jnp.float16)], room=room, angles=turned, only=of_queries, interpret=interpret)
    (folded,) = copies(plain, [Copy(jnp.float16, fold)], exponent=of_all, only=fades, interpret=interpret)
    return scaled, folded

  seen = visible(_tiles(known, vectors, v), settings)
  keys = _keys(None, plain, fold, known, log_scale, seen)._replace(top=top if turned is None else None)
  unknown = jnp.zeros(x.q.shape[:-1], jnp.int32)
  return Operands(q, keys, seen.last, v, unknown, exponent, top, angles=turned)


def _keys(
  folded: Array | None, plain: Array, fold: Array, known: _Gates, log_scale: Array, seen: Visible
) -> arrays.Keys:
  pull = known.since_start - log_scale
  return arrays.Keys(folded, plain, fold, known.since_start, pull, known.decay, seen.first, known.totals)


def operands_and_copies(
  x: Tokens,
  G: Total,
  exponents: Exponents,
  of_q: Sequence[Copy],
  of_k: Sequence[Copy],
  settings: Settings,
  has_state: Int[Array, "B H"] | None = None,
  folding: bool = True,
) -> tuple[Operands, list[Array], list[Array]]:
  """Operands of attention in chunks, and further copies of scaled and rotated queries and keys, for a state.

  Queries of heads that have no state (0, or 1) read beyond their chunks, and of these there are no further copies.
  Without `folding` the kernels multiply weights by discounts.
  """
  power = settings.power
  batch, time, _, head_dim = x.k.shape
  (known, until_end), log_scale = _gates(G), scales.log_scale(exponents.k, exponents.top, power)
  fold = jnp.exp2((until_end + log_scale) / power)

  turned = angles(x.rotation)
  by_query_head = None if has_state is None else jnp.repeat(has_state, x.q.shape[3], axis=1)
  of_q, of_k = ([copy._replace(of_some=True) for copy in further] for further in (of_q, of_k))
  of_folded = [Copy(jnp.float16, fold)]
  of_q, of_k = [Copy(jnp.float16), *of_q], [Copy(jnp.float16), *(of_folded if folding else ()), *of_k]
  q, q_exponent = x.q.reshape(batch, time, -1, head_dim), exponents.q
  if q.dtype == jnp.float32:
    q = (x.q * scales.power_of_two(-q_exponent)).astype(jnp.float16).reshape(q.shape)
    q, *q_copies = copies(q, of_q, angles=turned, some=by_query_head, interpret=settings.interpret)
  else:
    room = _room(x.rotation)
    how: dict[str, Any] = {"some": by_query_head, "interpret": settings.interpret}
    q, *q_copies, largest = copies(q, of_q, room=room, angles=turned, **how)
    q_exponent = jnp.moveaxis(scales.of_queries(largest, room), 1, 2).reshape(q_exponent.shape)
  scale = by_head(jnp.exp2(-exponents.k.astype(jnp.float32)))
  plain, *k_copies = copies(x.k, of_k, scale=scale, angles=turned, some=has_state, interpret=settings.interpret)
  folded = k_copies.pop(0) if folding else None

  def vectors(fades: Int[Array, "B H"]) -> tuple[Float16[Array, "B T Hq d"], Float16[Array, "B T H d"]]:
    if folded is not None:
      return q, folded
    (found,) = copies(plain, of_folded, only=fades, interpret=settings.interpret)
    return q, found

  v = x.v.astype(jnp.bfloat16)
  seen = visible(_tiles(known, vectors, v, has_state), settings)
  found = Operands(
    q=q,
    keys=_keys(folded, plain, fold, known, log_scale, seen),
    last=seen.last,
    v=v,
    q_exponent=q_exponent,
    exponent=exponents.k,
    top=exponents.top,
    has_state=seen.has_state,
  )
  return found, q_copies, k_copies


def read_without_states(x: Operands, heads: Bool[Array, "B H"]) -> Operands:
  """For some heads whose queries are to read all keys instead."""
  end = Total(*x.keys.totals[2:, ..., : x.last.shape[2]])
  return x.reading(without_states(x.seen, end, heads))


def exponents(x: Tokens, largest: Float[Array, "B T H"] | None = None) -> Exponents:
  """Such that the largest coordinate of each is between 1/2 and 1; that of keys may be known."""
  room = _room(x.rotation)
  of_keys = scales.of_keys(scales.largest(x.k) if largest is None else largest, room)
  return Exponents(scales.of_queries(scales.largest(x.q), room), *of_keys)


def _room(rotation: Rotation | None) -> int:
  """A rotation can make a coordinate larger, though not twice as large."""
  return 0 if rotation is None else 1


def forward(
  x: Operands, *, power: int, dtype: DTypeLike, save_low: bool, interpret: Any
) -> tuple[arrays.Outputs, Operands]:
  """What each query gathers, and the operands of the backward pass."""
  how: dict[str, Any] = {"power": power, "dtype": dtype, "save_low": save_low, "interpret": interpret}
  y = attention_forward.forward(x.q, x.keys, x.v, angles=x.angles, **how, alike=all_alike(x.q.shape[1]))
  if y.exponent is not None:
    x = x._replace(q_exponent=jnp.moveaxis(y.exponent, 1, 2).reshape(x.q_exponent.shape))
  if y.scaled is not None:
    x = x._replace(q=y.scaled, rounded_q=y.rounded)
  return y._replace(scaled=None, rounded=None, exponent=None), x


def states_of(x: Tokens, G: Total, settings: Settings, gradients: bool) -> Int[Array, "B H"]:
  """Which heads are to have a state: see `visible.worth_a_state`."""
  _, *ends = spans(G, TILE)
  before, end = (for_each(lambda half: half[..., 0], total) for total in ends)
  widths, group = (x.k.shape[-1], x.v.shape[-1]), x.q.shape[3]
  return worth_a_state(before, end, settings, widths, group, gradients)


def state_scale(top: Int[Array, "B H"]) -> Float[Array, "B H 1 1"]:
  """What the kernels' states were divided by, where the longest key was by 2 to `top`: a number, whatever the keys."""
  return scales.power_of_two(jnp.clip(2 * top, -126, 126))[..., None]
