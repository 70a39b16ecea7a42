"""What a run tells: `metrics.jsonl`, TensorBoard events, and lines for whoever watches."""

import json
import math
import os
import sys
from pathlib import Path
from typing import Any


class Journal:
  """The metrics of a run, one JSON object a line and one line a logged step; goes on where `step` left off.

  Lines of later steps are from a part of the run that is about to be run again, and a last line without its end is what
  a killed process left: both are removed. Non-finite numbers are written as null, which JSON has.
  """

  def __init__(self, workdir: Path, step: int, tensorboard: bool) -> None:
    path = workdir / "metrics.jsonl"
    known = _rewind(path, step)
    self._file = path.open("a")
    self._postponed = workdir / "postponed.json"
    self.postponed = None if step in known else self._take_postponed(step)
    self._writer: Any = None
    if tensorboard:
      from tensorboardX import SummaryWriter  # half a second that a dry run need not wait

      self._writer = SummaryWriter(str(workdir / "tensorboard"), purge_step=step + 1, flush_secs=10)

  def write(self, record: dict[str, Any]) -> None:
    """Adds a line; numbers, also nested ones, go to TensorBoard as well."""
    self._file.write(json.dumps(finite(record)) + "\n")
    self._file.flush()
    self._postponed.unlink(missing_ok=True)
    if self._writer is not None:
      for name, value in _scalars(record):
        self._writer.add_scalar(name, value, record["step"])

  def postpone(self, record: dict[str, Any]) -> None:
    """Keeps a record that was not completed for the next part of the run, which finds it in `postponed`."""
    self._postponed.write_text(json.dumps(finite(record)))

  def _take_postponed(self, step: int) -> dict[str, Any] | None:
    try:
      record = _record(self._postponed.read_text())
    except (OSError, ValueError):
      return None
    return record if record["step"] == step else None

  def text(self, name: str, text: str, step: int) -> None:
    """A text for TensorBoard."""
    if self._writer is not None:
      self._writer.add_text(name, f"```\n{text}\n```", step)

  def sync(self) -> None:
    """Brings all lines to the disk: a checkpoint must not be newer than the metrics before it."""
    self._file.flush()
    os.fsync(self._file.fileno())

  def close(self) -> None:
    """Closes the files."""
    self.sync()
    self._file.close()
    if self._writer is not None:
      self._writer.close()


def read(path: Path) -> list[dict[str, Any]]:
  """The records of a metrics.jsonl, up to the first line that is none: a torn last one is left out."""
  records = []
  for line in path.read_text(errors="replace").splitlines():
    try:
      records.append(_record(line))
    except ValueError:
      break
  return records


def _record(line: str) -> dict[str, Any]:
  try:
    found = json.loads(line)
  except RecursionError as error:
    raise ValueError("nested too deeply") from error
  if not isinstance(found, dict) or not isinstance(found.get("step"), int):
    raise ValueError("no record of a step")  # noqa: TRY004, as JSON's own errors are
  return found


def _rewind(path: Path, step: int) -> set[int]:
  """Cuts off the lines after a step; returns the steps that are left."""
  if not path.exists():
    return set()
  kept = [record for record in read(path) if record["step"] <= step]
  temporary = path.with_name(".metrics.jsonl")
  with temporary.open("w") as opened:
    opened.writelines(json.dumps(record) + "\n" for record in kept)
    opened.flush()
    os.fsync(opened.fileno())
  temporary.rename(path)
  return {record["step"] for record in kept}


def finite(value: Any) -> Any:
  """The value with None for every number that JSON does not have."""
  if isinstance(value, dict):
    return {name: finite(inner) for name, inner in value.items()}
  if isinstance(value, list):
    return [finite(inner) for inner in value]
  return None if isinstance(value, float) and not math.isfinite(value) else value


def _scalars(record: dict[str, Any], prefix: str = "") -> list[tuple[str, float]]:
  found = []
  for name, value in record.items():
    if isinstance(value, dict):
      found += _scalars(value, f"{prefix}{name}/")
    elif isinstance(value, int | float) and name != "step":
      found.append((prefix + name, value))
  return found


class Progress:
  """Lines for whoever watches: one that is written over on a terminal, plain ones in a log."""

  def __init__(self, total: int, tokens_per_step: int) -> None:
    self._total, self._tokens = total, tokens_per_step
    self._terminal = sys.stdout.isatty()
    self._width = 0

  def step(self, step: int, loss: float, tokens_per_s: float, due: bool) -> None:
    """Shows where the run is: always on a terminal, when due in a log."""
    if not (self._terminal or due):
      return
    remaining = (self._total - step) * self._tokens / tokens_per_s if tokens_per_s else math.inf
    text = f"step {step}/{self._total}  loss {loss:.4f}  {readable(tokens_per_s)} tokens/s  ETA {duration(remaining)}"
    if self._terminal:
      self._over(text)
    else:
      print(text, flush=True)

  def say(self, text: str) -> None:
    """A line that stays."""
    if self._terminal and self._width:
      self._over("")
      print("\r", end="")
      self._width = 0
    print(text, flush=True)

  def _over(self, text: str) -> None:
    print("\r" + text.ljust(self._width), end="", flush=True)
    self._width = len(text)


def readable(number: float, gap: str = "") -> str:
  """12.3k, 4.56M; with a gap before the prefix of a unit that is to follow."""
  for unit, name in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
    if abs(number) >= unit:
      return f"{number / unit:.3g}{gap}{name}"
  return f"{number:.3g}{gap}"


def size(count: int | float) -> str:
  """Bytes, for people."""
  for unit, name in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
    if count >= unit:
      return f"{count / unit:.3g} {name}"
  return f"{count:.0f} B"


def duration(seconds: float) -> str:
  """1:02:03."""
  if not math.isfinite(seconds):
    return "-"
  minutes, seconds = divmod(round(seconds), 60)
  hours, minutes = divmod(minutes, 60)
  return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
