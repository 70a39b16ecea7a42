"""Which implementations a call can have: XLA's always, Pallas kernels where there is one for the shape and the chip."""

import functools

import jax
from jax.typing import DTypeLike

from csympow import cost
from kernels_pallas.gpu import step
from kernels_pallas.gpu.tiles import BLOCK, TILE
from kernels_pallas.tpu.shifts import LANES, largest_chunk

_WIDTHS = (16, 32, 64, 128)
_WIDTHS_IN_WORDS = f"{', '.join(map(str, _WIDTHS[:-1]))} and {_WIDTHS[-1]}"
_TPU_WIDTHS = (64, 128)
_DTYPES = ("bfloat16", "float16")
_MOST_QUERIES = 8  # of a step, for which there are registers
_MOST_FEATURES = 65_536  # of which a table is in memory, and of which states are not too many to be worth it
_MOST_BYTES = 4 * 2**30  # of features that lie in memory, in the chunked form beyond power 2
_OTHER_GPU = "has kernels for NVIDIA Hopper GPUs (compute capability 9.0), and this is another"


def allowed(
  shape: cost.Shape,
  dtype: DTypeLike,
  form: str,
  chunk_size: int | None,
  asked: str | None,
  device: str,
  split: bool = False,
) -> dict[cost.Implementation, tuple[cost.Form, ...]]:
  """The implementations to choose from, and the forms that each has for this call, over a sequence that may be split.

  An asked one that cannot be had raises NotImplementedError that says why.
  """
  forms: tuple[cost.Form, ...] = ("attention", "chunked", "recurrent")
  wanted = tuple(name for name in forms if form in ("auto", name))
  if asked == "xla":
    return {"xla": wanted}
  # Of "auto" it goes without saying that no kernel is recurrent.
  considered = tuple(name for name in wanted if name in (form, "attention", "chunked"))
  refusals = {name: _why_no_kernel(shape, dtype, name, chunk_size, device, split) for name in considered}
  served = tuple(name for name, why in refusals.items() if why is None)
  if asked == "pallas":
    if not served:
      why = "; it ".join(dict.fromkeys(reason for reason in refusals.values() if reason))
      raise NotImplementedError(f"implementation='pallas' {why}; implementation='xla' or None runs everywhere")
    return {"pallas": served}
  return {"xla": wanted, "pallas": served} if served else {"xla": wanted}


def for_step(shape: cost.Shape, asked: str | None, device: str) -> cost.Implementation:
  """What a step is done by; an asked implementation that cannot be had raises NotImplementedError."""
  refusal = _why_no_step_kernel(shape, device)
  if asked == "pallas" and refusal:
    raise NotImplementedError(f"implementation='pallas' {refusal}; implementation='xla' or None runs everywhere")
  return "xla" if asked == "xla" or refusal else "pallas"


def _why_no_step_kernel(shape: cost.Shape, device: str) -> str | None:
  if device != "gpu":
    return f"has a kernel for steps on NVIDIA Hopper GPUs, and this call is for a {device}"
  wide = (shape.head_dim, shape.value_dim)
  if not set(wide) <= set(_WIDTHS):
    return f"has kernels for head dims d and dv of {_WIDTHS_IN_WORDS}, got d={wide[0]} and dv={wide[1]}"
  group = shape.query_heads // shape.heads
  if group > _MOST_QUERIES:
    return f"has a kernel for steps of at most {_MOST_QUERIES} queries for each key, got {group}"
  if shape.features > _MOST_FEATURES or not step.tiling(shape.features, shape.value_dim, group):
    fits = f"at most {_MOST_FEATURES:,} features, a multiple of {step.least_rows(wide[1])}"
    return f"has a kernel for steps with {fits}, got D={shape.features:,} (d={wide[0]}, power={shape.power})"
  return None if _hopper() else _OTHER_GPU


def _why_no_kernel(
  shape: cost.Shape, dtype: DTypeLike, form: cost.Form, chunk_size: int | None, device: str, split: bool
) -> str | None:
  """Why no Pallas kernel can serve a call, or None where one can."""
  if split and form == "attention":
    return "has kernels over a split sequence for form='chunked' only"
  if form == "recurrent":
    return "has no kernel for form='recurrent', only for 'attention' and 'chunked'"
  if device not in ("gpu", "tpu"):
    return f"has kernels for NVIDIA Hopper GPUs and for TPUs, and this call is for a {device}"
  if (dtype_name := jax.dtypes.canonicalize_dtype(dtype).name) not in _DTYPES:
    return f"has kernels for {' and '.join(_DTYPES)}, got {dtype_name}"
  if device == "tpu":
    return _why_none_on_tpu(shape, form, chunk_size)
  wide = (shape.head_dim, shape.value_dim)
  if not set(wide) <= set(_WIDTHS):
    return f"has kernels for head dims d and dv of {_WIDTHS_IN_WORDS}, got d={wide[0]} and dv={wide[1]}"
  if form == "attention":
    if chunk_size not in (None, TILE):
      return f"has attention kernels with blocks of {TILE}, got chunk_size={chunk_size}"
  else:
    if shape.power != 2 and split:
      return f"has kernels over a split sequence at power=2, got power={shape.power}"
    if shape.features > _MOST_FEATURES:
      most = f"at most {_MOST_FEATURES:,} features"
      return f"has kernels for form='chunked' with {most}, got D={shape.features:,} (d={wide[0]}, power={shape.power})"
    if shape.power != 2 and (least := cost.expanded_bytes(shape, BLOCK)) > _MOST_BYTES:
      most = f"features of {BLOCK} tokens in at most {_MOST_BYTES >> 30} GiB"
      return f"has kernels for form='chunked' at power={shape.power} with {most}, got {least / 2**30:.1f} GiB"
    if chunk_size is not None and chunk_size % BLOCK:
      return f"has kernels for form='chunked' with a chunk_size of whole {BLOCK}s, got chunk_size={chunk_size}"
  return None if _hopper() else _OTHER_GPU


def _why_none_on_tpu(shape: cost.Shape, form: cost.Form, chunk_size: int | None) -> str | None:
  if not {shape.head_dim, shape.value_dim} <= set(_TPU_WIDTHS):
    return f"has kernels for TPUs with d and dv of 64 and 128, got d={shape.head_dim} and dv={shape.value_dim}"
  if form == "attention":
    if chunk_size is not None:
      return f"has attention kernels for TPUs whose blocks have a size of their own, got chunk_size={chunk_size}"
    return None
  if shape.power != 2:
    return f"has kernels for form='chunked' at power=2, got power={shape.power}"
  group = shape.query_heads // shape.heads
  largest = largest_chunk(group)
  if not largest:
    return f"has kernels for form='chunked' on TPUs with at most 32 queries for each key, got {group}"
  if chunk_size is not None and (chunk_size % LANES or chunk_size > largest):
    return f"has kernels for TPUs with a chunk_size of whole {LANES}s up to {largest}, got chunk_size={chunk_size}"
  return None


@functools.cache
def _hopper() -> bool:
  """Whether all GPUs at hand are Hopper's. Where there are none, a program is compiled ahead of time, for Hopper."""
  devices = [device for device in jax.devices() if device.platform == "gpu"]
  return all(getattr(device, "compute_capability", "") == "9.0" for device in devices)
