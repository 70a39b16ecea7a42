"""The normaliser's state from chunk to chunk on Hopper.

    Z <- across_c Z + added_c          what each chunk finds, as a sum of bfloat16s; and what there is in the end

A block of the grid owns a few rows of Z of one head, in registers, and walks the chunks in order.
"""

from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, BFloat16, Float

from kernels_pallas.gpu.tiles import rounded, varying_as

TERMS = 2  # bfloat16s that a Z is the sum of
_VECTOR = 2  # numbers of a thread, which are next to each other: see `rounded`
_AT_ONCE = 8  # chunks that are asked for together


class Scanned(NamedTuple):
  """What each chunk finds, and what is there in the end."""

  found: BFloat16[Array, "B H n terms d d"]
  final: Float[Array, "B H d d"]


def scan(
  added: Float[Array, "B H n d d"],
  across: Float[Array, "B H n"],
  initial: Float[Array, "B H d d"] | None,
  *,
  reverse: bool = False,
  interpret: Any = None,
) -> Scanned:
  """From `initial`, or nothing, forwards or backwards in time."""
  batch, heads, count, head_dim = added.shape[:4]
  rows, rest = divmod(128 * _VECTOR, head_dim)  # of Z, in a block of the grid
  assert rest == 0
  slices, f32 = head_dim // rows, jnp.float32
  layout = plgpu.Layout.WG_STRIDED((rows, head_dim), vec_size=_VECTOR)

  def kernel(added_ref, across_ref, *more):
    found_ref, final_ref = more[-2:]
    row, n = (f(lax.axis_index("block"), jnp.int32(slices)) for f in (lax.div, lax.rem))
    b, head = (f(row, jnp.int32(heads)) for f in (lax.div, lax.rem))
    at = pl.ds(n * rows, rows)

    def load(ref):
      return plgpu.load(ref.at[at], layout=layout, optimized=False)

    def walk(group, Z):
      steps = [group * _AT_ONCE + i for i in range(_AT_ONCE)]
      chunks = [jnp.minimum(step, count - 1) for step in steps]
      chunks = [count - 1 - c for c in chunks] if reverse else chunks
      given = [(across_ref[b, head, c], load(added_ref.at[b, head, c])) for c in chunks]
      for step, c, (decay, more_of_Z) in zip(steps, chunks, given, strict=True):

        @pl.when(step < count)
        def _(c=c, rest=Z):
          for term in range(TERMS):
            high = rounded(rest, jnp.bfloat16)
            found_ref[b, head, c, term, at, :] = high
            rest = rest - high.astype(f32)

        Z = jnp.where(step < count, decay, 1.0) * Z + jnp.where(step < count, 1.0, 0.0) * more_of_Z
      return Z

    if initial is None:
      Z = plgpu.layout_cast(jnp.zeros((rows, head_dim), f32), layout)
    else:  # times 1: to shard_map what was loaded varies over its axes, and what was computed does not
      Z = 1 * load(more[0].at[b, head])
    final_ref[b, head, at, :] = lax.fori_loop(0, jnp.int32(-(-count // _AT_ONCE)), walk, Z)

  matrix = (head_dim, head_dim)
  found, final = plgpu.kernel(
    kernel,
    out_type=[
      jax.ShapeDtypeStruct((batch, heads, count, TERMS, *matrix), jnp.bfloat16),
      jax.ShapeDtypeStruct((batch, heads, *matrix), f32),
    ],
    grid=(batch * heads * slices,),
    grid_names=("block",),
    interpret=interpret,
    kernel_name="scan",
  )(added, across, *(() if initial is None else (initial,)))
  return Scanned(*varying_as(added, (found, final)))
