"""What the tasks that ask trained models for something hidden have in common: cells of trials, kept and written."""

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from csympow.command import NotFiniteError
from csympow.data.progress import Progress
from csympow.evaluate import heatmap, results
from csympow.evaluate.kept import Kept, digest
from csympow.evaluate.runs import Run

DEPTHS = tuple(10.0 * tenth for tenth in range(11))  # percent


class Asking:
  """The cells of one command: `trials` prompts of a length each."""

  def __init__(self, args: argparse.Namespace, task: str, tokens: int) -> None:
    self._args, self._task = args, task
    self._kept, self._progress = Kept(args.out, task), Progress(tokens)

  def cell[C](
    self, run: Run, about: tuple[Any, ...], length: int, told: str, ask: Callable[[Callable[[int], None]], dict[str, C]]
  ) -> dict[str, C]:
    """A cell that is kept, or what `ask` makes of one; `about` is what it depends on beside the run.

    `ask` is given a function to call before each piece of a prompt with the tokens that it has.
    """

    def check(tokens: int) -> None:
      self._args.stop.check()
      self._progress.add(tokens)
      self._progress.show(f"{self._task}, {run.label}, {told}")

    trials, seed = self._args.trials, self._args.seed
    asked = (run.identity, run.config.model, run.config.data.tokenizer, length, trials, seed, *about)
    found: dict[str, C] = self._kept.once(digest(*asked), lambda: ask(check), self._progress, trials * length)
    return found

  def write(
    self,
    runs: list[Run],
    cells: list[list[dict[str, Any]]],
    tables: Sequence[str],
    figure: tuple[Sequence[heatmap.Map], Sequence[heatmap.Score]],
    about: dict[str, Any],
  ) -> None:
    """Writes the files and prints the tables; raises NotFiniteError if there are answers that got no probability."""
    self._progress.end(self._task)
    rows = [
      results.of_run(run) | {"state_bytes": run.state_bytes(cell["length"])} | cell
      for run, found in zip(runs, cells, strict=True)
      for cell in found
    ]
    record = {"seed": self._args.seed} | about | {"runs": [results.of_run(run) for run in runs], "cells": rows}
    line = results.write(self._args.out, self._task, rows, record, heatmap.draw(*figure))
    print("\n".join([*tables, line]), flush=True)
    lost = dict.fromkeys(row["run"] for row in rows if not np.isfinite(row["nll"]))
    if lost:
      raise NotFiniteError(f"{'; '.join(lost)}: likelihoods are not finite")
