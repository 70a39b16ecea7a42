"""What some queries gather inside their chunks, and how long they and what they found in states are, p = 2, on Hopper.

    near_i = sum_j b_ij (q_i . k_j)^2          over keys of the chunk, up to the query's own

A block of the grid is one warpgroup with 64 queries of a head that follow one another, which reads the chunk from its
beginning. See `csympow.forms.faint`.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Float16, Int

from kernels_pallas.gpu.tiles import (
  ROWS,
  WGMMA,
  across,
  by_eights,
  down,
  index,
  place_in_ring,
  shared,
  square,
  varying_as,
)

_SLOTS = 4  # of keys on their way


class Heard(NamedTuple):
  """Of ROWS queries of each place."""

  near: Float[Array, "B Hq queries"]
  asked: Float[Array, "B Hq queries"]  # |q|^2
  found: Float[Array, "B Hq queries"]  # |numerator|^2


def heard(
  q: Float16[Array, "B T Hq d"],
  k: Float16[Array, "B T H d"],
  k_scale: Float[Array, "B H T"],
  log_gate: Float[Array, "B H T"],
  numerator: Float[Array, "B T Hq dv"],
  places: Int[np.ndarray, "m"],
  chunk: int,
  *,
  interpret: Any = None,
) -> Heard:
  """Of queries from `places` on, which are whole ROWS. Keys are k times scale; gates count since their chunk began."""
  batch, _, query_heads, head_dim = q.shape
  group, f32 = query_heads // k.shape[2], jnp.float32
  assert chunk % ROWS == 0
  assert not np.any(places % ROWS)

  def kernel(q_ref, k_ref, scale_ref, gate_ref, numerator_ref, places_ref, *refs):
    near_ref, asked_ref, found_ref, q_smem, k_smem, numerator_smem, filled, k_filled = refs
    rest, place = (f(lax.axis_index("block"), jnp.int32(len(places))) for f in (lax.div, lax.rem))
    b, head = (f(rest, jnp.int32(query_heads)) for f in (lax.div, lax.rem))
    kv = lax.div(head, jnp.int32(group))
    start = places_ref[place] * ROWS
    first = lax.div(start, jnp.int32(chunk)) * chunk
    count = lax.div(start - first, jnp.int32(ROWS)) + 1
    rows = pl.ds(start, ROWS)

    def fetch(n):
      slot = place_in_ring(n, _SLOTS)
      source = k_ref.at[b, pl.ds(first + n * ROWS, ROWS), kv]
      plgpu.copy_gmem_to_smem(source, k_smem.at[slot], k_filled.at[slot])

    def gather(n, so_far):
      slot, keys = place_in_ring(n, _SLOTS), pl.ds(first + n * ROWS, ROWS)
      numbers = (ref.at[b, kv, keys] for ref in (scale_ref, gate_ref))
      scale, pull = (plgpu.load(ref, layout=WGMMA.reduce(0), optimized=False) for ref in numbers)

      def product(s):
        plgpu.wgmma(s, q_smem, k_smem.at[slot].transpose((1, 0)))
        plgpu.wgmma_wait(0)
        return s[...]

      plgpu.barrier_wait(k_filled.at[slot])
      s = pl.run_scoped(product, plgpu.ACC((ROWS, ROWS), f32))
      plgpu.commit_smem()  # all have read it
      pl.when(n + _SLOTS < count)(lambda: fetch(n + _SLOTS))
      s = s * across(scale, s.shape)
      seen = index(s.shape, 1, n * ROWS) <= index(s.shape, 0, start - first)
      discount = jnp.exp(jnp.where(seen, jnp.minimum(down(gate, s.shape) - across(pull, s.shape), 0.0), -jnp.inf))
      return so_far + by_eights(s * s * discount)

    plgpu.copy_gmem_to_smem(q_ref.at[b, rows, head], q_smem, filled)
    plgpu.copy_gmem_to_smem(numerator_ref.at[b, rows, head], numerator_smem, filled)
    for n in range(_SLOTS):
      pl.when(n < count)(functools.partial(fetch, jnp.int32(n)))
    gate = plgpu.load(gate_ref.at[b, kv, rows], layout=WGMMA.reduce(1), optimized=False)
    plgpu.barrier_wait(filled)
    nothing = plgpu.layout_cast(jnp.zeros((ROWS, 8), f32), WGMMA)
    at = pl.ds(place * ROWS, ROWS)
    near_ref[b, head, at] = lax.fori_loop(0, count, gather, nothing).sum(axis=1)
    asked_ref[b, head, at] = square(q_smem)
    found_ref[b, head, at] = square(numerator_smem)

  found = plgpu.kernel(
    kernel,
    out_type=[jax.ShapeDtypeStruct((batch, query_heads, len(places) * ROWS), f32)] * 3,
    scratch_types=[
      shared((ROWS, head_dim), q.dtype),
      shared((_SLOTS, ROWS, head_dim), k.dtype),
      shared((ROWS, numerator.shape[-1]), numerator.dtype),
      plgpu.Barrier(num_arrivals=2),
      plgpu.Barrier(num_barriers=_SLOTS),
    ],
    grid=(batch * query_heads * len(places),),
    grid_names=("block",),
    compiler_params=plgpu.CompilerParams(approx_math=True),
    interpret=interpret,
    kernel_name="heard",
  )(q, k, k_scale, log_gate, numerator, jnp.asarray(places // ROWS, jnp.int32))
  result: Heard = varying_as(q, Heard(*found))
  return result
