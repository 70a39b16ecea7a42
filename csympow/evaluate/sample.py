"""Text from prompts: `--task=sample`."""

import argparse
import itertools
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int
from matplotlib.figure import Figure

from csympow.command import NotFiniteError
from csympow.config import ConfigError
from csympow.data.progress import Progress
from csympow.evaluate import results
from csympow.evaluate.caches import memory_of
from csympow.evaluate.flags import natural, positive, seed
from csympow.evaluate.generation import Sampling, folded_after, room_for
from csympow.evaluate.kept import Kept
from csympow.evaluate.runs import Run, open_runs
from csympow.evaluate.writing import Writer, show
from csympow.train.metrics import readable, size

_SMOOTHED = 15  # steps


class Sample(NamedTuple):
  """What one run wrote after one prompt.

  Attributes:
    prompt: the tokens read.
    tokens: the tokens written, up to the end of text if there is one among them.
    log_p: the log probability of each.
  """

  prompt: Int[np.ndarray, "n"]
  tokens: list[int]
  log_p: list[float]


class Timed(NamedTuple):
  """What one run wrote after all prompts.

  Attributes:
    samples: one for each prompt.
    first_s: the time to the first token.
    step_s: the time to each token of all rows after the one before; NaN for those that had something compiled.
  """

  samples: list[Sample]
  first_s: float
  step_s: Float[np.ndarray, "n"]

  @property
  def tokens_per_s(self) -> float:
    """Of all rows together, at the median step; NaN where no step was timed."""
    timed = self.step_s[np.isfinite(self.step_s)]
    return len(self.samples) / float(np.median(timed)) if len(timed) else math.nan


READS_RUNS = True


def add_options(parser: argparse.ArgumentParser) -> None:
  """The task's own options."""
  group = parser.add_argument_group("sample")
  group.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="to continue; may be repeated")
  group.add_argument("--prompts", type=Path, metavar="FILE", help="one a line, or a JSON list of strings (.json)")
  group.add_argument("--tokens", type=positive, default=200, metavar="N", help="to write after each (%(default)s)")
  group.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest token (%(default)s)")
  group.add_argument("--top_k", type=natural, default=0, help="draw from so many of the likeliest tokens; 0: all")
  group.add_argument("--top_p", type=float, default=1.0, help="draw from this share of probability; 1: all")
  group.add_argument("--seed", type=seed, default=0, help="of the draws (%(default)s)")


def run(args: argparse.Namespace) -> None:
  """The task."""
  _check(args)
  texts = [*args.prompt, *(_read(args.prompts) if args.prompts else [])]
  if not texts:
    raise ConfigError("--prompt=TEXT or --prompts=FILE must say what to continue")
  sampling = Sampling(args.temperature, args.top_k, args.top_p, args.seed)
  runs = open_runs(args)
  prompts = [[_encoded(each, text, args.max_context - args.tokens) for text in texts] for each in runs]
  kept = Kept(args.out, "sample")
  progress = Progress(sum(len(prompt) + args.tokens for of_run in prompts for prompt in of_run))
  found = []
  for each, of_run in zip(runs, prompts, strict=True):
    found.append((each, _timed(each, of_run, args.tokens, sampling, kept, progress)))
  rows = [row for each, timed in found for row in _rows(each, timed)]
  record = {"sampling": sampling._asdict(), "tokens": args.tokens, "runs": [_record(*pair) for pair in found]}
  line = results.write(args.out, "sample", rows, record, _figure(found))
  print(f"\n{_table(found)}\n{line}", flush=True)
  _require_finite(found)


def _require_finite(found: list[tuple[Run, Timed]]) -> None:
  lost = []
  for run, timed in found:
    places = [np.flatnonzero(~np.isfinite(sample.log_p)) for sample in timed.samples]
    first = min((int(place[0]) for place in places if len(place)), default=None)
    if first is not None:
      lost.append(f"{run.label}: log probabilities are not finite from token {first + 1:,} on")
  if lost:
    raise NotFiniteError("; ".join(lost))


def _check(args: argparse.Namespace) -> None:
  if not 0 <= args.temperature <= 1e9:
    raise ConfigError(f"--temperature must be from 0 to 1e9, got {args.temperature}")
  if not 0 < args.top_p <= 1:
    raise ConfigError(f"--top_p must be above 0 and at most 1, got {args.top_p}")


def _read(path: Path) -> list[str]:
  try:
    text = path.read_text()
    if path.suffix != ".json":
      return [line for line in text.splitlines() if line.strip()]
    found = json.loads(text)
  except OSError as error:
    raise ConfigError(f"--prompts={path} cannot be read: {error.strerror}") from error
  except (ValueError, RecursionError) as error:
    raise ConfigError(f"--prompts={path} cannot be read: {error}") from error
  if not isinstance(found, list) or not all(isinstance(prompt, str) for prompt in found):
    raise ConfigError(f"--prompts={path} must be a JSON list of strings")
  return found


def _encoded(run: Run, text: str, most: int) -> Int[np.ndarray, "n"]:
  tokens = run.encode(text)
  if not len(tokens):
    start = None if run.tokenizer is None else run.tokenizer.end_of_text
    if start is None:
      raise ConfigError(f"--prompt must not be empty: {run.directory} has no token that begins a text")
    tokens = np.asarray([start], np.int32)
  if len(tokens) > most:
    raise ConfigError(f"a prompt of {len(tokens):,} tokens and --tokens do not fit in --max_context; raise it")
  return tokens


def _timed(
  run: Run, prompts: list[np.ndarray], count: int, sampling: Sampling, kept: Kept, progress: Progress
) -> Timed:
  """All prompts in turn, as many side by side as fit; shows the text of a single one as it comes, else when it is done.

  The time of a step is then that of all groups.
  """
  print(f"--- {run.label}, step {run.step:,} ---", flush=True)
  room = room_for(run.model, prompts, count)
  samples, first_s, steps = [], 0.0, []
  for first in range(0, len(prompts), room.rows):
    group = prompts[first : first + room.rows]
    writer = Writer(run, group, count, sampling, room, first, len(prompts) == 1, kept, progress)
    written = writer.written()
    tokens, log_p = (zip(*written[name], strict=True) for name in ("tokens", "log_p"))
    made = [_cut(run, *found) for found in zip(group, tokens, log_p, strict=True)]
    if not writer.shown:
      progress.clear()
      for sample in made:
        show(f"{run.decode(sample.prompt)}{run.decode(sample.tokens)}\n" + "---\n" * (len(prompts) > 1))
    samples += made
    first_s += written["first_s"]
    steps.append(written["step_s"])
  return Timed(samples, first_s, np.asarray([sum(each) for each in itertools.zip_longest(*steps, fillvalue=0.0)]))


def _cut(run: Run, prompt: np.ndarray, tokens: tuple[int, ...], log_p: tuple[float, ...]) -> Sample:
  """What was written up to the end of the text, if it came."""
  end = None if run.tokenizer is None else run.tokenizer.end_of_text
  count = tokens.index(end) + 1 if end in tokens else len(tokens)
  return Sample(prompt, list(tokens[:count]), list(log_p[:count]))


def _rows(run: Run, timed: Timed) -> list[dict[str, Any]]:
  return [
    {
      "run": run.label,
      "step": run.step,
      "prompt": run.decode(sample.prompt),
      "text": run.decode(sample.tokens),
      "prompt_tokens": len(sample.prompt),
      "tokens": len(sample.tokens),
      "nats_per_token": -sum(sample.log_p) / len(sample.log_p),
      "tokens_per_s": timed.tokens_per_s,
      "state_bytes": run.state_bytes(len(sample.prompt) + len(sample.tokens)),
    }
    for sample in timed.samples
  ]


def _record(run: Run, timed: Timed) -> dict[str, Any]:
  samples = [
    row | {"token_ids": sample.tokens, "log_p": sample.log_p}
    for row, sample in zip(_rows(run, timed), timed.samples, strict=True)
  ]
  return results.of_run(run) | {"first_token_s": timed.first_s, "step_s": timed.step_s.tolist(), "samples": samples}


def _table(found: list[tuple[Run, Timed]]) -> str:
  rows = [["run", "prompts", "tokens each", "state of one", "tokens/s", "nats per token", "to the first token"]]
  for run, timed in found:
    log_p = [value for sample in timed.samples for value in sample.log_p]
    most = max(len(sample.tokens) for sample in timed.samples)
    state = size(run.state_bytes(_longest(timed)))
    rate = "-" if math.isnan(timed.tokens_per_s) else readable(timed.tokens_per_s)
    mean = f"{-sum(log_p) / len(log_p):.3f}"
    rows.append([run.label, str(len(timed.samples)), str(most), state, rate, mean, f"{timed.first_s:.1f} s"])
  return results.aligned(rows) + "\n  (the time to the first token includes compiling)"


def _figure(found: list[tuple[Run, Timed]]) -> Figure:
  figure = results.new_figure(8.0, 6.0)
  times, surprises = figure.subplots(2, 1, sharex=True)
  for number, (run, timed) in enumerate(found):
    color = f"C{number}"
    label = f"{run.label}: {memory_of(run.model, _longest(timed))}"
    smooth = _running_median(timed.step_s)
    times.plot(1 + _SMOOTHED // 2 + np.arange(len(smooth)), 1e3 * smooth, color=color, linewidth=1, label=label)
    folded = folded_after(run.model, max(len(sample.prompt) for sample in timed.samples))
    if folded is not None and folded < len(timed.step_s):
      times.axvline(folded, color=color, linestyle=":", label=f"{run.label}: keys and values folded into the state")
    for sample in timed.samples:
      mean = -np.cumsum(sample.log_p) / (1 + np.arange(len(sample.log_p)))
      surprises.plot(1 + np.arange(len(mean)), mean, color=color, linewidth=1, alpha=0.7)
  rows = len(found[0][1].samples)
  steps = [1e3 * rows / timed.tokens_per_s for _, timed in found if not math.isnan(timed.tokens_per_s)]
  times.set_ylabel(f"step of {rows} row{'s' if rows > 1 else ''} (ms, median of {_SMOOTHED})")
  times.set_ylim(0, 2 * max(steps, default=1.0))
  surprises.set_ylabel("mean -log p so far (nats)")
  surprises.set_xlabel("tokens written")
  for axes in (times, surprises):
    axes.grid(alpha=0.3)
  handles, labels = times.get_legend_handles_labels()
  figure.legend(handles, labels, loc="outside upper center", fontsize=9)
  return figure


def _longest(timed: Timed) -> int:
  return max(len(sample.prompt) + len(sample.tokens) for sample in timed.samples)


def _running_median(values: Float[np.ndarray, "n"]) -> Float[np.ndarray, "m"]:
  if len(values) < _SMOOTHED + 2:
    return np.zeros(0)
  return np.nanmedian(np.lib.stride_tricks.sliding_window_view(values, _SMOOTHED), axis=1)
