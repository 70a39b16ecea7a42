"""Which tiles of keys the attention kernels read for a tile of queries, and which heads need a state besides.

Left out is what hardly adds to any sum. That is every tile whose discount is 0 in the kernels' arithmetic, as those of
an earlier document are. In a long sequence it is also every tile that together with all before it adds at most LEFT_OUT
of what each query gathers from the two tiles before its own, of weights and of weights times values, wherever their
keys point (`kernels_pallas.gpu.bounds`, `kernels_pallas.gpu.reach`).

Gates of about 0.999 leave some 8,000 tokens to be read, be the sequence 65,536 long. In the chunked form a head that
forgets sooner, such that reading all it remembers costs less than a state, has none: its queries read beyond their
chunk. So do those of a head whose states are too coarse for them (`csympow.forms.faint`). Of some heads gates alone
tell that they will have none, before anything is made for a state.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, BFloat16, Bool, Float, Float16, Int

from csympow.forms.spans import Settings, for_each
from csympow.prefix import Total
from kernels_pallas.gpu.bounds import bounds
from kernels_pallas.gpu.reach import reach
from kernels_pallas.gpu.tiles import ROWS, TILE
from kernels_pallas.weights import INVISIBLE, LOG2E

LEFT_OUT = 2.0**-12  # of sums whose terms are rounded to 2 ** -9 of themselves
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

  `vectors` are queries and discounted keys, of heads that are 1.
  """

  before: Total  # B H n
  end: Total
  decay: Float[Array, "B H n"]
  vectors: Callable[[Int[Array, "B H"]], tuple[Float16[Array, "B T Hq d"], Float16[Array, "B T H d"]]]
  v: BFloat16[Array, "B T H dv"]
  head_dim: int
  may_have_state: Int[Array, "B H"] | None = None  # see `candidates`


def visible(x: Tiles, settings: Settings) -> Visible:
  """What is read inside chunks or, of heads that are better off without a state, beyond them."""
  tiles, in_chunk = x.decay.shape[2], settings.chunk // TILE
  if settings.gated and settings.chunk == tiles * TILE >= LONG:
    first = _earliest(x, _fades(x, tiles - 1), settings)
    return Visible(first, _latest(first, tiles))
  inside = _earliest_of_chunk(x, in_chunk)
  if x.may_have_state is None:
    return Visible(inside, _latest(inside, in_chunk))
  worth = tiles_of_a_state(x.head_dim, x.v.shape[3])
  fades = _fades(x, worth)
  beyond = _earliest(x, fades, settings)
  read = jnp.arange(tiles, dtype=jnp.int32) - beyond
  costs_more = jnp.mean(read.astype(jnp.float32), axis=-1) > worth
  has_state = ~fades | (costs_more & (x.may_have_state > 0))
  first = jnp.where(has_state[..., None], inside, beyond)
  return Visible(first, _latest(first, tiles), has_state.astype(jnp.int32))


def candidates(before: Total, end: Total, widths: tuple[int, int], settings: Settings) -> Int[Array, "B H"] | None:
  """Heads that may have a state: 1, or 0 if what a state is for has faded everywhere; None if all have one.

  Such a head has none even if its queries read more than what a state costs, some ten times that at most, whatever its
  keys: after so much nothing is visible. To know would take the copies that are spared.
  """
  tiles, worth = before.hi.shape[2], tiles_of_a_state(*widths)
  if not settings.gated or settings.chunk == tiles * TILE or tiles * TILE < LONG or tiles <= worth:
    return None
  return (~jnp.all(_faded(before, end, worth), axis=-1)).astype(jnp.int32)


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


def tiles_of_a_state(head_dim: int, value_dim: int) -> int:
  """How many tiles a query reads in about the time that a state takes: 16 in heads of 64, and 64 in heads of 128.

  Measured, in heads of 64 and chunks of 1,024, what is read inside the chunk included: 18 forwards, 15 with gradients.
  """
  return head_dim**2 * value_dim // (TILE * (head_dim + value_dim))


def _fades(x: Tiles, tiles: int) -> Bool[Array, "B H"]:
  """Whether gates leave LEFT_OUT or less of what is so many tiles away, mostly."""
  return jnp.mean(_faded(x.before, x.end, tiles).astype(jnp.float32), axis=-1) > 0.5


def _faded(before: Total, end: Total, tiles: int) -> Bool[Array, "B H m"]:
  """Where they do: at each tile that has so many before it."""
  kept = for_each(lambda total: total[..., tiles:], before) - for_each(lambda total: total[..., :-tiles], end)
  faded = kept < math.log(LEFT_OUT)
  if faded.shape[-1] > 1:  # or a block of threads would look up all of a head's
    faded = lax.optimization_barrier(faded)
  return faded


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


def _earliest_in_sight(end: Float[Array, "B H n"]) -> Int[Array, "B H n"]:
  """The earliest of all tiles that each can see at all, to a total's rounding: by search, for totals only fall."""
  tiles = end.shape[2]
  before = jnp.pad(end[..., :-1], ((0, 0), (0, 0), (1, 0)))
  search = functools.partial(jnp.searchsorted, side="right", method="scan_unrolled")
  unseen = jax.vmap(search)(*(-x.reshape(-1, tiles) for x in (end, before - INVISIBLE / LOG2E)))
  return jnp.minimum(unseen.reshape(end.shape).astype(jnp.int32), jnp.arange(tiles, dtype=jnp.int32))
