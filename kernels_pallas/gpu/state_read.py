"""What queries find in a state, on Hopper, p = 2.

    numerator_i  = scale_i sum_a (q_ia q_i) S[a]          S[a]: one matrix for each coordinate a, of i's chunk
    normaliser_i = scale_i q_i . Z q_i

The gradients of queries, keys and values are of the same form: with the cotangent of the numerator, or the values, in
place of the second q, S[a] the other way round, and Z q added. They go to what pairs inside the chunk gave.

A block of the grid owns 256 tokens of a chunk; states stream past. Features are not expanded: y times one column of x,
in registers, is the left operand. A pair of coordinates that are in two different quarters is taken once, twice as
heavy, unless S[a] stands the other way round. Z comes as terms whose sum has more bits than one, for the normaliser can
be the small rest of large terms.

    warpgroups 0 to 3   64 tokens each
    warpgroup 4         loads

Heads wider than 64 are read piece by piece, each launch adding to what the one before has found; their normaliser is
XLA's. What is added to is changed where it lies in memory, and is left as it is in heads without a state.
"""

import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike
from jaxtyping import Array, BFloat16, Float, Int

from kernels_pallas.gpu.in_place import kernel_in_place
from kernels_pallas.gpu.pieces import Piece, Pieces, coordinates
from kernels_pallas.gpu.scan import TERMS
from kernels_pallas.gpu.tiles import (
  BLOCK,
  LOADING_REGISTERS,
  REGISTERS,
  ROWS,
  STATE_WIDTH,
  WGMMA,
  accumulate,
  across,
  down,
  multiply,
  place_in_ring,
  shared,
  unless_stateless,
  varying_as,
  wait_if,
)

_SLOTS = 4  # each for what comes with a visit
_AT_ONCE = 2  # coordinates that come with a visit, of symmetric states twice: no fewer matrices than Z has terms
_COMPUTING = BLOCK // ROWS  # warpgroups


class Found(NamedTuple):
  """What queries find in a state."""

  numerator: Float[Array, "B T Hq dv"]
  normaliser: Float[Array, "B Hq T"]


class _Options(NamedTuple):
  """What some reads have and others do not."""

  Z: BFloat16[Array, "B H n terms d d"] | None = None
  w: BFloat16[Array, "B T Hq d"] | None = None  # what Z is multiplied by, if that is not asked for the normaliser
  w_scale: Float[Array, "B Hq T"] | None = None
  scale: Float[Array, "B Hq T"] | None = None
  has_state: Int[Array, "B H"] | None = None
  centre: BFloat16[Array, "B H dv"] | None = None  # taken from what x is multiplied by


def read(
  x: BFloat16[Array, "B Hq d T"],
  y: Float[Array, "B T Hq d"],
  S: BFloat16[Array, "B H m n w w w"],
  Z: BFloat16[Array, "B H n terms d d"],
  scale: Float[Array, "B Hq T"],
  *,
  has_state: Int[Array, "B H"] | None = None,
  by_rows: bool = False,
  dtype: DTypeLike = jnp.float32,
  interpret: Any = None,
) -> Found:
  """The sums over all that the chunk's state holds; x is y, time last, which may have another type of 16 bits.

  `by_rows`: matrices of S are S[a]^T, as `symmetric_write` leaves them. Numerators are of `dtype`, those of keys wider
  than 64 float32. In heads without a state (`has_state` 0) nothing is read, and found is anything.
  """
  pieces = _pieces(x, S)
  if pieces.first > 1:
    given, parts = _Options(scale=scale, has_state=has_state), dict[int, Array]()
    for piece in _symmetric(x, S):
      (parts[piece.u],) = _read(x, y, S, given, piece, parts.get(piece.u), transposed=False, interpret=interpret)
    return Found(_side_by_side(list(parts.values())), _normaliser(y.astype(x.dtype), Z, scale))
  find = functools.partial(_read, x, y, S, transposed=False, interpret=interpret, dtype=dtype, by_rows=by_rows)
  numerator, normaliser = find(_Options(Z=Z, scale=scale, has_state=has_state), Piece(0, 0, 0))
  more = [find(_Options(scale=scale, has_state=has_state), Piece(0, 0, u))[0] for u in range(1, pieces.values)]
  return Found(_side_by_side([numerator, *more]), normaliser)


def read_transposed(
  x: BFloat16[Array, "B Hq d T"],
  y: BFloat16[Array, "B T Hq dv"],
  S: BFloat16[Array, "B H m n w w w"],
  w: BFloat16[Array, "B T Hq d"],
  Z: BFloat16[Array, "B H n terms d d"],
  rows: Float[Array, "B T Hq d"],
  *,
  w_scale: Float[Array, "B Hq T"] | None = None,
  scale: Float[Array, "B Hq T"] | None = None,
  has_state: Int[Array, "B H"] | None = None,
  centre: BFloat16[Array, "B H dv"] | None = None,
  interpret: Any = None,
) -> Float[Array, "B T Hq d"]:
  """rows_i + scale_i (sum_a (x_ia y_i) S[a]^T + w_scale_i w_i Z); rows_i alone in heads without a state.

  Of y less `centre`, if that is given.
  """
  pieces, found = _pieces(x, S), rows
  for piece in itertools.starmap(Piece, np.ndindex(*pieces)):
    given = _Options(scale=scale, has_state=has_state, centre=centre)
    given = given._replace(Z=Z, w=w, w_scale=w_scale) if piece.u == 0 else given
    (found,) = _read(x, y, S, given, piece, found, transposed=True, interpret=interpret)
  return found


def read_values(
  x: BFloat16[Array, "B Hq d T"],
  y: BFloat16[Array, "B T Hq d"],
  S: BFloat16[Array, "B H m n w w w"],
  rows: Float[Array, "B T Hq dv"],
  discount: Float[Array, "B Hq T"],
  *,
  has_state: Int[Array, "B H"] | None = None,
  interpret: Any = None,
) -> Float[Array, "B T Hq dv"]:
  """rows_i + sum_a (x_ia y_i) S[a] / discount_i; rows_i alone in heads without a state.

  Both x, time last, and y are keys times the discount, which is once too often. A bfloat16 has no room for the square
  of less than 2 ** -56: then nothing is added.
  """
  given = _Options(scale=jnp.where(discount > 2.0**-56, 1 / discount, 0.0), has_state=has_state)
  # Sums of several launches are not rounded in between.
  found = rows if _pieces(x, S).first == 1 else rows.astype(jnp.float32)
  for piece in _symmetric(x, S):
    (found,) = _read(x, y, S, given, piece, found, transposed=False, interpret=interpret)
  return found.astype(rows.dtype)


def _pieces(x: BFloat16[Array, "B Hq d T"], S: BFloat16[Array, "B H m n w w w"]) -> Pieces:
  parts = x.shape[2] // STATE_WIDTH
  return Pieces(parts, parts, S.shape[2] // parts**2)


def _symmetric(x: BFloat16[Array, "B Hq d T"], S: BFloat16[Array, "B H m n w w w"]) -> list[Piece]:
  """Those that are read of a symmetric state: of pieces (i, j) and (j, i) one, twice as heavy."""
  return [piece for piece in itertools.starmap(Piece, np.ndindex(*_pieces(x, S))) if piece.i <= piece.j]


def _side_by_side(parts: list[Array]) -> Float[Array, "B T Hq _"]:
  return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=-1)


def _normaliser(
  y: BFloat16[Array, "B T Hq d"], Z: BFloat16[Array, "B H n terms d d"], scale: Float[Array, "B Hq T"]
) -> Float[Array, "B Hq T"]:
  """Scale y . Z y, of wide heads by XLA."""
  batch, time, all_heads, head_dim = y.shape
  q = y.reshape(batch, Z.shape[2], -1, Z.shape[1], all_heads // Z.shape[1], head_dim)
  product = functools.partial(jnp.einsum, "bnthgd,bhnde->bnthge", q, preferred_element_type=jnp.float32)
  Zq = sum(product(Z[:, :, :, term]) for term in range(TERMS))
  found: Array = jnp.sum(Zq * q.astype(jnp.float32), axis=-1).reshape(batch, time, all_heads)
  return jnp.moveaxis(found, 1, 2) * scale


def _read(
  x: BFloat16[Array, "B Hq d T"],
  y: Float[Array, "B T Hq _"],
  S: BFloat16[Array, "B H m n w w w"],
  given: _Options,
  piece: Piece,
  rows: Float[Array, "B T Hq _"] | None = None,
  *,
  transposed: bool,
  interpret: Any,
  dtype: DTypeLike = jnp.float32,
  by_rows: bool = False,
) -> tuple[Array, ...]:
  """What one piece gives, added to `rows` if there are: where its outputs' coordinates are in the whole head.

  Z's piece is that of its coordinates. Where there are several, the program reads from memory which one, so that one
  program serves many.
  """
  batch, all_heads, _, time = x.shape
  heads, _, count = S.shape[1:4]
  width, pieces = STATE_WIDTH, _pieces(x, S)
  place = None if pieces.total == 1 else jnp.asarray([*piece, pieces.number(piece)], jnp.int32)
  group, tiles, in_chunk = all_heads // heads, time // BLOCK, time // count // BLOCK
  assert time % (count * BLOCK) == 0
  # Matrices come whole, or by quarters of their columns, or rows: of S[a] only a's quarter and later ones are needed.
  whole = transposed or piece.i != piece.j
  columns = width if whole else width // 4
  parts = width // columns
  # Of a symmetric state come coordinates of the first quarter and of the last, four and one quarters of a matrix, or of
  # the second and the third, three and two: always five.
  kinds = [[(0, range(1))]] if whole else [[(0, range(4)), (3, range(3, 4))], [(1, range(1, 4)), (2, range(2, 4))]]
  in_visit = _AT_ONCE * sum(len(some) for _, some in kinds[0])
  assert in_visit >= TERMS * parts
  fetches = _AT_ONCE * len(kinds[0]) if by_rows else in_visit
  of_Z = TERMS * width // fetches  # rows of Z at a time, if by rows
  assert not by_rows or (pieces.total == 1 and of_Z * (fetches // TERMS) == width)
  first = 0 if given.Z is None else 1  # visits to Z come before those to S
  of_kind = width // _AT_ONCE // (len(kinds) * len(kinds[0]))
  visits = first + len(kinds) * of_kind
  finds_normaliser = given.Z is not None and not transposed
  f32 = jnp.float32

  def visited(n: Any, kind: int) -> list[tuple[Any, int, range]]:
    """The coordinates a that come with visit n, the quarter of each, and which parts of S[a]."""
    next_one = (n - first - kind * of_kind) * _AT_ONCE
    return [(quarter * columns + next_one + m, quarter, some) for m in range(_AT_ONCE) for quarter, some in kinds[kind]]

  def each_visit(visit: Any) -> None:
    for kind in range(len(kinds)):
      start = first + kind * of_kind
      lax.fori_loop(start, jnp.int32(start + of_kind), functools.partial(visit, kind=kind), None)

  def kernel(x_ref, y_ref, s_ref, *more):
    refs = list(more)
    options: Any = _Options(*(None if array is None else refs.pop(0) for array in given))
    place_ref: Any = None if place is None else refs.pop(0)
    added_to = None if rows is None else refs.pop(0)
    output = refs.pop(0)  # in the same memory
    target = output if added_to is None else added_to
    normaliser_ref = refs.pop(0) if finds_normaliser else None
    x_smem, (y_smem, rounded_smem), w_smem, s_smem, out_smem, vectors_smem, here, filled, freed, *staging = refs
    w_scale_smem, scale_smem, normaliser_smem = (vectors_smem.at[max(0, n)] for n in places)
    item, thread = lax.axis_index("block"), lax.axis_index("thread")
    row, tile = (f(item, jnp.int32(tiles)) for f in (lax.div, lax.rem))
    b, head = (f(row, jnp.int32(all_heads)) for f in (lax.div, lax.rem))
    c, source = lax.div(tile, jnp.int32(in_chunk)), lax.div(head, jnp.int32(group))
    i, j, u, number = (0,) * 4 if place is None else (place_ref[n] for n in range(4))
    of_y, of_target = (u, j) if transposed else (j, u)
    stateful = unless_stateless(1, options.has_state, b, source) > 0

    def tokens(part):
      return pl.ds(tile * BLOCK + part * ROWS, ROWS)

    def target_of(part):
      return target.at[b, tokens(part), head, coordinates(of_target if target.shape[-1] > width else 0)]

    @pl.when((thread < _COMPUTING) & stateful)
    def compute():
      plgpu.set_max_registers(REGISTERS[_COMPUTING], action="increase")

      def add_product(sums, left, right):
        multiply(sums, left, right, staging[0].at[thread, :, : left.shape[1]] if staging else None)

      def done_with(slot):
        plgpu.wgmma_wait(0)  # for all: ptxas gives the registers of left operands to the next slot's
        plgpu.barrier_arrive(freed.at[slot])

      def along(ref):
        """A number for each token."""
        return plgpu.load(ref, layout=WGMMA.reduce(1), optimized=False)

      def operand(slot, m):
        if by_rows:
          return s_smem.at[slot, pl.ds(m * columns, columns)]
        return s_smem.at[slot, m] if transposed else s_smem.at[slot, m].transpose((1, 0))

      def part_of(y, n):
        return y if parts == 1 else y[:, n * columns : (n + 1) * columns]

      def times_Z(left):
        def products(sums):
          for m in range(parts * TERMS):
            add_product(sums, part_of(left, m % parts), operand(0, m))
          done_with(0)
          return sums[...]

        plgpu.barrier_wait(filled.at[0])
        return pl.run_scoped(products, plgpu.ACC((ROWS, width), f32))

      plgpu.barrier_wait(here)
      y = plgpu.load(y_smem.at[thread], layout=WGMMA, optimized=False)
      if y.dtype != x.dtype:
        # By way of memory, or ptxas would keep the two halves of each register apart.
        rounded_smem[thread] = y.astype(f32).astype(x.dtype)
        y = plgpu.load(rounded_smem.at[thread], layout=WGMMA, optimized=False)
      if options.centre is not None:
        centre = plgpu.load(options.centre.at[b, source, coordinates(of_y)], layout=WGMMA.reduce(0), optimized=False)
        y = y - across(centre, y.shape)
      initial = plgpu.layout_cast(jnp.zeros((ROWS, width), f32), WGMMA)
      if options.w is not None:
        initial = times_Z(plgpu.load(w_smem.at[thread], layout=WGMMA, optimized=False))
        if options.w_scale is not None:
          initial = initial * down(along(w_scale_smem.at[thread]), initial.shape)
      elif finds_normaliser:
        normaliser = (times_Z(y) * y.astype(f32)).sum(axis=1)
        normaliser_smem[thread] = normaliser * along(scale_smem.at[thread])

      def gather(sums):
        def visit(n, none, *, kind):
          slot = place_in_ring(n, _SLOTS)
          plgpu.barrier_wait(filled.at[slot])
          products = [(a, quarter, part) for a, quarter, some in visited(n, kind) for part in some]
          for m, (a, quarter, part) in enumerate(products):
            factor, left = along(x_smem.at[a, pl.ds(thread * ROWS, ROWS)]), part_of(y, part)
            if not transposed and (whole or part > quarter):  # for (b, a), too
              factor = factor + factor
            add_product(sums, left * down(factor, left.shape), operand(slot, m))
            if m + 1 == in_visit // 2 and not whole:  # or ptxas is short of registers, and does so after every product
              plgpu.wgmma_wait(0)
          done_with(slot)
          return none

        each_visit(visit)

      (z,) = accumulate(gather, (initial,), interpret)
      if options.scale is not None:
        z = z * down(along(scale_smem.at[thread]), z.shape)
      if rows is not None:
        z = z + plgpu.load(out_smem.at[thread], layout=WGMMA, optimized=False).astype(f32)
      out_smem[thread] = z.astype(out_smem.dtype)
      plgpu.commit_smem()
      plgpu.copy_smem_to_gmem(out_smem.at[thread], target_of(thread))
      if normaliser_ref is not None:
        plgpu.copy_smem_to_gmem(normaliser_smem.at[thread], normaliser_ref.at[b, head, tokens(thread)])
      plgpu.wait_smem_to_gmem(0)

    @pl.when((thread == _COMPUTING) & stateful)
    def load():
      plgpu.set_max_registers(LOADING_REGISTERS, action="decrease")

      fetch = plgpu.copy_gmem_to_smem
      fetch(x_ref.at[b, head, coordinates(i), pl.ds(tile * BLOCK, BLOCK)], x_smem, here)
      for part in range(_COMPUTING):
        fetch(y_ref.at[b, tokens(part), head, coordinates(of_y)], y_smem.at[part], here)
        if options.w is not None:
          fetch(options.w.at[b, tokens(part), head, coordinates(i)], w_smem.at[part], here)
        if rows is not None:
          fetch(target_of(part), out_smem.at[part], here)
        for source_ref, numbers in ((options.w_scale, w_scale_smem), (options.scale, scale_smem)):
          if source_ref is not None:
            fetch(source_ref.at[b, head, tokens(part)], numbers.at[part], here)

      if first:
        for m in range(fetches):  # what is too many comes again, for a barrier waits for as many every time
          if by_rows:
            term, part = divmod(m, fetches // TERMS)
            some = pl.ds(part * of_Z, of_Z)
            fetch(options.Z.at[b, source, c, term, some], s_smem.at[0, pl.ds(m * of_Z, of_Z)], filled.at[0])
            continue
          n = m % (parts * TERMS)
          at = pl.ds(j * width + (n % parts) * columns, columns)
          fetch(options.Z.at[b, source, c, n // parts, coordinates(i), at], s_smem.at[0, m], filled.at[0])

      def copy(n, none, *, kind):
        slot = place_in_ring(n, _SLOTS)
        wait_if(n >= _SLOTS, freed.at[slot])
        m = 0
        for a, _, some in visited(n, kind):
          matrix = s_ref.at[b, source, number, c, a]
          if by_rows:  # what is needed is all in one place
            size = len(some) * columns
            part = s_smem.at[slot, pl.ds(m * columns, size)]
            fetch(matrix.at[pl.ds(some.start * columns, size)], part, filled.at[slot])
          else:
            for place, part in enumerate(some, m):
              fetch(matrix.at[:, pl.ds(part * columns, columns)], s_smem.at[slot, place], filled.at[slot])
          m += len(some)
        return none

      each_visit(copy)
      for n in range(visits - _SLOTS, visits):  # leave no arrival unseen
        plgpu.barrier_wait(freed.at[n % _SLOTS])

  outputs = [jax.ShapeDtypeStruct((batch, time, all_heads, width), dtype)]
  if rows is not None:
    outputs = [jax.ShapeDtypeStruct(rows.shape, rows.dtype, manual_axis_type=jax.typeof(rows).manual_axis_type)]
  if finds_normaliser:
    outputs.append(jax.ShapeDtypeStruct((batch, all_heads, time), f32))

  by_token = given.w, given.w_scale, rows, given.scale
  # Numbers of tokens in shared memory: those that scale, and the normalisers found.
  wanted = [given.w_scale is not None, given.scale is not None, finds_normaliser]
  places = [sum(wanted[: n + 1]) - 1 for n in range(3)]
  y_memory = [shared((_COMPUTING, ROWS, width), dtype) for dtype in (y.dtype, x.dtype)]
  scratch = [
    plgpu.SMEM((width, BLOCK), x.dtype),
    plgpu.RefUnion(*y_memory) if interpret is None else y_memory,
    plgpu.SMEM((1,), f32) if given.w is None else shared((_COMPUTING, ROWS, width), given.w.dtype),
    shared((_SLOTS, in_visit * columns, width) if by_rows else (_SLOTS, in_visit, width, columns), S.dtype, columns),
    shared((_COMPUTING, ROWS, width), dtype if rows is None else rows.dtype),
    plgpu.SMEM((max(1, sum(wanted)), _COMPUTING, ROWS), f32),
    plgpu.Barrier(num_arrivals=1 + _COMPUTING * (1 + sum(array is not None for array in by_token))),
    plgpu.Barrier(num_arrivals=fetches, num_barriers=_SLOTS),
    plgpu.Barrier(num_arrivals=_COMPUTING, num_barriers=_SLOTS),
    *((shared((_COMPUTING, ROWS, columns), x.dtype),) if interpret is not None else ()),
  ]
  operands = x, y, S, *(array for array in (*given, place, rows) if array is not None)
  how: dict[str, Any] = {
    "out_type": outputs,
    "scratch_types": scratch,
    "grid": (batch * all_heads * tiles,),
    "grid_names": ("block",),
    "num_threads": _COMPUTING + 1,
    "thread_name": "thread",
    "compiler_params": plgpu.CompilerParams(approx_math=True),
    "interpret": interpret,
  }
  if rows is None:
    return tuple(varying_as(x, plgpu.kernel(kernel, **how, kernel_name="state_read")(*operands)))

  @jax.custom_batching.sequential_vmap
  def one_at_a_time(*operands: Array) -> list[Array]:
    return kernel_in_place(kernel, changed={len(operands) - 1: 0}, **how, name="state_read")(*operands)

  return tuple(varying_as(x, one_at_a_time(*operands)))
