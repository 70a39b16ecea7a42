"""Keys and values into states on Hopper, p = 2, as `state_write` does it, but what is symmetric in them hardly twice.

    S[a]_b <- decay S[a]_b + sum_j (x_ja x_jb) v_j      for coordinates b of a's quarter and of later ones

A quarter of the coordinates is 16, the rows of wgmma's 64 that one warp has; so four quarters of b make one product,
whichever a each of them goes with:

    a of the first quarter               with b of the quarters 0 1 2 3
    a of the second, another of the last               1 2 3 and 3
    two a of the third                                 2 3 and 2 3

40 products for a state where there would be 64. A block of the grid owns a few of them, all of one kind, and walks the
chunks in order.

    2 to 4 warpgroups   one or two products each
    the last one        loads
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith
from jaxtyping import Array, BFloat16, Float, Int

from kernels_pallas.gpu.state_write import States
from kernels_pallas.gpu.tiles import (
  LOADING_REGISTERS,
  REGISTERS,
  ROWS,
  STATE_WIDTH,
  WGMMA,
  accumulate,
  across,
  down,
  fastest,
  multiply,
  place_in_ring,
  shared,
  unless_stateless,
  varying_as,
  wait_for_all,
  wait_if,
)

_QUARTER = STATE_WIDTH // 4
_VISIT = 2 * ROWS  # tokens that come at once
_SLOTS = 4
_SHARES = (2, 2), (3, 1), (4, 1)  # warpgroups that compute, and the products of each


class _Kind(NamedTuple):
  """Products alike: the rows of the n-th are those of two windows of b, each with its own a, n after the first one."""

  firsts: tuple[int, int]
  windows: tuple[range, range]
  products: int

  @property
  def rows(self) -> tuple[Any, Any]:
    """Of a product, those of the two windows."""
    boundary = len(self.windows[0])
    return pl.ds(0, boundary), pl.ds(boundary, STATE_WIDTH - boundary)


class Centre(NamedTuple):
  """States of values less `values` are less Z_ab times that, Z being what is found of sums without values."""

  values: Float[Array, "B H dv"]
  Z: Float[Array, "B H n d d"]


_KINDS = (
  _Kind((0, 0), (range(32), range(32, 64)), 16),
  _Kind((16, 48), (range(16, 64), range(48, 64)), 16),
  _Kind((32, 40), (range(32, 64), range(32, 64)), 8),
)


def write(
  x: BFloat16[Array, "B H d T"],
  v: BFloat16[Array, "B T H dv"],
  decay: Float[Array, "B H n"],
  centre: Centre,
  initial: Float[Array, "B H 1 w w w"] | None,
  *,
  has_state: Int[Array, "B H"] | None = None,
  interpret: Any = None,
) -> States:
  """Of heads of 64, from keys times the root of the discount until the chunk is left.

  The matrices `found` are S[a]^T, about `centre`; what is below the quarters on the diagonal is not written, and 0 in
  `final`, which is of values as they are. Heads without a state (`has_state` 0) are left out: what they find is
  anything.
  """
  batch, heads, width, time = x.shape
  count = decay.shape[2]
  assert width == v.shape[3] == STATE_WIDTH
  visits = time // count // _VISIT  # of a chunk
  computing, each = _shares(batch * heads)
  owned = computing * each
  slices = [-(-kind.products // owned) for kind in _KINDS]

  def kernel(x_ref, v_ref, decay_ref, centre_ref, z_ref, *more):
    refs = list(more)
    has_state_ref: Any
    initial_ref, has_state_ref = (None if array is None else refs.pop(0) for array in (initial, has_state))
    found_ref, final_ref, squares_ref, a_smem, b_smem, v_smem, s_smem, filled, freed, *staging = refs
    item, thread = lax.axis_index("block"), lax.axis_index("thread")
    row, share = (f(item, jnp.int32(sum(slices))) for f in (lax.div, lax.rem))
    b, head = (f(row, jnp.int32(heads)) for f in (lax.div, lax.rem))
    chunks = unless_stateless(count, has_state_ref, b, head)

    def compute(kind, start):
      """A warpgroup's products of a kind whose blocks of the grid begin at `start`."""
      plgpu.set_max_registers(REGISTERS[computing], action="increase")
      first = _first(kind, share - start, owned)
      places = [thread * each + n for n in range(each)]
      before = sum(other.products for other in _KINDS[: _KINDS.index(kind)])
      numbers = [before + first + place for place in places]  # among all products

      def unless_another_does(place):
        """Of what the last block does again to be filled up."""
        return pl.when(first + place >= (share - start) * owned)

      def store(states, target):
        """Leaves a copy of the states in memory."""
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for state, place in zip(states, places, strict=True):
          s_smem[place] = state.astype(x.dtype)
        plgpu.commit_smem()
        for place in places:

          @unless_another_does(place)
          def _(place=place):
            for rows, a, window in zip(kind.rows, kind.firsts, kind.windows, strict=True):
              part = target.at[a + first + place, pl.ds(window.start, len(window))]
              plgpu.copy_smem_to_gmem(s_smem.at[place, rows], part)

      def weights(c):
        """What a chunk finds of sums without values, for each row of a product. Early, for it comes from afar."""
        return tuple(1 * plgpu.load(z_ref.at[b, head, c, n], layout=WGMMA.reduce(1), optimized=False) for n in numbers)

      def advance(c, carry):
        states, Z = carry
        kept, of_next = decay_ref[b, head, c], weights(jnp.minimum(c + 1, count - 1))
        shape = (width, width)
        centred = [s - down(of_s, shape) * across(middle, shape) for s, of_s in zip(states, Z, strict=True)]
        store(centred, found_ref.at[b, head, 0, c])
        for state, place, number in zip(centred, places, numbers, strict=True):

          @unless_another_does(place)
          def _(state=state, number=number):
            squares_ref[b, head, c, number] = (state * state).sum(axis=1)

        decayed = tuple(state * kept for state in states)

        def add(*sums):
          def visit(n, none):
            slot = place_in_ring(c * visits + n, _SLOTS)
            plgpu.barrier_wait(filled.at[slot])
            for part in range(_VISIT // ROWS):
              some = pl.ds(part * ROWS, ROWS)
              keys, values = plgpu.load(b_smem.at[slot, :, some], layout=WGMMA, optimized=False), v_smem.at[slot, some]
              for total, place in zip(sums, places, strict=True):
                left = keys * _by_row(a_smem.at[slot, :, place, some], len(kind.windows[0]), interpret)
                multiply(total, left, values, staging[0].at[thread] if staging else None)
            plgpu.wgmma_wait(0)  # for all: ptxas gives the registers of left operands to the next visit's
            plgpu.barrier_arrive(freed.at[slot])
            return none

          lax.fori_loop(0, jnp.int32(visits), visit, None)

        return accumulate(add, decayed, interpret), of_next

      if initial_ref is None:
        states = (plgpu.layout_cast(jnp.zeros((width, width), jnp.float32), WGMMA),) * each
      else:  # times 1: to shard_map what was loaded varies over its axes, and what was computed does not
        given = initial_ref.at[b, head]
        states = tuple(1 * plgpu.load(given.at[number], layout=WGMMA, optimized=False) for number in numbers)
      middle = plgpu.load(centre_ref.at[b, head], layout=WGMMA.reduce(0), optimized=False)
      states, _ = lax.fori_loop(0, chunks, advance, (states, weights(0)))
      for state, place, number in zip(states, places, numbers, strict=True):

        @unless_another_does(place)
        def _(state=state, number=number):
          final_ref[b, head, number] = state

      plgpu.wait_smem_to_gmem(0)

    def load(kind, start):
      plgpu.set_max_registers(LOADING_REGISTERS, action="decrease")
      first = _first(kind, share - start, owned)

      def copy(visited, none):
        slot, at = place_in_ring(visited, _SLOTS), pl.ds(visited * _VISIT, _VISIT)
        fetch = functools.partial(plgpu.copy_gmem_to_smem, barrier=filled.at[slot])
        wait_if(visited >= _SLOTS, freed.at[slot])
        for n, (rows, a, window) in enumerate(zip(kind.rows, kind.firsts, kind.windows, strict=True)):
          fetch(x_ref.at[b, head, pl.ds(a + first, owned), at], a_smem.at[slot, n])
          fetch(x_ref.at[b, head, pl.ds(window.start, len(window)), at], b_smem.at[slot, rows])
        fetch(v_ref.at[b, at, head], v_smem.at[slot])
        return none

      total = chunks * visits
      lax.fori_loop(0, total, copy, None)
      wait_for_all(freed, total)

    for n, kind in enumerate(_KINDS):
      start = sum(slices[:n])
      of_this_kind = (share >= start) & (share < start + slices[n])
      pl.when(of_this_kind & (thread < computing))(functools.partial(compute, kind, start))
      pl.when(of_this_kind & (thread == computing))(functools.partial(load, kind, start))

  products = sum(kind.products for kind in _KINDS)
  given = [] if initial is None else [_products(initial)]
  given += [] if has_state is None else [has_state]
  results = plgpu.kernel(
    kernel,
    out_type=(
      jax.ShapeDtypeStruct((batch, heads, 1, count, width, width, width), x.dtype),
      jax.ShapeDtypeStruct((batch, heads, products, width, width), jnp.float32),
      jax.ShapeDtypeStruct((batch, heads, count, products, width), jnp.float32),
    ),
    scratch_types=[
      plgpu.SMEM((_SLOTS, 2, owned, _VISIT), x.dtype),
      shared((_SLOTS, width, _VISIT), x.dtype),
      shared((_SLOTS, _VISIT, width), v.dtype),
      shared((owned, width, width), x.dtype),
      plgpu.Barrier(num_arrivals=5, num_barriers=_SLOTS),
      plgpu.Barrier(num_arrivals=computing, num_barriers=_SLOTS),
      *((shared((computing, width, ROWS), v.dtype),) if interpret is not None else ()),
    ],
    grid=(batch * heads * sum(slices),),
    grid_names=("block",),
    num_threads=computing + 1,
    thread_name="thread",
    compiler_params=plgpu.CompilerParams(approx_math=True),
    interpret=interpret,
    kernel_name="symmetric_write",
  )(x, v, decay, centre.values, centre.Z[:, :, :, *_coordinates()], *given)
  found, final, squares = varying_as(x, results)
  return States(found, _matrices(final), None, jnp.sum(squares * _times(), axis=(3, 4)))


def _first(kind: _Kind, share: Any, owned: int) -> Any:
  """The first product of a block of the grid; the last block does again what fills it up."""
  return jnp.minimum(share * owned, kind.products - owned)


def _by_row(pair: Any, boundary: int, interpret: Any) -> BFloat16[Array, "rows tokens"]:
  """For each row the x of its coordinate, the first of `pair` or the second from row `boundary` on."""
  shape, layout = (STATE_WIDTH, ROWS), WGMMA.reduce(0)
  if interpret is not None:
    one, other = (across(plgpu.load(pair.at[n], layout=layout, optimized=False), shape) for n in range(2))
    return jnp.where(plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=WGMMA) < boundary, one, other)

  # A warp has 16 rows, all of one coordinate, so it need not load the other.
  result = plgpu.ShapeDtypeStruct(shape, jnp.bfloat16, WGMMA)
  registers: Any = layout.to_mgpu()

  @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=result)
  def of_warp(_, pair):
    i32 = ir.IntegerType.get_signless(32)
    warp = arith.remui(mgpu.utils.warp_idx(sync=False), mgpu.c(4, i32))
    second = arith.cmpi(arith.CmpIPredicate.uge, warp, mgpu.c(boundary // _QUARTER, i32))
    place = arith.index_castui(ir.IndexType.get(), arith.extui(i32, second))
    mine: Any = mgpu.memref_slice(pair, place)
    along = mgpu.FragmentedArray.load_untiled(mine, layout=registers, optimized=False)
    return along.broadcast_in_dim(shape, (1,), WGMMA.to_mgpu())

  factors: Array = of_warp(pair)
  return factors


def _coordinates() -> tuple[np.ndarray, np.ndarray]:
  """Of each row of all products, a and b."""
  pairs = [
    (first + n, b)
    for kind in _KINDS
    for n in range(kind.products)
    for first, window in zip(kind.firsts, kind.windows, strict=True)
    for b in window
  ]
  a, b = np.reshape(pairs, (-1, STATE_WIDTH, 2)).transpose(2, 0, 1)
  return a, b


def _times() -> Float[np.ndarray, "products w"]:
  """How often a state has what each row is: twice if a and b are of different quarters."""
  a, b = (coordinates // _QUARTER for coordinates in _coordinates())
  return np.where(a == b, np.float32(1), np.float32(2))


def _products(S: Float[Array, "B H 1 w w w"]) -> Float[Array, "B H products w w"]:
  a, b = _coordinates()
  return jnp.swapaxes(S[:, :, 0], -1, -2)[:, :, a, b]


def _matrices(rows: Float[Array, "B H products w w"]) -> Float[Array, "B H 1 w w w"]:
  """The inverse of `_products`."""
  a, b = _coordinates()
  nothing = jnp.zeros((*rows.shape[:2], *(STATE_WIDTH,) * 3), rows.dtype)
  return jnp.swapaxes(nothing.at[:, :, a, b].set(rows), -1, -2)[:, :, None]


def _shares(rows: int) -> tuple[int, int]:
  """Those with which the chip is done first."""
  return fastest(_SHARES, lambda owned: rows * sum(-(-kind.products // owned) for kind in _KINDS))
