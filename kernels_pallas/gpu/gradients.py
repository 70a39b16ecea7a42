"""From gradients of vectors as the kernels had them to those of what was given, on Hopper: the way back of `copies`.

    d given_i = factor_i R(-angle_i) dx_i
    pulled_i  = x_i . dx_i                       x rounded to bfloat16, as the products that made dx had it
    turned_i  = speed . (x_i turned by a quarter) dx_i

What is turned of dx is two bfloat16s.

A block of the grid is one warpgroup with 64 tokens of a head, which takes a few coordinates after another.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from kernels_pallas.gpu.angles import Angles, along, quarter_turn, radians
from kernels_pallas.gpu.tiles import (
  ROWS,
  WGMMA,
  WIDTH,
  TokenTile,
  across,
  by_coordinate,
  down,
  rounded,
  shared,
  varying_as,
)


class Gradients(NamedTuple):
  """Of what was given, and the sums over each token's coordinates that the gradients of gates and betas are made of."""

  given: Float[Array, "B T H d"]
  pulled: Float[Array, "B H T"]
  turned: Float[Array, "B H T"] | None


class WithoutState(NamedTuple):
  """What dx is in heads that have no state (0, or 1 if they have): there the other one is anything."""

  dx: Float[Array, "B T H d"]
  has_state: Int[Array, "B H"]


class _Rotation(NamedTuple):
  angles: Any
  speed: Any
  turning: Any  # a quarter turn, of queries or keys, and of gradients
  turning_gradients: Any


def gradients(
  x: Float[Array, "B T H d"],
  dx: Float[Array, "B T H d"],
  factor: Float[Array, "B H T"],
  dtype: DTypeLike,
  *,
  angles: Angles | None = None,
  speed: Float[Array, "d"] | None = None,
  without_state: WithoutState | None = None,
  unit: Float[Array, "B H"] | None = None,
  interpret: Any = None,
) -> Gradients:
  """Those of what was given in `dtype`. Several heads of x may share those of the angles, and of a unit.

  With a `unit`, a power of two, x is times that, and dx, which would be over it, is not.
  """
  batch, time, heads, head_dim = x.shape
  sources = angles.since if angles is not None else unit
  group = 1 if sources is None else heads // sources.shape[1]
  parts, shape, f32, bf16 = head_dim // WIDTH, (ROWS, WIDTH), jnp.float32, jnp.bfloat16
  sums = 1 if angles is None else 2

  def kernel(x_ref, dx_ref, factor_ref, *refs):
    rotation: Any
    by_pairs: Any
    rotation, by_pairs, unit_ref = jax.tree.unflatten(structure, refs[: len(leaves)])
    outputs, scratch = refs[len(leaves) : len(leaves) + 1 + sums], refs[len(leaves) + 1 + sums :]
    x_smem, dx_smem, out_smem, sums_smem, halves_smem, turning_smem, turning_gradients_smem, filled = scratch
    tile = TokenTile.of_block(time // ROWS, heads, group)
    b, head, at = tile.b, tile.head, tile.rows

    def fetch(ref, smem):
      for part in range(parts):
        plgpu.copy_gmem_to_smem(tile.part(ref, part), smem.at[part], filled)

    fetch(x_ref, x_smem)
    if by_pairs is None:
      fetch(dx_ref, dx_smem)
    else:
      stateful = by_pairs.has_state[b, head] > 0
      pl.when(stateful)(functools.partial(fetch, dx_ref, dx_smem))
      pl.when(~stateful)(functools.partial(fetch, by_pairs.dx, dx_smem))
    if rotation is not None:
      plgpu.copy_gmem_to_smem(rotation.turning, turning_smem, filled)
      plgpu.copy_gmem_to_smem(rotation.turning_gradients, turning_gradients_smem, filled)
    # While the vectors are on their way.
    factors = tile.by_token(factor_ref.at[b, head])
    turns: Any = None if rotation is None else along(rotation.angles, tile)
    over = None if unit is None else 1.0 / unit_ref[b, tile.source]
    plgpu.barrier_wait(filled)

    def work(part, so_far):
      def unrotated(turned):
        high = rounded(dx, bf16)
        halves_smem[0] = high
        halves_smem[1] = (dx - high.astype(f32)).astype(bf16)
        plgpu.commit_smem()
        for half in range(2):
          plgpu.wgmma(turned, halves_smem.at[half], turning_gradients_smem)
        angle = radians(rotation.angles, turns, tile, part)
        unturned = dx * jnp.cos(angle)
        plgpu.wgmma_wait(0)
        return unturned - turned[...] * jnp.sin(angle)

      def turned_by(turned):
        plgpu.wgmma(turned, x_smem.at[part], turning_smem)
        plgpu.wgmma_wait(0)
        torque = rounded(turned[...], bf16).astype(f32) * dx
        return (torque * across(by_coordinate(rotation.speed, part), shape)).sum(axis=1)

      x = plgpu.load(x_smem.at[part], layout=WGMMA, optimized=False).astype(f32)
      dx = plgpu.load(dx_smem.at[part], layout=WGMMA, optimized=False).astype(f32)
      exact = rounded(x, bf16).astype(f32)
      found = [((exact if over is None else exact * over) * dx).sum(axis=1)]
      given = dx
      if rotation is not None:
        found.append(pl.run_scoped(turned_by, plgpu.ACC(shape, f32)))
        given = pl.run_scoped(unrotated, plgpu.ACC(shape, f32))
      out_smem[part] = (given * down(factors, shape)).astype(dtype)
      return tuple(map(jnp.add, so_far, found))

    zero = plgpu.layout_cast(jnp.zeros((ROWS,), f32), WGMMA.reduce(1))
    found = lax.fori_loop(0, jnp.int32(parts), work, (zero,) * sums)
    for n in range(sums):
      sums_smem[n] = found[n]
    plgpu.commit_smem()
    for part in range(parts):
      plgpu.copy_smem_to_gmem(out_smem.at[part], tile.part(outputs[0], part))
    for n in range(sums):
      plgpu.copy_smem_to_gmem(sums_smem.at[n], outputs[1 + n].at[b, head, at])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)

  rotation = None
  if angles is not None:
    rotation = _Rotation(angles, speed, *(jnp.asarray(quarter_turn(), kind) for kind in (x.dtype, bf16)))
  leaves, structure = jax.tree.flatten((rotation, without_state, unit))
  unused = plgpu.SMEM((1,), f32)
  found = plgpu.kernel(
    kernel,
    out_type=[jax.ShapeDtypeStruct(x.shape, dtype), *[jax.ShapeDtypeStruct((batch, heads, time), f32)] * sums],
    scratch_types=[
      shared((parts, *shape), x.dtype),
      shared((parts, *shape), dx.dtype),
      shared((parts, *shape), dtype),
      plgpu.SMEM((sums, ROWS), f32),
      unused if rotation is None else shared((2, *shape), bf16),
      unused if rotation is None else shared((WIDTH, WIDTH), x.dtype),
      unused if rotation is None else shared((WIDTH, WIDTH), bf16),
      plgpu.Barrier(num_arrivals=2 * parts + (0 if rotation is None else 2)),
    ],
    grid=(batch * (time // ROWS) * heads,),
    grid_names=("block",),
    compiler_params=plgpu.CompilerParams(approx_math=True),
    interpret=interpret,
    kernel_name="gradients",
  )(x, dx, factor, *leaves)
  given, pulled, *turned = varying_as(x, found)
  return Gradients(given, pulled, turned[0] if turned else None)
