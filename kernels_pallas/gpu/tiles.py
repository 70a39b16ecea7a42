"""What the Hopper kernels share: tile sizes, shared memory laid out for wgmma, and a few idioms.

Kernels with products have warpgroups that compute and one that loads. The loader fills a ring of slots by TMA;
`filled` barriers tell that a slot's copies have arrived, `freed` barriers that all its readers are done.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

ROWS = 64  # a warpgroup's rows of a tile: the M of wgmma
TILE = 2 * ROWS  # tokens of two warpgroups
FRAME = 256  # tokens whose keys are discounted to a common end; time is padded to whole frames
STATE_WIDTH = 64  # of heads in states; narrower ones are filled up with zeros
MULTIPROCESSORS = 132  # of an H100 or H200
WGMMA = plgpu.Layout.WGMMA


def shared(shape: tuple[int, ...], dtype: DTypeLike, columns: int | None = None) -> Any:
  """Shared memory for matrices that wgmma and TMA both read: rows in tiles of 8, swizzled.

  `columns` are those of a tile; two operands of one product need the same.
  """
  size = jnp.dtype(dtype).itemsize
  columns = columns or min(shape[-1], 128 // size)
  transforms = (plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(columns * size))
  return plgpu.SMEM(shape, dtype, transforms=transforms)


def varying_as(like: Array, tree: Any) -> Any:
  """Marks a kernel's results as varying over the axes of shard_map that `like` varies over."""
  axes = jax.typeof(like).manual_axis_type.varying

  def mark(x: Array) -> Array:
    missing = tuple(axes - jax.typeof(x).manual_axis_type.varying)
    return lax.pcast(x, missing, to="varying") if missing else x

  return jax.tree.map(mark, tree)


def place_in_grid(item: Int[Array, ""], rows: int, tiles: int) -> tuple[Int[Array, ""], Int[Array, ""]]:
  """(the sequence and head, the tile of tokens) of a block of the grid, last tiles first.

  A row's tiles follow one another, and only as many rows take part at once as fill the chip: neighbours read the same
  memory at about the same time, so that it stays in the cache.
  """
  fill = -(-MULTIPROCESSORS // tiles)
  together = next(n for n in range(min(fill, rows), 0, -1) if rows % n == 0)
  group, rest = (f(item, jnp.int32(tiles * together)) for f in (lax.div, lax.rem))
  tile, row = (f(rest, jnp.int32(together)) for f in (lax.div, lax.rem))
  return group * together + row, tiles - 1 - tile


def token_tile(item: Int[Array, ""], tiles: int, heads: int) -> tuple[Int[Array, ""], Int[Array, ""], Int[Array, ""]]:
  """(the sequence, the tile of tokens, the head) of a block of a grid over all of them; heads lie side by side."""
  row, head = (f(item, jnp.int32(heads)) for f in (lax.div, lax.rem))
  b, tile = (f(row, jnp.int32(tiles)) for f in (lax.div, lax.rem))
  return b, tile, head


def across(x: Float[Array, "columns"], shape: tuple[int, ...]) -> Float[Array, "rows columns"]:
  """A vector over columns, repeated for every row."""
  return lax.broadcast_in_dim(x, shape, [1])


def down(x: Float[Array, "rows"], shape: tuple[int, ...]) -> Float[Array, "rows columns"]:
  """A vector over rows, repeated for every column."""
  return lax.broadcast_in_dim(x, shape, [0])


def index(shape: tuple[int, int], axis: int, start: Int[Array, ""]) -> Int[Array, "rows columns"]:
  """The token of each row or column of a tile that starts at `start`."""
  return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=WGMMA) + start


def accumulate(add: Callable[..., None], initial: tuple[Array, ...], interpret: Any) -> tuple[Array, ...]:
  """Runs `add` on accumulators of wgmma that begin with `initial`; returns what they hold in the end."""
  if interpret is None:
    return pl.run_state(lambda refs: add(*refs))(tuple(map(plgpu.ACC.init, initial)))

  def from_nothing(*sums: Any) -> tuple[Array, ...]:  # the interpreter begins with zeros only
    add(*sums)
    return tuple(x[...] for x in sums)

  added = pl.run_scoped(from_nothing, *(plgpu.ACC((x.shape[0], x.shape[1]), x.dtype) for x in initial))
  return tuple(map(jnp.add, initial, added))


def wait_if(condition: Bool[Array, ""], barrier: Any) -> None:
  """Waits for a barrier that a ring's first round does not have."""

  @pl.when(condition)
  def _() -> None:
    plgpu.barrier_wait(barrier)
