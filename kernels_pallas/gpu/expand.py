"""Features in memory, on Hopper, for powers whose states no kernel holds: expanded for matrix products that are XLA's.

    expanded     phi_f = w_f x_a x_b ...            a, b, ...: the p coordinates that feature f is a product of
    contracted   dx_a  = sum_f dphi_f (d phi_f / d x_a)

Time stands last: a thread has two neighbouring tokens, so a feature is a product of p vectors whatever its coordinates
are, which come from a table.

    4 warpgroups   each a share of the features, of the same tokens
    grid           256 tokens of one head, and a part of the features if that alone does not keep the chip busy
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, BFloat16, Float, Int

from kernels_pallas.gpu.tiles import BLOCK, MULTIPROCESSORS, rounded, varying_as

_WARPGROUPS = 4
_AT_ONCE = 8  # features whose loads are under way together
_BLOCKS = 2 * MULTIPROCESSORS
_TOKENS = plgpu.Layout.WG_STRIDED((BLOCK,), 2)


class Table(NamedTuple):
  """The multisets of coordinates that features are products of, and their weights."""

  indices: np.ndarray  # p D
  weight: np.ndarray  # D


def padded_features(table: Table, rows: int, time: int) -> int:
  """How many `expanded` makes, those that fill up parts included: they are 0."""
  return _parts(table, rows, time)[1]


def _parts(table: Table, rows: int, time: int) -> tuple[int, int]:
  """Into how many parts features are cut, and how many features that makes."""
  unit = _WARPGROUPS * _AT_ONCE
  parts = min(-(-_BLOCKS // (rows * time // BLOCK)), -(-table.weight.size // unit))
  return parts, -(-table.weight.size // (parts * unit)) * parts * unit


def expanded(
  x: Float[Array, "N d T"], table: Table, *, interpret: Any = None
) -> tuple[BFloat16[Array, "N F T"], BFloat16[Array, "N F T"]]:
  """The features of every token, and what rounding lost of them; T is whole BLOCKs."""
  rows, _, time = x.shape

  def kernel(place, factors, high_ref, low_ref):
    def expand(first):
      made = [weight * functools.reduce(jnp.multiply, xs) for weight, xs, _ in factors(first)]
      for n, phi in enumerate(made):
        high = rounded(phi, jnp.bfloat16)
        high_ref[place.row, first + n, place.tokens] = high
        low_ref[place.row, first + n, place.tokens] = (phi - high.astype(jnp.float32)).astype(jnp.bfloat16)

    place.for_each(expand)

  result = jax.ShapeDtypeStruct((rows, padded_features(table, rows, time), time), jnp.bfloat16)
  high, low = _run(kernel, x, table, [], [result, result], [], interpret, "expanded")
  return high, low


def contracted(
  x: Float[Array, "N d T"], dphi: Float[Array, "N F T"], table: Table, *, interpret: Any = None
) -> Float[Array, "N d T"]:
  """The cotangent of x, given that of its features."""
  rows, head_dim, time = x.shape

  def kernel(place, factors, dphi_ref, out_ref, sums_smem):
    thread = lax.axis_index("thread")
    sums = sums_smem.at[thread]

    def clear(a, none):
      sums[a] = plgpu.layout_cast(jnp.zeros((BLOCK,), jnp.float32), _TOKENS)
      return none

    def contract(first):
      found = [_load(dphi_ref.at[place.row, first + n, place.tokens]) for n in range(_AT_ONCE)]
      for dfeature, (weight, xs, coordinates) in zip(found, factors(first), strict=True):
        for a, others in zip(coordinates, _products_of_others(xs), strict=True):
          sums[a] = _load(sums.at[a]) + weight * dfeature * others

    def leave(a, none):
      out_ref[thread, place.part, place.row, a, place.tokens] = _load(sums.at[a])
      return none

    lax.fori_loop(0, head_dim, clear, None)
    place.for_each(contract)
    lax.fori_loop(0, head_dim, leave, None)

  result = jax.ShapeDtypeStruct((_WARPGROUPS, _parts(table, rows, time)[0], *x.shape), jnp.float32)
  scratch = [plgpu.SMEM((_WARPGROUPS, head_dim, BLOCK), jnp.float32)]
  (parts,) = _run(kernel, x, table, [dphi], [result], scratch, interpret, "contracted")
  return jnp.sum(parts, axis=(0, 1))


class _Place(NamedTuple):
  """What a block of the grid does."""

  row: Int[Array, ""]
  tokens: Any
  part: Int[Array, ""]
  share: int  # features of a warpgroup

  @classmethod
  def of_block(cls, time: int, parts: int, features: int) -> "_Place":
    rest, part = (f(lax.axis_index("block"), jnp.int32(parts)) for f in (lax.div, lax.rem))
    row, tile = (f(rest, jnp.int32(time // BLOCK)) for f in (lax.div, lax.rem))
    return cls(row, pl.ds(tile * BLOCK, BLOCK), part, features // (parts * _WARPGROUPS))

  def for_each(self, work: Callable[[Int[Array, ""]], None]) -> None:
    """Works through the warpgroup's features, given the first of those that come at once."""
    first = (self.part * _WARPGROUPS + lax.axis_index("thread")) * self.share

    def turn(n, none):
      work(first + n * _AT_ONCE)
      return none

    lax.fori_loop(0, jnp.int32(self.share // _AT_ONCE), turn, None)


def _factors(first: Int[Array, ""], index_ref: Any, weight_ref: Any, x_smem: Any) -> list[tuple[Array, Any, Any]]:
  """Of each feature that comes at once: its weight, what it is a product of, and the numbers of those coordinates."""
  numbers = [[index_ref[i, first + n] for i in range(index_ref.shape[0])] for n in range(_AT_ONCE)]
  weights = [weight_ref[first + n] for n in range(_AT_ONCE)]
  return [
    (weight, [_load(x_smem.at[a]) for a in of_one], of_one) for weight, of_one in zip(weights, numbers, strict=True)
  ]


def _load(ref: Any) -> Array:
  loaded: Array = plgpu.load(ref, layout=_TOKENS, optimized=False)
  return loaded


def _products_of_others(xs: list[Array]) -> list[Array]:
  """For each of the vectors the product of all the others."""
  before, after = [xs[0]], [xs[-1]]
  for x, y in zip(xs[1:-1], xs[-2:0:-1], strict=True):
    before.append(before[-1] * x)
    after.append(y * after[-1])
  between = (x * y for x, y in zip(before, after[-2::-1], strict=False))
  return [after[-1], *between, before[-1]]


def _run(
  work: Callable[..., None],
  x: Float[Array, "N d T"],
  table: Table,
  more: list[Array],
  results: list[jax.ShapeDtypeStruct],
  scratch: list[Any],
  interpret: Any,
  name: str,
) -> list[Array]:
  """What a kernel makes that works with the tokens of its block in shared memory, and with the table."""
  rows, head_dim, time = x.shape
  parts, features = _parts(table, rows, time)

  def kernel(x_ref, index_ref, weight_ref, *refs):
    *others, x_smem, filled = refs
    place = _Place.of_block(time, parts, features)

    @pl.when(lax.axis_index("thread") == 0)
    def send():
      plgpu.copy_gmem_to_smem(x_ref.at[place.row, :, place.tokens], x_smem, filled)

    plgpu.barrier_wait(filled)
    work(place, lambda first: _factors(first, index_ref, weight_ref, x_smem), *others)

  rest = features - table.weight.size
  indices = jnp.asarray(np.pad(table.indices, ((0, 0), (0, rest))), jnp.int32)
  weight = jnp.asarray(np.pad(table.weight, (0, rest)), jnp.float32)
  found = plgpu.kernel(
    kernel,
    out_type=results,
    scratch_types=[*scratch, plgpu.SMEM((head_dim, BLOCK), jnp.float32), plgpu.Barrier(num_arrivals=1)],
    grid=(rows * (time // BLOCK) * parts,),
    grid_names=("block",),
    num_threads=_WARPGROUPS,
    thread_name="thread",
    # A thread writes nothing to shared memory that another one reads.
    compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
    interpret=interpret,
    kernel_name=name,
  )(x, indices, weight, *more)
  marked: list[Array] = varying_as(x, found)
  return marked
