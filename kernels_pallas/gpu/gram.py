"""Sums over chunks of outer products on Hopper: the state of the normaliser, p = 2.

    Z_c = sum_j (weight_j x_j) k_j^T          j: the tokens of chunk c

A block of the grid owns one chunk of one head, and of wide heads 64 by 64 coordinates. A weighted vector is two
bfloat16s, or it would not be the same that a gradient is made of.

    warpgroup 0   multiplies
    warpgroup 1   loads
"""

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, BFloat16, Float, Int

from kernels_pallas.gpu.pieces import coordinates
from kernels_pallas.gpu.tiles import (
  ROWS,
  STATE_WIDTH,
  WGMMA,
  across,
  place_in_ring,
  rounded,
  shared,
  unless_stateless,
  varying_as,
  wait_for_all,
  wait_if,
)

_SLOTS = 4


def gram(
  x: BFloat16[Array, "B T Hq d"] | BFloat16[Array, "B Hq d T"],
  k: BFloat16[Array, "B T Hq d"] | None,
  weight: Float[Array, "B Hq T"] | None,
  heads: int,
  count: int,
  *,
  time_last: bool,
  has_state: Int[Array, "B H"] | None = None,
  interpret: Any = None,
) -> Float[Array, "B H n d d"]:
  """Added in float32; `time_last` is how x stands. Several heads may share a sum.

  Without k it is x, of heads of 64, time last and without a weight. Where `has_state` is 0 so is the sum.
  """
  assert k is not None or (time_last and weight is None and x.shape[2] == STATE_WIDTH)
  batch, all_heads, head_dim, time = x.shape if time_last else [x.shape[n] for n in (0, 2, 3, 1)]
  group, blocks = all_heads // heads, time // count // ROWS
  parts, width = head_dim // STATE_WIDTH, STATE_WIDTH
  extra = 1 if interpret is not None and weight is not None else 0  # scratch of the interpreter's

  def kernel(x_ref, *more):
    refs = list(more)
    k_ref: Any
    weight_ref: Any
    has_state_ref: Any
    k_ref, weight_ref, has_state_ref = (None if array is None else refs.pop(0) for array in (k, weight, has_state))
    z_ref, x_smem, k_smem, weight_smem, z_smem, filled, freed, *staging = refs
    item, thread = lax.axis_index("block"), lax.axis_index("thread")
    rest, c = (f(item, jnp.int32(count)) for f in (lax.div, lax.rem))
    row, number = (f(rest, jnp.int32(parts * parts)) for f in (lax.div, lax.rem))
    i, j = (f(number, jnp.int32(parts)) for f in (lax.div, lax.rem))
    b, head = (f(row, jnp.int32(heads)) for f in (lax.div, lax.rem))
    visits = unless_stateless(group * blocks, has_state_ref, b, head)

    @pl.when(thread == 0)
    def compute():
      def lefts(slot):
        vectors = x_smem.at[slot] if time_last else x_smem.at[slot].transpose((1, 0))
        if weight is None:
          return [vectors]
        rows = plgpu.load(vectors, layout=WGMMA, optimized=False)
        along = plgpu.load(weight_smem.at[slot], layout=WGMMA.reduce(0), optimized=False)
        exact = rows.astype(jnp.float32) * across(along, rows.shape)
        high = rounded(exact, rows.dtype)
        return [high, (exact - high.astype(jnp.float32)).astype(rows.dtype)]

      def right(slot):
        return x_smem.at[slot].transpose((1, 0)) if k is None else k_smem.at[slot]

      def add(sums):
        def visit(n, none):
          slot = place_in_ring(n, _SLOTS)
          plgpu.barrier_wait(filled.at[slot])
          for left in lefts(slot):
            if staging:  # the interpreter's wgmma takes no operand from registers
              staging[0][...] = left
              plgpu.commit_smem()
              plgpu.wgmma(sums, staging[0], right(slot))
              plgpu.wgmma_wait(0)
            else:
              plgpu.wgmma(sums, left, right(slot))
          plgpu.wgmma_wait(0)
          plgpu.barrier_arrive(freed.at[slot])
          return none

        lax.fori_loop(0, visits, visit, None)
        return sums[...]

      z_smem[...] = pl.run_scoped(add, plgpu.ACC((width, width), jnp.float32))
      plgpu.commit_smem()
      plgpu.copy_smem_to_gmem(z_smem, z_ref.at[b, head, c, coordinates(i), coordinates(j)])
      plgpu.wait_smem_to_gmem(0)

    @pl.when(thread == 1)
    def load():
      def copy(n, none):
        slot = place_in_ring(n, _SLOTS)
        source = head * group + lax.div(n, jnp.int32(blocks))
        at = pl.ds((c * blocks + lax.rem(n, jnp.int32(blocks))) * ROWS, ROWS)
        wait_if(n >= _SLOTS, freed.at[slot])
        vectors = x_ref.at[b, source, coordinates(i), at] if time_last else x_ref.at[b, at, source, coordinates(i)]
        plgpu.copy_gmem_to_smem(vectors, x_smem.at[slot], filled.at[slot])
        if k is not None:
          plgpu.copy_gmem_to_smem(k_ref.at[b, at, source, coordinates(j)], k_smem.at[slot], filled.at[slot])
        if weight is not None:
          plgpu.copy_gmem_to_smem(weight_ref.at[b, source, at], weight_smem.at[slot], filled.at[slot])
        return none

      lax.fori_loop(0, visits, copy, None)
      wait_for_all(freed, visits)

  sums = plgpu.kernel(
    kernel,
    out_type=jax.ShapeDtypeStruct((batch, heads, count, head_dim, head_dim), jnp.float32),
    scratch_types=[
      shared((_SLOTS, width, ROWS) if time_last else (_SLOTS, ROWS, width), x.dtype),
      plgpu.SMEM((1,), jnp.float32) if k is None else shared((_SLOTS, ROWS, width), k.dtype),
      plgpu.SMEM((_SLOTS, ROWS), jnp.float32),
      shared((width, width), jnp.float32),
      plgpu.Barrier(num_arrivals=1 + sum(array is not None for array in (k, weight)), num_barriers=_SLOTS),
      plgpu.Barrier(num_arrivals=1, num_barriers=_SLOTS),
      *((shared((width, ROWS), x.dtype),) * extra),
    ],
    grid=(batch * heads * parts * parts * count,),
    grid_names=("block",),
    num_threads=2,
    thread_name="thread",
    compiler_params=plgpu.CompilerParams(approx_math=True),
    interpret=interpret,
    kernel_name="gram",
  )(x, *(array for array in (k, weight, has_state) if array is not None))
  result: Array = varying_as(x, sums)
  return result
