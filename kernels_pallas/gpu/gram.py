"""Sums over chunks of outer products on Hopper: the state of the normaliser, p = 2.

    Z_c = sum_j x_j y_j^T          j: the tokens of chunk c

A block of the grid owns one chunk of one head.

    warpgroup 0   multiplies
    warpgroup 1   loads
"""

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, BFloat16, Float

from kernels_pallas.gpu.tiles import ROWS, shared, varying_as, wait_if

_SLOTS = 4


def gram(
  x: BFloat16[Array, "B T Hq d"] | BFloat16[Array, "B Hq d T"],
  y: BFloat16[Array, "B T Hq d"],
  heads: int,
  count: int,
  *,
  interpret: Any = None,
) -> Float[Array, "B H n d d"]:
  """Exact products, added in float32. Several heads may share a sum; x may stand time last."""
  batch, time, all_heads, head_dim = y.shape
  group, blocks = all_heads // heads, time // count // ROWS
  time_last = x.shape != y.shape
  visits = group * blocks

  def kernel(x_ref, y_ref, z_ref, x_smem, y_smem, z_smem, filled, freed):
    item, thread = lax.axis_index("block"), lax.axis_index("thread")
    row, c = (f(item, jnp.int32(count)) for f in (lax.div, lax.rem))
    b, head = (f(row, jnp.int32(heads)) for f in (lax.div, lax.rem))

    @pl.when(thread == 0)
    def compute():
      def add(sums):
        def visit(n, none):
          slot = lax.rem(n, jnp.int32(_SLOTS))
          plgpu.barrier_wait(filled.at[slot])
          left = x_smem.at[slot]
          plgpu.wgmma(sums, left if time_last else left.transpose((1, 0)), y_smem.at[slot])
          plgpu.wgmma_wait(0)
          plgpu.barrier_arrive(freed.at[slot])
          return none

        lax.fori_loop(0, jnp.int32(visits), visit, None)
        return sums[...]

      z_smem[...] = pl.run_scoped(add, plgpu.ACC((head_dim, head_dim), jnp.float32))
      plgpu.commit_smem()
      plgpu.copy_smem_to_gmem(z_smem, z_ref.at[b, head, c])
      plgpu.wait_smem_to_gmem(0)

    @pl.when(thread == 1)
    def load():
      def copy(n, none):
        slot = lax.rem(n, jnp.int32(_SLOTS))
        source = head * group + lax.div(n, jnp.int32(blocks))
        at = pl.ds((c * blocks + lax.rem(n, jnp.int32(blocks))) * ROWS, ROWS)
        wait_if(n >= _SLOTS, freed.at[slot])
        x_at = x_ref.at[b, source, :, at] if time_last else x_ref.at[b, at, source]
        plgpu.copy_gmem_to_smem(x_at, x_smem.at[slot], filled.at[slot])
        plgpu.copy_gmem_to_smem(y_ref.at[b, at, source], y_smem.at[slot], filled.at[slot])
        return none

      lax.fori_loop(0, jnp.int32(visits), copy, None)
      for n in range(max(0, visits - _SLOTS), visits):  # leave no arrival unseen
        plgpu.barrier_wait(freed.at[n % _SLOTS])

  sums = plgpu.kernel(
    kernel,
    out_type=jax.ShapeDtypeStruct((batch, heads, count, head_dim, head_dim), jnp.float32),
    scratch_types=[
      shared((_SLOTS, head_dim, ROWS) if time_last else (_SLOTS, ROWS, head_dim), x.dtype),
      shared((_SLOTS, ROWS, head_dim), y.dtype),
      shared((head_dim, head_dim), jnp.float32),
      plgpu.Barrier(num_arrivals=2, num_barriers=_SLOTS),
      plgpu.Barrier(num_arrivals=1, num_barriers=_SLOTS),
    ],
    grid=(batch * heads * count,),
    grid_names=("block",),
    num_threads=2,
    thread_name="thread",
    compiler_params=plgpu.CompilerParams(approx_math=True),
    interpret=interpret,
    kernel_name="gram",
  )(x, y)
  result: Array = varying_as(x, sums)
  return result
