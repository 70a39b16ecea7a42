"""Products of two matrices that begin from nothing, on Hopper.

`plgpu.wgmma` adds to an accumulator. Where that is zero ptxas leaves it to the first instruction not to add, but not
inside two loops, nor in all of several places: there it sets each register to zero before, 32 instructions for 64 x 64.
Here the first instruction is told.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import fragmented_array, mma_utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm
from jaxtyping import Array, Float

from kernels_pallas.gpu.tiles import ROWS, WGMMA

_K = 16  # of an instruction
_SUMS = ROWS // 2  # of a thread
_FENCE, _COMMIT = "wgmma.fence.sync.aligned;", "wgmma.commit_group.sync.aligned;"


def product(left: Any, right: Any, interpret: Any) -> Float[Array, "rows columns"]:
  """`left @ right.T`, of ROWS rows each, finished: all products that this warpgroup has begun have come."""
  result = begun(left, right, interpret)
  plgpu.wgmma_wait(0)
  found: Array = lax.optimization_barrier(result)
  return found


def begun(left: Any, right: Any, interpret: Any) -> Float[Array, "rows columns"]:
  """The same, under way: to be used after `plgpu.wgmma_wait` only, behind a barrier.

  The left one may be in registers.
  """
  shape, kind = (ROWS, ROWS), jnp.dtype(right.dtype)
  if interpret is not None:  # where there is no inline code, nor are left operands in registers

    def summed(sums: Any) -> Array:
      plgpu.wgmma(sums, left, right.transpose((1, 0)))
      found: Array = sums[...]
      return found

    in_full: Array = pl.run_scoped(summed, plgpu.ACC(shape, jnp.float32))
    return in_full
  wide = min(right.shape[-1], 64)  # columns of a swizzled tile
  ref = plgpu.RefType((plgpu.TilingTransform((8, wide)), plgpu.SwizzleTransform(2 * wide)))
  in_registers = isinstance(left, jax.Array)
  name = {"bfloat16": "bf16", "float16": "f16"}[kind.name]

  @plgpu.inline_mgpu(
    arg_types=(WGMMA if in_registers else ref, ref), return_type=plgpu.ShapeDtypeStruct(shape, jnp.float32, WGMMA)
  )
  def from_nothing(_: Any, left: Any, right: Any) -> Any:
    lefts = list(_in_registers(left) if in_registers else ([x] for x in _descriptors(left, wide, is_right=False)))
    rights = list(_descriptors(right, wide, is_right=True))
    sums, steps = ", ".join(f"${n}" for n in range(_SUMS)), []
    for n in range(len(rights)):
      first, many = _SUMS + n * len(lefts[0]), len(lefts[0])
      a = ", ".join(f"${first + m}" for m in range(many))
      a, b = f"{{{a}}}" if in_registers else a, _SUMS + len(lefts) * many + n
      flags = f"{int(n > 0)}, 1, 1, 0" + ("" if in_registers else ", 0")  # whether to add; signs; nothing is transposed
      steps.append(f"wgmma.mma_async.sync.aligned.m64n{ROWS}k{_K}.f32.{name}.{name} {{{sums}}}, {a}, ${b}, {flags};")
    operands = [*(x for part in lefts for x in part), *rights]
    kinds = ["=f"] * _SUMS + ["r" if in_registers else "l"] * (len(operands) - len(rights)) + ["l"] * len(rights)
    f32 = ir.F32Type.get()
    found = llvm.inline_asm(
      llvm.StructType.get_literal([f32] * _SUMS),
      operands,
      " ".join([_FENCE, *steps, _COMMIT]),
      ",".join([*kinds, "~{memory}"]),
      has_side_effects=True,
    )
    layout = fragmented_array.WGMMA_LAYOUT_ACC_32BIT
    registers = np.empty(layout.registers_shape(shape), dtype=object)
    for n, place in enumerate(np.ndindex(registers.shape)):
      registers[place] = llvm.bitcast(ir.VectorType.get((1,), f32), llvm.extractvalue(f32, found, [n]))
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None).to_layout(
      fragmented_array.WGMMA_LAYOUT
    )

  result: Array = from_nothing(left, right)
  return result


def _in_registers(x: Any) -> Iterator[Any]:
  """The registers of each instruction's left operand."""
  i32 = ir.IntegerType.get_signless(32)
  for start in range(0, x.shape[1], _K):
    yield [llvm.bitcast(i32, pair) for pair in x[:, start : start + _K].registers.flat]


def _descriptors(ref: Any, wide: int, *, is_right: bool) -> Iterator[Any]:
  """Where each instruction finds its operand, whose rows lie one after another."""
  (base, (_, (step,))), (_, of_part), _ = mma_utils.create_descriptor(
    mgpu.utils.memref_transpose(ref, (1, 0, 3, 2)) if is_right else ref,
    swizzle=2 * wide,
    large_tile=(wide, wide) if is_right else (ROWS, wide),
    group_size=(wide, ROWS) if is_right else (ROWS, wide),
    logical_k_major=is_right,
  )
  for part in range(ir.MemRefType(ref.type).shape[1]):
    for n in range(wide // _K):
      further = mgpu.utils.c(mma_utils.encode_addr(part * of_part + n * step), base.type)
      yield llvm.add(base, further, overflow_flags=llvm.IntegerOverflowFlags.none)
