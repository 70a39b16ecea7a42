"""Products of two matrices that begin from nothing, on Hopper.

`plgpu.wgmma` adds to an accumulator. Where that is zero ptxas leaves it to the first instruction not to add, but not
inside two loops, nor in all of several places: there it sets each register to zero before, 32 instructions for 64 x 64.
Here the first instruction is told.
"""

from typing import Any

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
_KINDS = {"bfloat16": "bf16", "float16": "f16"}


def product(left: Any, right: Any, interpret: Any) -> Float[Array, "rows columns"]:
  """`left @ right.T` of shared memory, of ROWS rows each; all products that this warpgroup has begun have come, too."""
  if interpret is not None:  # where there is no inline code

    def summed(sums: Any) -> Array:
      plgpu.wgmma(sums, left, right.transpose((1, 0)))
      found: Array = sums[...]
      return found

    in_full: Array = pl.run_scoped(summed, plgpu.ACC((ROWS, ROWS), jnp.float32))
    return in_full
  under_way = _begin(left, right)
  plgpu.wgmma_wait(0)
  found: Array = lax.optimization_barrier(under_way)  # used from here on
  return found


def _begin(left: Any, right: Any) -> Float[Array, "rows columns"]:
  assert left.dtype == right.dtype
  assert left.shape == right.shape
  shape, kind = (ROWS, ROWS), _KINDS[jnp.dtype(right.dtype).name]
  wide = min(right.shape[-1], 64)  # columns of a swizzled tile
  ref = plgpu.RefType((plgpu.TilingTransform((8, wide)), plgpu.SwizzleTransform(2 * wide)))

  @plgpu.inline_mgpu(arg_types=(ref, ref), return_type=plgpu.ShapeDtypeStruct(shape, jnp.float32, WGMMA))
  def from_nothing(_: Any, left: Any, right: Any) -> Any:
    lefts, rights = _descriptors(left, wide, is_right=False), _descriptors(right, wide, is_right=True)
    sums = ", ".join(f"${n}" for n in range(_SUMS))
    steps = [
      f"wgmma.mma_async.sync.aligned.m64n{ROWS}k{_K}.f32.{kind}.{kind} "
      f"{{{sums}}}, ${_SUMS + n}, ${_SUMS + len(lefts) + n}, "
      f"{int(n > 0)}, 1, 1, 0, 0;"  # whether to add; signs; nothing is transposed
      for n in range(len(lefts))
    ]
    f32 = ir.F32Type.get()
    found = llvm.inline_asm(
      llvm.StructType.get_literal([f32] * _SUMS),
      [*lefts, *rights],
      " ".join(["wgmma.fence.sync.aligned;", *steps, "wgmma.commit_group.sync.aligned;"]),
      ",".join(["=&f"] * _SUMS + ["l"] * (len(lefts) + len(rights)) + ["~{memory}"]),
      has_side_effects=True,
    )
    layout = fragmented_array.WGMMA_LAYOUT_ACC_32BIT
    registers = np.empty(layout.registers_shape(shape), dtype=object)
    for n, place in enumerate(np.ndindex(registers.shape)):
      registers[place] = llvm.bitcast(ir.VectorType.get((1,), f32), llvm.extractvalue(f32, found, [n]))
    array = mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)
    return array.to_layout(fragmented_array.WGMMA_LAYOUT)

  result: Array = from_nothing(left, right)
  return result


def _descriptors(ref: Any, wide: int, *, is_right: bool) -> list[Any]:
  """Where each instruction finds its operand, whose rows lie one after another."""
  (base, (_, (step,))), (_, of_part), _ = mma_utils.create_descriptor(
    mgpu.utils.memref_transpose(ref, (1, 0, 3, 2)) if is_right else ref,
    swizzle=2 * wide,
    large_tile=(wide, wide) if is_right else (ROWS, wide),
    group_size=(wide, ROWS) if is_right else (ROWS, wide),
    logical_k_major=is_right,
  )
  parts = ir.MemRefType(ref.type).shape[1]
  offsets = [part * of_part + n * step for part in range(parts) for n in range(wide // _K)]
  addresses = [mgpu.utils.c(mma_utils.encode_addr(offset), base.type) for offset in offsets]
  return [llvm.add(base, further, overflow_flags=llvm.IntegerOverflowFlags.none) for further in addresses]
