"""Scores over length and, say, depth, as a picture of one row for each model and one column for each score."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float
from matplotlib.figure import Figure

from csympow.evaluate.results import new_figure


class Score(NamedTuple):
  """One column.

  Attributes:
    title: above it.
    low: the value at the colours' one end; None: the least there is.
    high: and at the other; None: the greatest.
    good_is_high: whether more is better.
    digits: behind the point, in the cells.
    around_zero: whether the sign matters: the colours then reach as far to both sides, and to 1 at least.
  """

  title: str
  low: float | None
  high: float | None
  good_is_high: bool
  digits: int
  around_zero: bool = False


class Map(NamedTuple):
  """One model's scores.

  Attributes:
    label: the model.
    lengths: of the columns.
    rows: their names, from the top.
    axis: what they are.
    trained: the training context, drawn as a dashed red line where there are lengths on both sides.
    values: for each score, by row and length; NaN is left empty.
  """

  label: str
  lengths: Sequence[int]
  rows: Sequence[str]
  axis: str
  trained: int
  values: Sequence[Float[np.ndarray, "rows lengths"]]


def draw(maps: Sequence[Map], scores: Sequence[Score]) -> Figure:
  """The picture."""
  width = max(3.2, 0.5 * max(len(one.lengths) for one in maps) + 1.6)
  heights = [0.24 * len(one.rows) + 1.2 for one in maps]
  figure = new_figure(len(scores) * width, sum(heights))
  all_axes = figure.subplots(len(maps), len(scores), squeeze=False, height_ratios=heights)
  for column, score in enumerate(scores):
    found = np.concatenate([one.values[column].ravel() for one in maps])
    found = found[np.isfinite(found)]
    found = found if found.size else np.zeros(1)  # a model that has no numbers
    low = float(found.min()) if score.low is None else score.low
    high = float(found.max()) if score.high is None else score.high
    if score.around_zero:
      high = float(np.abs(found).max(initial=1.0))
      low = -high
    for row, one in enumerate(maps):
      axes = all_axes[row, column]
      # Bright is good, on paper and on a screen.
      colours = "viridis" if score.good_is_high else "viridis_r"
      image = axes.imshow(one.values[column], cmap=colours, vmin=low, vmax=max(high, low + 1e-9), aspect="auto")
      _cells(axes, one.values[column], score, low, high)
      axes.set_xticks(range(len(one.lengths)), [_short(length) for length in one.lengths])
      axes.set_yticks(range(len(one.rows)), one.rows)
      axes.set_xlabel("length (tokens)")
      axes.set_ylabel(one.axis)
      axes.set_title(f"{one.label}\n{score.title}", fontsize=9)
      within = sum(length <= one.trained for length in one.lengths)
      if 0 < within < len(one.lengths):
        axes.axvline(within - 0.5, color="red", linestyle="--", linewidth=1.5)
      figure.colorbar(image, ax=axes)
  return figure


def _cells(axes: Any, values: Float[np.ndarray, "rows lengths"], score: Score, low: float, high: float) -> None:
  for (y, x), value in np.ndenumerate(values):
    if np.isfinite(value):
      shade = (value - low) / max(high - low, 1e-9)
      bright = shade > 0.6 if score.good_is_high else shade < 0.4
      axes.text(
        x,
        y,
        f"{round(value, score.digits) + 0.0:.{score.digits}f}",
        ha="center",
        va="center",
        fontsize=6,
        color="black" if bright else "white",
      )


def _short(length: int) -> str:
  """65,536 as 64k."""
  return f"{length // 1024}k" if length >= 1024 and length % 1024 == 0 else f"{length:,}"
