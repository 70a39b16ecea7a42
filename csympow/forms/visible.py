"""Which tiles of keys the attention kernels read for a tile of queries, and which heads need a state besides.

Left out is what hardly adds to any sum. That is every tile whose discount is 0 in the kernels' arithmetic, as those of
an earlier document are. In a long sequence it is also every tile that together with all before it adds at most LEFT_OUT
of what each query gathers from the two tiles before its own, of weights and of weights times values, wherever their
keys point (`kernels_pallas.gpu.bounds`, `kernels_pallas.gpu.reach`).

Gates of about 0.999 leave some 8,000 tokens to be read, be the sequence 65,536 long. In the chunked form heads that
forget sooner, such that reading all they remember costs less than states, have none: their queries read beyond their
chunk. So do those of a head whose states are too coarse for them (`csympow.forms.faint`). Which heads forget is told by
gates alone, before anything is made for a state.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Bool, Float, Float16, Int

from csympow.forms.spans import Settings, for_each
from csympow.prefix import Total
from kernels_pallas.gpu.bounds import bounds
from kernels_pallas.gpu.pieces import Pieces
from kernels_pallas.gpu.reach import reach
from kernels_pallas.gpu.tiles import MULTIPROCESSORS, ROWS, STATE_WIDTH, TILE
from kernels_pallas.weights import INVISIBLE, LOG2E

LEFT_OUT = 2.0**-12  # of sums whose terms are rounded to 2 ** -9 of themselves
# Of states in one piece and in eight, without gradients and with them: if there is one, for each that is read, and for
# each that is written.
_COSTS = {(1, False): (30, 6.5, 9), (1, True): (19, 8.5, 9), (8, False): (288, 29.5, 45), (8, True): (110, 16, 42)}
_COMPARED = 1_024  # tiles, each with all others, in less time than they are searched
LONG = 4_096  # tokens from which on looking for more to leave out is worth its time


class Visible(NamedTuple):
  """Of each tile the earliest that it reads, and the latest that reads it; of each head whether it has a state.

  A block of the grid reads from where its first tile does.
  """

  first: Int[Array, "B H n"]
  last: Int[Array, "B H n"]
  has_state: Int[Array, "B H"] | None = None  # 1, or 0 if its queries read all that it remembers; None: all have one


class Tiles(NamedTuple):
  """A sequence as it is searched; totals are those of the log gates just before each tile and at its end.

  `vectors` are queries and discounted keys, of heads that are 1; `has_state` as in Visible.
  """

  before: Total  # B H n
  end: Total
  decay: Float[Array, "B H n"]
  vectors: Callable[[Int[Array, "B H"]], tuple[Float16[Array, "B T Hq d"], Float16[Array, "B T H d"]]]
  v: BFloat16[Array, "B T H dv"]
  has_state: Int[Array, "B H"] | None = None


def visible(x: Tiles, settings: Settings) -> Visible:
  """What is read inside chunks or, of heads that are better off without a state, beyond them."""
  tiles, in_chunk = x.decay.shape[2], settings.chunk // TILE
  if settings.gated and settings.chunk == tiles * TILE >= LONG:
    first = _earliest(x, _fades(x), settings)
    return Visible(first, _latest(first, tiles))
  inside = _earliest_of_chunk(x, in_chunk)
  if x.has_state is None:
    return Visible(inside, _latest(inside, in_chunk))
  beyond = _earliest(x, x.has_state == 0, settings)
  first = jnp.where(x.has_state[..., None] > 0, inside, beyond)
  return Visible(first, _latest(first, tiles), x.has_state)


def may_spare_states(time: int, settings: Settings) -> bool:
  """Whether there are heads that had better have no state for all that `worth_a_state` knows before it sees gates."""
  return settings.gated and settings.chunk < time and time >= LONG


def worth_a_state(
  before: Total, end: Total, settings: Settings, widths: tuple[int, int], group: int, gradients: bool
) -> Int[Array, "B H"]:
  """Heads that are to have a state: 1, or 0 if queries had better read what gates leave.

  Of each sequence those that remember most, as many as makes it cheapest if all sequences are like it, and if there are
  no others: under vmap each call counts as if it were alone. A head without a state may read more than was counted
  here, where its keys are longer the older they are, some ten times as much at most: after so much nothing is visible.
  """
  batch, _, tiles = before.hi.shape
  place = jnp.arange(tiles)
  read = place - _earliest_in_sight(end.hi, math.log(LEFT_OUT))
  inside = jnp.minimum(read, place % (settings.chunk // TILE))
  (all_of_it, longest), (inside, longest_inside) = ((jnp.mean(x, axis=-1), jnp.max(x, axis=-1)) for x in (read, inside))
  # Whoever has one if this head has and all that remember as much, and if none has: B head head.
  have_one = all_of_it[:, None] >= jnp.concatenate([all_of_it, jnp.full((batch, 1), jnp.inf)], axis=1)[..., None]
  states = jnp.sum(have_one, axis=-1)
  by_all = jnp.sum(jnp.where(have_one, inside[:, None], all_of_it[:, None]), axis=-1)
  # A block of the grid of the slower pass, for all heads that share keys or for some tiles of one, is not done before
  # it has read all that it is to.
  of_block = group if gradients else 2 if max(widths) <= STATE_WIDTH else 1
  by_block = jnp.max(jnp.where(have_one, longest_inside[:, None], longest[:, None]), axis=-1)
  by_block *= of_block * MULTIPROCESSORS / (batch * group * tiles)
  costs = jnp.maximum(by_all, by_block) + cost_of_states(states, batch, widths, group, gradients)
  best = jnp.argmin(costs, axis=-1)
  return jnp.take_along_axis(have_one, best[:, None, None], axis=1)[:, 0].astype(jnp.int32)


def cost_of_states(
  states: Int[Array, "*lead"], batch: int, widths: tuple[int, int], group: int, gradients: bool
) -> Float[Array, "*lead"]:
  """Of so many heads of a sequence, in tiles of keys that all queries of a head read in the same time."""
  pieces = Pieces.of(*widths).total
  measured = 1 if pieces == 1 else 8
  whatever, read, write = (cost * pieces / measured for cost in _COSTS[measured, gradients])
  together = 12 / pieces  # are written at once, which takes as long for fewer
  written = jnp.ceil(batch * states / together) * together / batch
  return read * states + (whatever * (states > 0) + write * written) / group


@jax.custom_batching.custom_vmap
def anywhere(has_state: Int[Array, "B H"]) -> Bool[Array, ""]:
  """Whether any head has one; of many calls at once any head of any, so that there is still one answer."""
  return jnp.any(has_state > 0)


@anywhere.def_vmap
def _of_many(size: int, batched: list[bool], has_state: Int[Array, "n B H"]) -> tuple[Bool[Array, ""], bool]:
  del size, batched
  return anywhere(jnp.max(has_state, axis=0)), False


def share_in_sight(log_gate: Float[Array, "B T H"]) -> Float[Array, ""]:
  """The part of all pairs of tiles, a query's and an earlier one of keys, of which gates leave more than LEFT_OUT."""
  batch, time, heads = log_gate.shape
  tiles = time // TILE
  end = jnp.cumsum(jnp.sum(log_gate.reshape(batch, tiles, TILE, heads), axis=2), axis=1)
  earliest = _earliest_in_sight(jnp.moveaxis(end, 1, 2), math.log(LEFT_OUT))
  return 2 * jnp.mean(jnp.arange(tiles) - earliest) / tiles


def without_states(x: Visible, end: Total, heads: Bool[Array, "B H"]) -> Visible:
  """The same, but that queries of some `heads` read all keys in their sight; `end`: the totals at the tiles' ends."""
  had_state = jnp.ones_like(heads) if x.has_state is None else x.has_state > 0
  first = jnp.where((heads & had_state)[..., None], _earliest_in_sight(end.hi), x.first)
  return Visible(first, _latest(first, first.shape[2]), (had_state & ~heads).astype(jnp.int32))


def in_whole_rows(before: Total, end: Total) -> Float[Array, "4 B H whole"]:
  """Totals before tiles and at their ends, high and low each, as the kernels read them: in whole ROWS of tiles."""
  both = jnp.stack((*before, *end))
  return jnp.pad(both, ((0, 0),) * 3 + ((0, -both.shape[3] % ROWS),))


def all_alike(time: int) -> bool:
  """Whether heads of so short a sequence are all read as far back, but for documents."""
  return time < LONG


def _fades(x: Tiles) -> Bool[Array, "B H"]:
  """Whether gates leave LEFT_OUT or less of the first tile to the last one."""
  kept = for_each(lambda total: total[..., -1], x.before) - for_each(lambda total: total[..., 0], x.end)
  fades: Array = kept < math.log(LEFT_OUT)
  return fades


def _earliest(x: Tiles, fades: Bool[Array, "B H"], settings: Settings) -> Int[Array, "B H n"]:
  """The earliest tile of all that each reads, of heads that fade; of others the first."""
  batch, heads, tiles = x.decay.shape
  flags = fades.astype(jnp.int32)
  found = bounds(*x.vectors(flags), x.v, x.decay, flags, power=settings.power, interpret=settings.interpret)
  far = reach(found, in_whole_rows(x.before, x.end), flags, tiles, left_out=LEFT_OUT, interpret=settings.interpret)
  # The two tiles of a block of the grid alike.
  pairs = far.reshape(batch, heads, -1, 2)
  return jnp.minimum(pairs, pairs[..., ::-1]).reshape(x.decay.shape)


def _latest(first: Int[Array, "B H n"], in_chunk: int) -> Int[Array, "B H n"]:
  """The latest tile that reads each, where none reads beyond so many tiles that belong together.

  No later one is read less far: the backward kernel's turns rely on it, and would wait for ever.
  """
  place = jnp.arange(first.shape[2], dtype=jnp.int32).reshape(-1, in_chunk)
  reads = first.reshape(*first.shape[:2], -1, 1, in_chunk) <= place[:, :, None]
  return jnp.max(jnp.where(reads, place[:, None], 0), axis=-1).reshape(first.shape)


def _earliest_of_chunk(x: Tiles, in_chunk: int) -> Int[Array, "B H n"]:
  """The earliest of its chunk's tiles that each can see at all."""
  place = jnp.arange(in_chunk, dtype=jnp.int32)
  by_chunk = (*x.decay.shape[:2], -1, in_chunk)
  starts, ends = (for_each(lambda total: total.reshape(by_chunk), totals) for totals in (x.before, x.end))
  # Between the end of one tile and the start of a later one: B H chunk, query tile, key tile.
  between = for_each(lambda start: start[..., None], starts) - for_each(lambda end: end[..., None, :], ends)
  unseen = jnp.sum((between * LOG2E <= INVISIBLE) & (place < place[:, None]), axis=-1, dtype=jnp.int32)
  start = in_chunk * jnp.arange(unseen.shape[2], dtype=jnp.int32)[:, None]
  return (start + unseen).reshape(x.decay.shape)


def _earliest_in_sight(end: Float[Array, "B H n"], least: float = INVISIBLE / LOG2E) -> Int[Array, "B H n"]:
  """The earliest of all tiles that each can see at all, or of which gates leave as much as the exponential of `least`.

  To a total's rounding, and by search, for totals only fall.
  """
  tiles = end.shape[2]
  before = jnp.pad(end[..., :-1], ((0, 0), (0, 0), (1, 0)))
  # Which is one launch, but for many tiles too much work.
  method = "compare_all" if tiles <= _COMPARED else "scan_unrolled"
  search = functools.partial(jnp.searchsorted, side="right", method=method)
  unseen = jax.vmap(search)(*(-x.reshape(-1, tiles) for x in (end, before - least)))
  return jnp.minimum(unseen.reshape(end.shape).astype(jnp.int32), jnp.arange(tiles, dtype=jnp.int32))
