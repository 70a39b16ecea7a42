"""How much arithmetic a step is, and what share of the chips' it reaches.

    FLOPs per token = 3 x (2 x matrix parameters + attention of all layers)

Forward is one part and backward two; the matrix parameters are all kernels and the tied embedding once, as the readout.
Attention counts what its form does, from `csympow.cost`; for softmax, 2 T (d + dv) / 2 per query head, the causal half.
Recomputation under remat is not counted, so remat lowers the utilisation.
"""

import math
from typing import Any

import jax

import csympow
from csympow import op
from csympow.config import Config, ConfigError

# Dense bfloat16 FLOP/s of one device, by what JAX calls it.
PEAKS = {
  "NVIDIA H200": 989e12,
  "NVIDIA H100": 989e12,
  "NVIDIA H100 PCIe": 756e12,
  "NVIDIA H100 NVL": 835e12,
  "NVIDIA B200": 2250e12,
  "NVIDIA A100": 312e12,
  "TPU v4": 275e12,
  "TPU v5 lite": 197e12,
  "TPU v5e": 197e12,
  "TPU v5p": 459e12,
  "TPU v5": 459e12,
  "TPU v6 lite": 918e12,
  "TPU v6e": 918e12,
  "TPU7x": 2307e12,
}

FORMULA = "3 x (2 x matrix parameters + attention), remat not counted"


def explanation(config: Config, sizes: dict[str, int], platform: str) -> csympow.Explanation | None:
  """What `csympow.explain` says of one layer's attention on one device; None for softmax.

  Raises a ConfigError if the implementation that the config asks for is not to be had there.
  """
  model = config.model
  if model.variant == "softmax":
    return None
  rows = config.rows // config.accumulation // (sizes["data"] * sizes["fsdp"])

  def shape(heads: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((rows, config.context, heads // sizes["tensor"], model.head_dim), model.dtype)

  queries, keys = shape(model.num_heads), shape(model.num_kv_heads or model.num_heads)
  sequence = op._shape(queries, keys, keys, model.power, needs_state=False)
  how = model.form, model.chunk_size, model.implementation, platform
  try:
    return op._explained(sequence, queries.dtype, *how, split=sizes["context"] > 1)
  except NotImplementedError as error:
    raise ConfigError(f"model.{error}") from error


def per_token(config: Config, parameters: Any, platform: str) -> float:
  """FLOPs of a training step per token."""
  matrices = sum(x.size for x in jax.tree.leaves(parameters) if x.ndim > 2)  # stacked kernels; norms have 2 axes
  embedding = config.model.padded_vocab_size * config.model.d_model
  model = config.model
  whole = {"data": 1, "fsdp": 1, "tensor": 1, "context": 1}
  explained = explanation(config, whole, platform)
  if explained is None:
    attention: float = 2 * config.context * model.head_dim * model.num_heads
  else:
    attention = explained.flops * config.accumulation / config.batch_tokens
  return 3.0 * (2 * (matrices + embedding) + model.num_layers * attention)


def peak(device_kind: str) -> float | None:
  """The FLOP/s of a device, or None if it is not in the table: the longest name that fits wins."""
  fitting = [name for name in PEAKS if device_kind.startswith(name)]
  return PEAKS[max(fitting, key=len)] if fitting else None


def utilisation(tokens_per_s: float, flops_per_token: float, devices: int, device_kind: str) -> float | None:
  """MFU, or None on an unknown chip."""
  of_chip = peak(device_kind)
  return (
    None if of_chip is None or not math.isfinite(tokens_per_s) else tokens_per_s * flops_per_token / (of_chip * devices)
  )
