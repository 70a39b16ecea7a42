"""The evaluation of runs; `main` is what `eval.py` calls. Exit codes are those of `csympow.command`."""

import argparse
import importlib
import logging
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from csympow.command import (
  EXIT_DONE,
  EXIT_ERROR,
  EXIT_NOT_FINITE,
  EXIT_STOPPED,
  EXIT_USAGE,
  NotFiniteError,
  Parser,
  explained,
  fail,
)
from csympow.config import ConfigError
from csympow.disk import require_writable
from csympow.evaluate.kept import anything_kept
from csympow.train.stop import Stop, Stopped

# The module of each task (see `csympow.evaluate`), imported when it is asked for.
TASKS = {
  "context": "csympow.evaluate.context",
  "recall": "csympow.evaluate.recall",
  "passkey": "csympow.evaluate.passkey",
  "needles": "csympow.evaluate.needles",
  "sample": "csympow.evaluate.sample",
  "memory": "csympow.evaluate.memory",
}


_MAX_CONTEXT = 65_536


def main(arguments: Sequence[str] | None = None) -> NoReturn:
  """Runs the command line and ends the process with its exit code."""
  stop = Stop()
  stop.install()
  logging.getLogger("absl").setLevel(logging.CRITICAL)  # Orbax explains at length what `fail` says in a line
  code = _run(list(sys.argv[1:] if arguments is None else arguments), stop)
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(code)  # the task may still be at work in its thread, and Python would wait for it


def _run(arguments: list[str], stop: Stop) -> int:
  where = "--out"
  try:
    args, task = _parse(arguments)
    where = f"--out={args.out}"
    _make(args.out, args.task)
    args.stop = stop
    # On a thread of its own, so that a signal is obeyed at once, also while XLA compiles. Tasks keep what they have
    # computed as they go, and replace files as a whole.
    stop.interruptible(lambda: task.run(args))
  except ConfigError as error:
    return fail(str(error), EXIT_USAGE)
  except NotFiniteError as error:
    return fail(str(error), EXIT_NOT_FINITE)
  except Stopped:
    told = f"what was computed is kept in {args.out}, and the same command goes on from there"
    print(f"stopped; {told if anything_kept(args.out, args.task) else 'nothing was computed yet'}", flush=True)
    return EXIT_STOPPED
  except SystemExit as error:  # argparse
    return error.code if isinstance(error.code, int) else EXIT_USAGE
  except Exception as error:
    line = explained(error, where)
    if line is not None:
      return fail(line, EXIT_ERROR)
    traceback.print_exc()
    return EXIT_ERROR
  return EXIT_DONE


def _parse(arguments: list[str]) -> tuple[argparse.Namespace, ModuleType]:
  first = Parser(add_help=False, allow_abbrev=False)
  first.add_argument("--task", choices=TASKS)
  name = first.parse_known_args(arguments)[0].task
  task = None if name is None else importlib.import_module(TASKS[name])

  parser = Parser(
    prog="eval.py",
    allow_abbrev=False,
    description="Evaluates trained models: writes TASK.csv, TASK.json and TASK.png and prints a table.",
    epilog="Each task has options of its own: --task=TASK --help",
  )
  parser.add_argument("--workdir", action="append", type=Path, metavar="DIR", help="of a run; may be given repeatedly")
  parser.add_argument("--task", choices=TASKS, required=True, help="what to evaluate")
  parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="where the results go")
  parser.add_argument("--step", type=int, metavar="N", help="of the checkpoint; by default the newest that is whole")
  parser.add_argument("--max_context", type=int, metavar="N", help=f"tokens of the longest context ({_MAX_CONTEXT})")
  if task is not None:
    task.add_options(parser)
  args = parser.parse_args(arguments)
  assert task is not None
  for flag in ("workdir", "step", "max_context"):
    if not task.READS_RUNS and getattr(args, flag) is not None:
      parser.error(f"--{flag} is for tasks that read runs; --task={args.task} trains models of its own")
  args.max_context = _MAX_CONTEXT if args.max_context is None else args.max_context
  if not 2 <= args.max_context < 2**31:
    parser.error(f"--max_context must be from 2 to 2^31 - 1, got {args.max_context}")
  return args, task


def _make(directory: Path, task: str) -> None:
  """Makes the directory; raises a ConfigError unless the results can be written to it when they are there."""
  require_writable(directory, f"--out={directory}")
  if (directory / "config.json").exists() and (directory / "checkpoints").exists():
    raise ConfigError(f"--out={directory} is the directory of a run, which has results of its own; give another")
  for name in (f"{task}.csv", f"{task}.png", f"{task}.json"):
    if (directory / name).is_dir():
      raise ConfigError(f"--out={directory}: {name} would be written there, and it is a directory")
