"""What is kept of a run, small enough to commit.

NAME.csv            a line a step
NAME_context.csv    losses by position and context, where its model was evaluated
NAME.json           the rest, written last: without it nothing is kept
"""

import csv
import io
import json
import math
import shutil
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from csympow.config import ConfigError
from csympow.data.output import replace_file
from csympow.train.metrics import finite, read

TAIL = 0.05  # of the steps, the last ones, whose mean is the final loss
_WARMUP_STEPS = 2  # whose times do not count
_COLUMNS = ("step", "loss", "grad_norm", "step_s", "heldout_loss")


class Mean(NamedTuple):
  """A mean and its standard error; NaN for a single value."""

  mean: float
  error: float


class Record(NamedTuple):
  """A run whose training has ended.

  Attributes:
    name: of the run.
    summary: what NAME.json says.
    steps: the columns of NAME.csv, with None where a step has no value.
    context: the rows of NAME_context.csv, if there is one.
  """

  name: str
  summary: dict[str, Any]
  steps: dict[str, list[float | None]]
  context: list[dict[str, str]]

  @property
  def kind(self) -> str:
    """What it was for."""
    return str(self.summary["kind"])

  @property
  def variant(self) -> str:
    """Of attention."""
    return str(self.summary["config"]["model"]["variant"])

  @property
  def power(self) -> int:
    """Of attention; means nothing for softmax."""
    return int(self.summary["config"]["model"]["power"])

  @property
  def trained_at(self) -> int:
    """Its training context."""
    return int(self.summary["config"]["context"])

  @property
  def stepping(self) -> float:
    """Seconds that its steps took."""
    return sum(time for time in self.steps["step_s"] if time is not None)

  @property
  def rate(self) -> float:
    """Its learning rate."""
    return float(self.summary["config"]["optimizer"]["learning_rate"])

  @property
  def offset(self) -> float:
    """Of the gate's logit."""
    return float(self.summary["config"]["model"]["gate_offset"])

  @property
  def diverged(self) -> bool:
    """Whether it ended at a loss or gradient that was not finite."""
    return bool(self.summary["outcome"] == "diverged")

  @property
  def losses(self) -> list[float]:
    """The training losses."""
    return [math.nan if loss is None else loss for loss in self.steps["loss"]]

  @property
  def tail(self) -> list[float]:
    """The training losses of the last steps; none of a run that diverged."""
    losses = self.losses
    return [] if self.diverged else losses[-max(1, round(TAIL * len(losses))) :]

  @property
  def final_loss(self) -> Mean:
    """The mean training loss over the last steps; infinite if the run diverged."""
    return mean(self.tail)

  @property
  def heldout_loss(self) -> float | None:
    """The last held-out loss."""
    told = [loss for loss in self.steps["heldout_loss"] if loss is not None]
    return told[-1] if told else None

  @property
  def tokens_per_s(self) -> float:
    """By the median step."""
    times = [time for time in self.steps["step_s"][_WARMUP_STEPS:] if time is not None] or [math.nan]
    return float(self.summary["config"]["batch_tokens"]) / statistics.median(times)


def mean(values: list[float]) -> Mean:
  """The mean of some losses; infinite of none."""
  if not values:
    return Mean(math.inf, math.nan)
  error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
  return Mean(statistics.fmean(values), error)


def training_seconds(workdir: Path) -> float:
  """How long the steps of a run under way have taken, compilation and reports not counted."""
  records = _metrics(workdir)
  gaps = zip(records, [0, *(record["step"] for record in records)], strict=False)
  return float(sum(record["step_s"] * (record["step"] - before) for record, before in gaps))


def seconds_in_all(workdir: Path, seconds: float) -> float:
  """How long a run has taken in all calls, the last of which took so long."""
  path = workdir / "study_seconds.txt"
  if path.exists():
    seconds += float(path.read_text())
  if workdir.exists():
    replace_file(path, f"{seconds:.1f}\n".encode())
  return seconds


def save(out: Path, name: str, workdir: Path, evaluation: Path | None, told: dict[str, Any]) -> Record:
  """Keeps a run whose training has ended in its workdir, and the evaluation of its model if there is one."""
  records = _metrics(workdir)
  replace_file(out / f"{name}.csv", _lines(records))
  if evaluation is not None:
    shutil.copyfile(evaluation / "context.csv", out / f"{name}_context.csv")
  config = json.loads((workdir / "config.json").read_text())["config"]
  del config["data"]["train"], config["data"]["heldout"]
  summary = told | {
    "memory_bytes": max((record.get("memory_bytes") or 0 for record in records), default=0) or None,
    "gates": next((_extremes(record["gates"]) for record in reversed(records) if "gates" in record), None),
    "config": config,
  }
  replace_file(out / f"{name}.json", (json.dumps(finite(summary), indent=1) + "\n").encode())
  record = load(out, name)
  assert record is not None
  return record


def kept_from(out: Path, name: str, workdir: Path) -> bool:
  """Whether what is kept of a run was trained in this workdir, and not in one that is gone."""
  return (out / f"{name}.csv").read_bytes() == _lines(_metrics(workdir))


def load(out: Path, name: str) -> Record | None:
  """What is kept of a run, or None."""
  try:
    if not (out / f"{name}.json").exists():
      return None
    summary = json.loads((out / f"{name}.json").read_text())
    with (out / f"{name}.csv").open(newline="") as lines:
      rows = list(csv.DictReader(lines))
    steps = {column: [float(row[column]) if row[column] else None for row in rows] for column in _COLUMNS}
    context = []
    if summary["evaluated"]:
      with (out / f"{name}_context.csv").open(newline="") as lines:
        context = list(csv.DictReader(lines))
    return Record(name, summary, steps, context)
  except (OSError, ValueError, KeyError, TypeError) as error:
    raise ConfigError(f"{out / name}.json, .csv: damaged ({error}); remove them and the run is done again") from error


def load_all(out: Path) -> list[Record]:
  """What is kept of all runs."""
  names = [path.stem for path in sorted(out.glob("*.json")) if path.with_suffix(".csv").exists()]
  return [record for record in (load(out, name) for name in names) if record is not None]


def _metrics(workdir: Path) -> list[dict[str, Any]]:
  path = workdir / "metrics.jsonl"
  return read(path) if path.exists() else []


def _lines(metrics: Sequence[dict[str, Any]]) -> bytes:
  """NAME.csv."""
  text = io.StringIO()
  writer = csv.writer(text, lineterminator="\n")
  writer.writerow(_COLUMNS)
  writer.writerows([_cell(record.get(column)) for column in _COLUMNS] for record in metrics)
  return text.getvalue().encode()


def _cell(value: int | float | None) -> str:
  return "" if value is None else f"{value:.6g}"


def _extremes(gates: dict[str, Any]) -> dict[str, float]:
  return {name: value for name, value in gates.items() if not name.endswith("_by_head")}
