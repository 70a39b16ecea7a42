"""What the Hopper kernels share: tile sizes, shared memory laid out for wgmma, and a few idioms.

Kernels with products have warpgroups that compute and one that loads. The loader fills a ring of slots by TMA;
`filled` barriers tell that a slot's copies have arrived, and what the loader computed beside them, `freed` barriers
that all its readers are done.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.typing import DTypeLike
from jaxtyping import Array, BFloat16, Bool, Float, Int, Num

from kernels_pallas.weights import LEAST, MOST

ROWS = 64  # a warpgroup's rows of a tile: the M of wgmma
TILE = 2 * ROWS  # tokens of two warpgroups; their keys are discounted to a common end
IN_TILE = TILE // ROWS
WIDTH = 32  # coordinates that a kernel without a loader takes at a time: registers are left for other blocks
STATE_WIDTH = 64  # of heads in states; narrower ones are filled up with zeros
BLOCK = 4 * ROWS  # sequences and chunks are whole ones of these
MULTIPROCESSORS = 132  # of an H100 or H200
# Of a thread, by how many warpgroups compute beside one that loads. Together they are no more than a block starts with,
# 65,536 over its threads in whole 8s: a warpgroup that asked for more would wait for ever.
REGISTERS, LOADING_REGISTERS = {2: 232, 3: 160, 4: 112}, 32
WGMMA = plgpu.Layout.WGMMA


def attention_widths(head_dim: int, value_dim: int) -> tuple[int, int]:
  """What heads are filled up to for the attention kernels: 32 at least, and one width if one is beyond 64."""
  widths = max(32, head_dim), max(32, value_dim)
  return widths if max(widths) <= 64 else (max(widths), max(widths))


def multiprocessors() -> int:
  """Of the GPU that is here; where there is none, of that which is compiled for."""
  here = jax.local_devices()[0]
  return int(getattr(here, "core_count", MULTIPROCESSORS)) if here.platform == "gpu" else MULTIPROCESSORS


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


def fastest(shares: tuple[tuple[int, int], ...], blocks: Callable[[int], int]) -> tuple[int, int]:
  """How many warpgroups of a block compute how much each, so that the chip is done first.

  `blocks` are those of the grid by how much each of them does.
  """

  def time(share: tuple[int, int]) -> int:
    owned = share[0] * share[1]
    return -(-blocks(owned) // MULTIPROCESSORS) * owned

  return min(shares, key=time)


def place_in_grid(
  item: Any, rows: int, tiles: int, by: tuple[Callable[..., Any], ...] = (lax.div, lax.rem)
) -> tuple[Any, Any]:
  """(the sequence and head, the tile of tokens) of a block of the grid, last tiles first.

  A row's tiles follow one another, and only as many rows take part at once as fill the chip: neighbours read the same
  memory at about the same time, so that it stays in the cache. Numbers are divided `by` what divides their kind.
  """
  fill, number = -(-MULTIPROCESSORS // tiles), item.dtype.type
  together = next(n for n in range(min(fill, rows), 0, -1) if rows % n == 0)
  group, rest = (f(item, number(tiles * together)) for f in by)
  tile, row = (f(rest, number(together)) for f in by)
  return group * together + row, tiles - 1 - tile


def tiles_of_a_block(rows: int, tiles: int, head_dim: int) -> int:
  """How many a block of one warpgroup takes, of so many in a row.

  Several where there are many, so that fewer blocks begin; of wide heads one, for those that fetch the next tile
  meanwhile would have it in another block's place.
  """
  return math.gcd(tiles, 4) if rows * tiles >= 32 * MULTIPROCESSORS and head_dim <= 64 else 1


class TokenTile(NamedTuple):
  """ROWS tokens of one head, which a block of the grid of one warpgroup takes WIDTH coordinates at a time."""

  b: Int[Array, ""]
  number: Int[Array, ""]
  head: Int[Array, ""]
  source: Int[Array, ""]  # the head of what several heads share

  @classmethod
  def of_block(cls, tiles: int, heads: int, group: int, several: int = 1) -> "TokenTile":
    """The first of this block, in a grid over all sequences, `several` of their tiles, and heads side by side."""
    row, head = (f(lax.axis_index("block"), jnp.int32(heads)) for f in (lax.div, lax.rem))
    b, number = (f(row, jnp.int32(tiles // several)) for f in (lax.div, lax.rem))
    return cls(b, number * several, head, lax.div(head, jnp.int32(group)))

  def later(self, n: Int[Array, ""]) -> "TokenTile":
    """So many tiles later."""
    return self._replace(number=self.number + n)

  @property
  def rows(self) -> Any:
    """Its tokens."""
    return pl.ds(self.number * ROWS, ROWS)

  def part(self, ref: Any, part: Any) -> Any:
    """Some coordinates of an array B T H d."""
    return ref.at[self.b, self.rows, self.head, columns(part)]

  def by_token(self, ref: Any) -> Float[Array, "rows"]:
    """A number for each token, of a vector over time."""
    return by_token(ref, self.number)


def columns(part: Any) -> Any:
  """Coordinates of a part of a head."""
  return pl.ds(part * WIDTH, WIDTH)


def by_token(ref: Any, tile: Any) -> Float[Array, "rows"]:
  """A number for each token of a tile of ROWS, of a vector over time."""
  numbers: Array = plgpu.load(ref.at[pl.ds(tile * ROWS, ROWS)], layout=WGMMA.reduce(1), optimized=False)
  return numbers


def by_coordinate(ref: Any, part: Any) -> Float[Array, "columns"]:
  """A number for each of them."""
  numbers: Array = plgpu.load(ref.at[columns(part)], layout=WGMMA.reduce(0), optimized=False)
  return numbers


def across(x: Num[Array, "columns"], shape: tuple[int, ...]) -> Num[Array, "rows columns"]:
  """A vector over columns, repeated for every row."""
  return lax.broadcast_in_dim(x, shape, [1])


def down(x: Num[Array, "rows"], shape: tuple[int, ...]) -> Num[Array, "rows columns"]:
  """A vector over rows, repeated for every column."""
  return lax.broadcast_in_dim(x, shape, [0])


def by_eights(x: Float[Array, "rows columns"]) -> Float[Array, "rows 8"]:
  """The sum over every eighth column, which needs no other thread."""
  return functools.reduce(jnp.add, (x[:, n : n + 8] for n in range(0, x.shape[1], 8)))


def by_eights_in_pairs(x: BFloat16[Array, "rows columns"]) -> BFloat16[Array, "rows 8"]:
  """The same of bfloat16s, two of which are added by one instruction; each number is rounded a few times only."""
  parts = [x[:, n : n + 8] for n in range(0, x.shape[1], 8)]
  while len(parts) > 1:
    parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=True)]
  return parts[0]


def square(ref: Any) -> Float[Array, "rows"]:
  """The squared lengths of vectors in shared memory."""
  x = plgpu.load(ref, layout=WGMMA, optimized=False).astype(jnp.float32)
  return by_eights(x * x).sum(axis=1)


def index(shape: tuple[int, int], axis: int, start: Int[Array, ""]) -> Int[Array, "rows columns"]:
  """The token of each row or column of a tile that starts at `start`.

  From one number for each, not for each pair of them, of which the compiler would hold more in registers.
  """
  along = plgpu.broadcasted_iota(jnp.int32, shape[axis : axis + 1], 0, layout=WGMMA.reduce(1 - axis)) + start
  return down(along, shape) if axis == 0 else across(along, shape)


def causal(x: Float[Array, "n n"]) -> Float[Array, "n n"]:
  """-inf above the diagonal.

  Of 8 columns a thread has four differences of row and column, which are compared with constants. The numbers of all
  its columns would be the same in every place, so the compiler would compute them once, and spill them.
  """
  shape, zero = (x.shape[0], 8), jnp.int32(0)
  below = index(shape, 0, zero) - index(shape, 1, zero)
  return jnp.concatenate([jnp.where(below >= n, x[:, n : n + 8], -jnp.inf) for n in range(0, x.shape[1], 8)], axis=1)


def rounded(x: Float[Array, "*shape"], dtype: DTypeLike) -> Float[Array, "*shape"]:
  """X in `dtype`, for whoever needs it in float32 again.

  Without the barrier each number would be converted on its own, by the unit that exponentials wait for. A register of
  the layout must hold 32 bits of a result of 16, as WGMMA's do: of wider ones jax 0.11.2's barrier returns the words
  of several registers in another order.
  """
  result: Array = lax.optimization_barrier(x.astype(dtype))
  return result


def power_of_two(largest: Float[Array, "rows"], room: int) -> tuple[Float[Array, "rows"], Int[Array, "rows"]]:
  """2 to minus the exponent, and the exponent e: the largest coordinate is below 2 ** (e - room). Of 0 it is 0."""
  e = (lax.bitcast_convert_type(largest, jnp.int32) >> 23) - 126
  e = jnp.where(e <= LEAST, 0, jnp.minimum(e + room, MOST))
  return lax.bitcast_convert_type((127 - e) * 2**23, jnp.float32), e


def accumulate(add: Callable[..., None], initial: tuple[Array, ...], interpret: Any) -> tuple[Array, ...]:
  """Runs `add` on accumulators of wgmma that begin with `initial`; returns what they hold in the end."""
  if interpret is None:
    return pl.run_state(lambda refs: add(*refs))(tuple(map(plgpu.ACC.init, initial)))

  def from_nothing(*sums: Any) -> tuple[Array, ...]:  # the interpreter begins with zeros only
    add(*sums)
    return tuple(x[...] for x in sums)

  added = pl.run_scoped(from_nothing, *(plgpu.ACC((x.shape[0], x.shape[1]), x.dtype) for x in initial))
  return tuple(map(jnp.add, initial, added))


def multiply(sums: Any, left: Array, right: Any, staging: Any) -> None:
  """Adds left @ right, of which left is in registers; from there the interpreter's wgmma takes nothing."""
  if staging is None:
    plgpu.wgmma(sums, left, right)
    return
  staging[...] = left
  plgpu.commit_smem()
  plgpu.wgmma(sums, staging, right)
  plgpu.wgmma_wait(0)


def place_in_ring(visit: Int[Array, ""], slots: int) -> Int[Array, ""]:
  """The slot of a visit: of a power of two of them that is one instruction, where a remainder minds the sign."""
  return visit & (slots - 1) if slots & (slots - 1) == 0 else lax.rem(visit, jnp.int32(slots))


def wait_for_all(freed: Any, visits: int | Int[Array, ""]) -> None:
  """Waits for the last readers of a ring's slots: no arrival is left unseen."""
  slots = freed.shape[0]

  def wait(visited: Int[Array, ""], none: None) -> None:
    plgpu.barrier_wait(freed.at[place_in_ring(visited, slots)])
    return none

  lax.fori_loop(jnp.maximum(0, visits - slots), jnp.int32(visits), wait, None)


def unless_stateless(many: int, has_state: Any, b: Int[Array, ""], head: Int[Array, ""]) -> Int[Array, ""]:
  """So many, or none in a head that has no state: `has_state` is 1 or 0 for each. Without it all have one."""
  return jnp.int32(many) if has_state is None else many * has_state[b, head]


def wait_for_warps() -> None:
  """Waits for the other warps of this warpgroup, in a kernel that has no such barriers but its own."""

  @plgpu.inline_mgpu()
  def barrier(_: Any) -> None:
    mgpu.utils.warpgroup_barrier()

  barrier()


def wait_if(condition: Bool[Array, ""], barrier: Any) -> None:
  """Waits for a barrier that a ring's first round does not have."""

  @pl.when(condition)
  def _() -> None:
    plgpu.barrier_wait(barrier)
