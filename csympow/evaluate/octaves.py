"""Held-out loss by powers of two of the position: the curve that ends a training run, far past its context."""

import csv
import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from csympow.evaluate.curves import standard_error


class Curve(NamedTuple):
  """The loss at positions in (context / 2, context], one entry a power of two.

  Attributes:
    context: the last position of each bucket.
    loss: the mean over positions and documents, in nats.
    error: its standard error over documents.
    documents: how many, or stretches of documents.
  """

  context: list[int]
  loss: list[float]
  error: list[float]
  documents: int


def curve(losses: Float[np.ndarray, "documents length"]) -> Curve:
  """The losses by powers of two of the position."""
  documents, length = losses.shape
  contexts = [2**n for n in range(length.bit_length()) if 2**n <= length]
  means, errors = [], []
  for context in contexts:
    by_document = np.nanmean(losses[:, context // 2 : context], axis=1)
    means.append(float(by_document.mean()))
    errors.append(float(standard_error(by_document)))
  return Curve(contexts, means, errors, documents)


def table(result: Curve, trained: int) -> str:
  """For a terminal."""
  lines = ["  positions         loss (nats/token)   standard error"]
  for context, loss, error in zip(result.context, result.loss, result.error, strict=True):
    if context < 8 and context != 1:
      continue
    span = f"{context // 2 + 1:,} to {context:,}" if context > 1 else "1"
    mark = "   <- training context" if context == trained else f"   {context // trained}x" if context > trained else ""
    lines.append(f"  {span:<18}{loss:>10.4f}{error:>19.4f}{mark}")
  return "\n".join(lines)


def made_at(directory: Path) -> int | None:
  """The step of the model whose curve lies in the directory."""
  try:
    step: int = json.loads((directory / "context.json").read_text())["step"]
  except (OSError, ValueError, KeyError, TypeError, RecursionError):
    return None
  return step


def write(result: Curve, directory: Path, trained: int, step: int, label: str) -> Path:
  """Writes context.csv, context.png and, last and at once, context.json; returns the picture's path."""
  with (directory / "context.csv").open("w", newline="") as opened:
    writer = csv.writer(opened)
    writer.writerow(["context", "loss", "standard_error", "documents"])
    writer.writerows(zip(result.context, result.loss, result.error, [result.documents] * len(result.loss), strict=True))
  picture = _plot(result, directory / "context.png", trained, label)
  temporary = directory / ".context.json"
  temporary.write_text(json.dumps(result._asdict() | {"trained_at": trained, "step": step}, indent=1))
  temporary.rename(directory / "context.json")
  return picture


def _plot(result: Curve, path: Path, trained: int, label: str) -> Path:
  # Not pyplot: that would look for a display.
  from matplotlib.backends.backend_agg import FigureCanvasAgg
  from matplotlib.figure import Figure

  figure = Figure(figsize=(6.4, 4), dpi=150, layout="constrained")
  FigureCanvasAgg(figure)
  axes = figure.subplots()
  middle = [max(1.0, 0.75 * context) for context in result.context]
  axes.errorbar(middle, result.loss, yerr=result.error, marker="o", markersize=4, capsize=2, label=label)
  axes.axvline(trained, color="red", linestyle="--", linewidth=1, label=f"training context, {trained:,} tokens")
  axes.set_xscale("log", base=2)
  axes.set_xlabel("position in the document (tokens)")
  axes.set_ylabel("held-out loss (nats per token)")
  axes.set_xticks(result.context[::2], [f"{context:,}" for context in result.context[::2]])
  axes.minorticks_off()
  axes.set_title(f"mean over {result.documents} stretches of held-out text, and its standard error", fontsize=10)
  axes.grid(alpha=0.3)
  axes.legend()
  figure.savefig(path)
  return path
