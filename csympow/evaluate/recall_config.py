"""The schema of the recall experiment: which small models are trained on which mix, and what they are asked.

The defaults are the whole experiment, for a GPU; `configs/recall_small.py` is one for a CPU.
"""

import dataclasses
import math
from typing import Any

from csympow.config import ConfigError
from csympow.evaluate.mqar import Setting
from csympow.model import ModelConfig
from csympow.nn import VARIANTS

type Mix = tuple[tuple[int, int, int], ...]  # (length, pairs, examples) each


@dataclasses.dataclass(frozen=True)
class RecallConfig:
  """A grid of two-layer models, every one trained at every learning rate, and their task.

  Attributes:
    vocab_size: half keys, half values.
    train: what is trained on, as (length, pairs, examples).
    test: what is asked, the same way.
    forgetting: the share of pairs that are keys returning with a new value; 0: every key has one value.
    variants: of attention.
    powers: of each variant but softmax, which has none.
    widths: of the residual stream. A head has width / heads, so the state grows with the width.
    heads: of attention.
    layers: of the model.
    gate_offset: as in ModelConfig.
    rates: learning rates; the best counts.
    epochs: passes over the training mix.
    batch: sequences of a step.
    warmup: share of the steps over which the learning rate rises; then it falls to 0 by a cosine.
    weight_decay: of AdamW, on matrices.
    clip_norm: the largest norm of a gradient.
  """

  vocab_size: int = 8192
  train: Mix = ((64, 4, 100_000), (128, 8, 20_000), (256, 16, 20_000), (256, 32, 20_000), (256, 64, 20_000))
  test: Mix = (
    *((64, 4, 1000), (64, 8, 1000), (64, 16, 1000), (128, 32, 1000)),
    *((256, 64, 1000), (512, 128, 1000), (1024, 256, 1000)),
  )
  forgetting: float = 0.0
  variants: tuple[str, ...] = VARIANTS
  powers: tuple[int, ...] = (2, 4)
  widths: tuple[int, ...] = (64, 128, 256)
  heads: int = 4
  layers: int = 2
  gate_offset: float = 0.0
  rates: tuple[float, ...] = tuple(10 ** (-3 + 0.5 * i) for i in range(4))
  epochs: int = 32
  batch: int = 256
  warmup: float = 0.1
  weight_decay: float = 0.1
  clip_norm: float = 1.0

  def __post_init__(self) -> None:
    for name in ("train", "test", "variants", "widths", "rates"):
      _require(len(getattr(self, name)) > 0, f"{name} must not be empty")
    for name in ("epochs", "batch", "heads", "layers"):
      _require(getattr(self, name) >= 1, f"{name} must be at least 1, got {getattr(self, name)}")
    _require(0 <= self.forgetting <= 0.5, f"forgetting must be from 0 to 0.5, got {self.forgetting}")
    _require(0 <= self.warmup < 1, f"warmup must be from 0 to below 1, got {self.warmup}")
    _require(self.weight_decay >= 0, f"weight_decay must not be negative, got {self.weight_decay}")
    _require(self.clip_norm > 0, f"clip_norm must be positive, got {self.clip_norm}")
    fits = all(math.isfinite(rate) and rate > 0 for rate in self.rates)
    _require(fits, f"rates must be positive, got {', '.join(map(str, self.rates))}")
    for setting in (*self.settings(self.train), *self.settings(self.test)):
      setting.check_vocabulary(self.vocab_size)
    _require(len(self.models()) > 0, "powers must not be empty unless softmax is all there is")

  def settings(self, mix: Mix) -> list[Setting]:
    """The settings of a mix, with the share of returning keys."""
    return [Setting(*entry, returning=round(self.forgetting * entry[1])) for entry in mix]

  def models(self) -> list[ModelConfig]:
    """The shapes of the grid, the small ones first."""
    shapes = []
    for width in self.widths:
      _require(width % self.heads == 0, f"widths must be multiples of heads={self.heads}, got {width}")
      for variant in self.variants:
        for power in (2,) if variant == "softmax" else self.powers:
          try:
            shapes.append(self._shape(width, variant, power))
          except ValueError as error:
            raise ConfigError(f"recall: {error}") from error
    return shapes

  def _shape(self, width: int, variant: str, power: int) -> ModelConfig:
    return ModelConfig(
      vocab_size=self.vocab_size,
      d_model=width,
      num_layers=self.layers,
      num_heads=self.heads,
      head_dim=width // self.heads,
      power=power,
      variant=variant,
      gate_offset=self.gate_offset,
      dtype="float32",
    )


def of_one_model(config: RecallConfig) -> dict[str, Any]:
  """What a model's result depends on beside its own shape, for JSON: the grid that it belongs to does not matter."""
  tree = dataclasses.asdict(config)
  return {name: value for name, value in tree.items() if name not in ("variants", "powers", "widths")}


def _require(condition: bool, message: str) -> None:
  if not condition:
    raise ConfigError(f"recall: {message}")
