"""Vectors as the other kernels want them, on Hopper: read once, scaled and rotated, and written as often as is asked.

x_i    = R(angle_i) scale_i given_i         rounded to float16
copy_i = factor_i x_i                       in a type of its own, by token or time last
scale_i                                     given, or a power of two by which the largest coordinate fits

grid              a block of one warpgroup takes 64 tokens of one head, a few coordinates after another; where there are
                  many, a few such tiles, of which the next one comes meanwhile
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from kernels_pallas.gpu.angles import Angles, along, of_head, radians, rotated
from kernels_pallas.gpu.tiles import (
  ROWS,
  WGMMA,
  WIDTH,
  TokenTile,
  columns,
  down,
  place_in_ring,
  power_of_two,
  shared,
  tiles_of_a_block,
  varying_as,
)


class Copy(NamedTuple):
  """One to be written."""

  dtype: DTypeLike
  factor: Float[Array, "B H T"] | None = None
  time_last: bool = False
  of_some: bool = False  # heads only, if these are told apart


class _Given(NamedTuple):
  """What x may come with."""

  factors: tuple[Any, ...]  # of the copies
  scale: Any
  exponent: Any
  angles: Any
  only: Any
  some: Any
  after: Any


def copies(
  x: Float[Array, "B T H d"],
  wanted: Sequence[Copy],
  *,
  scale: Float[Array, "B H T"] | None = None,
  exponent: Int[Array, "B H"] | None = None,
  room: int | None = None,
  angles: Angles | None = None,
  only: Int[Array, "B H"] | None = None,
  some: Int[Array, "B H"] | None = None,
  after: Array | None = None,
  interpret: Any = None,
) -> list[Array]:
  """Copies of a 16-bit x, B T H d or, time last, B H d T. Several of its heads may share those of the angles.

  With `room` each vector is divided by a power of two, at most 2 ** MOST, so that its largest coordinate is below
  2 ** -room (`tiles.power_of_two`); these coordinates, B H T, without their signs, come after the copies. By
  2 ** `exponent` all vectors of a head are divided. Heads that are not 1 in `only` get anything, and so do those that
  are not 1 in `some` of copies that are `of_some`. Nothing is made before there is `after`, so that it takes no memory
  until then.
  """
  batch, time, heads, head_dim = x.shape
  group = 1 if angles is None else heads // angles.first.shape[1]
  parts, shape, f32 = head_dim // WIDTH, (ROWS, WIDTH), jnp.float32
  tiles = time // ROWS
  # Blocks that find nothing to do take their time, too.
  several = math.gcd(tiles, 16) if only is not None else tiles_of_a_block(batch * heads, tiles, head_dim)
  slots = min(several, 2)
  exact_already = scale is None and exponent is None and room is None and angles is None
  assert room is None or (scale is None and exponent is None)

  def largest(x_smem):
    found = [jnp.abs(plgpu.load(x_smem.at[n], layout=WGMMA, optimized=False).astype(f32)) for n in range(parts)]
    return functools.reduce(jnp.maximum, found).max(axis=1)

  def kernel(x_ref, *refs):
    given = jax.tree.unflatten(structure, refs[: len(leaves)])
    outputs, scratch = refs[len(leaves) : len(leaves) + len(results)], refs[len(leaves) + len(results) :]
    all_of_x, filled = scratch[0], scratch[-1]
    first = TokenTile.of_block(tiles, heads, group, several)
    many = jnp.int32(several) if only is None else several * given.only[first.b, first.head]

    def fetch(n):
      slot = place_in_ring(n, slots)
      for part in range(parts):
        plgpu.copy_gmem_to_smem(first.later(n).part(x_ref, part), all_of_x.at[slot, part], filled.at[slot])

    def make(asked):
      def copy_one(n, none):
        pl.when(n + 1 < many)(lambda: fetch(n + 1))
        copy_tile(given, outputs, scratch, first, n, asked)
        return none

      fetch(jnp.int32(0))
      lax.fori_loop(0, many, copy_one, None)
      plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    everything = range(len(wanted))
    of_all = [m for m in everything if not wanted[m].of_some]
    if some is None:
      pl.when(many > 0)(lambda: make(everything))
    else:  # one branch for a whole block: inside the loop it would cost time
      has_all = given.some[first.b, first.head] > 0
      pl.when((many > 0) & has_all)(lambda: make(everything))
      pl.when((many > 0) & ~has_all)(lambda: make(of_all))

  def copy_tile(given, outputs, scratch, first, n, asked):
    all_of_x, *out_smem, filled = scratch
    slot, tile = place_in_ring(n, slots), first.later(n)
    x_smem, b, head, at = all_of_x.at[slot], tile.b, tile.head, tile.rows
    # While x is on its way.
    chosen = [(wanted[m], out_smem[m], outputs[m]) for m in asked]
    factors = [given.factors[m] for m in asked]
    factors = [None if ref is None else tile.by_token(ref.at[b, head]) for ref in factors]
    scales = None if scale is None else tile.by_token(given.scale.at[b, head])
    unit = None if exponent is None else jnp.exp2(-given.exponent[b, head].astype(f32))
    if angles is not None:
      angles_here = of_head(given.angles, b, tile.source)
      turns = along(angles_here, tile.number, parts)
    plgpu.barrier_wait(filled.at[slot])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # for copies of the tile before
    if room is not None:
      size = largest(x_smem)
      scales, _ = power_of_two(size, room)
      outputs[-1][b, head, at] = size

    def work(part):
      exact = plgpu.load(x_smem.at[part], layout=WGMMA, optimized=False).astype(f32)
      if scales is not None:
        exact = exact * down(scales, shape)
      if unit is not None:
        exact = exact * unit
      if angles is not None:
        exact = rotated(exact, radians(angles_here, turns, tile.number, part), interpret)
      if not exact_already:
        exact = exact.astype(jnp.float16).astype(f32)
      for (copy, smem, _), factor in zip(chosen, factors, strict=True):
        value = exact if factor is None else exact * down(factor, shape)
        target = smem.at[part].transpose((1, 0)) if copy.time_last else smem.at[part]
        target[...] = value.astype(copy.dtype)

    for part in range(parts):
      work(part)
    plgpu.commit_smem()
    for copy, smem, out in chosen:
      for part in range(parts):
        to = out.at[b, head, columns(part), at] if copy.time_last else tile.part(out, part)
        plgpu.copy_smem_to_gmem(smem.at[part], to)

  arguments = _Given(tuple(copy.factor for copy in wanted), scale, exponent, angles, only, some, after)
  leaves, structure = jax.tree.flatten(arguments)
  results = [
    jax.ShapeDtypeStruct((batch, heads, head_dim, time) if copy.time_last else x.shape, copy.dtype) for copy in wanted
  ]
  if room is not None:
    results.append(jax.ShapeDtypeStruct((batch, heads, time), f32))
  found = plgpu.kernel(
    kernel,
    out_type=results,
    scratch_types=[
      shared((slots, parts, *shape), x.dtype),
      *(shared((parts, *(shape[::-1] if copy.time_last else shape)), copy.dtype) for copy in wanted),
      plgpu.Barrier(num_arrivals=parts, num_barriers=slots),
    ],
    grid=(batch * (tiles // several) * heads,),
    grid_names=("block",),
    compiler_params=plgpu.CompilerParams(approx_math=True),
    interpret=interpret,
    kernel_name="copies",
  )(x, *leaves)
  result: list[Array] = varying_as(x, found)
  return result
