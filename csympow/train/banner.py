"""What a run is about to do, in a few lines."""

import math
from typing import Any

import jax

from csympow.config import Config
from csympow.data.loader import Windows
from csympow.train import flops
from csympow.train.metrics import readable, size
from csympow.train.step import TrainState


def describe(
  config: Config, state: TrainState, sizes: dict[str, int], devices: Any, windows: Windows, workdir: object
) -> str:
  """The banner, but for what only the compiler knows."""
  device = devices[0]
  platform = "gpu" if device.platform in ("cuda", "rocm") else device.platform
  count = sum(math.prod(x.shape) for x in jax.tree.leaves(state.parameters))
  tokens = config.batch_tokens
  epochs = config.steps * config.rows / len(windows)
  model = config.model
  explained = flops.explanation(config, sizes, platform)
  state_bytes = 0
  if explained is None:
    how = "softmax attention, " + ("cuDNN where it takes the shapes" if platform == "gpu" else "XLA")
    memory = f"keys and values, {size(_kv_bytes(config))} a sequence of {config.context:,}"
  else:
    how = f"{explained.form} form, {explained.implementation}, chunk {explained.chunk_size:,}: {explained.reason}"
    rows = config.rows // config.accumulation // (sizes["data"] * sizes["fsdp"])
    state_bytes = explained.state_bytes * model.num_layers * sizes["tensor"] // rows
    memory = f"{size(state_bytes)} a sequence of any length, over all layers"
  held = sum(x.dtype.itemsize * math.prod(x.sharding.shard_shape(x.shape)) for x in jax.tree.leaves(state))
  per_token = flops.per_token(config, state.parameters, platform)
  spread = " x ".join(f"{name} {n}" for name, n in sizes.items()) if len(devices) > 1 else "one device"
  lines = {
    "model": f"{model.variant}, p={model.power}, {count:,} parameters, {model.num_layers} layers of "
    f"{model.num_heads} heads of {model.head_dim}"
    if model.variant != "softmax"
    else f"softmax, {count:,} parameters, {model.num_layers} layers of {model.num_heads} heads of {model.head_dim}",
    "data": f"{config.data.train}: {len(windows):,} windows of {config.context:,} tokens; {epochs:.3g} epochs",
    "steps": f"{config.steps:,} of {tokens:,} tokens ({config.rows} x {config.context:,}), "
    f"{config.steps * tokens:,} tokens in all",
    "attention": how,
    "state": memory,
    "compute": f"{readable(per_token, ' ')}FLOP a token ({flops.FORMULA})",
    "devices": f"{len(devices)} {device.device_kind}: {spread}; {jax.process_count()} process"
    + ("es" if jax.process_count() > 1 else ""),
    "predicted": f"{size(held)} of parameters and optimizer a device, as much again for gradients and copies; "
    "the compiler's own count follows",
    "workdir": str(workdir),
  }
  return "\n".join(f"  {name:<10} {text}" for name, text in lines.items())


def memory(compiled: Any) -> tuple[int, str]:
  """Bytes of a device that the compiled step needs, by the compiler's count, and how they are made up."""
  analysis = compiled.memory_analysis()
  if analysis is None:
    return 0, "not told by this compiler"
  arguments, temporary = analysis.argument_size_in_bytes, analysis.temp_size_in_bytes
  output = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
  total = arguments + temporary + output + analysis.generated_code_size_in_bytes
  return total, f"{size(total)} a device: {size(arguments)} arguments, {size(temporary)} temporaries"


def _kv_bytes(config: Config) -> int:
  model = config.model
  width = 2 * (model.num_kv_heads or model.num_heads) * model.head_dim * jax.numpy.dtype(model.dtype).itemsize
  return config.context * model.num_layers * width
