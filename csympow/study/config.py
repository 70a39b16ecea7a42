"""The schema of the study; the defaults are the study itself, and a file with `get_config()` may hold another one."""

import dataclasses
import math

from csympow.config import ConfigError
from csympow.nn import VARIANTS

type Cell = tuple[int, int]  # power, context

GATED = ("sympow+gating", "conformal")


@dataclasses.dataclass(frozen=True)
class StudyConfig:
  """Which runs there are.

  Attributes:
    configs: the directory of the runs' config files, `pP_CONTEXT.py` for each cell of the grid.
    grid: powers and contexts, the most telling ones first.
    evaluated: those cells whose models are evaluated past their training context.
    variants: of attention, at every cell.
    tokens: that each run of the grid is trained on.
    max_context: tokens of the longest context that models are evaluated at.
    documents: held-out stretches that they are evaluated on, at most.
    sweep: the cell at which learning rate and gate offset are chosen.
    sweep_share: of a run's tokens, for each run of the sweep.
    rates: learning rates to choose from.
    offsets: offsets of the gate's logit to choose from, for the variants that have gates.
    clock: config files, by stem, that are run with each of `clock_variants` for the same time.
    clock_variants: of attention.
    clock_seconds: of training, for each of these.
    speed: config files, by stem, that are run as they are, for their speed and memory.
  """

  configs: str = "configs/study"
  grid: tuple[Cell, ...] = (
    *((2, 4096), (4, 16_384), (2, 8192), (2, 1024)),
    *((4, 4096), (2, 256), (4, 1024), (4, 65_536)),
  )
  evaluated: tuple[Cell, ...] = ((2, 4096), (4, 16_384))
  variants: tuple[str, ...] = VARIANTS
  tokens: int = 384 * 65_536
  max_context: int = 65_536
  documents: int = 16
  sweep: Cell = (2, 4096)
  sweep_share: float = 0.5
  rates: tuple[float, ...] = (5e-4, 1e-3, 2e-3)
  offsets: tuple[float, ...] = (0.0, 6.906768)
  clock: tuple[str, ...] = ("large_65536",)
  clock_variants: tuple[str, ...] = ("conformal", "softmax")
  clock_seconds: float = 100.0
  speed: tuple[str, ...] = ("million_1048576", "million_4096")

  def __post_init__(self) -> None:
    for name in ("grid", "variants", "rates", "offsets"):
      _require(len(getattr(self, name)) > 0, f"{name} must not be empty")
    for name in ("tokens", "max_context", "documents"):
      _require(getattr(self, name) >= 1, f"{name} must be at least 1, got {getattr(self, name)}")
    _require(0 < self.sweep_share <= 1, f"sweep_share must be above 0 and at most 1, got {self.sweep_share}")
    seconds = self.clock_seconds
    _require(math.isfinite(seconds) and seconds > 0, f"clock_seconds must be positive, got {seconds}")
    for variant in (*self.variants, *self.clock_variants):
      _require(variant in VARIANTS, f"variants are {', '.join(VARIANTS)}, got {variant}")
    unknown = set(self.evaluated) - set(self.grid)
    _require(not unknown, f"evaluated must be cells of the grid, got {unknown}")

  def contexts(self, power: int) -> list[int]:
    """The contexts of a power, ascending."""
    return sorted(context for p, context in self.grid if p == power)

  @property
  def powers(self) -> list[int]:
    """The powers of the grid, ascending."""
    return sorted({power for power, _ in self.grid})


def _require(condition: bool, message: str) -> None:
  if not condition:
    raise ConfigError(f"study: {message}")
