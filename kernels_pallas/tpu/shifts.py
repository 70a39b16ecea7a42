"""What the chunk kernels on TPU share: states at p = 2, features by cyclic shifts, and pairs inside a chunk.

Tokens lie on lanes and coordinates on sublanes, so that a cyclic shift of a vector is a load that begins some rows
later (of bfloat16 coordinates see `pair`). With x * roll(x, s), s = 0 .. d/2, every product of two coordinates occurs
once (of the last shift only the first half is taken), so a state is

    S[s, i] = sum_j k_ji k_j(i+s) v_j        weight 1 for s = 0, else 2        D = d (d + 1) / 2 rows of dv

In which order is said in `kernels_pallas.tpu.features`.

All matrix products have bfloat16 operands and float32 sums. VMEM is rows of 128 lanes, hence tiles of 128 tokens.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, BFloat16, Float

LANES = 128  # tokens in a tile
ROWS = 1024  # features that a turn of the loop over shifts expands: the more, the shorter the matrix units wait
PART = 256  # of these, those that a product adds to a state
VMEM = 60 * 2**20  # bytes that a kernel may ask for
NT = ((1,), (1,))  # a product with the second operand transposed


class Chunks(NamedTuple):
  """What all chunk kernels read. Queries and keys are scaled to at most 1, and the gates count from a chunk's start."""

  q: BFloat16[Array, "B H g d T"]
  k: BFloat16[Array, "B H d T"]
  v: BFloat16[Array, "B H dv T"]
  gate: Float[Array, "B H 1 T"]  # the discount since the chunk began, its logarithm to base 2
  until: Float[Array, "B H 1 T"]  # the discount until the chunk ends
  across: Float[Array, "B H 1 n"]  # the discount across each chunk


class State(NamedTuple):
  """A state, or its cotangent, as the kernels carry it."""

  S: Float[Array, "*lead D dv"]  # features by series of shifts: see `kernels_pallas.tpu.features`
  Z: Float[Array, "*lead d d"]


# Chunks of a head in order, and nothing of a grid's other places.
PARAMETERS = pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=VMEM)
IN_MEMORY = pl.BlockSpec(memory_space=pl.ANY)


def specs(x: Chunks, chunk: int, place: Callable[[Any], Any] = lambda n: n) -> list[pl.BlockSpec]:
  """The blocks of a chunk; `place` says which chunk comes n-th."""
  group, head_dim, value_dim = x.q.shape[2], x.k.shape[2], x.v.shape[2]
  whole = pl.BlockSpec((1, 1, 1, x.across.shape[-1]), lambda b, h, n: (b, h, 0, 0), memory_space=pltpu.SMEM)
  rows = [by_token(count, chunk, place) for count in (head_dim, value_dim, 1, 1)]
  return [by_group(group, head_dim, chunk, place), *rows, whole]


def by_token(rows: int, chunk: int, place: Callable[[Any], Any] = lambda n: n) -> pl.BlockSpec:
  """The block of an array B H rows T."""
  return pl.BlockSpec((1, 1, rows, chunk), lambda b, h, n: (b, h, 0, place(n)))


def by_group(group: int, rows: int, chunk: int, place: Callable[[Any], Any] = lambda n: n) -> pl.BlockSpec:
  """The block of an array B H g rows T."""
  return pl.BlockSpec((1, 1, group, rows, chunk), lambda b, h, n: (b, h, 0, 0, place(n)))


def dot(a: Array, b: Array, contract: tuple[tuple[int], tuple[int]] = ((1,), (0,))) -> Float[Array, "m n"]:
  """The product of bfloat16 matrices, in float32: exactly, so no other precision than this is to be had or needed."""
  how: dict[str, Any] = {"precision": lax.Precision.DEFAULT, "preferred_element_type": jnp.float32}
  return lax.dot_general(a, b, (contract, ((), ())), **how)


def largest_chunk(group: int) -> int:
  """The most tokens in a chunk whose queries, `group` for each key, fit the chip's memory beside the state; or 0."""
  return next((size for size in (512, 256, 128) if size * group <= 4096), 0)


class Carried(NamedTuple):
  """Where a kernel holds the state, and what tells that a copy of it has arrived."""

  S: Any
  Z: Any
  copied: Any

  @classmethod
  def scratch(cls, head_dim: int, value_dim: int) -> "Carried":
    """The memory to ask for."""
    return cls(
      pltpu.VMEM((head_dim * (head_dim + 1) // 2, value_dim), jnp.float32),
      pltpu.VMEM((head_dim, head_dim), jnp.float32),
      pltpu.SemaphoreType.DMA,
    )


def scratch_of_vectors(count: int, head_dim: int) -> Any:
  """Room for `count` tiles of vectors, or of sums to them, and their first half once more below."""
  return pltpu.VMEM((count, head_dim * 3 // 2, LANES), jnp.float32)


def scratch_of_factors(count: int, head_dim: int) -> Any:
  """Room for `count` tiles of vectors whose coordinates are multiplied with one another, for `write_factors`.

  In pairs, twice, each with its first half once more below; or as they are.
  """
  if not multiplies_pairs():
    return scratch_of_vectors(count, head_dim)
  return pltpu.VMEM((count, 2, head_dim * 3 // 4, LANES), jnp.uint32)


def scratch_of_features(tiles: int, rows: int = ROWS) -> Any:
  """Room for features. One array for each tile: in longer rows a register of 16-bit values would lie in two halves."""
  return pltpu.VMEM((tiles, rows, LANES), jnp.bfloat16)


def scratch_of_transposed(head_dim: int, value_dim: int) -> list[Any]:
  """Room for a state's features of a turn of the loop, or of the last shift, on lanes: by tiles, as above."""
  sizes = (ROWS, head_dim // 2)
  return [pltpu.VMEM((-(-size // LANES), value_dim, min(size, LANES)), jnp.bfloat16) for size in sizes]


def transpose(out: Any, state: Any) -> None:
  """Writes a state that is in memory with features on lanes."""
  for n in range(out.shape[0]):
    out[n] = state[pl.ds(n * LANES, out.shape[2])].astype(jnp.float32).T.astype(jnp.bfloat16)


def transposed(tiles: Any) -> BFloat16[Array, "v f"]:
  """What `transpose` wrote."""
  return side_by_side(tiles[n] for n in range(tiles.shape[0]))


def side_by_side(tiles: Iterable[BFloat16[Array, "rows _"]]) -> BFloat16[Array, "rows columns"]:
  """Tiles side by side."""
  return jnp.concatenate(list(tiles), axis=1)


def clear(ref: Any) -> None:
  """Writes zeros, in a loop: unrolled they would be most of a kernel's code."""

  def rows(n: Array, none: None) -> None:
    ref[pl.ds(n * 8, 8)] = jnp.zeros((8, *ref.shape[1:]), ref.dtype)
    return none

  lax.fori_loop(jnp.int32(0), jnp.int32(ref.shape[0] // 8), rows, None)


def begin(carried: "Carried", initial: tuple[Any, Any] | None, place: tuple[Any, ...]) -> None:
  """Starts a sequence: from its initial state, or from nothing."""
  if initial is None:
    clear(carried.S)
    clear(carried.Z)
  else:
    _copy(initial[0].at[place], carried.S, carried.copied)
    _copy(initial[1].at[place], carried.Z, carried.copied)


def keep(carried: "Carried", kept: tuple[Any, Any], place: tuple[Any, ...]) -> None:
  """Leaves a copy of the state in memory."""
  _copy(carried.S, kept[0].at[place], carried.copied)
  _copy(carried.Z, kept[1].at[place], carried.copied)


def _copy(source: Any, target: Any, copied: Any) -> None:
  copy = pltpu.make_async_copy(source, target, copied)
  copy.start()
  copy.wait()


def multiplies_pairs() -> bool:
  """Whether the chip multiplies bfloat16s, two at once, as all do from v6e on; so does one that is not known.

  Known is the chip that is here, and when compiling for another that of the mesh.
  """
  return not pltpu.is_tpu_device() or pltpu.get_tpu_info().generation > 5


def write_factors(ref: Any, n: Any, x: BFloat16[Array, "d t"]) -> None:
  """Writes a tile of vectors the way that the memory is for."""
  (pair if ref.dtype == jnp.uint32 else double)(ref, n, x)


def double(ref: Any, n: Any, x: BFloat16[Array, "d t"]) -> None:
  """Writes a tile of vectors, and their first half below."""
  d = x.shape[0]
  ref[n, :d] = x.astype(jnp.float32)
  ref[n, d:] = x[: d // 2].astype(jnp.float32)


def pair(ref: Any, n: Any, x: BFloat16[Array, "d t"]) -> None:
  """Writes the coordinates of a tile of vectors in pairs: i and i + 1 of even i, and of odd i, once each.

  So any shift of bfloat16 coordinates is a load that begins some rows later, too: rows of memory have 32 bits.
  """
  size = x.shape[0] // 2
  even = pltpu.bitcast(x, jnp.uint32)
  ref[n, 0, :size], ref[n, 0, size:] = even, even[: size // 2]
  odd = lax.shift_right_logical(even, jnp.uint32(16)) | lax.shift_left(ref[n, 0, pl.ds(1, size)], jnp.uint32(16))
  ref[n, 1, :size], ref[n, 1, size:] = odd, odd[: size // 2]


def for_all_groups(group: int, visit: Callable[[Any], None]) -> None:
  """Visits all queries that share a key: unrolled where there is one."""
  if group == 1:
    visit(0)
  else:

    def turn(g: Array, none: None) -> None:
      visit(g)
      return none

    lax.fori_loop(jnp.int32(0), jnp.int32(group), turn, None)


def take_turns(*works: Iterator[None]) -> None:
  """Does a step of each work in turn: the matrix units make products of one while those of another are taken up."""
  for _ in itertools.zip_longest(*works):
    pass


def pieces(Z: Float[Array, "d d"]) -> tuple[BFloat16[Array, "d d"], BFloat16[Array, "d d"]]:
  """Z as a sum of bfloat16s: a normaliser can be the small rest of large terms."""
  high = Z.astype(jnp.bfloat16)
  return high, (Z - high.astype(jnp.float32)).astype(jnp.bfloat16)


def add_gram(Z: Any, decay: Any, x: Float[Array, "d t"], weight: Float[Array, "1 t"]) -> None:
  """Z <- decay Z + sum_j weight_j x_j x_j^T."""
  Z[...] = Z[...] * decay + dot((x.astype(jnp.float32) * weight).astype(jnp.bfloat16), x, NT)


def column(row: Float[Array, "1 t"]) -> Float[Array, "t 1"]:
  """A vector over lanes, as one over sublanes."""
  return jnp.broadcast_to(row, (8, row.shape[1])).T[:, :1]


def tokens_down(x: BFloat16[Array, "d t"]) -> BFloat16[Array, "t d"]:
  """The transpose, which the chip has in 32 bits only."""
  return x.astype(jnp.float32).T.astype(jnp.bfloat16)


def triangle(tiles: int) -> list[tuple[slice, int]]:
  """Pairs inside a chunk: the queries of some tiles, and each tile of keys that any of them sees, by queries."""
  queries = [slice(some[0] * LANES, (some[-1] + 1) * LANES) for some in by_twos(tiles)]
  return [(i, j) for i in queries for j in range(i.stop // LANES)]


def begun_ahead[P, R](places: Iterable[P], begin: Callable[[P], R]) -> Iterator[tuple[P, R]]:
  """Each place with what is begun there, one ahead: matrix units take products in the order of the program, and would
  wait while something is made of one before the next was given to them.
  """
  begun: list[tuple[P, R]] = []
  for place in places:
    begun.append((place, begin(place)))
    if len(begun) == 2:
      yield begun.pop(0)
  yield from begun


def by_twos(tiles: int) -> list[list[int]]:
  """The tiles by twos: a product with 256 tokens fills the matrix units of every chip."""
  return [list(range(n, min(n + 2, tiles))) for n in range(0, tiles, 2)]


def tile(n: int) -> Any:
  """The lanes of a tile of tokens."""
  return pl.ds(n * LANES, LANES)


def discounts(gate: Float[Array, "1 i"], pull: Float[Array, "j 1"], ahead: int) -> Float[Array, "j i"]:
  """b_ij of keys j, down, and queries i, across, the first of them so many tokens ahead of the first key; 0 for a key
  after its query.
  """
  exponent = gate - pull
  if ahead < exponent.shape[0]:
    key, query = (lax.broadcasted_iota(jnp.int32, exponent.shape, axis) for axis in range(2))
    exponent = jnp.where(key <= query + ahead, exponent, -jnp.inf)
  return jnp.exp2(exponent)


def vary_as(like: Array) -> Callable[..., jax.ShapeDtypeStruct]:
  """Makes shapes of results that vary over the axes of shard_map that `like` varies over."""
  axes = jax.typeof(like).manual_axis_type

  def shape(sizes: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype, manual_axis_type=axes)

  return shape


def as_one_batch(kernel: Callable[..., Any], *arguments: Any) -> Any:
  """Runs a kernel of arrays whose first axis is the batch, and puts what vmap adds into that.

  Pallas would cut arrays that stay in memory, and does not lower that.
  """

  @jax.custom_batching.custom_vmap
  def run(*arguments: Any) -> Any:
    return kernel(*arguments)

  @run.def_vmap
  def as_larger_batch(size: int, batched: Any, *arguments: Any) -> tuple[Any, Any]:
    def merged(x: Array, has_axis: bool) -> Array:
      every = x if has_axis else jnp.broadcast_to(x, (size, *x.shape))
      return every.reshape(-1, *every.shape[2:])

    merged_arguments = jax.tree.map(merged, arguments, tuple(batched))
    results = jax.tree.map(lambda x: x.reshape(size, -1, *x.shape[1:]), run(*merged_arguments))
    return results, jax.tree.map(lambda _: True, results)

  return run(*arguments)
