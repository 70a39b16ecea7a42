"""The runs of the study, and what its sweep chose for them.

sweep_VARIANT_rateR[_offsetO]      short runs at one cell of the grid, to choose the learning rate and the offset
pP_CONTEXT_VARIANT                 the grid; softmax_CONTEXT where the variant has no power
clock_STEM_VARIANT                 runs of a certain time, for loss against time
STEM                               runs for their speed and memory
"""

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from csympow import overrides
from csympow.config import Config, ConfigError
from csympow.data.output import replace_file
from csympow.study.config import GATED, Cell, StudyConfig
from csympow.study.records import Record

CHOICE = "choice.json"
type Kind = Literal["sweep", "grid", "clock", "speed"]


@dataclasses.dataclass(frozen=True)
class Settings:
  """What the sweep chooses."""

  rate: float
  offset: float


@dataclasses.dataclass(frozen=True)
class Run:
  """One run of train.py and what is due after it.

  Attributes:
    name: of the run, its workdir and its files.
    kind: what it is for.
    file: its config file.
    changes: overrides of it, but for where the data lie.
    config: what they come to.
    evaluated: whether its model is evaluated past its training context.
    seconds: of training, after which it is ended; None: by its steps.
  """

  name: str
  kind: Kind
  file: str
  changes: dict[str, str]
  config: Config
  evaluated: bool = False
  seconds: float | None = None

  @property
  def alone(self) -> bool:
    """Whether it must have the device for itself, because it is timed."""
    return self.kind in ("clock", "speed")

  @property
  def tokens(self) -> int:
    """That it is trained on, unless it is ended before."""
    return self.config.steps * self.config.batch_tokens


def sweep(study: StudyConfig) -> list[Run]:
  """The runs that settings are chosen by, those of all variants at one rate together."""
  tokens = int(study.tokens * study.sweep_share)
  runs = []
  for settings in _candidates(study):
    for variant in study.variants:
      if variant in GATED or settings.offset == study.offsets[0]:
        told = f"_offset{settings.offset:.1f}" if variant in GATED else ""
        name = f"sweep_{_slug(variant)}_rate{settings.rate:g}{told}"
        runs.append(_run(study, name, "sweep", study.sweep, variant, settings, tokens))
  return runs


def grid(study: StudyConfig, choice: dict[str, Settings]) -> list[Run]:
  """The runs of all variants at every cell; of softmax, which has no power, one for each context."""
  runs: dict[str, Run] = {}
  for cell in study.grid:
    power, context = cell
    for variant in study.variants:
      alike = [(p, c) for p, c in study.grid if c == context] if variant == "softmax" else [cell]
      name = f"softmax_{context}" if variant == "softmax" else f"p{power}_{context}_{_slug(variant)}"
      run = _run(study, name, "grid", alike[0], variant, choice[variant], study.tokens)
      runs.setdefault(name, dataclasses.replace(run, evaluated=any(other in study.evaluated for other in alike)))
  return list(runs.values())


def timed(study: StudyConfig) -> list[Run]:
  """The runs that are timed, each alone on the device."""
  runs = []
  for stem in study.clock:
    for variant in study.clock_variants:
      file, changes = f"{study.configs}/{stem}.py", {"model.variant": variant}
      config = overrides.load(file, changes)
      name = f"clock_{stem}_{_slug(variant)}"
      runs.append(Run(name, "clock", file, changes, config, seconds=study.clock_seconds))
  for stem in study.speed:
    file = f"{study.configs}/{stem}.py"
    runs.append(Run(stem, "speed", file, {}, overrides.load(file)))
  return runs


def choose(study: StudyConfig, records: Sequence[Record]) -> dict[str, Settings]:
  """For each variant the settings with the lowest final training loss in the sweep."""
  found: dict[str, Settings] = {}
  for variant in study.variants:
    tried = [record for record in records if record.kind == "sweep" and record.variant == variant]
    best = min(tried, key=lambda record: record.final_loss.mean)
    found[variant] = Settings(best.rate, best.offset)
  return found


def read_choice(study: StudyConfig, out: Path) -> dict[str, Settings] | None:
  """What choice.json says, if it is there: it may be written by hand."""
  path = out / CHOICE
  if not path.exists():
    return None
  try:
    told = json.loads(path.read_text())
    return {variant: Settings(**{k: float(v) for k, v in told[variant].items()}) for variant in study.variants}
  except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
    wanted = f'{{"rate": ..., "offset": ...}} for each of {", ".join(study.variants)}'
    raise ConfigError(f"{path} must hold {wanted}: {type(error).__name__} {error}") from error


def write_choice(out: Path, choice: dict[str, Settings]) -> None:
  """Writes choice.json."""
  told = {variant: dataclasses.asdict(settings) for variant, settings in choice.items()}
  replace_file(out / CHOICE, (json.dumps(told, indent=1) + "\n").encode())


def _candidates(study: StudyConfig) -> Iterator[Settings]:
  for rate in study.rates:
    for offset in study.offsets:
      yield Settings(rate, offset)


def _run(study: StudyConfig, name: str, kind: Kind, cell: Cell, variant: str, settings: Settings, tokens: int) -> Run:
  power, context = cell
  file = f"{study.configs}/p{power}_{context}.py"
  changes = {"model.variant": variant, "optimizer.learning_rate": repr(settings.rate)}
  if variant in GATED:
    changes["model.gate_offset"] = repr(settings.offset)
  steps = max(1, tokens // overrides.load(file).batch_tokens)
  changes["steps"] = str(steps)
  return Run(name, kind, file, changes, overrides.load(file, changes))


def _slug(variant: str) -> str:
  """The variant as a part of a file's name."""
  return variant.removeprefix("sympow+")
