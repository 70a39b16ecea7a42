"""Text from prompts: `--task=sample`."""

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int
from matplotlib.figure import Figure

from csympow.config import ConfigError
from csympow.evaluate import results
from csympow.evaluate.generation import Drawn, Sampling, folded_after, generate
from csympow.evaluate.runs import Run, open_runs
from csympow.train.metrics import readable
from csympow.train.stop import Stop

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_WINDOW = 64  # tokens that are decoded again with each new one
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
  """The samples of one run, and how long it took to the first token and then for each one of all rows."""

  samples: list[Sample]
  first_s: float
  step_s: list[float]

  @property
  def tokens_per_s(self) -> float:
    """Of all rows together, at the median step; NaN for a single token, which comes of the prompt."""
    return len(self.samples) / statistics.median(self.step_s) if self.step_s else math.nan


def add_options(parser: argparse.ArgumentParser) -> None:
  """The task's own options."""
  group = parser.add_argument_group("sample")
  group.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="to continue; may be repeated")
  group.add_argument("--prompts", type=Path, metavar="FILE", help="one a line, or a JSON list of strings (.json)")
  group.add_argument("--tokens", type=int, default=200, metavar="N", help="to write after each prompt (%(default)s)")
  group.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest token (%(default)s)")
  group.add_argument("--top_k", type=int, default=0, help="draw from so many of the likeliest tokens; 0: all")
  group.add_argument("--top_p", type=float, default=1.0, help="draw from this share of probability; 1: all")
  group.add_argument("--seed", type=int, default=0, help="of the draws (%(default)s)")


def run(args: argparse.Namespace) -> None:
  """The task."""
  _check(args)
  texts = [*args.prompt, *(_read(args.prompts) if args.prompts else [])]
  if not texts:
    raise ConfigError("--prompt=TEXT or --prompts=FILE must say what to continue")
  sampling = Sampling(args.temperature, args.top_k, args.top_p, args.seed)
  found = []
  for each in open_runs(args):
    prompts = [_encoded(each, text, args.max_context - args.tokens) for text in texts]
    found.append((each, _timed(each, prompts, args.tokens, sampling, args.stop)))
  rows = [row for each, timed in found for row in _rows(each, timed)]
  record = {"sampling": sampling._asdict(), "tokens": args.tokens, "runs": [_record(*pair) for pair in found]}
  line = results.write(args.out, "sample", rows, record, _figure(found))
  print(f"\n{_table(found)}\n{line}", flush=True)


class TextStream:
  """Text of tokens as they come: of a character whose bytes are not all there, nothing is shown yet."""

  def __init__(self, decode: Callable[[list[int]], str]) -> None:
    self._decode = decode
    self._tokens: list[int] = []
    self._shown = 0  # characters of their text

  def add(self, token: int) -> str:
    """What can be shown now that this token has come."""
    self._tokens.append(token)
    text = self._decode(self._tokens)
    whole = text.removesuffix(_REPLACEMENT)
    new = whole[self._shown :]
    self._shown = max(self._shown, len(whole))
    if whole == text and len(self._tokens) > _WINDOW:
      # Some tokens stay: what a decoder makes of the next may depend on them.
      self._tokens = self._tokens[-8:]
      self._shown = len(self._decode(self._tokens))
    return new

  def end(self) -> str:
    """What is left: an unfinished character."""
    return self._decode(self._tokens)[self._shown :]


def _check(args: argparse.Namespace) -> None:
  for name, least in (("tokens", 1), ("temperature", 0), ("top_k", 0), ("seed", 0)):
    value = getattr(args, name)
    if not (math.isfinite(value) and value >= least):
      raise ConfigError(f"--{name} must be at least {least}, got {value}")
  if not 0 < args.top_p <= 1:
    raise ConfigError(f"--top_p must be above 0 and at most 1, got {args.top_p}")
  if args.seed >= 2**31:
    raise ConfigError(f"--seed must be below 2^31, got {args.seed}")


def _read(path: Path) -> list[str]:
  try:
    text = path.read_text()
    if path.suffix != ".json":
      return [line for line in text.splitlines() if line.strip()]
    found = json.loads(text)
  except OSError as error:
    raise ConfigError(f"--prompts={path} cannot be read: {error.strerror}") from error
  except ValueError as error:
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


def _timed(run: Run, prompts: list[np.ndarray], count: int, sampling: Sampling, stop: Stop) -> Timed:
  """Generates, showing the text of a single prompt as it comes and that of several when all are done."""
  print(f"--- {run.label}, step {run.step:,} ---", flush=True)
  samples = [Sample(prompt, [], []) for prompt in prompts]
  end = None if run.tokenizer is None else run.tokenizer.end_of_text
  streamed = TextStream(run.decode) if len(prompts) == 1 else None
  if streamed is not None:
    _show(run.decode(prompts[0]))
  times = [time.perf_counter()]
  for drawn in generate(run.model, prompts, count, sampling):
    stop.check()
    times.append(time.perf_counter())
    _take(samples, drawn, end)
    if streamed is not None and samples[0].tokens[-1] != end:
      _show(streamed.add(samples[0].tokens[-1]))
    if all(sample.tokens[-1] == end for sample in samples):
      break
  if streamed is not None:
    _show(streamed.end() + "\n")
  else:
    for sample in samples:
      _show(f"{run.decode(sample.prompt)}{run.decode(sample.tokens)}\n---\n")
  # The first step compiles its program; the one that folds the cache does too, and the median passes over it.
  return Timed(samples, times[1] - times[0], np.diff(times[2:]).tolist())


def _take(samples: list[Sample], drawn: Drawn, end: int | None) -> None:
  for sample, token, log_p in zip(samples, drawn.tokens.tolist(), drawn.log_p.tolist(), strict=True):
    if end is None or not sample.tokens or sample.tokens[-1] != end:
      sample.tokens.append(token)
      sample.log_p.append(log_p)


def _show(text: str) -> None:
  sys.stdout.write(text)
  sys.stdout.flush()


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
    }
    for sample in timed.samples
  ]


def _record(run: Run, timed: Timed) -> dict[str, Any]:
  samples = [
    row | {"token_ids": sample.tokens, "log_p": sample.log_p}
    for row, sample in zip(_rows(run, timed), timed.samples, strict=True)
  ]
  return results.of_run(run) | {"first_token_s": timed.first_s, "step_s": timed.step_s, "samples": samples}


def _table(found: list[tuple[Run, Timed]]) -> str:
  rows = [["run", "prompts", "tokens each", "tokens/s", "nats per token", "to the first token"]]
  for run, timed in found:
    log_p = [value for sample in timed.samples for value in sample.log_p]
    most = max(len(sample.tokens) for sample in timed.samples)
    rate = readable(timed.tokens_per_s) if timed.step_s else "-"
    mean = -sum(log_p) / len(log_p)
    rows.append([run.label, str(len(timed.samples)), str(most), rate, f"{mean:.3f}", f"{timed.first_s:.1f} s"])
  return results.aligned(rows) + "\n  (the time to the first token includes compiling)"


def _figure(found: list[tuple[Run, Timed]]) -> Figure:
  figure = results.new_figure(8.0, 6.0)
  times, surprises = figure.subplots(2, 1, sharex=True)
  for number, (run, timed) in enumerate(found):
    color = f"C{number}"
    longest = max(len(sample.prompt) for sample in timed.samples)
    label = f"{run.label}: {results.memory_of(run, longest + len(timed.step_s) + 2)}"
    smooth = _running_median(timed.step_s)
    times.plot(3 + _SMOOTHED // 2 + np.arange(len(smooth)), 1e3 * smooth, color=color, linewidth=1, label=label)
    folded = folded_after(run.model, longest)
    if folded is not None and folded < len(timed.step_s):
      times.axvline(folded, color=color, linestyle=":", label=f"{run.label}: keys and values folded into the state")
    for sample in timed.samples:
      mean = -np.cumsum(sample.log_p) / (1 + np.arange(len(sample.log_p)))
      surprises.plot(1 + np.arange(len(mean)), mean, color=color, linewidth=1, alpha=0.7)
  steps = [1e3 * statistics.median(timed.step_s) for _, timed in found if timed.step_s]
  rows = len(found[0][1].samples)
  times.set_ylabel(f"step of {rows} row{'s' if rows > 1 else ''} (ms, median of {_SMOOTHED})")
  times.set_ylim(0, 2 * max(steps, default=1.0))
  surprises.set_ylabel("mean -log p so far (nats)")
  surprises.set_xlabel("tokens written")
  for axes in (times, surprises):
    axes.grid(alpha=0.3)
  handles, labels = times.get_legend_handles_labels()
  figure.legend(handles, labels, loc="outside upper center", fontsize=9)
  return figure


def _running_median(values: list[float]) -> Float[np.ndarray, "n"]:
  if len(values) < _SMOOTHED:
    return np.zeros(0)
  return np.median(np.lib.stride_tricks.sliding_window_view(np.asarray(values), _SMOOTHED), axis=1)
