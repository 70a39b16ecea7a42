"""Kernels in which one warpgroup sums up while three others read vectors, on Hopper: how long these are comes beside.

warpgroup 0   sums up, in the first blocks of the grid
3 others      read 64 vectors of a head by turns, in all blocks
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from kernels_pallas.gpu.tiles import ROWS, WGMMA, multiprocessors, place_in_ring, shared

_REGISTERS = 232, 88  # of a thread that sums up and of one that reads: together no more than a block starts with
_READERS, _BYTES = 3, 72 * 1024  # of vectors, and what is on its way to them together


def run_beside_readers(
  sum_up: Callable[..., None],
  arrays: Sequence[Array],
  vectors: Float[Array, "B T H d"] | None,
  *,
  outputs: Sequence[jax.ShapeDtypeStruct],
  scratch: Sequence[Any],
  blocks: int,
  name: str,
  interpret: Any,
) -> list[Array]:
  """The outputs of so many blocks that `sum_up`, which is given arrays, outputs and scratch.

  If there are vectors, whole ROWS of them, the largest coordinate of each, B H T, without its sign, is one more.
  """
  kernel, grid = sum_up, blocks
  threads: dict[str, Any] = {}
  if vectors is not None:
    batch, time, heads, head_dim = vectors.shape
    assert time % ROWS == 0
    slots = max(1, _BYTES // (_READERS * ROWS * head_dim * vectors.dtype.itemsize))
    grid = max(blocks, min(multiprocessors(), -(-batch * heads * (time // ROWS) // _READERS)))
    given, made = len(arrays), len(outputs)

    def kernel(*refs: Any) -> None:
      of_sums, vectors_ref = refs[:given], refs[given]
      *more, vectors_smem, filled = refs[given + 1 :]
      largest_ref = more.pop(made)
      thread = lax.axis_index("thread")

      @pl.when((thread == 0) & (lax.axis_index("block") < blocks))
      def _() -> None:
        plgpu.set_max_registers(_REGISTERS[0], action="increase")
        sum_up(*of_sums, *more)

      @pl.when(thread > 0)
      def _() -> None:
        plgpu.set_max_registers(_REGISTERS[1], action="decrease")
        _find_largest(vectors_ref, largest_ref, vectors_smem, filled, thread - 1, grid)

    arrays = [*arrays, vectors]
    outputs = [*outputs, jax.ShapeDtypeStruct((batch, heads, time), jnp.float32)]
    memory = shared((_READERS, slots, ROWS, head_dim), vectors.dtype)
    scratch = [*scratch, memory, plgpu.Barrier(num_barriers=_READERS * slots)]
    threads = {"num_threads": 1 + _READERS, "thread_name": "thread"}
  found: list[Array] = plgpu.kernel(
    kernel,
    out_type=list(outputs),
    scratch_types=list(scratch),
    grid=(grid,),
    grid_names=("block",),
    interpret=interpret,
    kernel_name=name,
    **threads,
  )(*arrays)
  return found


def _find_largest(
  vectors_ref: Any, largest_ref: Any, smem: Any, filled: Any, reader: Int[Array, ""], blocks: int
) -> None:
  """What one reader of each of `blocks` blocks does.

  It keeps a number for each vector: the largest of all would go by way of memory that the readers of a block share.
  """
  batch, time, heads, _ = vectors_ref.shape
  slots, smem = smem.shape[1], smem.at[reader]
  turns, step = batch * heads * (time // ROWS), _READERS * blocks
  first = reader * blocks + lax.axis_index("block")

  def place(n: Int[Array, ""]) -> tuple[Int[Array, ""], Any, Int[Array, ""]]:
    """(sequence, tokens, head) of the n-th turn: those of all heads lie side by side."""
    row, head = (f(first + n * step, jnp.int32(heads)) for f in (lax.div, lax.rem))
    b, part = (f(row, jnp.int32(time // ROWS)) for f in (lax.div, lax.rem))
    return b, pl.ds(part * ROWS, ROWS), head

  def fetch(n: Int[Array, ""]) -> None:
    slot = place_in_ring(n, slots)
    plgpu.copy_gmem_to_smem(vectors_ref.at[place(n)], smem.at[slot], filled.at[reader * slots + slot])

  def find(n: Int[Array, ""], none: None) -> None:
    slot, (b, at, head) = place_in_ring(n, slots), place(n)
    plgpu.barrier_wait(filled.at[reader * slots + slot])
    vector = plgpu.load(smem.at[slot], layout=WGMMA, optimized=False).astype(jnp.float32)
    plgpu.commit_smem()  # all have read it
    pl.when(n + slots < mine)(lambda: fetch(n + slots))
    largest_ref[b, head, at] = jnp.abs(vector).max(axis=1)
    return none

  mine = lax.div(turns - first + step - 1, jnp.int32(step))
  for n in range(slots):
    pl.when(n < mine)(functools.partial(fetch, jnp.int32(n)))
  lax.fori_loop(0, mine, find, None)
