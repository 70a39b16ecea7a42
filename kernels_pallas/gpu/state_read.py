"""What queries find in a state, on Hopper, p = 2.

    numerator_i  = sum_a (x_ia y_i) S[a]          S[a]: one matrix for each coordinate a, of the chunk that i is in
    normaliser_i = y_i . Z y_i

x is the query discounted since the chunk began, y the query. The gradients of queries, keys and values are of the same
form: with y the cotangent of the numerator, or the values, S[a] the other way round, and w Z added, w the query times
the cotangent of the normaliser, or the key. They are added to what pairs inside the chunk gave.

A block of the grid owns 256 tokens of a chunk; states stream past. Features are not expanded: y times one column of x,
in registers, is the left operand. Z comes in pieces whose sum has more bits than one, for the normaliser can be the
small rest of large terms.

    warpgroups 0, 1   128 tokens each
    warpgroup 2       loads
"""

from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, BFloat16, Float

from kernels_pallas.gpu.tiles import ROWS, WGMMA, down, shared, varying_as, wait_if

TOKENS = 4 * ROWS  # of a block of the grid
PIECES = 2  # of Z
_SLOTS = 4  # of as many matrices each


class Found(NamedTuple):
  """What queries find in a state."""

  numerator: Float[Array, "B T Hq dv"]
  normaliser: Float[Array, "B Hq T"]  # not discounted


class Added(NamedTuple):
  """What to add: rows + scale * what was read. The sum has the rows' type."""

  rows: Float[Array, "B T Hq _"]
  scale: Float[Array, "B Hq T"] | None = None


def read(
  x: BFloat16[Array, "B Hq d T"],
  y: BFloat16[Array, "B T Hq d"],
  S: BFloat16[Array, "B H n d dv d"],
  Z: BFloat16[Array, "B H n pieces d d"],
  *,
  interpret: Any = None,
) -> Found:
  """The sums over all that the chunk's state holds."""
  return Found(*_read(x, y, None, S, Z, None, interpret))


def read_transposed(
  x: BFloat16[Array, "B Hq d T"],
  y: BFloat16[Array, "B T Hq dv"],
  w: BFloat16[Array, "B T Hq d"],
  S: BFloat16[Array, "B H n d dv d"],
  Z: BFloat16[Array, "B H n pieces d d"],
  added: Added,
  *,
  interpret: Any = None,
) -> Float[Array, "B T Hq d"]:
  """sum_a (x_ia y_i) S[a]^T + w_i Z."""
  result: Array = _read(x, y, w, S, Z, added, interpret)[0]
  return result


def read_values(
  x: BFloat16[Array, "B Hq d T"],
  y: BFloat16[Array, "B T Hq d"],
  S: BFloat16[Array, "B H n d dv d"],
  added: Added,
  *,
  interpret: Any = None,
) -> Float[Array, "B T Hq dv"]:
  """The numerators alone."""
  result: Array = _read(x, y, None, S, None, added, interpret)[0]
  return result


def _read(
  x: BFloat16[Array, "B Hq d T"],
  y: BFloat16[Array, "B T Hq _"],
  w: BFloat16[Array, "B T Hq d"] | None,
  S: BFloat16[Array, "B H n d dv d"],
  Z: BFloat16[Array, "B H n pieces d d"] | None,
  added: Added | None,
  interpret: Any,
) -> tuple[Array, ...]:
  batch, all_heads, head_dim, time = x.shape
  heads, count, _, value_dim = S.shape[1:5]
  width, out = (head_dim, value_dim) if w is None else (value_dim, head_dim)
  group, tiles, in_chunk = all_heads // heads, time // TOKENS, time // count // TOKENS
  first = 0 if Z is None else 1  # visits to Z come before those to S
  visits = first + head_dim // PIECES
  finds_normaliser = Z is not None and w is None
  optional = (Z, w, *((None, None) if added is None else added))

  def kernel(x_ref, y_ref, s_ref, *more):
    refs = list(more)
    z_ref: Any
    z_ref, w_ref, rows_ref, scale_ref = (None if a is None else refs.pop(0) for a in optional)
    outputs = [refs.pop(0) for _ in range(results)]
    x_smem, y_smem, w_smem, s_smem, out_smem, row_smem, here, filled, freed, *staging = refs
    item, thread = lax.axis_index("block"), lax.axis_index("thread")
    row, tile = (f(item, jnp.int32(tiles)) for f in (lax.div, lax.rem))
    b, head = (f(row, jnp.int32(all_heads)) for f in (lax.div, lax.rem))
    c, source = lax.div(tile, jnp.int32(in_chunk)), lax.div(head, jnp.int32(group))

    def tokens(part):
      return pl.ds(tile * TOKENS + part * ROWS, ROWS)

    @pl.when(thread < 2)
    def compute():
      plgpu.set_max_registers(232, action="increase")
      parts = (2 * thread, 2 * thread + 1)

      def multiply(sums, left, right):
        if staging:  # the interpreter's wgmma takes no operand from registers
          staging[0][thread, :, : left.shape[1]] = left
          plgpu.commit_smem()
          plgpu.wgmma(sums, staging[0].at[thread, :, : left.shape[1]], right)
          plgpu.wgmma_wait(0)
        else:
          plgpu.wgmma(sums, left, right)

      def done_with(slot):
        plgpu.wgmma_wait(0)  # for all: ptxas gives the registers of left operands to the next slot's
        plgpu.barrier_arrive(freed.at[slot])

      plgpu.barrier_wait(here)
      rows = [plgpu.load(y_smem.at[part], layout=WGMMA, optimized=False) for part in parts]
      if finds_normaliser:
        plgpu.barrier_wait(filled.at[0])

        def forms(*sums):
          for y, u in zip(rows, sums, strict=True):
            for m in range(PIECES):
              multiply(u, y, s_smem.at[0, m])
          done_with(0)
          return tuple(u[...] for u in sums)

        sums = pl.run_scoped(forms, *(plgpu.ACC((ROWS, head_dim), jnp.float32),) * 2)
        for y, u, part in zip(rows, sums, parts, strict=True):
          row_smem[part] = (u * y.astype(jnp.float32)).sum(axis=1)

      def gather(*sums):
        if Z is not None and w is not None:
          plgpu.barrier_wait(filled.at[0])
          for z, part in zip(sums, parts, strict=True):
            for m in range(PIECES):
              plgpu.wgmma(z, w_smem.at[part], s_smem.at[0, m])
          done_with(0)

        def visit(n, none):
          slot = lax.rem(n, jnp.int32(_SLOTS))
          plgpu.barrier_wait(filled.at[slot])
          for m in range(PIECES):
            for y, z, part in zip(rows, sums, parts, strict=True):
              at = ((n - first) * PIECES + m, pl.ds(part * ROWS, ROWS))
              left = y * down(plgpu.load(x_smem.at[at], layout=WGMMA.reduce(1), optimized=False), y.shape)
              multiply(z, left, s_smem.at[slot, m].transpose((1, 0)) if w is None else s_smem.at[slot, m])
          done_with(slot)
          return none

        lax.fori_loop(first, jnp.int32(visits), visit, None)
        return tuple(z[...] for z in sums)

      sums = pl.run_scoped(gather, *(plgpu.ACC((ROWS, out), jnp.float32),) * 2)
      for z, part in zip(sums, parts, strict=True):
        if scale_ref is not None:
          z = z * down(plgpu.load(row_smem.at[part], layout=WGMMA.reduce(1), optimized=False), z.shape)
        if rows_ref is not None:
          z = z + plgpu.load(out_smem.at[part], layout=WGMMA, optimized=False).astype(f32)
        out_smem[part] = z.astype(out_smem.dtype)
      plgpu.commit_smem()
      for part in parts:
        plgpu.copy_smem_to_gmem(out_smem.at[part], outputs[0].at[b, tokens(part), head])
        if finds_normaliser:
          plgpu.copy_smem_to_gmem(row_smem.at[part], outputs[1].at[b, head, tokens(part)])
      plgpu.wait_smem_to_gmem(0)

    @pl.when(thread == 2)
    def load():
      plgpu.set_max_registers(40, action="decrease")
      plgpu.copy_gmem_to_smem(x_ref.at[b, head, :, pl.ds(tile * TOKENS, TOKENS)], x_smem, here)
      for part in range(4):
        plgpu.copy_gmem_to_smem(y_ref.at[b, tokens(part), head], y_smem.at[part], here)
        for source_ref, target in ((w_ref, w_smem), (rows_ref, out_smem)):
          if source_ref is not None:
            plgpu.copy_gmem_to_smem(source_ref.at[b, tokens(part), head], target.at[part], here)
        if scale_ref is not None:
          plgpu.copy_gmem_to_smem(scale_ref.at[b, head, tokens(part)], row_smem.at[part], here)
      if Z is not None:
        for m in range(PIECES):
          plgpu.copy_gmem_to_smem(z_ref.at[b, source, c, m], s_smem.at[0, m], filled.at[0])

      def copy(n, none):
        slot = lax.rem(n, jnp.int32(_SLOTS))
        wait_if(n >= _SLOTS, freed.at[slot])
        for m in range(PIECES):
          at = (b, source, c, (n - first) * PIECES + m)
          plgpu.copy_gmem_to_smem(s_ref.at[at], s_smem.at[slot, m], filled.at[slot])
        return none

      lax.fori_loop(first, jnp.int32(visits), copy, None)
      for n in range(visits - _SLOTS, visits):  # leave no arrival unseen
        plgpu.barrier_wait(freed.at[n % _SLOTS])

  f32 = jnp.float32
  dtype = f32 if added is None else added.rows.dtype
  outputs = [jax.ShapeDtypeStruct((batch, time, all_heads, out), dtype)]
  if finds_normaliser:
    outputs.append(jax.ShapeDtypeStruct((batch, all_heads, time), f32))
  results = len(outputs)
  scratch = [
    plgpu.SMEM((head_dim, TOKENS), x.dtype),
    shared((4, ROWS, width), y.dtype),
    plgpu.SMEM((1,), f32) if w is None else shared((4, ROWS, head_dim), w.dtype),
    shared((_SLOTS, PIECES, value_dim, head_dim), S.dtype),
    shared((4, ROWS, out), dtype),
    plgpu.SMEM((4, ROWS), f32),
    plgpu.Barrier(num_arrivals=1 + 4 * (1 + sum(a is not None for a in optional[1:]))),
    plgpu.Barrier(num_arrivals=PIECES, num_barriers=_SLOTS),
    plgpu.Barrier(num_arrivals=2, num_barriers=_SLOTS),
    *((shared((2, ROWS, width), y.dtype),) if interpret is not None else ()),
  ]
  found = plgpu.kernel(
    kernel,
    out_type=outputs,
    scratch_types=scratch,
    grid=(batch * all_heads * tiles,),
    grid_names=("block",),
    num_threads=3,
    thread_name="thread",
    compiler_params=plgpu.CompilerParams(approx_math=True),
    interpret=interpret,
    kernel_name="state_read",
  )(x, y, S, *(a for a in optional if a is not None))
  return tuple(varying_as(x, found))
