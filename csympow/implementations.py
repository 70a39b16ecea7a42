"""Which implementations a call can have: XLA's always, Pallas kernels where there is one for the shape and the chip."""

import functools

import jax
from jax.typing import DTypeLike

from csympow import cost

_WIDTHS = (32, 64, 128)
_DTYPES = ("bfloat16", "float16")


def allowed(
  shape: cost.Shape, dtype: DTypeLike, form: str, chunk_size: int | None, asked: str | None, device: str
) -> tuple[cost.Implementation, ...]:
  """The implementations to choose from; an asked one that cannot be had raises NotImplementedError that says why."""
  if asked == "xla":
    return ("xla",)
  refusal = _why_no_kernel(shape, dtype, form, chunk_size, device)
  if asked == "pallas":
    if refusal is not None:
      raise NotImplementedError(f"implementation='pallas' {refusal}; implementation='xla' or None runs everywhere")
    return ("pallas",)
  return ("xla",) if refusal is not None else ("xla", "pallas")


def _why_no_kernel(shape: cost.Shape, dtype: DTypeLike, form: str, chunk_size: int | None, device: str) -> str | None:
  """Why no Pallas kernel can serve a call, or None where one can."""
  if form not in ("auto", "attention"):
    return f"has no kernel for form={form!r} yet, only for 'attention'"
  if device != "gpu":
    return f"has kernels for NVIDIA Hopper GPUs, and this call is for a {device}"
  if chunk_size is not None:
    return f"has kernels with blocks of their own size, got chunk_size={chunk_size}"
  if (dtype_name := jax.dtypes.canonicalize_dtype(dtype).name) not in _DTYPES:
    return f"has kernels for {' and '.join(_DTYPES)}, got {dtype_name}"
  wide = (shape.head_dim, shape.value_dim)
  if not set(wide) <= set(_WIDTHS):
    return f"has kernels for head dims d and dv of 32, 64 and 128, got d={wide[0]} and dv={wide[1]}"
  if shape.needs_state and max(wide) > 64 and wide[0] != wide[1]:
    return f"has kernels with a state for d = dv or both at most 64, got d={wide[0]} and dv={wide[1]}"
  if not _hopper():
    return "has kernels for NVIDIA Hopper GPUs (compute capability 9.0), and this is another"
  return None


@functools.cache
def _hopper() -> bool:
  """Whether all GPUs at hand are Hopper's. Where there are none, a program is compiled ahead of time, for Hopper."""
  devices = [device for device in jax.devices() if device.platform == "gpu"]
  return all(getattr(device, "compute_capability", "") == "9.0" for device in devices)
