"""The passkey task: a number told once, in a line somewhere in filler of any length, and asked for at the end.

A prompt is made of tokens, not of characters: it has exactly the length that it stands for (less the tokens that the
model may write), and the line with the number begins at exactly its share of the filler.
"""

import argparse
import functools
import itertools
import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from csympow.evaluate import heatmap, results
from csympow.evaluate.answers import Answerer, Question
from csympow.evaluate.asking import DEPTHS, Asking
from csympow.evaluate.caches import memory_of
from csympow.evaluate.curves import standard_error
from csympow.evaluate.flags import positive, positives, seed
from csympow.evaluate.prompts import begin, lengths_of, split_answer
from csympow.evaluate.runs import Run, open_runs
from csympow.train.metrics import size

_INSTRUCTIONS = (
  "There is an important info hidden inside a lot of irrelevant text. Find it and memorize it. I will quiz you about "
  "the important information there.\n"
)
_FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
_LINE = "\nThe pass key is {number}. Remember it. {number} is the pass key.\n"
_QUESTION = "\nWhat is the pass key? The pass key is"
_LARGEST = 50_000
_WRITTEN = 10  # tokens, in which the first integer counts
_NUMBER_TOKENS = 12  # of its answer, at most

GUESS = math.log(_LARGEST)  # nats, of whoever knows the range and nothing else


class Cell(NamedTuple):
  """The trials at one length and depth.

  Attributes:
    length: tokens of the prompt and the answer.
    depth: where the number stands, in percent of the filler.
    trials: how many.
    exact_match: share of trials whose first written integer is the number.
    nll: mean -log probability of the number, in nats, over all its tokens.
    nll_error: its standard error.
    nll_other: the same of a number of as many digits that the prompt does not hold.
  """

  length: int
  depth: float
  trials: int
  exact_match: float
  nll: float
  nll_error: float
  nll_other: float


class Passkey:
  """Prompts in a run's own tokens."""

  def __init__(self, run: Run) -> None:
    self._run = run
    self._head = np.concatenate([begin(run), run.encode(_INSTRUCTIONS)])
    self._sentences = run.encode(_FILLER)
    longest_line = max(len(self._line(number)) for number in (_LARGEST - 1, 33_333, 47_777))
    # With a token to spare: some five digits may take more tokens than these.
    self.shortest = len(self._head) + longest_line + len(run.encode(_QUESTION)) + 2 + _WRITTEN

  def question(self, length: int, depth: float, number: int, other: int) -> Question:
    """A prompt that with ten tokens more is `length` long; the answers are its number, and another for comparison."""
    question, answer = split_answer(self._run, _QUESTION, f" {number}")
    line = self._line(number)
    room = length - _WRITTEN - len(self._head) - len(line) - len(question)
    filler = np.resize(self._sentences, room)
    before = round(depth / 100 * room)
    prompt = np.concatenate([self._head, filler[:before], line, filler[before:], question])
    return Question(prompt, (answer, split_answer(self._run, _QUESTION, f" {other}")[1]))

  def _line(self, number: int) -> Int[np.ndarray, "n"]:
    return self._run.encode(_LINE.format(number=number))


READS_RUNS = True


def add_options(parser: argparse.ArgumentParser) -> None:
  """The task's own flags."""
  group = parser.add_argument_group("passkey")
  group.add_argument("--lengths", type=positives, metavar="N,N,...", help="in tokens; by default powers of two")
  group.add_argument("--trials", type=positive, default=20, help="numbers at each length and depth (%(default)s)")
  group.add_argument("--seed", type=seed, default=0, help="of what is hidden and where (%(default)s)")


def run(args: argparse.Namespace) -> None:
  """Asks every run at every length and depth; writes passkey.csv, .json and .png and prints a table."""
  opened = open_runs(args)
  tasks = [Passkey(one) for one in opened]
  lengths = [lengths_of(args, one, task.shortest, "a passkey") for one, task in zip(opened, tasks, strict=True)]
  asking = Asking(args, "passkey", sum(args.trials * len(DEPTHS) * sum(chosen) for chosen in lengths))
  cells: list[list[Cell]] = []
  for one, task, chosen in zip(opened, tasks, lengths, strict=True):
    answerer = Answerer(one.model, max(chosen), _NUMBER_TOKENS, _WRITTEN, args.trials)
    cells.append([])
    for length, depth in itertools.product(chosen, DEPTHS):
      ask = functools.partial(_ask, one, task, length, depth, answerer, args)
      found = asking.cell(one, ("passkey", depth), length, f"{length:,} tokens, depth {depth:.0f} %", ask)
      cells[-1].append(Cell(**found))
  scores = (
    heatmap.Score("exact match", 0.0, 1.0, good_is_high=True, digits=2),
    heatmap.Score("nats of the number", None, None, good_is_high=False, digits=1),
    heatmap.Score("nats less than another number", None, None, good_is_high=True, digits=1, around_zero=True),
  )
  found_of = list(zip(opened, cells, strict=True))
  asking.write(
    opened,
    [[cell._asdict() for cell in found] for found in cells],
    [table(*pair) for pair in found_of],
    ([_map(*pair) for pair in found_of], scores),
    {"guess_nats": GUESS},
  )


def _ask(
  one: Run,
  task: Passkey,
  length: int,
  depth: float,
  answerer: Answerer,
  args: argparse.Namespace,
  check: Callable[[int], None],
) -> dict[str, Any]:
  # One seed for all runs: they are asked for the same numbers.
  rng = np.random.default_rng((args.seed, length, int(depth)))
  numbers = [int(rng.integers(1, _LARGEST + 1)) for _ in range(args.trials)]
  questions = [task.question(length, depth, number, _unlike(number, rng)) for number in numbers]
  replies = list(answerer.replies(questions, check))
  right = [first_integer(one.decode(reply.written)) == number for number, reply in zip(numbers, replies, strict=True)]
  nll = np.array([reply.nll for reply in replies])
  error = float(standard_error(nll[:, 0]))
  means = (float(np.mean(right)), float(nll[:, 0].mean()), error, float(nll[:, 1].mean()))
  return Cell(length, depth, args.trials, *means)._asdict()


def first_integer(text: str) -> int | None:
  """The first run of digits in a text."""
  found = re.search(r"[0-9]+", text)
  return int(found.group()) if found else None


def _unlike(number: int, rng: np.random.Generator) -> int:
  """Another number with as many digits."""
  low = 10 ** (len(str(number)) - 1)
  high = min(10 * low, _LARGEST + 1)
  other = int(rng.integers(low, high - 1))
  return other + (other >= number)


def table(run: Run, cells: list[Cell]) -> str:
  """For a terminal: a row for each length, over all depths."""
  rows = [["length", "state", "exact match", "nats of the number", "of another number"]]
  for length in sorted({cell.length for cell in cells}):
    here = [cell for cell in cells if cell.length == length]
    match, nll, other = (
      np.mean([getattr(cell, name) for cell in here]) for name in ("exact_match", "nll", "nll_other")
    )
    state = size(run.state_bytes(length))
    rows.append([f"{length:,}", state, f"{100 * match:.1f} %", f"{nll:.2f}", f"{other:.2f}"])
  guess = f"a guess from 1 to {_LARGEST:,} is {GUESS:.1f} nats"
  return f"passkey, {run.label}, step {run.step:,}; {guess}\n{results.aligned(rows)}"


def _map(one: Run, cells: list[Cell]) -> heatmap.Map:
  lengths = sorted({cell.length for cell in cells})
  by_place = {(cell.depth, cell.length): cell for cell in cells}
  match, nll, other = (
    np.array([[getattr(by_place[depth, length], name) for length in lengths] for depth in DEPTHS])
    for name in ("exact_match", "nll", "nll_other")
  )
  rows = [f"{depth:.0f}" for depth in DEPTHS]
  label = f"{one.label}\n{memory_of(one.model, lengths[-1])}"
  return heatmap.Map(label, lengths, rows, "depth (%)", one.config.context, [match, nll, other - nll])
