"""The needles task: RULER-style prompts of every kind and length, answered by trained models and scored.

The score is the mean share of the gold strings that what the model writes contains, upper or lower case. A small model
contains none of them; how likely it finds the gold answer still tells what it has kept.
"""

import argparse
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from csympow.config import ConfigError
from csympow.evaluate import haystack, heatmap, results
from csympow.evaluate.answers import Answerer, Question
from csympow.evaluate.asking import DEPTHS, Asking
from csympow.evaluate.caches import memory_of
from csympow.evaluate.curves import standard_error
from csympow.evaluate.flags import positive, positives, seed
from csympow.evaluate.haystack import KINDS, VALUES, WITH_DEPTH, Haystack, Prompt
from csympow.evaluate.prompts import begin, lengths_of, split_answer
from csympow.evaluate.runs import Run, open_runs
from csympow.train.metrics import size

_WRITTEN = 128  # tokens that a model may write: prompt + 128 <= length


class Cell(NamedTuple):
  """The trials of a kind at one length and, where there is one, depth.

  Attributes:
    kind: of prompt.
    length: tokens of the prompt and of what may be written.
    depth: where the needle asked for stands, in percent; None where that is random or means nothing.
    trials: how many.
    score: mean share of gold strings written.
    score_error: its standard error.
    nll: mean -log probability of the gold answer, in nats a token.
    nll_other: the same of the answer to another prompt of the kind.
  """

  kind: str
  length: int
  depth: float | None
  trials: int
  score: float
  score_error: float
  nll: float
  nll_other: float


class Needles:
  """The prompts of one kind in a run's own tokens."""

  def __init__(self, run: Run, kind: str, hay: Haystack) -> None:
    self.kind, self._run, self._hay, self._begin = kind, run, hay, begin(run)
    smallest = self._tokens(self.prompt(haystack.least_size(kind), None, np.random.default_rng(0)))
    # Prompts of one size differ by a few tokens: other words, other numbers.
    self.shortest = len(smallest.prompt) + len(smallest.prompt) // 8 + _WRITTEN
    gold = len(smallest.answers[0])
    self.answer_tokens = gold + 16
    if gold > _WRITTEN:
      raise ConfigError(
        f"--kinds: the answer of {kind} is {gold} tokens long for {run.label}, and {_WRITTEN} are written"
      )

  def prompt(self, size: int, depth: float | None, rng: np.random.Generator) -> Prompt:
    """A prompt with a haystack of some size."""
    return haystack.make(self.kind, size, self._hay, depth, rng)

  def size(self, length: int) -> int:
    """The size of haystack that fills a length."""
    return haystack.largest_size(self.kind, lambda size: self._fits(size, length))

  def question(
    self, length: int, size: int, depth: float | None, rng: np.random.Generator
  ) -> tuple[Question, tuple[str, ...]]:
    """One that fits the length, of the size or, if it came out long, a little less; and its gold strings.

    Beside the gold answer it has that of another prompt, for comparison.
    """
    other = self.prompt(haystack.least_size(self.kind), None, rng).gold
    while True:
      made = self.prompt(size, depth, rng)
      tokens = self._tokens(made, other)
      if len(tokens.prompt) + _WRITTEN <= length:
        return tokens, made.gold
      size = max(haystack.least_size(self.kind), size - max(1, size // 50))

  def _fits(self, size: int, length: int) -> bool:
    made = self._tokens(self.prompt(size, None, np.random.default_rng(0)))
    return len(made.prompt) + _WRITTEN <= length

  def _tokens(self, made: Prompt, other: tuple[str, ...] = ()) -> Question:
    question, answer = split_answer(self._run, made.question, f" {', '.join(made.gold)}")
    _, wrong = split_answer(self._run, made.question, f" {', '.join(other or made.gold)}")
    return Question(np.concatenate([self._begin, self._run.encode(made.text), question]), (answer, wrong))


def share_of_gold(written: str, gold: Sequence[str]) -> float:
  """The share of the gold strings that a text contains, upper or lower case."""
  return sum(one.lower() in written.lower() for one in gold) / len(gold)


READS_RUNS = True


def add_options(parser: argparse.ArgumentParser) -> None:
  """The task's own flags."""
  group = parser.add_argument_group("needles")
  group.add_argument("--kinds", type=_kinds, default=KINDS, metavar="KIND,...", help=f"of {', '.join(KINDS)}")
  group.add_argument("--values", choices=VALUES, default="numbers", help="what needles hide (%(default)s)")
  group.add_argument(
    "--haystack", default="noise", metavar="noise|needles|FILE", help="repeated lines, other needles or a text"
  )
  group.add_argument("--lengths", type=positives, metavar="N,N,...", help="in tokens; by default powers of two")
  group.add_argument("--trials", type=positive, default=20, help="prompts for each number shown (%(default)s)")
  group.add_argument("--seed", type=seed, default=0, help="of what is hidden and where (%(default)s)")


def run(args: argparse.Namespace) -> None:
  """Asks every run; writes needles.csv, .json and .png and prints a table."""
  hay = Haystack(args.haystack, args.values)
  opened = open_runs(args)
  plans = [_plan(one, hay, args) for one in opened]
  work = (args.trials * len(_depths(task.kind)) * sum(lengths) for plan in plans for task, lengths in plan)
  asking = Asking(args, "needles", sum(work))
  cells: list[list[Cell]] = []
  for one, plan in zip(opened, plans, strict=True):
    longest = max(length for _, lengths in plan for length in lengths)
    answerer = Answerer(one.model, longest, max(task.answer_tokens for task, _ in plan), _WRITTEN, args.trials)
    cells.append([])
    for task, lengths in plan:
      for length, depth in itertools.product(lengths, _depths(task.kind)):
        about = ("needles", task.kind, hay.identity, depth)
        ask = functools.partial(_ask, one, task, length, depth, answerer, args)
        found = asking.cell(one, about, length, f"{task.kind}, {length:,} tokens", ask)
        cells[-1].append(Cell(**found))
  scores = (
    heatmap.Score("share of gold strings written", 0.0, 1.0, good_is_high=True, digits=2),
    heatmap.Score("nats a token of the gold answer", None, None, good_is_high=False, digits=2),
    heatmap.Score("nats less than another answer", None, None, good_is_high=True, digits=2, around_zero=True),
  )
  asked = {"values": args.values, "haystack": args.haystack}
  found_of = list(zip(opened, cells, strict=True))
  asking.write(
    opened,
    [[asked | cell._asdict() for cell in found] for found in cells],
    [table(*pair) for pair in found_of],
    ([each for pair in found_of for each in _maps(*pair)], scores),
    {},
  )


def _plan(one: Run, hay: Haystack, args: argparse.Namespace) -> list[tuple[Needles, list[int]]]:
  tasks = [Needles(one, kind, hay) for kind in args.kinds]
  return [(task, lengths_of(args, one, task.shortest, f"needles of kind {task.kind}")) for task in tasks]


def _depths(kind: str) -> list[float | None]:
  return [*DEPTHS] if kind in WITH_DEPTH else [None]


def _ask(
  one: Run,
  task: Needles,
  length: int,
  depth: float | None,
  answerer: Answerer,
  args: argparse.Namespace,
  check: Callable[[int], None],
) -> dict[str, Any]:
  # One seed for all runs: they are asked for the same things, as far as their tokens allow.
  rng = np.random.default_rng((args.seed, length, KINDS.index(task.kind), int(depth or 0)))
  size = task.size(length)
  asked, gold = [], []
  for _ in range(args.trials):
    question, wanted = task.question(length, size, depth, rng)
    asked.append(question)
    gold.append(wanted)
  replies = list(answerer.replies(asked, check))
  scores = [share_of_gold(one.decode(reply.written), wanted) for reply, wanted in zip(replies, gold, strict=True)]
  counts = np.array([[len(answer) for answer in question.answers] for question in asked])
  nll = np.array([reply.nll for reply in replies]) / np.maximum(counts, 1)
  error = float(standard_error(np.array(scores)))
  means = (float(np.mean(scores)), error, float(nll[:, 0].mean()), float(nll[:, 1].mean()))
  return Cell(task.kind, length, depth, args.trials, *means)._asdict()


def table(run: Run, cells: Sequence[Cell]) -> str:
  """For a terminal: a row for each kind and length, over all depths."""
  rows = [["kind", "length", "state", "score", "nats a token", "of another answer"]]
  for kind, length in dict.fromkeys((cell.kind, cell.length) for cell in cells):
    score, nll, other = (_mean(cells, kind, length, name) for name in ("score", "nll", "nll_other"))
    rows.append(
      [kind, f"{length:,}", size(run.state_bytes(length)), f"{100 * score:.1f} %", f"{nll:.2f}", f"{other:.2f}"]
    )
  return f"needles, {run.label}, step {run.step:,}\n{results.aligned(rows)}"


def _mean(cells: Sequence[Cell], kind: str, length: int, name: str, depth: float | None = None) -> float:
  chosen = [
    getattr(cell, name)
    for cell in cells
    if (cell.kind, cell.length) == (kind, length) and (depth is None or cell.depth == depth)
  ]
  return float(np.mean(chosen)) if chosen else math.nan


def _maps(one: Run, cells: list[Cell]) -> list[heatmap.Map]:
  """All kinds against length, and against length and depth those that have one."""
  lengths = sorted({cell.length for cell in cells})
  kinds = list(dict.fromkeys(cell.kind for cell in cells))
  rows: list[tuple[str, float | None]] = [(kind, None) for kind in kinds]
  memory = memory_of(one.model, lengths[-1])
  maps = [heatmap.Map(f"{one.label}\n{memory}", lengths, kinds, "", one.config.context, _values(cells, rows, lengths))]
  for kind in kinds:
    if kind in WITH_DEPTH:
      rows = [(kind, depth) for depth in _depths(kind)]
      names = [f"{depth:.0f}" for depth in _depths(kind)]
      values = _values(cells, rows, lengths)
      maps.append(
        heatmap.Map(f"{one.label}: {kind}\n{memory}", lengths, names, "depth (%)", one.config.context, values)
      )
  return maps


def _values(cells: list[Cell], rows: list[tuple[str, float | None]], lengths: list[int]) -> list[np.ndarray]:
  score, nll, other = (
    np.array([[_mean(cells, kind, length, name, depth) for length in lengths] for kind, depth in rows])
    for name in ("score", "nll", "nll_other")
  )
  return [score, nll, other - nll]


def _kinds(text: str) -> tuple[str, ...]:
  chosen = tuple(text.split(","))
  for kind in chosen:
    if kind not in KINDS:
      raise argparse.ArgumentTypeError(f"must be of {', '.join(KINDS)}, got {kind!r}")
  return tuple(dict.fromkeys(chosen))
