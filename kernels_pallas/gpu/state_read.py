"""What queries find in a state, on Hopper, p = 2.

    z_i = sum_a (x_ia y_i) S[a]           S[a]: one matrix for each coordinate a, of the chunk that i is in

With x the query discounted since the chunk began, and y the query, that is the numerator that a state adds to a
query's sums. The gradients of queries, keys and values are of the same form: with y the cotangent of the sums, or the
values, and S[a] the other way round.

A block of the grid owns 256 tokens of a chunk; states stream past. Features are not expanded: y times one column of x,
in registers, is the left operand.

    warpgroups 0, 1   128 tokens each
    warpgroup 2       loads
"""

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, BFloat16, Float

from kernels_pallas.gpu.tiles import ROWS, WGMMA, down, shared, varying_as, wait_if

TOKENS = 4 * ROWS  # of a block of the grid
_AT_ONCE = 2  # coordinates in a slot
_SLOTS = 6


def read(
  x: BFloat16[Array, "B Hq d T"],
  y: BFloat16[Array, "B T Hq w"],
  states: BFloat16[Array, "B H n d dv d"],
  *,
  by_key: bool,
  interpret: Any = None,
) -> Float[Array, "B T Hq out"]:
  """The sums z. `by_key`: y is as wide as a key, and z as a value; else the other way round."""
  batch, all_heads, head_dim, time = x.shape
  heads, count, _, value_dim = states.shape[1:5]
  width, out = (head_dim, value_dim) if by_key else (value_dim, head_dim)
  group, tiles, in_chunk = all_heads // heads, time // TOKENS, time // count // TOKENS
  visits = head_dim // _AT_ONCE

  def kernel(x_ref, y_ref, s_ref, z_ref, x_smem, y_smem, s_smem, z_smem, here, filled, freed, *staging):
    item, thread = lax.axis_index("block"), lax.axis_index("thread")
    row, tile = (f(item, jnp.int32(tiles)) for f in (lax.div, lax.rem))
    b, head = (f(row, jnp.int32(all_heads)) for f in (lax.div, lax.rem))
    c, source = lax.div(tile, jnp.int32(in_chunk)), lax.div(head, jnp.int32(group))

    @pl.when(thread < 2)
    def compute():
      plgpu.set_max_registers(232, action="increase")
      parts = (2 * thread, 2 * thread + 1)
      plgpu.barrier_wait(here)
      rows = [plgpu.load(y_smem.at[part], layout=WGMMA, optimized=False) for part in parts]

      def gather(*sums):
        def visit(n, none):
          slot = lax.rem(n, jnp.int32(_SLOTS))
          plgpu.barrier_wait(filled.at[slot])
          for m in range(_AT_ONCE):
            for y, z, part in zip(rows, sums, parts, strict=True):
              at = (n * _AT_ONCE + m, pl.ds(part * ROWS, ROWS))
              left = y * down(plgpu.load(x_smem.at[at], layout=WGMMA.reduce(1), optimized=False), y.shape)
              right = s_smem.at[slot, m].transpose((1, 0)) if by_key else s_smem.at[slot, m]
              if staging:  # the interpreter's wgmma takes no operand from registers
                staging[0][thread] = left
                plgpu.commit_smem()
                plgpu.wgmma(z, staging[0].at[thread], right)
                plgpu.wgmma_wait(0)
              else:
                plgpu.wgmma(z, left, right)

          plgpu.wgmma_wait(0)  # for all: ptxas gives the registers of left operands to the next slot's
          plgpu.barrier_arrive(freed.at[slot])
          return none

        lax.fori_loop(0, visits, visit, None)
        return tuple(z[...] for z in sums)

      sums = pl.run_scoped(gather, *(plgpu.ACC((ROWS, out), jnp.float32),) * 2)
      for z, part in zip(sums, parts, strict=True):
        z_smem[part] = z
      plgpu.commit_smem()
      for part in parts:
        at = pl.ds(tile * TOKENS + part * ROWS, ROWS)
        plgpu.copy_smem_to_gmem(z_smem.at[part], z_ref.at[b, at, head])
      plgpu.wait_smem_to_gmem(0)

    @pl.when(thread == 2)
    def load():
      plgpu.set_max_registers(40, action="decrease")
      plgpu.copy_gmem_to_smem(x_ref.at[b, head, :, pl.ds(tile * TOKENS, TOKENS)], x_smem, here)
      for part in range(4):
        at = pl.ds(tile * TOKENS + part * ROWS, ROWS)
        plgpu.copy_gmem_to_smem(y_ref.at[b, at, head], y_smem.at[part], here)

      def copy(n, none):
        slot = lax.rem(n, jnp.int32(_SLOTS))
        wait_if(n >= _SLOTS, freed.at[slot])
        for m in range(_AT_ONCE):
          plgpu.copy_gmem_to_smem(s_ref.at[b, source, c, n * _AT_ONCE + m], s_smem.at[slot, m], filled.at[slot])
        return none

      lax.fori_loop(0, visits, copy, None)
      for n in range(max(0, visits - _SLOTS), visits):  # leave no arrival unseen
        plgpu.barrier_wait(freed.at[n % _SLOTS])

  scratch = [
    plgpu.SMEM((head_dim, TOKENS), x.dtype),
    shared((4, ROWS, width), y.dtype),
    shared((_SLOTS, _AT_ONCE, value_dim, head_dim), states.dtype),
    shared((4, ROWS, out), jnp.float32),
    plgpu.Barrier(num_arrivals=5),
    plgpu.Barrier(num_arrivals=_AT_ONCE, num_barriers=_SLOTS),
    plgpu.Barrier(num_arrivals=2, num_barriers=_SLOTS),
    *((shared((2, ROWS, width), y.dtype),) if interpret is not None else ()),
  ]
  z = plgpu.kernel(
    kernel,
    out_type=jax.ShapeDtypeStruct((batch, time, all_heads, out), jnp.float32),
    scratch_types=scratch,
    grid=(batch * all_heads * tiles,),
    grid_names=("block",),
    num_threads=3,
    thread_name="thread",
    compiler_params=plgpu.CompilerParams(approx_math=True),
    interpret=interpret,
    kernel_name="state_read",
  )(x, y, states)
  result: Array = varying_as(x, z)
  return result
