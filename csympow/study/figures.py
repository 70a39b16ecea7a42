"""The study's figures: the paper's two, loss against context for the same tokens, and loss against time."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from csympow.evaluate import results
from csympow.study.config import StudyConfig
from csympow.study.records import TAIL, Mean, Record
from csympow.study.tables import contexts_run, evaluated_cells, measured, of_grid

if TYPE_CHECKING:
  from matplotlib.figure import Figure

# The same in every figure; lines can be told apart without colours, also where one lies on another.
_STYLES: dict[str, dict[str, Any]] = {
  "softmax": {"color": "black", "marker": "o", "linestyle": "-", "linewidth": 1.3},
  "sympow": {"color": "tab:orange", "marker": "s", "linestyle": "--", "linewidth": 1.5},
  "sympow+gating": {"color": "#8ab8e6", "marker": "D", "linestyle": "-", "linewidth": 3.5, "zorder": 1.9},
  "conformal": {"color": "#1a7a2e", "marker": "^", "linestyle": "-", "linewidth": 1.3},
}
_PANEL = (4.6, 3.7)  # inches: its text can be read at half the width of a page
_WIDE = 6.4  # inches, of a panel that stands alone
_FIRST_POSITION = 256  # below it few tokens are averaged, and the loss is that of a book's very beginning
_FIRST_WINDOW = 64  # every model gains by every token up to it
_CEILING = 1.5  # nats above the others' range up to which a loss that breaks down is drawn
_SMOOTHED = 0.05  # of the time, over which losses against time are averaged


def training(study: StudyConfig, kept: Sequence[Record]) -> "Figure | None":
  """Final training loss against training context, a panel for each power that was run; None if none was."""
  ended = [record for record in kept if not record.diverged]
  shown = {power: contexts for power in study.powers if (contexts := contexts_run(study, ended, power))}
  if not shown:
    return None
  figure, panels = _panels(len(shown), sharey=True)
  for axes, (power, contexts) in zip(panels, shown.items(), strict=True):
    absent = []
    for variant in study.variants:
      found = {context: of_grid(ended, power, context, variant) for context in contexts}
      points = {context: record.final_loss for context, record in found.items() if record}
      _line(axes, points, variant)
      absent += [] if points else [variant]
    axes.set_xscale("log", base=2)
    axes.set_xticks(contexts, [f"{context:,}" for context in contexts])
    axes.set_xlim(contexts[0] / 1.4, contexts[-1] * 1.4)
    axes.minorticks_off()
    axes.set_title(f"p = {power}{', without ' * bool(absent)}{', '.join(absent)}", fontsize=11)
    axes.set_xlabel("training context (tokens)")
    axes.grid(alpha=0.3)
  panels[0].set_ylabel("final training loss (nats per token)")
  _legend(figure, panels)
  told = f"mean over the last {TAIL:.0%} of the steps; bars: standard error over their batches"
  _note(figure, f"{told}, which all variants of a context share")
  return figure


def past_context(study: StudyConfig, kept: Sequence[Record]) -> "Figure | None":
  """Held-out loss against position, far past the training context, a panel for each cell that was evaluated."""
  told = "bands: standard error over them, which all variants share"
  return _evaluated(study, kept, "position", _FIRST_POSITION, "position (tokens)", told, banded=True)


def window(study: StudyConfig, kept: Sequence[Record]) -> "Figure | None":
  """Held-out loss of the same last tokens against how many tokens before them the model is given."""
  told = "their last 256 tokens, the same at every context and for all variants"
  return _evaluated(study, kept, "window", _FIRST_WINDOW, "context given (tokens)", told, banded=False)


def _evaluated(
  study: StudyConfig, kept: Sequence[Record], measure: str, first: int, label: str, told: str, *, banded: bool
) -> "Figure | None":
  """A curve of the evaluation from `first` tokens on, a panel for each cell that was evaluated; None if none was."""
  shown = evaluated_cells(study, kept)
  if not shown:
    return None
  figure, panels = _panels(len(shown))
  notes = ""
  for axes, (power, trained) in zip(panels, shown, strict=True):
    last, drawn = 1, []
    for variant in study.variants:
      record = of_grid(kept, power, trained, variant)
      curve = measured(record, measure)
      if record is None or not curve:
        continue
      notes = f"{record.context[0]['stretches']} stretches of held-out books; {told}"
      ends = [end for end in curve if end >= min(first, max(curve))]
      _curve(axes, ends, [curve[end] for end in ends], variant, banded=banded)
      last = max(last, *ends)
      drawn.append([curve[end].mean for end in ends if math.isfinite(curve[end].mean)])
    _limit(axes, list(filter(None, drawn)))
    axes.axvline(trained, color="red", linestyle=":", linewidth=1.3, label="training context")
    results.tokens_axis(axes, last, label)
    begin = min(first, last)
    ticks = [2**n for n in range(begin.bit_length() - 1, last.bit_length(), 2)]
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks], fontsize=9)
    axes.set_xlim(begin, last * 1.1)
    axes.set_title(f"p = {power}, trained at {trained:,}", fontsize=11)
    axes.set_ylabel("held-out loss (nats per token)")
  _legend(figure, panels)
  _note(figure, notes)
  return figure


def clock(study: StudyConfig, kept: Sequence[Record]) -> "Figure | None":
  """Losses against the time of training; None if nothing was run for it."""
  timed = [record for record in kept if record.kind == "clock"]
  if not timed:
    return None
  figure, (axes,) = _panels(1, width=_WIDE)
  for record in timed:
    seconds = np.cumsum([time or 0.0 for time in record.steps["step_s"]])
    losses = np.asarray(record.losses)
    window = max(1, round(_SMOOTHED * len(losses)))
    smooth = np.convolve(losses, np.full(window, 1 / window), mode="valid")
    style = _STYLES[record.variant]
    colour, marker = style["color"], style["marker"]
    axes.plot(seconds, losses, linewidth=0.5, alpha=0.3, color=colour)
    label = f"{record.variant}: {len(losses):,} steps, {record.tokens_per_s:,.0f} tokens/s"
    middle = (window - 1) // 2
    axes.plot(seconds[middle : middle + len(smooth)], smooth, label=label, **_unmarked(record.variant))
    heldout = [math.nan if loss is None else loss for loss in record.steps["heldout_loss"]]
    axes.plot(seconds, heldout, linestyle="none", marker=marker, markerfacecolor="white", color=colour, zorder=3)
  axes.set_ylim(top=min(9.5, max(float(np.nanmax(record.losses)) for record in timed)))
  model = timed[0].summary["config"]["model"]
  shape = f"{model['num_layers']} layers, {model['d_model']:,} wide, p = {model['power']}"
  axes.set_title(f"{shape}, {timed[0].trained_at:,} tokens of context, {timed[0].summary['device']}", fontsize=10)
  axes.set_xlabel("seconds of training")
  axes.set_ylabel("loss (nats per token)")
  axes.grid(alpha=0.3)
  axes.legend(fontsize=9)
  _note(figure, f"training loss by step and (thick) over {_SMOOTHED:.0%} of the time; marks: held-out loss")
  return figure


def _panels(count: int, *, width: float = _PANEL[0], sharey: bool = False) -> tuple["Figure", list[Any]]:
  """A figure of panels side by side."""
  figure = results.new_figure(width * count, _PANEL[1])
  return figure, list(figure.subplots(1, count, squeeze=False, sharey=sharey)[0])


def _line(axes: Any, points: dict[int, Mean], variant: str) -> None:
  errors = [0.0 if math.isnan(point.error) else point.error for point in points.values()]
  means = [point.mean for point in points.values()]
  axes.errorbar(
    list(points), means, yerr=errors, elinewidth=1, markersize=4, capsize=2, label=variant, **_STYLES[variant]
  )


def _curve(axes: Any, ends: list[int], points: list[Mean], variant: str, *, banded: bool) -> None:
  style = _unmarked(variant)
  axes.plot(ends, [point.mean for point in points], label=variant, **style)
  if banded:
    low, high = ([point.mean + sign * point.error for point in points] for sign in (-1, 1))
    axes.fill_between(ends, low, high, color=style["color"], alpha=0.15, linewidth=0)


def _limit(axes: Any, drawn: list[list[float]]) -> None:
  """Lets a curve that breaks down leave the panel, so that the others can be told apart."""
  if drawn:
    least, most = min(map(min, drawn)), min(map(max, drawn))
    top = min(max(map(max, drawn)), most + _CEILING)
    margin = max(0.1 * (top - least), 0.01)
    axes.set_ylim(least - margin, top + margin)


def _unmarked(variant: str) -> dict[str, Any]:
  return {name: value for name, value in _STYLES[variant].items() if name != "marker"}


def _legend(figure: "Figure", panels: Sequence[Any]) -> None:
  handles, labels = panels[0].get_legend_handles_labels()
  columns = -(-len(labels) // (1 if len(panels) > 1 else 2))  # over a single panel, in two lines
  figure.legend(handles, labels, loc="outside upper center", ncols=columns, fontsize=9)


def _note(figure: "Figure", text: str) -> None:
  """What is drawn, in small print below."""
  figure.supxlabel(text, fontsize=8)
