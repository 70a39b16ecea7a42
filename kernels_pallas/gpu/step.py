"""One token into and out of the state on Hopper, in place: every number of the state is read once and written once.

    S <- gamma S + phi(k) v^T          Z <- gamma Z + phi(k)          phi(q) . gamma S, phi(q) . gamma Z

A block of the grid owns a slice of the features of one head, and leaves its part of the sums that queries gather. It
sends for all tiles of its slice at once, and expands features while they are on their way. Arithmetic is float32.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, memref
from jaxtyping import Array, Float, Int

from kernels_pallas.gpu.in_place import kernel_in_place
from kernels_pallas.gpu.tiles import MULTIPROCESSORS

_WARPS, _LANES = 4, 32
_MOST_REGISTERS = 40  # of a thread, for its part of a tile of the state and of what queries take from it
_MOST_BYTES = 40 * 1024  # of the state in a block's shared memory, so that five blocks fit
_BLOCKS = 8 * MULTIPROCESSORS  # enough to keep all busy to the end
SLICES = 32  # of a head, whose sums are few enough to be added by a program that does something else as well
_SMALLEST_NORMAL = 2.0**-126


class Token(NamedTuple):
  """Queries and keys rotated, each pair of coordinates as its first and its second; queries of any length."""

  q: tuple[Float[Array, "B H g r"], Float[Array, "B H g r"]]
  k: tuple[Float[Array, "B H r"], Float[Array, "B H r"]]
  v: Float[Array, "B H dv"]
  log_gate: Float[Array, "B H"]


class Features(NamedTuple):
  """The multisets of coordinates that features are products of."""

  indices: Int[Array, "p D"]
  weight: Float[Array, "D"]


class Gathered(NamedTuple):
  """What queries gather, in units of their largest coordinate to the power p."""

  older_S: Float[Array, "B H n g dv"]  # by each slice
  older_Z: Float[Array, "B H n g dv"]  # the same in every column
  own_weight: Float[Array, "B H g rows"]  # of their own token, in every row


class _Tiling(NamedTuple):
  """How a tile of the state lies in registers: a row to each group of lanes, in vectors."""

  vector: int
  rows: int  # that all warps hold at once
  repeats: int  # of those in a tile

  @property
  def tile(self) -> int:
    return self.rows * self.repeats


def least_rows(value_dim: int) -> int:
  """What features must be a multiple of: rows that all warps hold at once, with a number of one to each lane."""
  return _WARPS * _LANES // min(value_dim, _LANES)


def tiling(features: int, value_dim: int, group: int = 1) -> _Tiling | None:
  """Tiles that features are whole numbers of, or None where there are none."""
  for vector in (4, 2, 1):
    lanes = value_dim // vector
    rows = _WARPS * _LANES // lanes
    if lanes <= _LANES and features % rows == 0:
      most = max(1, _MOST_REGISTERS // (vector * (1 + group)))
      return _Tiling(vector, rows, max(n for n in range(1, most + 1) if features // rows % n == 0))
  return None


def step(
  S: Float[Array, "L B H D dv"],
  Z: Float[Array, "L B H D"],
  layer: Int[Array, "1"] | None,
  token: Token,
  features: Features,
  *,
  interpret: Any = None,
) -> tuple[Float[Array, "L B H D dv"], Float[Array, "L B H D"], Gathered]:
  """States of which one has the token in it, in the same memory, and what the token's queries gather.

  That of `layer`, or of the first; of the others nothing is read or written.
  """

  @jax.custom_batching.custom_vmap
  def run(S, Z, token, layer, features):
    return _step(S, Z, token, layer, features, interpret)

  @run.def_vmap
  def as_more_rows(size, batched, S, Z, token, *rest):
    assert not any(jax.tree.leaves(batched[3:])), "vmap is over rows, not over layers"

    def merged(x, has_axis, axis):
      every = jnp.moveaxis(x, 0, axis) if has_axis else jnp.broadcast_to(jnp.expand_dims(x, axis), _with(x, axis, size))
      return every.reshape(*every.shape[:axis], -1, *every.shape[axis + 2 :])

    def divided(x, axis):
      return jnp.moveaxis(x.reshape(*x.shape[:axis], size, -1, *x.shape[axis + 1 :]), axis, 0)

    S, Z = (merged(x, has_axis, 1) for x, has_axis in zip((S, Z), batched[:2], strict=True))
    token = jax.tree.map(functools.partial(merged, axis=0), token, batched[2])
    S, Z, gathered = run(S, Z, token, *rest)
    results = divided(S, 1), divided(Z, 1), jax.tree.map(lambda x: divided(x, 0), gathered)
    return results, jax.tree.map(lambda _: True, results)

  results: tuple[Array, Array, Gathered] = run(S, Z, token, layer, features)
  return results


def _with(x: Array, axis: int, size: int) -> tuple[int, ...]:
  return (*x.shape[:axis], size, *x.shape[axis:])


def _step(
  S: Float[Array, "L B H D dv"],
  Z: Float[Array, "L B H D"],
  token: Token,
  layer: Int[Array, "1"] | None,
  features: Features,
  interpret: Any,
) -> tuple[Float[Array, "L B H D dv"], Float[Array, "L B H D"], Gathered]:
  (_, batch, heads, count, value_dim), group = S.shape, token.q[0].shape[2]
  power, pairs = features.indices.shape[0], token.k[0].shape[-1]
  how = tiling(count, value_dim, group)
  assert how is not None, "implementations.py lets no such state through"
  lanes = value_dim // how.vector
  wide = max(pairs, lanes)  # every lane has a column at least
  layout, picking = _layout(how.rows, value_dim, lanes), _layout(how.rows, wide, lanes)
  tiles = count // how.tile
  wanted = max(1, batch * heads * tiles // _BLOCKS, -(-tiles // SLICES))
  each = min(wanted, _MOST_BYTES // (how.tile * value_dim * S.dtype.itemsize))  # tiles of a block
  slices = -(-tiles // each)
  f32, rows = jnp.float32, layout.reduce(1)

  def down(x, to, columns):
    """A vector over rows, repeated for every column."""
    return plgpu.layout_cast(lax.broadcast_in_dim(x, (x.shape[0], columns), [0]), to)

  def across(x, to, height):
    """A vector over columns, repeated for every row."""
    return plgpu.layout_cast(lax.broadcast_in_dim(x, (height, x.shape[0]), [1]), to)

  def kernel(*refs):
    *layer_ref, S_ref, Z_ref, new_S_ref, new_Z_ref, older_S_ref, older_Z_ref, own_ref = refs[8:-3]
    S_smem, vectors_smem, filled = refs[-3:]
    q_refs, k_refs, (v_ref, gate_ref, index_ref, weight_ref) = refs[:2], refs[2:4], refs[4:8]
    chosen = layer_ref[0][0] if layer_ref else 0
    row, part = (f(lax.axis_index("block"), jnp.int32(slices)) for f in (lax.div, lax.rem))
    b, head = (f(row, jnp.int32(heads)) for f in (lax.div, lax.rem))
    begin, end = part * each, jnp.minimum(part * each + each, tiles)

    def fetch(n, none):
      at = pl.ds(n * how.tile, how.tile)
      plgpu.copy_gmem_to_smem(S_ref.at[chosen, b, head, at], S_smem.at[n - begin], filled.at[n - begin])
      return none

    lax.fori_loop(begin, end, fetch, None)

    def vector(ref, columns):
      return plgpu.load(ref, layout=columns.reduce(0), optimized=False).astype(f32)

    def scaled(pair):
      """In units of the largest coordinate."""
      sizes = (jnp.abs(across(x, picking, how.rows)) for x in pair)
      largest = down(jnp.maximum(*sizes).max(axis=1), picking, wide).max(axis=0)
      empty = largest < _SMALLEST_NORMAL  # NaN is not
      inverse = jnp.where(empty, 0.0, 1 / jnp.where(empty, 1.0, largest))
      return [x * inverse for x in pair]

    key = [vector(ref.at[b, head], picking) for ref in k_refs]
    queries = [scaled([vector(ref.at[b, head, n], picking) for ref in q_refs]) for n in range(group)]
    value = vector(v_ref.at[b, head], layout)
    kept, rest = _discount(gate_ref[b, head])
    for n, pair in enumerate((key, *queries)):
      for half in range(2):
        _store(vectors_smem.at[n, half], pair[half])
    plgpu.commit_smem()

    def visit(n, sums):
      at = pl.ds(n * how.tile, how.tile)
      indices = [plgpu.load(index_ref.at[i, at], layout=rows, optimized=False) for i in range(power)]
      weight = plgpu.load(weight_ref.at[at], layout=rows, optimized=False)
      found_Z = plgpu.load(Z_ref.at[chosen, b, head, at], layout=rows, optimized=False).astype(f32)

      def phi(vector):
        return functools.reduce(jnp.multiply, (_picked(vector, index, rows, interpret) for index in indices), weight)

      phi_k, *phi_q = (phi(vectors_smem.at[n]) for n in range(1 + group))
      older_Z = found_Z * kept + found_Z * rest
      _store(new_Z_ref.at[chosen, b, head, at], (older_Z + phi_k).astype(Z.dtype))
      plgpu.barrier_wait(filled.at[n - begin])
      found = plgpu.load(S_smem.at[n - begin], layout=layout, optimized=False).astype(f32)
      older = found * kept + found * rest
      added = down(phi_k, layout, value_dim) * across(value, layout, how.tile)
      _store(new_S_ref.at[chosen, b, head, at], (older + added).astype(S.dtype))
      return tuple(
        (S_sum + _folded(down(x, layout, value_dim) * older, how.rows), Z_sum + _folded(x * older_Z, how.rows))
        for x, (S_sum, Z_sum) in zip(phi_q, sums, strict=True)
      )

    nothing = (
      plgpu.layout_cast(jnp.zeros((how.rows, value_dim), f32), layout),
      plgpu.layout_cast(jnp.zeros((how.rows,), f32), rows),
    )
    sums = lax.fori_loop(begin, end, visit, (nothing,) * group)
    for n, (S_sum, Z_sum) in enumerate(sums):
      _store(older_S_ref.at[b, head, part, n], S_sum.sum(axis=0))
      _store(older_Z_ref.at[b, head, part, n], down(Z_sum, layout, value_dim).sum(axis=0))

    @pl.when(part == 0)
    def meet_own_key():
      for n, pair in enumerate(queries):
        first, second = (across(x * y, picking, how.rows) for x, y in zip(pair, key, strict=True))
        _store(own_ref.at[b, head, n], (first + second).sum(axis=1) ** power)

  def padded(x):
    return jnp.pad(x, ((0, 0),) * (x.ndim - 1) + ((0, wide - pairs),))

  vectors = (*map(padded, (*token.q, *token.k)), token.v, token.log_gate)
  operands = (*vectors, *features, *(() if layer is None else (layer,)), S, Z)
  result = functools.partial(jax.ShapeDtypeStruct, manual_axis_type=jax.typeof(S).manual_axis_type)
  S, Z, *gathered = kernel_in_place(
    kernel,
    changed={len(operands) - 2: 0, len(operands) - 1: 1},
    out_type=[
      result(S.shape, S.dtype),
      result(Z.shape, Z.dtype),
      *(result((batch, heads, slices, group, value_dim), f32),) * 2,
      result((batch, heads, group, how.rows), f32),
    ],
    scratch_types=[
      plgpu.SMEM((each, how.tile, value_dim), S.dtype),
      plgpu.SMEM((1 + group, 2, wide), f32),
      plgpu.Barrier(num_arrivals=1, num_barriers=each),
    ],
    grid=(batch * heads * slices,),
    grid_names=("block",),
    compiler_params=plgpu.CompilerParams(),
    interpret=interpret,
    name="step",
  )(*operands)
  return S, Z, Gathered(*gathered)


def _picked(vector: Any, numbers: Int[Array, "n"], layout: Any, interpret: Any) -> Float[Array, "n"]:
  """Coordinates of a vector in shared memory, which has all first ones of pairs before all second ones."""
  if interpret is not None:
    found: Array = vector[...].T.reshape(-1)[numbers]
    return found

  # Pallas has no gathers.
  result = plgpu.ShapeDtypeStruct(numbers.shape, jnp.float32, layout)

  @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout), return_type=result)
  def gather(_: Any, vector: Any, numbers: Any) -> Any:
    def load(number: Any, _: Any) -> Any:
      one = mgpu.c(1, number.type)
      place = arith.andi(number, one), arith.shrui(number, one)
      return memref.load(vector, [arith.index_cast(ir.IndexType.get(), n) for n in place])

    return numbers.foreach(load, create_array=True)

  picked: Array = gather(vector, numbers)
  return picked


def _store(ref: Any, x: Float[Array, "..."]) -> None:
  """To memory, a few bytes a warp at a time; jax 0.12 wants to be told that this is meant."""
  if hasattr(plgpu, "store"):
    plgpu.store(ref, x, optimized=False)
  else:
    ref[...] = x


def _layout(rows: int, columns: int, lanes: int) -> Any:
  """Rows over warps and over groups of `lanes` lanes; of its row, a lane holds neighbouring columns."""
  if lanes == _LANES:
    tiles = plgpu.Tiling(((rows, columns), (columns // lanes,)))
    return plgpu.Layout.TILED(tiles, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)
  tiles = plgpu.Tiling(((rows, columns), (rows // _WARPS, columns), (columns // lanes,)))
  return plgpu.Layout.TILED(tiles, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)


def _folded(x: Float[Array, "tile *columns"], rows: int) -> Float[Array, "rows *columns"]:
  """The sum over the repeats of a tile."""
  return sum((x[start : start + rows] for start in range(rows, x.shape[0], rows)), start=x[:rows])


def _discount(log_gate: Float[Array, ""]) -> tuple[Float[Array, ""], Float[Array, ""]]:
  """Gamma as a sum of two numbers, of which near 1 the second is what a float32 cannot hold beside the first."""
  near_one = log_gate > -0.5
  x, series = jnp.where(near_one, log_gate, 0.0), jnp.float32(0)
  for n in range(10, 0, -1):  # expm1
    series = (series + 1) * x / n
  return jnp.where(near_one, 1.0, jnp.exp(log_gate)), series
