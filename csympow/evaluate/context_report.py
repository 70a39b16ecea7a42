"""The four curves of loss against context of several runs, as a table, CSV, JSON and a figure."""

import math
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from csympow.evaluate import curves, results
from csympow.evaluate.caches import memory_of
from csympow.evaluate.curves import Curve
from csympow.evaluate.runs import Run
from csympow.evaluate.stretches import Stretches
from csympow.train.metrics import size

if TYPE_CHECKING:
  from matplotlib.figure import Figure

  from csympow.evaluate.context import Losses

_MEASURES = {
  "position": "mean loss of positions first..context, 8 buckets an octave",
  "cumulative": "mean loss of positions 1..context",
  "window": "mean loss of the last {scored} tokens, the same at every context, given only the last `context` tokens; "
  "below {scored}, they are cut into blocks of `context` tokens that each begin anew",
  "gain": "window-matched loss at this context less that at the whole length, paired by stretch",
}


def write(directory: Path, runs: list[Run], stretches: Stretches, losses: list["Losses"]) -> str:
  """Writes the files; returns the table and the line that names them."""
  measured = [_measures(each, stretches.length) for each in losses]
  rows = [row for run, curves in zip(runs, measured, strict=True) for row in _rows(run, stretches, curves)]
  scored = min(curves.SCORED, stretches.length)
  record = stretches.record() | {
    "unit": "nats per token",
    "measures": {name: text.format(scored=scored) for name, text in _MEASURES.items()},
    "runs": [
      results.of_run(run)
      | {"rotary": rotary(run), "state_bytes": run.state_bytes(stretches.length)}
      | {"not_finite_from": lost.not_finite_from}
      | {name: _as_json(run, curve) for name, curve in found.items()}
      for run, lost, found in zip(runs, losses, measured, strict=True)
    ],
  }
  figure = _figure(runs, stretches, measured) if results.can_draw() else None
  line = results.write(directory, "context", rows, record, figure)
  tables = []
  for run, lost, found in zip(runs, losses, measured, strict=True):
    tables.append(table(run, stretches, found) + (f"\n  {not_finite(run, lost)}" if lost.not_finite_from else ""))
  return "\n\n".join([*tables, line])


def not_finite(run: Run, losses: "Losses") -> str:
  """The line that tells where a model breaks."""
  return f"{run.label}: losses are not finite from position {losses.not_finite_from:,}"


def rotary(run: Run) -> str:
  """What becomes of the rotary positions beyond the training context."""
  model = run.config.model
  same = f"rates of N = {model.max_length:,} as in training, positions count on past {run.config.context:,}"
  return f"{same}, at a speed the data decide" if model.variant == "conformal" else f"{same}; no interpolation"


def table(run: Run, stretches: Stretches, measured: dict[str, Curve]) -> str:
  """For a terminal: a line for each power of two."""
  rows = [["context", "at position", "cumulative", f"last {_scored(stretches)}", "gain", "state"]]
  found = {name: dict(zip(c.last, zip(c.loss, c.error, strict=True), strict=True)) for name, c in measured.items()}
  trained = run.config.context
  marks = []
  for context in curves.contexts(stretches.length):
    values = [_number(found[name].get(context)) for name in _MEASURES]
    rows.append([f"{context:,}", *values, size(run.state_bytes(context))])
    marks.append(" <- training context" if context == trained else "")
  header, *lines = results.aligned(rows).splitlines()
  told = [
    f"{run.label}, step {run.step:,}: nats per token (and standard error) over {stretches.describe()}",
    header,
    *(line + mark for line, mark in zip(lines, marks, strict=True)),
  ]
  if run.config.model.variant == "softmax":
    told.append(f"  rotary: {rotary(run)}")
  return "\n".join(told)


def _measures(losses: "Losses", length: int) -> dict[str, Curve]:
  return {
    "position": curves.by_position(losses.sums, losses.counts, length),
    "cumulative": curves.cumulative(losses.sums, losses.counts, length),
    "window": curves.window_matched(losses.windows, length),
    "gain": curves.gain(losses.windows, length),
  }


def _rows(run: Run, stretches: Stretches, measured: dict[str, Curve]) -> list[dict[str, Any]]:
  return [
    {
      "run": run.label,
      "step": run.step,
      "measure": name,
      "first": first,
      "context": last,
      "loss": loss,
      "standard_error": error,
      "stretches": len(stretches.tokens),
      "documents": stretches.documents,
      "joined": stretches.joined,
      "trained_at": run.config.context,
      "state_bytes": run.state_bytes(last),
    }
    for name, curve in measured.items()
    for first, last, loss, error in zip(*curve, strict=True)
  ]


def _as_json(run: Run, curve: Curve) -> dict[str, list[Any]]:
  return {
    "first": curve.first,
    "context": curve.last,
    "loss": curve.loss,
    "standard_error": curve.error,
    "state_bytes": [run.state_bytes(last) for last in curve.last],
  }


def _scored(stretches: Stretches) -> int:
  return min(curves.SCORED, stretches.length)


def _number(value: tuple[float, float] | None) -> str:
  if value is None:
    return "-"
  loss, error = value
  return f"{round(loss, 4) + 0.0:.4f}" + (f" ({error:.4f})" if math.isfinite(error) else "")


def _figure(runs: list[Run], stretches: Stretches, measured: list[dict[str, Curve]]) -> "Figure":
  figure = results.new_figure(10.0, 8.0)
  panels = figure.subplots(2, 2)
  scored = _scored(stretches)
  titles = {
    "position": ("by position", "position in the text (tokens)"),
    "cumulative": ("mean of all positions up to C", "C (tokens)"),
    "window": (f"the same last {scored} tokens, given only the last C", "C (tokens)"),
    "gain": ("what context beyond C gains: loss at C less loss at the end", "C (tokens)"),
  }
  for axes, (name, (title, label)) in zip(panels.flat, titles.items(), strict=True):
    for number, (run, found) in enumerate(zip(runs, measured, strict=True)):
      _draw(
        axes, found[name], f"{run.label}: {memory_of(run.model, stretches.length)}", number, dense=name == "position"
      )
    for trained in sorted({run.config.context for run in runs}):
      told = f"training context, {trained:,} tokens"
      axes.axvline(trained, color="red", linestyle="--", linewidth=1, label=told)
    results.tokens_axis(axes, stretches.length, label)
    axes.set_title(title, fontsize=10)
    axes.set_ylabel("loss (nats per token)")
  panels[1, 1].set_ylabel("gain (nats per token)")
  handles, labels = panels[0, 0].get_legend_handles_labels()
  figure.legend(handles, labels, loc="outside upper center", fontsize=9, ncols=2 if len(labels) > 3 else 1)
  bars = "; bands and bars: standard error over them" if len(stretches.tokens) > 1 else ": no standard error of one"
  notes = [f"{stretches.describe()}, from {stretches.source}{bars}"]
  notes += [f"{run.label}, rotary: {rotary(run)}" for run in runs if run.config.model.variant == "softmax"]
  figure.supxlabel("\n".join(line for note in notes for line in textwrap.wrap(note, 150)), fontsize=8)
  return figure


def _draw(axes: Any, curve: Curve, label: str, number: int, *, dense: bool) -> None:
  style: dict[str, Any] = {"color": f"C{number}", "linestyle": ("-", "-.", ":")[number % 3], "label": label}
  if not dense:
    axes.errorbar(curve.last, curve.loss, yerr=curve.error, marker="osD^"[number % 4], markersize=4, capsize=2, **style)
    return
  middle = [(first * last) ** 0.5 for first, last in zip(curve.first, curve.last, strict=True)]
  axes.plot(middle, curve.loss, linewidth=1.2, **style)
  low, high = ([m + sign * e for m, e in zip(curve.loss, curve.error, strict=True)] for sign in (-1, 1))
  axes.fill_between(middle, low, high, color=style["color"], alpha=0.2, linewidth=0)
