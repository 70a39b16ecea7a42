"""From gradients of vectors as the kernels had them to those of what was given, on Hopper: the way back of `copies`.

    d given_i = factor_i R(-angle_i) dx_i
    pulled_i  = x_i . dx_i                       x rounded to bfloat16, as the products that made dx had it
    turned_i  = speed . (x_i turned by a quarter) dx_i

A block of the grid is one warpgroup with 64 tokens of a head, which takes a few coordinates after another; where there
are many, with a few such tiles, of which the next one comes meanwhile. Results lie where the vectors were.
"""

from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from kernels_pallas.gpu.angles import Angles, along, of_head, radians, rotated_back
from kernels_pallas.gpu.tiles import (
  ROWS,
  WGMMA,
  WIDTH,
  TokenTile,
  by_coordinate,
  down,
  place_in_ring,
  rounded,
  shared,
  tiles_of_a_block,
  varying_as,
)


class Gradients(NamedTuple):
  """Of what was given, and the sums over each token's coordinates that the gradients of gates and betas are made of."""

  given: Float[Array, "B T H d"]
  pulled: Float[Array, "B H T"]
  turned: Float[Array, "B H T"] | None


class _Rotation(NamedTuple):
  angles: Any
  speed: Any


def gradients(
  x: Float[Array, "B T H d"],
  dx: Float[Array, "B T H d"],
  factor: Float[Array, "B H T"],
  dtype: DTypeLike,
  *,
  angles: Angles | None = None,
  speed: Float[Array, "d"] | None = None,
  unit: Float[Array, "B H"] | None = None,
  interpret: Any = None,
) -> Gradients:
  """Those of what was given in `dtype`. Several heads of x may share those of the angles, and of a unit.

  With a `unit`, a power of two, x is times that, and dx, which would be over it, is not.
  """
  batch, time, heads, head_dim = x.shape
  sources = angles.first if angles is not None else unit
  group = 1 if sources is None else heads // sources.shape[1]
  parts, shape, f32, bf16 = head_dim // WIDTH, (ROWS, WIDTH), jnp.float32, jnp.bfloat16
  sums, tiles = 1 if angles is None else 2, time // ROWS
  several = 1 if angles is None else tiles_of_a_block(batch * heads, tiles, head_dim)
  slots = min(several, 2)
  dtype = jnp.dtype(dtype)

  def kernel(x_ref, dx_ref, factor_ref, *refs):
    rotation: Any
    rotation, unit_ref = jax.tree.unflatten(structure, refs[: len(leaves)])
    outputs, scratch = refs[len(leaves) : len(leaves) + 1 + sums], refs[len(leaves) + 1 + sums :]
    (x_smem, out_smem), dx_smem, sums_smem, filled = scratch
    first = TokenTile.of_block(tiles, heads, group, several)

    def fetch(n):
      slot, tile = place_in_ring(n, slots), first.later(n)

      def fetch_one(ref, smem):
        for part in range(parts):
          plgpu.copy_gmem_to_smem(tile.part(ref, part), smem.at[slot, part], filled.at[slot])

      fetch_one(x_ref, x_smem)
      fetch_one(dx_ref, dx_smem)

    def take(n, none):
      slot, tile = place_in_ring(n, slots), first.later(n)
      b, head = tile.b, tile.head
      # While the vectors are on their way.
      factors = tile.by_token(factor_ref.at[b, head])
      if rotation is not None:
        angles_here = of_head(rotation.angles, b, tile.source)
        turns = along(angles_here, tile.number)
      over = None if unit is None else 1.0 / unit_ref[b, tile.source]
      plgpu.barrier_wait(filled.at[slot])

      def work(part, so_far):
        x = plgpu.load(x_smem.at[slot, part], layout=WGMMA, optimized=False).astype(f32)
        dx = plgpu.load(dx_smem.at[slot, part], layout=WGMMA, optimized=False).astype(f32)
        exact, given = rounded(x, bf16), dx
        found = [((exact.astype(f32) if over is None else exact.astype(f32) * over) * dx).sum(axis=1)]
        plgpu.commit_smem()  # all have read it: what comes next may lie there
        if rotation is not None:
          angle, speeds = radians(angles_here, turns, tile.number, part), by_coordinate(rotation.speed, part)
          given, torque = rotated_back(dx, exact.astype(f32), angle, speeds, interpret)
          found.append(torque)
        out_smem[slot, part] = (given * down(factors, shape)).astype(dtype)

        @pl.when((part == 0) & (n + 1 < several))
        def _():
          plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # results of the tile before are where the next one goes
          fetch(n + 1)

        return tuple(map(jnp.add, so_far, found))

      zero = plgpu.layout_cast(jnp.zeros((ROWS,), f32), WGMMA.reduce(1))
      found = lax.fori_loop(0, jnp.int32(parts), work, (zero,) * sums)
      for m in range(sums):
        sums_smem[slot, m] = found[m]
      plgpu.commit_smem()
      for part in range(parts):
        plgpu.copy_smem_to_gmem(out_smem.at[slot, part], tile.part(outputs[0], part))
      for m in range(sums):
        plgpu.copy_smem_to_gmem(sums_smem.at[slot, m], outputs[1 + m].at[b, head, tile.rows])
      return none

    fetch(jnp.int32(0))
    lax.fori_loop(0, jnp.int32(several), take, None)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)

  rotation = None if angles is None else _Rotation(angles, speed)
  leaves, structure = jax.tree.flatten((rotation, unit))
  x_memory, dx_memory, out_memory = (shared((slots, parts, *shape), kind) for kind in (x.dtype, dx.dtype, dtype))
  # The interpreter would see races in what lies where something else was.
  in_place = interpret is None
  found = plgpu.kernel(
    kernel,
    out_type=[jax.ShapeDtypeStruct(x.shape, dtype), *[jax.ShapeDtypeStruct((batch, heads, time), f32)] * sums],
    scratch_types=[
      plgpu.RefUnion(x_memory, out_memory) if in_place and dtype.itemsize == 2 else (x_memory, out_memory),
      dx_memory,
      plgpu.SMEM((slots, sums, ROWS), f32),
      plgpu.Barrier(num_arrivals=2 * parts, num_barriers=slots),
    ],
    grid=(batch * (tiles // several) * heads,),
    grid_names=("block",),
    compiler_params=plgpu.CompilerParams(approx_math=True),
    interpret=interpret,
    kernel_name="gradients",
  )(x, dx, factor, *leaves)
  given, pulled, *turned = varying_as(x, found)
  return Gradients(given, pulled, turned[0] if turned else None)
