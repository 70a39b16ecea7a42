"""Between which bounds sums of weights lie, on Hopper: by them the attention kernels leave out what hardly adds to any.

    least = min_i sum_j (q_i . k_j) ** p / |q_i| ** p     over a tile's queries, and the keys of the two tiles before it
    most  = sum_j |k_j| ** p                              of a tile's keys: no query of length 1 gathers more,

nor more, in heads of whole ROWS, than what M = sum_j k_j k_j^T says:

    p = 2   sqrt(max_a sum_b |M^2|_ab)                    for it gathers q . M q, M's largest eigenvalue at most
    p > 2   max_j |k_j| ** (p - 4)  max_i k_i . M k_i     for sum_j (q . k_j) ** 4 is at most the largest eigenvalue of
                                                          (k_i . k_j) ** 2, and that its largest sum of a row

and the same of weights times the size of each key's value. Keys are those that the attention kernels read, discounted
to the end of their tile, and `least` is in the scale of what has come to the start of the query's tile.

A block of the grid is one warpgroup, which takes a tile's queries with the keys of the tile before, or several tiles'
one after another. Heads whose gates do not fade are not looked at.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, BFloat16, Float, Float16, Int

from kernels_pallas.gpu.tiles import (
  IN_TILE,
  ROWS,
  TILE,
  WGMMA,
  across,
  by_eights,
  shared,
  square,
  tiles_of_a_block,
  varying_as,
)
from kernels_pallas.weights import even_power, raised

_KINDS = 2  # of sums: of weights, and of weights times values
_RELATIVE, _ABSOLUTE = 2.0**-11, 2.0**-24  # no more is lost by rounding to float16, to a normal number or to another


class Bounds(NamedTuple):
  """Of the queries of a tile, and of its keys; of heads that do not fade they are anything.

  So is the first tile's `least`, which sees no other, and the last one's `most`, which none sees, and so are tiles that
  fill up whole ROWS of them.
  """

  least: Float[Array, "2 B Hq n"]
  most: Float[Array, "2 B H n"]


def bounds(
  q: Float16[Array, "B T Hq d"],
  folded: Float16[Array, "B T H d"],
  v: BFloat16[Array, "B T H dv"],
  decay: Float[Array, "B H tiles"],
  fades: Int[Array, "B H"],
  *,
  power: int,
  interpret: Any = None,
) -> Bounds:
  """Bounds of a sequence of whole tiles, in heads that fade (1, or 0)."""
  batch, time, query_heads, head_dim = q.shape
  heads, tiles, f32 = folded.shape[2], time // TILE, jnp.float32
  several = tiles_of_a_block(batch * query_heads, tiles, head_dim)

  def kernel(q_ref, k_ref, decay_ref, sizes_ref, fades_ref, least_ref, most_ref, *scratch):
    q_smem, k_smem, sizes_smem, moments_smem, filled = scratch
    row, head = (f(lax.axis_index("block"), jnp.int32(query_heads)) for f in (lax.div, lax.rem))
    b, first = (f(row, jnp.int32(tiles // several)) for f in (lax.div, lax.rem))
    kv, of_group = (f(head, jnp.int32(query_heads // heads)) for f in (lax.div, lax.rem))

    def load(n, further, nearer):
      for part in range(IN_TILE):
        for ref, h, tile, target in (
          (q_ref, head, n, q_smem.at[part]),
          (k_ref, kv, further, k_smem.at[0, part]),
          (k_ref, kv, nearer, k_smem.at[1, part]),
        ):
          plgpu.copy_gmem_to_smem(ref.at[b, pl.ds(tile * TILE + part * ROWS, ROWS), h], target, filled)
        for m, tile in enumerate((further, nearer)):
          rows = pl.ds(tile * TILE + part * ROWS, ROWS)
          plgpu.copy_gmem_to_smem(sizes_ref.at[b, kv, rows], sizes_smem.at[m, part], filled)

    def size_of(tile, part, axis):
      return plgpu.load(sizes_smem.at[tile, part], layout=WGMMA.reduce(axis), optimized=False)

    def gathered(part, tile):
      """What queries gather from a tile's keys, each thread's share."""

      def product(block, s):
        plgpu.wgmma(s, q_smem.at[part], k_smem.at[tile, block].transpose((1, 0)))
        weights = even_power(s[...], power)
        return by_eights(weights), by_eights(weights * across(size_of(tile, block, 0), weights.shape))

      def add(block, sums):
        added = pl.run_scoped(functools.partial(product, block), plgpu.ACC((ROWS, ROWS), f32))
        return tuple(map(jnp.add, sums, added))

      nothing = plgpu.layout_cast(jnp.zeros((ROWS, 8), f32), WGMMA)
      return lax.fori_loop(0, jnp.int32(IN_TILE), add, (nothing,) * _KINDS)

    def of_queries(kept, part, so_far):
      sums = [(far * kept + near).sum(axis=1) for far, near in zip(gathered(part, 0), gathered(part, 1), strict=True)]
      length = raised(square(q_smem.at[part]), power // 2)
      shares = (jnp.min(jnp.where(length > 0, x / length, jnp.inf)) for x in sums)
      return tuple(map(jnp.minimum, so_far, shares))

    def largest(parts, add, number):
      """Of the numbers that a matrix's parts have: ROWS rows each, which `add` makes."""

      def of_part(part, sums):
        add(part, sums)
        return number(part, sums[...])

      accumulator = plgpu.ACC((ROWS, head_dim), f32)
      return functools.reduce(
        jnp.maximum, (pl.run_scoped(functools.partial(of_part, part), accumulator) for part in range(parts))
      )

    def together(trace, longest):
      """What M says. Over its trace it is a matrix that float16 has room for."""
      halves = [pl.ds(n * ROWS, ROWS) for n in range(head_dim // ROWS)]
      scale = jnp.where(trace > 0, 1 / trace, 0.0)

      def moments(part, sums):
        for keys in (k_smem.at[1, block] for block in range(IN_TILE)):
          plgpu.wgmma(sums, keys.at[:, halves[part]].transpose((1, 0)), keys)

      def times_moments(lefts, part, sums):
        for n, left in enumerate(lefts(part)):
          plgpu.wgmma(sums, left, moments_smem.at[n])

      def rows_of_moments(part):  # for they are symmetric; and Mosaic wants two operands that are not the same
        return [moments_smem.at[n, :, halves[part]].transpose((1, 0)) for n in range(len(halves))]

      def rows_of_keys(part):
        return [k_smem.at[1, part, :, half] for half in halves]

      def widest_row(_, found):
        return jnp.max(jnp.abs(found).sum(axis=1))

      def keep(part, found):
        moments_smem[part] = (found * scale).astype(q.dtype)
        return widest_row(part, found * scale)

      def times_keys(part, found):
        return jnp.max((found * plgpu.load(k_smem.at[1, part], layout=WGMMA, optimized=False).astype(f32)).sum(axis=1))

      widest = largest(len(halves), moments, keep)
      plgpu.commit_smem()
      lost = widest * _RELATIVE + head_dim * _ABSOLUTE  # of a row's sum, at most
      if power == 2:
        squared = largest(len(halves), functools.partial(times_moments, rows_of_moments), widest_row)
        return trace * jnp.sqrt(squared + 3 * widest * lost)
      found = largest(IN_TILE, functools.partial(times_moments, rows_of_keys), times_keys)
      return trace * raised(longest, power // 2 - 2) * (found + longest * lost)

    def of_keys():
      squares, sizes = (
        [f(part) for part in range(IN_TILE)] for f in (lambda p: square(k_smem.at[1, p]), lambda p: size_of(1, p, 1))
      )
      alone = [raised(x, power // 2) for x in squares]
      most = [sum(map(jnp.sum, alone)), sum(jnp.sum(x * size) for x, size in zip(alone, sizes, strict=True))]
      if head_dim >= ROWS:  # narrower heads are no operand of such products
        longest, largest_value = (functools.reduce(jnp.maximum, map(jnp.max, x)) for x in (squares, sizes))
        bound = together(sum(map(jnp.sum, squares)), longest)
        most = [jnp.minimum(most[0], bound), jnp.minimum(most[1], bound * largest_value)]
      return most

    def of_tile(i, none):
      n = first * several + i
      further, nearer = jnp.maximum(n - 2, 0), jnp.maximum(n - 1, 0)
      owns_keys = (n > 0) & (of_group == 0)  # those of the nearer tile
      load(n, further, nearer)
      kept = jnp.where(n > 1, decay_ref[b, kv, nearer], 0.0)  # of the further tile, if there is one
      plgpu.barrier_wait(filled)
      nothing_yet = (jnp.float32(jnp.inf),) * _KINDS
      least = lax.fori_loop(0, jnp.int32(IN_TILE), functools.partial(of_queries, kept), nothing_yet)
      for kind in range(_KINDS):
        least_ref[kind, b, head, n] = least[kind]

      @pl.when(owns_keys)
      def _():
        for kind, most in enumerate(of_keys()):
          most_ref[kind, b, kv, nearer] = most

      plgpu.commit_smem()  # what has been read: the next tile comes to the same place
      return none

    lax.fori_loop(0, several * fades_ref[b, kv], of_tile, None)

  whole = tiles + -tiles % ROWS
  found = plgpu.kernel(
    kernel,
    out_type=[jax.ShapeDtypeStruct((_KINDS, batch, many, whole), f32) for many in (query_heads, heads)],
    scratch_types=[
      shared((IN_TILE, ROWS, head_dim), q.dtype),
      shared((2, IN_TILE, ROWS, head_dim), q.dtype),
      plgpu.SMEM((2, IN_TILE, ROWS), f32),
      shared((head_dim // ROWS, ROWS, head_dim), q.dtype) if head_dim >= ROWS else plgpu.SMEM((1,), f32),
      plgpu.Barrier(num_arrivals=5 * IN_TILE),
    ],
    grid=(batch * (tiles // several) * query_heads,),
    grid_names=("block",),
    compiler_params=plgpu.CompilerParams(approx_math=True),
    interpret=interpret,
    kernel_name="bounds",
  )(q, folded, decay, _sizes(v, fades, interpret), fades)
  return Bounds(*varying_as(q, found))


def _sizes(v: BFloat16[Array, "B T H dv"], fades: Int[Array, "B H"], interpret: Any) -> Float[Array, "B H T"]:
  """The largest coordinate of each value, without its sign."""
  batch, time, heads, value_dim = v.shape
  tiles = time // TILE
  several = tiles_of_a_block(batch * heads, tiles, value_dim)

  def kernel(v_ref, fades_ref, sizes_ref):
    row, head = (f(lax.axis_index("block"), jnp.int32(heads)) for f in (lax.div, lax.rem))
    b, n = (f(row, jnp.int32(tiles // several)) for f in (lax.div, lax.rem))

    def of_part(part, none):
      rows = pl.ds((n * several * IN_TILE + part) * ROWS, ROWS)
      values = plgpu.load(v_ref.at[b, rows, head], layout=WGMMA, optimized=False)
      sizes_ref[b, head, rows] = jnp.abs(values.astype(jnp.float32)).max(axis=1)
      return none

    lax.fori_loop(0, several * IN_TILE * fades_ref[b, head], of_part, None)

  found = plgpu.kernel(
    kernel,
    out_type=jax.ShapeDtypeStruct((batch, heads, time), jnp.float32),
    grid=(batch * (tiles // several) * heads,),
    grid_names=("block",),
    interpret=interpret,
    kernel_name="sizes",
  )(v, fades)
  result: Array = varying_as(v, found)
  return result
