"""The study's figures: the paper's two, and loss against time."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from csympow.evaluate import results
from csympow.study.config import StudyConfig
from csympow.study.records import Mean, Record
from csympow.study.tables import measured, of_grid

if TYPE_CHECKING:
  from matplotlib.figure import Figure

# The same in every figure; lines can be told apart without colours.
_STYLES: dict[str, dict[str, Any]] = {
  "softmax": {"color": "black", "marker": "o", "linestyle": "-"},
  "sympow": {"color": "tab:orange", "marker": "s", "linestyle": "--"},
  "sympow+gating": {"color": "tab:blue", "marker": "D", "linestyle": "-."},
  "conformal": {"color": "tab:green", "marker": "^", "linestyle": "-"},
}
_FIRST_POSITION = 32  # below it the loss is that of a book's very beginning, and off the scale
_CEILING = 1.5  # nats above the others' range up to which a loss that breaks down is drawn
_SMOOTHED = 0.05  # of the time, over which losses against time are averaged


def training(study: StudyConfig, kept: Sequence[Record]) -> "Figure":
  """Final training loss against training context, a panel for each power."""
  figure = results.new_figure(9.0, 3.8)
  panels = figure.subplots(1, len(study.powers), squeeze=False)[0]
  for axes, power in zip(panels, study.powers, strict=True):
    contexts = study.contexts(power)
    for variant in study.variants:
      found = {context: of_grid(kept, power, context, variant) for context in contexts}
      known = {context: record.final_loss for context, record in found.items() if record and not record.diverged}
      _line(axes, known, variant)
    axes.set_xscale("log", base=2)
    axes.set_xticks(contexts, [f"{context:,}" for context in contexts])
    axes.minorticks_off()
    axes.set_title(f"p = {power}")
    axes.set_xlabel("training context (tokens)")
    axes.set_ylabel("final training loss (nats per token)")
    axes.grid(alpha=0.3)
  _legend(figure, panels[0])
  return figure


def past_context(study: StudyConfig, kept: Sequence[Record]) -> "Figure":
  """Held-out loss against position, far past the training context, a panel for each evaluated cell."""
  figure = results.new_figure(9.0, 4.2)
  panels = figure.subplots(1, len(study.evaluated), squeeze=False)[0]
  notes = ""
  for axes, (power, trained) in zip(panels, study.evaluated, strict=True):
    last, drawn = 1, []
    for variant in study.variants:
      record = of_grid(kept, power, trained, variant)
      curve = measured(record, "position")
      if record is None or not curve:
        continue
      notes = f"{record.context[0]['stretches']} stretches of held-out books; bands: standard error over them"
      ends = [end for end in curve if end >= min(_FIRST_POSITION, max(curve))]
      _band(axes, ends, [curve[end] for end in ends], variant)
      last = max(last, *ends)
      drawn.append([curve[end].mean for end in ends if math.isfinite(curve[end].mean)])
    if drawn:
      # One that breaks down leaves the panel, so that the others can be told apart.
      least, most = min(map(min, drawn)), sorted(map(max, drawn))[0]
      top = min(max(map(max, drawn)), most + _CEILING)
      axes.set_ylim(least - 0.05 * (top - least), top + 0.05 * (top - least))
    axes.axvline(trained, color="red", linestyle="--", linewidth=1, label="training context")
    results.tokens_axis(axes, last, "position (tokens)")
    first = min(_FIRST_POSITION, last)
    ticks = [2**n for n in range(first.bit_length(), last.bit_length(), 2)]
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks], fontsize=8)
    axes.set_xlim(first, last * 1.1)
    axes.set_title(f"p = {power}, trained at {trained:,}")
    axes.set_ylabel("held-out loss (nats per token)")
  _legend(figure, panels[0])
  figure.supxlabel(notes, fontsize=8)
  return figure


def clock(study: StudyConfig, kept: Sequence[Record]) -> "Figure":
  """Training loss against the time of training."""
  figure = results.new_figure(6.4, 4.0)
  axes = figure.subplots()
  context = 0
  for record in (record for record in kept if record.kind == "clock"):
    context = record.trained_at
    seconds = np.cumsum([time or 0.0 for time in record.steps["step_s"]])
    losses = np.asarray([math.nan if loss is None else loss for loss in record.steps["loss"]])
    window = max(1, round(_SMOOTHED * len(losses)))
    smooth = np.convolve(losses, np.full(window, 1 / window), mode="valid")
    style = {name: value for name, value in _STYLES[record.variant].items() if name != "marker"}
    label = f"{record.variant}: {record.tokens_per_s:,.0f} tokens/s"
    axes.plot(seconds, losses, linewidth=0.5, alpha=0.3, color=style["color"])
    middle = (window - 1) // 2
    axes.plot(seconds[middle : middle + len(smooth)], smooth, linewidth=1.5, label=label, **style)
    axes.set_ylim(top=min(9.5, float(np.nanmax(losses))))
  axes.set_xlabel("seconds of training")
  axes.set_ylabel("training loss (nats per token)")
  axes.set_title(f"{context:,} tokens of context", fontsize=10)
  axes.grid(alpha=0.3)
  axes.legend()
  return figure


def _line(axes: Any, points: dict[int, Mean], variant: str) -> None:
  errors = [0.0 if math.isnan(point.error) else point.error for point in points.values()]
  means = [point.mean for point in points.values()]
  axes.errorbar(list(points), means, yerr=errors, markersize=4, capsize=2, label=variant, **_STYLES[variant])


def _band(axes: Any, ends: list[int], points: list[Mean], variant: str) -> None:
  style = {name: value for name, value in _STYLES[variant].items() if name != "marker"}
  axes.plot(ends, [point.mean for point in points], linewidth=1.2, label=variant, **style)
  low, high = ([point.mean + sign * point.error for point in points] for sign in (-1, 1))
  axes.fill_between(ends, low, high, color=style["color"], alpha=0.15, linewidth=0)


def _legend(figure: "Figure", axes: Any) -> None:
  handles, labels = axes.get_legend_handles_labels()
  if labels:
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), fontsize=9)
