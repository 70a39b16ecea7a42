"""Runs of train.py and eval.py as processes of their own, several at once on one device, within a time budget.

While one run compiles, others train: at this size compiling takes as long. What would not end before the budget does is
not begun; what is under way when it ends is told to stop, saves, and goes on from there if its workdir is still there.

A run is kept as soon as its training has ended, and anew once its model has been evaluated, where that is due. Until
then it is not done: the next call evaluates the model if the workdir still has it. If not, the model is trained again,
and what is kept of the first stays until the second has been trained too.
"""

import concurrent.futures
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from csympow.command import EXIT_DONE, EXIT_NOT_FINITE, EXIT_STOPPED
from csympow.config import ConfigError, differences, to_dict
from csympow.study import records
from csympow.study.config import StudyConfig
from csympow.study.plan import Run
from csympow.study.records import Record
from csympow.train.checkpoint import finished_steps
from csympow.train.stop import Stop

_GRACE = 20.0  # seconds before the end of the budget at which runs are told to stop, so that they can save
_LOOK = 0.2  # seconds between two looks at a process
_DEVICE_SHARE = 0.9  # of the device's memory, for all runs at once

type Outcome = Literal["done", "diverged", "stopped", "failed"]


class Workers:
  """What performs runs. Its methods may be called from several threads."""

  def __init__(
    self, study: StudyConfig, out: Path, workdirs: Path, data: Path, count: int, budget: float, stop: Stop
  ) -> None:
    self._study, self._out, self._workdirs, self._data, self._count = study, out, workdirs, data, count
    self._stop, self._began, self._budget = stop, time.monotonic(), budget
    self._lock = threading.Lock()
    self.failed: list[str] = []

  def perform(self, runs: Sequence[Run]) -> None:
    """All of these runs that are not done and for which there is time, in this order."""
    missing = [run for run in runs if done(self._out, run) is None]
    self._waiting = len(missing)
    for alone in (False, True):
      with concurrent.futures.ThreadPoolExecutor(1 if alone else self._count) as pool:
        list(pool.map(self._perform, [run for run in missing if run.alone == alone]))

  @property
  def left(self) -> float:
    """Seconds until runs are told to stop."""
    return self._budget - _GRACE - (time.monotonic() - self._began)

  def say(self, text: str) -> None:
    """A line of progress."""
    with self._lock:
      print(f"[{time.monotonic() - self._began:4.0f} s] {text}", flush=True)

  def _perform(self, run: Run) -> None:
    expected = self._expected(run)
    if self._over or expected > self.left:
      if not self._stop.requested:
        self.say(f"{run.name}: not begun, it takes about {expected:.0f} s and {max(0.0, self.left):.0f} s are left")
      return
    record = trained(self._out, self._workdir(run), run)
    if record is None:
      self.say(f"{run.name}: {'going on' if self._workdir(run).exists() else 'begins'}")
      record = self._train(run)
    if record is not None and run.evaluated and not record.diverged:
      self.say(f"{run.name}: {describe(record)}; its evaluation begins")
      record = self._evaluate(run, record)
    if record is None:
      return
    with self._lock:
      self._waiting -= 1
    self.say(f"{run.name}: {describe(record)}; {self._waiting} to go")

  def _train(self, run: Run) -> Record | None:
    """What is now kept of the run; nothing if its training did not come to an end."""
    workdir, began = self._workdir(run), time.monotonic()
    changes = run.changes | {f"data.{split}": str(self._data / f"{split}.zarr") for split in ("train", "heldout")}
    command = ["train.py", f"--config={run.file}", f"--workdir={workdir}"]
    command += [f"--config.{name}={value}" for name, value in changes.items()]
    code = self._process(run, command, run.seconds)
    took = records.seconds_in_all(workdir, time.monotonic() - began)
    if code == EXIT_STOPPED and run.seconds is not None and records.training_seconds(workdir) >= run.seconds:
      code = EXIT_DONE
    outcome = self._outcome(run, code)
    if outcome == "stopped":
      self.say(f"{run.name}: stopped after {took:.0f} s of training")
    if outcome in ("stopped", "failed"):
      return None
    told = {
      "name": run.name,
      "kind": run.kind,
      "outcome": outcome,
      "evaluated": False,
      "device": self._device(run),
      "workers": 1 if run.alone else self._count,
      "train_seconds": round(took, 1),
      "evaluate_seconds": 0.0,
    }
    return records.save(self._out, run.name, workdir, None, told)

  def _evaluate(self, run: Run, record: Record) -> Record | None:
    """What is now kept of the run, trained in its workdir; nothing if the evaluation did not come to an end."""
    workdir, began = self._workdir(run), time.monotonic()
    command = ["eval.py", "--task=context", f"--workdir={workdir}", f"--out={workdir / 'evaluation'}"]
    command += [f"--max_context={self._study.max_context}", f"--documents={self._study.documents}"]
    code = self._process(run, command, None)
    took = time.monotonic() - began
    # A model that breaks past its training context is a result, and by now all of it is written.
    outcome = self._outcome(run, EXIT_DONE if code == EXIT_NOT_FINITE else code)
    if outcome == "stopped":
      self.say(f"{run.name}: stopped after {took:.0f} s of its evaluation; its training is kept")
    if outcome != "done":
      return None
    told = record.summary | {"evaluated": True, "evaluate_seconds": round(took, 1)}
    return records.save(self._out, run.name, workdir, workdir / "evaluation", told)

  def _outcome(self, run: Run, code: int) -> Outcome:
    found: dict[int, Outcome] = {EXIT_DONE: "done", EXIT_NOT_FINITE: "diverged", EXIT_STOPPED: "stopped"}
    if code in found:
      return found[code]
    if self._over:  # and the process had no time to save
      return "stopped"
    log = self._log(run).read_text(errors="replace").splitlines() or ["it printed nothing"]
    self.say(f"{run.name}: failed with exit code {code}: {log[-1][:300]} (all of it: {self._log(run)})")
    with self._lock:
      self.failed.append(run.name)
    return "failed"

  def _process(self, run: Run, command: list[str], seconds: float | None) -> int:
    """The exit code of a program of the project, which is told to stop when the time is up."""
    share = _DEVICE_SHARE if run.alone else _DEVICE_SHARE / self._count
    environment = {
      "JAX_COMPILATION_CACHE_DIR": str((self._workdirs / "xla").absolute()),
      **os.environ,
      "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
      "XLA_PYTHON_CLIENT_MEM_FRACTION": f"{share:.3f}",
    }
    self._log(run).parent.mkdir(parents=True, exist_ok=True)
    with self._log(run).open("ab") as log:
      # In a group of its own: a Ctrl-C is for this program, which passes it on once.
      process = subprocess.Popen(
        [sys.executable, *command], env=environment, stdout=log, stderr=subprocess.STDOUT, process_group=0
      )
      told = False
      try:
        while (code := process.poll()) is None:
          time.sleep(_LOOK)
          enough = seconds is not None and records.training_seconds(self._workdir(run)) >= seconds
          if (self._over or enough) and not told:
            process.send_signal(signal.SIGTERM)
            told = True
          if self.left < -_GRACE:
            process.kill()
      finally:
        if process.poll() is None:
          process.kill()
    return code

  @property
  def _over(self) -> bool:
    return self._stop.requested or self.left <= 0

  def _expected(self, run: Run) -> float:
    """Seconds that a run can take, by the fastest of the runs that are done and nearest to it in context; 0 if none is.

    The slower ones had to share the device with more others than a run that begins late.
    """
    found = [record for record in records.load_all(self._out) if record.kind in ("sweep", "grid")]
    if run.alone or not found:
      return run.seconds or 0.0
    if trained(self._out, self._workdir(run), run) is not None:
      return _evaluating(found)
    apart = [abs(math.log(record.trained_at / run.config.context)) for record in found]
    near = [record for record, distance in zip(found, apart, strict=True) if distance == min(apart)]
    seconds = min(_scaled(record, run) for record in near)
    return seconds + (_evaluating(found) if run.evaluated else 0.0)

  def _device(self, run: Run) -> str:
    found = re.findall(r"^  devices +\d+ (.+?): ", self._log(run).read_text(errors="replace"), re.MULTILINE)
    return found[-1] if found else "unknown"

  def _workdir(self, run: Run) -> Path:
    return self._workdirs / run.name

  def _log(self, run: Run) -> Path:
    return self._workdirs / "logs" / f"{run.name}.txt"


def kept(out: Path, run: Run) -> Record | None:
  """What is kept of a run; raises a ConfigError if it was another run of that name."""
  record = records.load(out, run.name)
  if record is None:
    return None
  ours, theirs = to_dict(run.config), record.summary["config"]
  differing = differences(ours, theirs)
  if run.seconds is None and ours["steps"] != theirs["steps"]:
    differing["steps"] = (ours["steps"], theirs["steps"])
  if run.seconds is not None and not record.diverged and record.stepping < run.seconds:
    differing["seconds of training"] = (run.seconds, round(record.stepping))
  if differing:
    told = "; ".join(f"{name} is {there!r} there, {here!r} here" for name, (here, there) in sorted(differing.items()))
    raise ConfigError(f"--out={out} holds another {run.name}: {told}. Give another --out, or remove its files")
  return record


def done(out: Path, run: Run) -> Record | None:
  """What is kept of a run, if nothing of it is missing."""
  record = kept(out, run)
  return None if record is None or unevaluated(run, record) else record


def unevaluated(run: Run, record: Record) -> bool:
  """Whether the run is trained and its evaluation is missing."""
  return run.evaluated and not record.diverged and not record.summary["evaluated"]


def trained(out: Path, workdir: Path, run: Run) -> Record | None:
  """What is kept of a run, if its evaluation is missing and the model that was trained still lies in the workdir."""
  record = kept(out, run)
  return record if record is not None and unevaluated(run, record) and has_model(out, workdir, run) else None


def has_model(out: Path, workdir: Path, run: Run) -> bool:
  """Whether the model of which the training is kept lies in the workdir."""
  return records.kept_from(out, run.name, workdir) and run.config.steps in finished_steps(workdir / "checkpoints")


def describe(record: Record) -> str:
  """The outcome in a few words."""
  took = f"{float(record.summary['train_seconds']) + float(record.summary['evaluate_seconds']):.0f} s"
  if record.diverged:
    return f"diverged at step {len(record.steps['step'])}, {took}"
  heldout = "" if record.heldout_loss is None else f", held-out {record.heldout_loss:.4f}"
  evaluated = ", evaluated" if record.summary["evaluated"] else ""
  return f"loss {record.final_loss.mean:.4f}{heldout}, {record.tokens_per_s:,.0f} tokens/s{evaluated}, {took}"


def _scaled(record: Record, run: Run) -> float:
  """Seconds that a run takes by what one like it took: compiling as long, steps in proportion to the tokens.

  A longer context takes longer, by less than in proportion: attention is a part of the step.
  """
  config = record.summary["config"]
  longer = max(1.0, math.sqrt(run.config.context / record.trained_at))
  share = longer * run.tokens / (int(config["steps"]) * int(config["batch_tokens"]))
  return float(record.summary["train_seconds"]) + record.stepping * (share - 1)


def _evaluating(found: Sequence[Record]) -> float:
  """Seconds that an evaluation takes, by the fastest one."""
  return min((float(r.summary["evaluate_seconds"]) for r in found if r.summary["evaluated"]), default=0.0)
