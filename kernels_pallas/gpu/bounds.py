"""Between which bounds weights lie, on Hopper: by them the attention kernels leave out what no sum would notice.

    least = min_i sum_j (q_i . k_j) ** p / |q_i| ** p       over a tile's queries, and keys of the two tiles before it
    most  = min(sum_j |k_j| ** p,                           of a tile's keys: no query of length 1 gathers more
                max_j |k_j| ** (p - 2)  max_a sum_b |sum_j k_ja k_jb|)

Keys are those that the attention kernels read, discounted to the end of their tile, and `least` is in the scale of what
has come to the start of the query's. The second bound of `most` is the largest eigenvalue's, of the sum of k k^T.

A block of the grid is one warpgroup with the queries of a tile. Nothing is looked at where the gates leave so much of
the first tile's keys to the last tile that hardly any could be left out: then `least` is 0 and `most` 1.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Float16

from kernels_pallas.gpu.tiles import ROWS, TILE, WGMMA, by_eights, shared, varying_as
from kernels_pallas.weights import even_power

_IN_TILE = TILE // ROWS


class Totals(NamedTuple):
  """Running totals of log gates just before each tile, and at its end: two float32s each, for whole ROWS of tiles."""

  before: Float[Array, "2 B H n"]
  end: Float[Array, "2 B H n"]


class Bounds(NamedTuple):
  """Of the queries of a tile, and of its keys. Of the first tile, which sees no other, `least` is anything.

  Tiles are filled up to whole ROWS of them with anything, and so is the last one's `most`, which none sees.
  """

  least: Float[Array, "B Hq n"]
  most: Float[Array, "B H n"]


def bounds(
  q: Float16[Array, "B T Hq d"],
  folded: Float16[Array, "B T H d"],
  decay: Float[Array, "B H tiles"],
  totals: Totals,
  *,
  power: int,
  leaves: float,
  interpret: Any = None,
) -> Bounds:
  """Bounds of a sequence of whole tiles, of which no more than a share of `leaves` could be left out."""
  batch, time, query_heads, head_dim = q.shape
  heads, tiles, f32 = folded.shape[2], time // TILE, jnp.float32

  def kernel(q_ref, k_ref, decay_ref, before_ref, end_ref, least_ref, most_ref, q_smem, k_smem, filled):
    row, head = (f(lax.axis_index("block"), jnp.int32(query_heads)) for f in (lax.div, lax.rem))
    b, n = (f(row, jnp.int32(tiles)) for f in (lax.div, lax.rem))
    kv, of_group = (f(head, jnp.int32(query_heads // heads)) for f in (lax.div, lax.rem))
    further, nearer = jnp.maximum(n - 2, 0), jnp.maximum(n - 1, 0)
    owns_keys = (n > 0) & (of_group == 0)  # those of the nearer tile
    across = [before_ref[half, b, kv, tiles - 1] - end_ref[half, b, kv, 0] for half in range(2)]
    fades = across[0] + across[1] < math.log(leaves)

    def square(smem):
      x = plgpu.load(smem, layout=WGMMA, optimized=False).astype(f32)
      return by_eights(x * x).sum(axis=1)

    def weights(part, tile):
      """Of a query's keys in a tile, each thread's."""

      def product(block, s):
        plgpu.wgmma(s, q_smem.at[part], k_smem.at[tile, block].transpose((1, 0)))
        return by_eights(even_power(s[...], power))

      def add(block, sums):
        return sums + pl.run_scoped(functools.partial(product, block), plgpu.ACC((ROWS, ROWS), f32))

      nothing = plgpu.layout_cast(jnp.zeros((ROWS, 8), f32), WGMMA)
      return lax.fori_loop(0, jnp.int32(_IN_TILE), add, nothing)

    def of_queries(kept, part, so_far):
      gathered = (weights(part, 0) * kept + weights(part, 1)).sum(axis=1)
      size = raised(square(q_smem.at[part]), power // 2)
      return jnp.minimum(so_far, jnp.min(jnp.where(size > 0, gathered / size, jnp.inf)))

    def products(part, sums):
      for block in range(_IN_TILE):
        coordinates = k_smem.at[1, block, :, pl.ds(part * ROWS, ROWS)]
        plgpu.wgmma(sums, coordinates.transpose((1, 0)), k_smem.at[1, block])
      return jnp.max(jnp.abs(sums[...]).sum(axis=1))

    def of_keys():
      squares = [square(k_smem.at[1, part]) for part in range(_IN_TILE)]
      most = sum(jnp.sum(raised(x, power // 2)) for x in squares)
      accumulator = plgpu.ACC((ROWS, head_dim), f32)
      spreads = [pl.run_scoped(functools.partial(products, part), accumulator) for part in range(head_dim // ROWS)]
      if spreads:
        longest = functools.reduce(jnp.maximum, map(jnp.max, squares))
        together = raised(longest, power // 2 - 1) * functools.reduce(jnp.maximum, spreads)
        most = jnp.minimum(most, together)
      most_ref[b, kv, nearer] = most

    @pl.when(~fades)
    def _():
      least_ref[b, head, n] = jnp.float32(0)

      @pl.when(owns_keys)
      def _():
        most_ref[b, kv, nearer] = jnp.float32(1)

    @pl.when(fades)
    def _():
      for part in range(_IN_TILE):
        for ref, h, tile, target in (
          (q_ref, head, n, q_smem.at[part]),
          (k_ref, kv, further, k_smem.at[0, part]),
          (k_ref, kv, nearer, k_smem.at[1, part]),
        ):
          plgpu.copy_gmem_to_smem(ref.at[b, pl.ds(tile * TILE + part * ROWS, ROWS), h], target, filled)
      kept = jnp.where(n > 1, decay_ref[b, kv, nearer], 0.0)  # of the further tile, if there is one
      plgpu.barrier_wait(filled)
      gathered = functools.partial(of_queries, kept)
      least_ref[b, head, n] = lax.fori_loop(0, jnp.int32(_IN_TILE), gathered, jnp.float32(jnp.inf))
      pl.when(owns_keys)(of_keys)

  whole = totals.end.shape[-1]
  found = plgpu.kernel(
    kernel,
    out_type=[jax.ShapeDtypeStruct((batch, many, whole), f32) for many in (query_heads, heads)],
    scratch_types=[
      shared((_IN_TILE, ROWS, head_dim), q.dtype),
      shared((2, _IN_TILE, ROWS, head_dim), q.dtype),
      plgpu.Barrier(num_arrivals=3 * _IN_TILE),
    ],
    grid=(batch * tiles * query_heads,),
    grid_names=("block",),
    compiler_params=plgpu.CompilerParams(approx_math=True),
    interpret=interpret,
    kernel_name="bounds",
  )(q, folded, decay, *totals)
  return Bounds(*varying_as(q, found))


def raised(x: Float[Array, "*shape"], times: int) -> Float[Array, "*shape"]:
  """X to a power by multiplications."""
  return functools.reduce(jnp.multiply, [x] * times) if times else jnp.ones_like(x)
