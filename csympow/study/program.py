"""The command line of the study; exit codes are those of `csympow.command`, 75 also if the budget left runs undone."""

import argparse
import fnmatch
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from csympow import overrides
from csympow.command import EXIT_DONE, EXIT_ERROR, EXIT_STOPPED, EXIT_USAGE, Parser, fail, no_room
from csympow.config import ConfigError
from csympow.study import plan, records
from csympow.study.config import StudyConfig
from csympow.study.plan import Run
from csympow.study.records import Record
from csympow.study.workers import Workers, describe, done, has_model, kept, unevaluated
from csympow.train.stop import Stop


def main(arguments: Sequence[str] | None = None) -> NoReturn:
  """Runs the command line and ends the process with its exit code."""
  stop = Stop()
  stop.install()
  code = _run(list(sys.argv[1:] if arguments is None else arguments), stop)
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(code)


def _run(arguments: list[str], stop: Stop) -> int:
  try:
    options = _parse(arguments)
    study = _study(options)
    if options.report is not None:
      from csympow.study import report  # which needs what figures are made with

      print(report.write(study, options.out, options.report), flush=True)
      return EXIT_DONE
    if options.list:
      return _list(study, options)
    return _perform(study, options, stop)
  except ConfigError as error:
    return fail(str(error), EXIT_USAGE)
  except SystemExit as error:  # argparse
    return error.code if isinstance(error.code, int) else EXIT_USAGE
  except Exception as error:
    full = no_room(error, "--out or --workdirs")
    if full is not None:
      return fail(f"{full}; the same command goes on from what is there", EXIT_ERROR)
    traceback.print_exc()
    return EXIT_ERROR


def _parse(arguments: list[str]) -> argparse.Namespace:
  parser = Parser(
    prog="csympow.study",
    allow_abbrev=False,
    description="Trains and evaluates the runs of the study that are not yet done, and keeps what they tell in --out.",
    epilog="--out is all that a later call needs, also on another machine, to do only what is missing. What was run "
    "for docs/results.md is kept in docs/study.",
  )
  parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="where metrics are kept")
  parser.add_argument("--data", type=Path, default=Path("data/study"), metavar="DIR", help="the dataset (%(default)s)")
  parser.add_argument("--workdirs", type=Path, default=Path("runs/study"), metavar="DIR", help="of runs (%(default)s)")
  parser.add_argument("--budget", type=float, default=float("inf"), metavar="S", help="seconds that all may take")
  parser.add_argument("--workers", type=int, default=1, metavar="N", help="runs at once (%(default)s)")
  parser.add_argument(
    "--only", action="append", metavar="PATTERN", help="runs with such names; may be given repeatedly"
  )
  parser.add_argument("--tokens", type=int, metavar="N", help="of each run of the grid")
  parser.add_argument("--documents", type=int, metavar="N", help="stretches that models are evaluated on, at most")
  parser.add_argument("--clock", type=float, metavar="S", help="seconds of each run for loss against time")
  parser.add_argument("--config", metavar="FILE", help="a Python file with get_config() for another StudyConfig")
  parser.add_argument("--list", action="store_true", help="show the runs and what is done, and stop")
  parser.add_argument("--report", type=Path, metavar="DIR", help="make figures, tables and results.md there, and stop")
  options = parser.parse_args(arguments)
  if options.workers < 1:
    parser.error(f"--workers must be at least 1, got {options.workers}")
  if not options.budget > 0:
    parser.error(f"--budget must be positive, got {options.budget}")
  return options


def _study(options: argparse.Namespace) -> StudyConfig:
  study = StudyConfig() if options.config is None else overrides.load(options.config, schema=StudyConfig)
  changes = {"tokens": options.tokens, "documents": options.documents, "clock_seconds": options.clock}
  return overrides.replaced(study, {name: str(value) for name, value in changes.items() if value is not None})


def _selected(options: argparse.Namespace, runs: Sequence[Run]) -> list[Run]:
  patterns = options.only or ["*"]
  return [run for run in runs if any(fnmatch.fnmatchcase(run.name, pattern) for pattern in patterns)]


def _list(study: StudyConfig, options: argparse.Namespace) -> int:
  choice = plan.read_choice(study, options.out)
  shown = choice or dict.fromkeys(study.variants, plan.Settings(study.rates[0], study.offsets[0]))
  for run in _selected(options, [*plan.sweep(study), *plan.grid(study, shown), *plan.timed(study)]):
    # Until the sweep has chosen, the settings of the grid are not those that it was run with.
    record = records.load(options.out, run.name) if choice is None else kept(options.out, run)
    print(f"{run.name:<34} {_stands(run, record, options)}")
  if choice is not None:
    print("\n".join(f"{variant}: rate {s.rate:g}, offset {s.offset:g}" for variant, s in choice.items()))
  return EXIT_DONE


def _stands(run: Run, record: Record | None, options: argparse.Namespace) -> str:
  """What is done of a run, and what is not."""
  if record is None:
    due = f"{run.seconds:,.0f} s" if run.seconds else f"{run.tokens:,} tokens"
    return f"{due} at {run.config.context:,}{', then evaluated' if run.evaluated else ''}"
  if not unevaluated(run, record):
    return f"done: {describe(record)}"
  workdir = options.workdirs / run.name
  here = has_model(options.out, workdir, run)
  missing = f"its model lies in {workdir}" if here else f"its model is not in {workdir}, and is trained again for it"
  return f"trained: {describe(record)}; not evaluated: {missing}"


def _perform(study: StudyConfig, options: argparse.Namespace, stop: Stop) -> int:
  for needed in ("train.py", "eval.py"):
    if not Path(needed).is_file():
      raise ConfigError(f"the study must be started where {needed} lies, and there is none in {Path.cwd()}")
  for split in ("train", "heldout"):
    if not (options.data / f"{split}.zarr").exists():
      raise ConfigError(f"--data={options.data} has no {split}.zarr; `python -m csympow.study.prepare` makes it")
  options.out.mkdir(parents=True, exist_ok=True)
  workers = Workers(study, options.out, options.workdirs, options.data, options.workers, options.budget, stop)

  every_sweep = plan.sweep(study)
  wanted = _selected(options, every_sweep)
  workers.perform(wanted)
  choice = _choice(study, options, workers, every_sweep)
  unchosen = dict.fromkeys(study.variants, plan.Settings(study.rates[0], study.offsets[0]))
  later = _selected(options, [*plan.grid(study, choice or unchosen), *plan.timed(study)])
  if not wanted and not later:
    raise ConfigError(f"--only={' --only='.join(options.only)}: no run has such a name; --list shows them")
  blocked = [run for run in later if run.kind == "grid" and choice is None]
  if blocked and not wanted:
    told = "do the sweep first, which chooses the learning rates"
    raise ConfigError(f"--out={options.out} has no {plan.CHOICE} for the grid: {told}, or write that file")
  if blocked:
    workers.say(f"{len(blocked)} runs of the grid wait for the sweep")
  workers.perform([run for run in later if run not in blocked])
  if workers.failed:
    return fail(f"{len(workers.failed)} runs failed: {', '.join(workers.failed)}", EXIT_ERROR)
  missing = [run.name for run in [*wanted, *later] if run in blocked or done(options.out, run) is None]
  if missing:
    workers.say(f"left to do, by the same command: {', '.join(missing)} ({len(missing)} of {len(wanted) + len(later)})")
    return EXIT_STOPPED
  workers.say(f"done: all of {len(wanted) + len(later)}, in {options.out}")
  return EXIT_DONE


def _choice(
  study: StudyConfig, options: argparse.Namespace, workers: Workers, sweep: Sequence[Run]
) -> dict[str, plan.Settings] | None:
  """What the sweep chose, now or before; None while it is not done."""
  choice = plan.read_choice(study, options.out)
  if choice is None and all(done(options.out, run) is not None for run in sweep):
    choice = plan.choose(study, records.load_all(options.out))
    plan.write_choice(options.out, choice)
    told = "; ".join(f"{variant} rate {s.rate:g}, offset {s.offset:g}" for variant, s in choice.items())
    workers.say(f"the sweep chose: {told}")
  return choice
