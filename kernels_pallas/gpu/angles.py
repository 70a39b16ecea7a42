"""Rotations inside the Hopper kernels, whose angles are multiplied out there and never written to memory.

A rotation takes a vector, and the vector with every pair of coordinates turned by a quarter. Both coordinates of a pair
are in one thread.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir.dialects import arith, vector
from jaxtyping import Array, Float

from kernels_pallas.gpu.tiles import ROWS, WGMMA, WIDTH, across, by_coordinate, by_token, down

_WHOLE = 1.5 * 2**24  # added to a number and taken away again it leaves a whole one, whatever the number


class Angles(NamedTuple):
  """Those of every token and coordinate, in turns: first + since * cycles, modulo 1.

  `since` and `cycles` are sums of two, the first of 12 significant bits: then the product of these two is exact, and
  its whole turns drop out without error.
  """

  first: Float[Array, "B H n d"]  # of each tile of ROWS tokens, modulo 1
  since: Float[Array, "2 B H T"]  # the total of betas since then
  cycles: Float[Array, "2 d"]
  same: Float[Array, "B H T"] | None  # 1, and 0 where another run has begun since: there `first` does not count


class Along(NamedTuple):
  """What of `Angles` belongs to the tokens of a tile, loaded."""

  first: list[Array] | None  # by parts; None: not yet, for a loop's part is no place in a list
  since: Array
  rest: Array
  same: Array | None


def of_head(angles: Any, b: Any, head: Any) -> Any:
  """References to the `Angles` of one head of a sequence."""
  first, since, cycles, same = angles
  return Angles(first.at[b, head], since.at[:, b, head], cycles, None if same is None else same.at[b, head])


def of_tiles(angles: Any, b: Any, head: Any, tile: Any, many: int) -> list[Any]:
  """And those of so many of its tiles, for a loader to copy, in the order of `Angles`."""
  first, since, cycles, same = of_head(angles, b, head)
  tokens = pl.ds(tile * ROWS, many * ROWS)
  return [first.at[pl.ds(tile, many)], since.at[:, tokens], cycles, *([] if same is None else [same.at[tokens]])]


def memory(angles: Angles, many: int, *lead: int) -> Any:
  """Shared memory for the `Angles` of so many tiles of a head."""
  head_dim, tokens = angles.cycles.shape[1], many * ROWS
  shapes = [(many, head_dim), (2, tokens), (2, head_dim), None if angles.same is None else (tokens,)]
  found: list[Any] = [None if shape is None else plgpu.SMEM((*lead, *shape), jnp.float32) for shape in shapes]
  return Angles(*found)


def parts_of(x: Float[Array, "rows d"]) -> list[Float[Array, "rows columns"]]:
  """Coordinates of vectors, as many as have their angles together."""
  return [x[:, n : n + WIDTH] for n in range(0, x.shape[1], WIDTH)]


def along(angles: Any, tile: Any, parts: int | None = None) -> Along:
  """From those of a head, with `first` of all its `parts`, if they are known."""
  first = None
  if parts is not None:
    first = [by_coordinate(angles.first.at[tile], part) for part in range(parts)]
  since, rest = (by_token(angles.since.at[n], tile) for n in range(2))
  return Along(first, since, rest, None if angles.same is None else by_token(angles.same, tile))


def radians(angles: Any, at: Along, tile: Any, part: Any) -> Float[Array, "rows columns"]:
  """The angles of a part of a tile."""
  shape = (ROWS, WIDTH)
  since, rest = down(at.since, shape), down(at.rest, shape)
  cycles, of_cycles = (across(by_coordinate(angles.cycles.at[n], part), shape) for n in range(2))
  whole = since * cycles
  first = across(by_coordinate(angles.first.at[tile], part) if at.first is None else at.first[part], shape)
  if at.same is not None:
    first = first * down(at.same, shape)
  # Less any whole number near it: by additions, for a rounding takes a unit as slow as that of sines and cosines.
  part_of_turn = whole - (lax.optimization_barrier(whole + _WHOLE) - _WHOLE)
  return (part_of_turn + (since * of_cycles + rest * (cycles + of_cycles) + first)) * (2 * np.pi)


def rotated(
  x: Float[Array, "rows columns"], angle: Float[Array, "rows columns"], interpret: Any
) -> Float[Array, "rows columns"]:
  """Every pair of coordinates by its angle."""
  cosine, sine = _cosine_and_sine(angle, interpret)
  return x * cosine + _quarter_turned(x, interpret) * sine


def rotated_back(
  dx: Float[Array, "rows columns"],
  x: Float[Array, "rows columns"],
  angle: Float[Array, "rows columns"],
  speed: Float[Array, "columns"],
  interpret: Any,
) -> tuple[Float[Array, "rows columns"], Float[Array, "rows"]]:
  """A gradient of what was rotated to x, and the torque: speed . (x turned by a quarter) dx, for each row."""
  cosine, sine = _cosine_and_sine(angle, interpret)
  across_dx = _quarter_turned(dx, interpret)  # instead of x, with the other sign
  return dx * cosine - across_dx * sine, -(x * across_dx * across(speed, x.shape)).sum(axis=1)


def all_rotated_back(
  dx: Float[Array, "rows d"], x: Float[Array, "rows d"], angles: Any, speed: Any, tile: Any, interpret: Any
) -> tuple[Float[Array, "rows d"], Float[Array, "rows"]]:
  """`rotated_back` of whole vectors, by the angles of a tile of a head."""
  turns, found = along(angles, tile), []
  for n, part in enumerate(zip(parts_of(dx), parts_of(x), strict=True)):
    found.append(rotated_back(*part, radians(angles, turns, tile, n), by_coordinate(speed, n), interpret))
  back, torques = zip(*found, strict=True)
  return jnp.concatenate(back, axis=1), functools.reduce(jnp.add, torques)


def _cosine_and_sine(
  angle: Float[Array, "rows columns"], interpret: Any
) -> tuple[Float[Array, "rows columns"], Float[Array, "rows columns"]]:
  """Of angles that are the same for both coordinates of a pair, and computed once."""
  angle = _pairwise(angle, lambda x, _: (x, x), interpret)
  return jnp.cos(angle), jnp.sin(angle)


def _quarter_turned(x: Float[Array, "rows columns"], interpret: Any) -> Float[Array, "rows columns"]:
  """Every pair (x, y) of coordinates as (-y, x)."""
  return _pairwise(x, lambda x, y: (-y if interpret is not None else arith.negf(y), x), interpret)


def _pairwise(
  x: Float[Array, "rows columns"], function: Callable[..., tuple[Any, Any]], interpret: Any
) -> Float[Array, "rows columns"]:
  """A function of every pair of columns, of which a thread holds both, in one register of the layout."""
  if interpret is not None:
    return jnp.stack(function(x[:, ::2], x[:, 1::2]), axis=-1).reshape(x.shape)

  # Pallas itself has nothing that moves columns.
  @plgpu.inline_mgpu(arg_types=(WGMMA,), return_type=plgpu.ShapeDtypeStruct(x.shape, x.dtype, WGMMA))
  def of_registers(_: Any, x: Any) -> Any:
    found = np.empty_like(x.registers)
    for place, pair in np.ndenumerate(x.registers):
      found[place] = vector.from_elements(pair.type, function(*(vector.extract(pair, [], [n]) for n in range(2))))
    return mgpu.FragmentedArray(_registers=found, _layout=x.layout, _is_signed=None)

  result: Array = of_registers(x)
  return result
