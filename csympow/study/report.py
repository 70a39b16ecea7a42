"""What is kept of the study as figures, tables and `results.md`, whose prose stays as it was written.

In results.md a part that is made here stands between two comments, and only that is replaced:

    <!-- training: made by python -m csympow.study --report -->
    ...
    <!-- end of training -->
"""

import csv
import io
import re
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from csympow.config import ConfigError
from csympow.data.output import replace_file
from csympow.evaluate import results
from csympow.study import figures, records, tables
from csympow.study.config import StudyConfig
from csympow.study.records import Record

if TYPE_CHECKING:
  from matplotlib.figure import Figure

_BEGIN, _END = "<!-- {}: made by python -m csympow.study --report -->", "<!-- end of {} -->"

_PARTS: dict[str, tuple[str, Callable[[StudyConfig, Sequence[Record]], str]]] = {
  "training": ("Final training loss, and in brackets the paper's", tables.training),
  "over_softmax": ("The same, less softmax's", tables.over_softmax),
  "heldout": ("Held-out loss at the training context", tables.heldout),
  "past_context": ("Past the training context", tables.past_context),
  "window": ("The same last 256 tokens, given more and more of what came before", tables.window),
  "gain": ("What more context is worth to a model", tables.gain),
  "sweep": ("How learning rate and offset were chosen", tables.sweep),
  "twice": ("The same run twice", tables.twice),
  "memory": ("Tokens that heads remember: the median head, and the one that remembers longest", tables.memory),
  "clock": ("Loss against time at 65,536 tokens", tables.clock),
  "speed": ("A million tokens of context", tables.speed),
}
_FIGURES = {
  "training": figures.training,
  "past_context": figures.past_context,
  "window": figures.window,
  "clock": figures.clock,
}


def write(study: StudyConfig, out: Path, directory: Path) -> str:
  """Makes everything in a directory from what `out` keeps; returns a line that tells of it."""
  kept = records.load_all(out)
  if not kept:
    raise ConfigError(f"--out={out} keeps no run that is done; there is nothing to report")
  if not results.can_draw():
    raise ConfigError("--report needs matplotlib to draw with: pip install matplotlib")
  images = directory / "images"
  images.mkdir(parents=True, exist_ok=True)
  drawn = {name: figure for name, draw in _FIGURES.items() if (figure := draw(study, kept)) is not None}
  for name, figure in drawn.items():
    replace_file(images / f"study_{name}.png", _png(figure))
  replace_file(directory / "results.csv", _csv(kept))
  document = directory / "results.md"
  text = document.read_text() if document.exists() else _skeleton(drawn)
  for name, (_, make) in _PARTS.items():
    text = replaced(text, name, make(study, kept))
  replace_file(document, text.encode())
  pictures = ", ".join(f"images/study_{name}.png" for name in drawn)
  return f"wrote results.md, results.csv{', ' * bool(pictures)}{pictures} in {directory} of {len(kept)} runs"


def replaced(text: str, name: str, part: str) -> str:
  """The text with one part made anew; a part that it has no place for is left out."""
  begin, end = _BEGIN.format(name), _END.format(name)
  return re.sub(
    f"{re.escape(begin)}.*?{re.escape(end)}", lambda _: f"{begin}\n{part}\n{end}", text, count=1, flags=re.DOTALL
  )


def _png(figure: "Figure") -> bytes:
  """The picture in 256 colours: of lines that is a third of the bytes, and no difference to be seen."""
  from PIL import Image  # which matplotlib writes its own with

  picture = io.BytesIO()
  colours = Image.open(io.BytesIO(results.png(figure))).convert("RGB").quantize(256, dither=Image.Dither.NONE)
  colours.save(picture, format="PNG", optimize=True)
  return picture.getvalue()


def _skeleton(drawn: Collection[str]) -> str:
  parts = ["# Results"]
  for name, (title, _) in _PARTS.items():
    picture = f"![{title.lower()}](images/study_{name}.png)\n\n" if name in drawn else ""
    parts.append(f"## {title}\n\n{picture}{_BEGIN.format(name)}\n{_END.format(name)}")
  return "\n\n".join(parts) + "\n"


def _csv(kept: Sequence[Record]) -> bytes:
  text = io.StringIO()
  rows = [_row(record) for record in kept]
  writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
  writer.writeheader()
  writer.writerows(rows)
  return text.getvalue().encode()


def _row(record: Record) -> dict[str, Any]:
  summary, steps, final = record.summary, len(record.steps["step"]), record.final_loss
  return {
    "run": record.name,
    "kind": record.kind,
    "variant": record.variant,
    "power": None if record.variant == "softmax" else record.power,
    "context": record.trained_at,
    "rate": record.rate,
    "offset": record.offset,
    "outcome": summary["outcome"],
    "steps": steps,
    "tokens": steps * summary["config"]["batch_tokens"],
    "loss": f"{final.mean:.5g}",
    "standard_error": f"{final.error:.3g}",
    "heldout_loss": record.heldout_loss,
    "tokens_per_s": f"{record.tokens_per_s:.6g}",
    "memory_bytes": summary["memory_bytes"],
    "device": summary["device"],
    "workers": summary["workers"],
    "train_seconds": summary["train_seconds"],
  }
