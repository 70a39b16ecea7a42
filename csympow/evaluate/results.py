"""What every task leaves: TASK.csv, TASK.png and, last, TASK.json, each there as a whole or not at all.

Where matplotlib is not installed, as on a machine lent for its chips alone, `context` leaves no picture; the others
need it.
"""

import csv
import importlib.util
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from csympow.data.output import replace_file
from csympow.evaluate.runs import Run
from csympow.train.metrics import finite

if TYPE_CHECKING:
  from matplotlib.figure import Figure


def write(
  directory: Path, task: str, rows: Sequence[dict[str, Any]], record: dict[str, Any], figure: "Figure | None"
) -> str:
  """Writes the files; returns a line that tells of them."""
  table = io.StringIO()
  writer = csv.DictWriter(table, list(rows[0]), lineterminator="\n")
  writer.writeheader()
  writer.writerows({name: "" if value != value else value for name, value in row.items()} for row in rows)  # NaN
  replace_file(directory / f"{task}.csv", table.getvalue().encode())
  if figure is not None:
    replace_file(directory / f"{task}.png", png(figure))
  record = {"task": task, "device": jax.local_devices()[0].device_kind, "jax": jax.__version__} | record
  replace_file(directory / f"{task}.json", (json.dumps(finite(record), indent=1) + "\n").encode())
  pictured = ", .json and .png" if figure is not None else " and .json, no .png: matplotlib is not installed"
  return f"wrote {directory / task}.csv{pictured}"


def can_draw() -> bool:
  """Whether there is what figures are made with."""
  return importlib.util.find_spec("matplotlib") is not None


def png(figure: "Figure") -> bytes:
  """The picture, as a file has it."""
  picture = io.BytesIO()
  figure.savefig(picture, format="png")
  return picture.getvalue()


def new_figure(width: float, height: float) -> "Figure":
  """A figure for print, in inches; not pyplot's, which would look for a display."""
  from matplotlib.backends.backend_agg import FigureCanvasAgg
  from matplotlib.figure import Figure

  figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
  FigureCanvasAgg(figure)
  return figure


def tokens_axis(axes: Any, last: int, label: str) -> None:
  """A logarithmic axis of tokens from 1 to `last`."""
  octaves = max(1, last.bit_length() - 1)
  fewest = -(-octaves // 7)
  step = next((n for n in range(fewest, 2 * fewest + 1) if octaves % n == 0), fewest)  # so that the last has a tick
  ticks = [2**n for n in range(0, octaves + 1, step)]
  axes.set_xscale("log", base=2)
  axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks], fontsize=8)
  axes.minorticks_off()
  axes.set_xlim(0.8, last * 1.25)
  axes.set_xlabel(label)
  axes.grid(alpha=0.3)


def of_run(run: Run) -> dict[str, Any]:
  """What identifies a run in a JSON file."""
  model = run.config.model
  return {
    "run": run.label,
    "workdir": str(run.directory),
    "step": run.step,
    "checkpoint": run.identity,
    "variant": model.variant,
    "power": None if model.variant == "softmax" else model.power,
    "trained_at": run.config.context,
  }


def aligned(rows: Sequence[Sequence[str]]) -> str:
  """A table: the first row is its header, numbers stand to the right."""
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
  return "\n".join(f"  {line}" for line in lines)
