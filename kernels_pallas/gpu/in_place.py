"""Mosaic GPU kernels that change some of their operands in memory, inside shard_map too.

The one place that needs a private part of JAX: what is beneath `plgpu.kernel` can do this, and it does not pass it on.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
from jax.experimental import pallas as pl
from jaxtyping import Array


def kernel_in_place(
  body: Callable[..., None],
  *,
  changed: Mapping[int, int],
  out_type: list[jax.ShapeDtypeStruct],
  scratch_types: list[Any],
  grid: tuple[int, ...],
  grid_names: tuple[str, ...],
  compiler_params: plgpu.CompilerParams,
  interpret: Any,
  name: str,
  num_threads: int | None = None,
  thread_name: str | None = None,
) -> Callable[..., list[Array]]:
  """`plgpu.kernel`, in which operand i and output changed[i] are the same memory: either may be written to.

  XLA copies the operand first where it is still needed afterwards. Not to be used under vmap.
  """
  from jax._src.pallas import mpmd  # here, so that where it is not found all else still works

  def with_scratch(*refs: Any) -> None:
    pl.run_scoped(functools.partial(body, *refs), *scratch_types, collective_axes=thread_name or ())

  mesh = plgpu.Mesh(
    grid=grid, grid_names=grid_names, num_threads=num_threads, thread_name=thread_name, kernel_name=name
  )
  return mpmd._mpmd_map(
    [(mesh, with_scratch)],
    out_type,
    input_output_aliases=changed,
    compiler_params=compiler_params,
    interpret=interpret or False,
    name=name,
  )
