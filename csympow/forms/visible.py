"""Which tiles of keys the attention kernels read for a tile of queries.

Left out is what hardly adds to any sum. That is every tile whose discount is 0 in the kernels' arithmetic, as those of
an earlier document are. In a long sequence it is also every tile that together with all before it adds at most LEFT_OUT
of what each query gathers from the two tiles before its own, of weights and of weights times values, wherever their
keys point (`kernels_pallas.gpu.bounds`, `kernels_pallas.gpu.reach`).

Gates of about 0.999 leave some 8,000 tokens to be read, be the sequence 65,536 long.
"""

import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Float, Float16, Int

from csympow.forms.spans import Settings, by_head, for_each
from csympow.prefix import Total
from kernels_pallas.gpu.bounds import Totals, bounds
from kernels_pallas.gpu.reach import reach
from kernels_pallas.gpu.tiles import ROWS, TILE
from kernels_pallas.weights import INVISIBLE, LOG2E

LEFT_OUT = 2.0**-12  # of sums whose terms are rounded to 2 ** -9 of themselves
LONG = 4_096  # tokens from which on looking for more to leave out is worth its time


def visible(
  before: Total,
  end: Total,
  q: Float16[Array, "B T Hq d"],
  folded: Float16[Array, "B T H d"],
  v: BFloat16[Array, "B T H dv"],
  decay: Float[Array, "B H n"],
  settings: Settings,
) -> tuple[Int[Array, "B H n"], Int[Array, "B H n"]]:
  """Of each tile: the earliest of its chunk's tiles that it reads, and the latest that reads it.

  `before` and `end` are the running totals of log gates, B H n 1, just before each tile and at its end.
  """
  batch, heads, tiles = decay.shape
  in_chunk = settings.chunk // TILE
  by_chunk = (batch, heads, tiles // in_chunk, in_chunk)
  place = jnp.arange(in_chunk, dtype=jnp.int32)
  if settings.gated and settings.chunk == tiles * TILE >= LONG:
    padding = ((0, 0),) * 3 + ((0, -tiles % ROWS),)
    totals = Totals(*(jnp.pad(jnp.stack(total)[..., 0], padding, mode="edge") for total in (before, end)))
    sizes = by_head(jnp.max(jnp.abs(v), axis=-1)).astype(jnp.float32)
    how = {"left_out": LEFT_OUT, "interpret": settings.interpret}
    found = bounds(q, folded, decay, sizes, totals, power=settings.power, **how)
    # The two tiles of a block of the grid alike.
    pairs = reach(found, totals, tiles, **how).reshape(batch, heads, -1, 2)
    first = jnp.minimum(pairs, pairs[..., ::-1])
  else:
    starts, ends = (for_each(lambda x: x.reshape(by_chunk), total) for total in (before, end))
    # Between the end of one tile and the start of a later one: B H chunk, query tile, key tile.
    between = for_each(lambda x: x[..., None], starts) - for_each(lambda x: x[..., None, :], ends)
    first = jnp.sum((between * LOG2E <= INVISIBLE) & (place < place[:, None]), axis=-1, dtype=jnp.int32)
  first = first.reshape(by_chunk)
  # No later one is read less far: the backward kernel's turns rely on it, and would wait for ever.
  last = jnp.max(jnp.where(first[..., None, :] <= place[:, None], place, 0), axis=-1)
  start = in_chunk * jnp.arange(by_chunk[2], dtype=jnp.int32)[:, None]
  return (start + first).reshape(decay.shape), (start + last).reshape(decay.shape)
