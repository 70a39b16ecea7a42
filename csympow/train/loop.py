"""The steps of a run, one after the other, and what happens between them."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np

from csympow.data.loader import Batch
from csympow.sharding import Layout
from csympow.train.checkpoint import Checkpoints
from csympow.train.metrics import Journal, Progress
from csympow.train.reports import Reports
from csympow.train.step import Metrics, Program, TrainState
from csympow.train.stop import Stop, Stopped


class HaltedError(Exception):
  """The guard let no further step pass."""


class Loop:
  """The steps of a run. The host is one step ahead of what it knows of the devices, so that they never wait for it."""

  def __init__(
    self,
    program: Program,
    state: TrainState,
    source: Callable[[int], Iterator[Batch]],
    checkpoints: Checkpoints,
    journal: Journal | None,
    reports: Reports,
    stop: Stop,
  ) -> None:
    self._config, self._source, self._checkpoints = program.config, source, checkpoints
    self._journal, self._reports, self._stop = journal, reports, stop
    self._flags = StopFlags(program.layout)
    self._progress = Progress(self._config.steps, self._config.batch_tokens)
    self.state = state

  def run(self, compiled: Any, profile: "Profile") -> None:
    """All steps from the state's on, by the compiled step; raises Stopped or HaltedError."""
    first = int(self.state.step)
    self._since, self._at = time.monotonic(), first
    pending: tuple[int, Metrics] | None = None
    for step, batch in enumerate(self._source(first), start=first + 1):
      profile.before(step, self.state)
      self.state, metrics = compiled(self.state, batch, self._flags(self._stop.requested))
      stop = pending is not None and self._look(*pending)
      pending = (step, metrics)
      if self._due(step):
        stop = self._look(*pending) or stop
        self._report(step, metrics, batch)
        pending = None
      if stop:
        if pending is not None:
          self._look(*pending)
        raise Stopped

  def finish_postponed(self) -> None:
    """Completes the record of the state's step, if the part before was told to stop while it was being made."""
    if self._journal is None or self._journal.postponed is None:
      return
    record = self._journal.postponed
    if jax.process_count() > 1:  # what is due needs all of them, and only this one knows
      self._journal.write(record)
    else:
      self._complete(record, next(self._source(record["step"] - 1)))

  def _look(self, step: int, metrics: Metrics) -> bool:
    """Waits for a step; raises HaltedError if it was none, and returns whether to stop."""
    if metrics.halted:
      config, found = self._config.guard, f"loss {float(metrics.loss)}, gradient norm {float(metrics.grad_norm)}"
      why = "a spike of the loss" if metrics.spike else "not finite"
      after = f" after {config.skip_limit} bad steps in a row were skipped" if config.skip_limit else ""
      self._checkpoints.wait()
      kept = self._checkpoints.last_step
      where = "no checkpoint was due before it" if kept is None else f"the last checkpoint, step {kept}, is kept"
      raise HaltedError(
        f"stopped before the update of step {step}{after}: {found} ({why}); {where}; "
        "--config.guard.skip_limit=10 would skip such steps"
      )
    if metrics.bad:
      self._say(f"step {step} skipped: loss {float(metrics.loss)}, gradient norm {float(metrics.grad_norm)}")
    return bool(metrics.stop)

  def _due(self, step: int) -> bool:
    config = self._config
    periods = (config.log.every, config.log.gates, config.log.heldout, config.log.sample, config.checkpoint.every)
    return step in (1, config.steps) or any(period and step % period == 0 for period in periods)

  def _report(self, step: int, metrics: Metrics, batch: Batch) -> None:
    """What is due after this step, the save last: it is then never newer than what was told."""
    config = self._config
    now = time.monotonic()
    seconds = (now - self._since) / max(1, step - self._at)
    speed = config.batch_tokens / seconds
    record: dict[str, Any] = {
      "step": step,
      "loss": float(metrics.loss),
      "lr": float(metrics.lr),
      "grad_norm": float(metrics.grad_norm),
      "tokens": step * config.batch_tokens,
      "tokens_per_s": speed,
      "step_s": seconds,
      "eta_s": (config.steps - step) * seconds,
      "skipped": int(metrics.skipped),
    }
    told = {"mfu": self._reports.utilisation(speed), "memory_bytes": self._reports.memory()}
    record |= {name: value for name, value in told.items() if value is not None}
    self._checkpoints.look()
    self._progress.step(step, record["loss"], speed, due=self._journal is not None)
    self._complete(record, batch)
    if step % config.checkpoint.every == 0 or step == config.steps:
      if self._journal is not None:
        self._journal.sync()
      self._checkpoints.save(self.state)
      if step == config.steps:
        self._checkpoints.wait()
    self._since, self._at = time.monotonic(), step

  def _complete(self, record: dict[str, Any], batch: Batch) -> None:
    """Adds what is due to a step's record and writes it; if told to stop meanwhile, leaves it to the next part."""
    try:
      record |= self._reports.due(record["step"], self.state, batch, self._say, self._journal)
    except Stopped:
      if self._journal is not None:
        self._journal.postpone(record)
      raise
    if self._journal is not None:
      self._journal.write(record)

  def _say(self, text: str) -> None:
    if self._journal is not None:
      self._progress.say(text)


class Profile:
  """A trace of some steps, for TensorBoard's profiler."""

  def __init__(self, steps: range, directory: Path) -> None:
    self._steps, self._directory = steps, directory
    self._first: int | None = None  # step of the trace under way

  def before(self, step: int, state: TrainState) -> None:
    """To be called before each step: begins and ends the trace."""
    if self._first is None and step in self._steps:
      jax.profiler.start_trace(str(self._directory))
      self._first = step
    elif self._first is not None and step not in self._steps:
      jax.block_until_ready(state)
      self._end(step - 1)

  def _end(self, last: int | None = None) -> None:
    if self._first is not None:
      jax.profiler.stop_trace()
      if jax.process_index() == 0:
        print(f"profile from step {self._first}{f' to {last}' if last else ''} in {self._directory}", flush=True)
      self._first = None

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *_: object) -> None:
    self._end()


class StopFlags:
  """The wish to stop, as an argument of the step: every process then hears of it at the same step."""

  def __init__(self, layout: Layout | None) -> None:
    # Made once: the two are all there ever are.
    self._no, self._yes = (self._spread(layout, wish) for wish in (0, 1))

  def __call__(self, wish: bool) -> jax.Array:
    return self._yes if wish else self._no

  @staticmethod
  def abstract(layout: Layout | None) -> jax.ShapeDtypeStruct:
    """One number for each device."""
    if layout is None:
      return jax.ShapeDtypeStruct((1,), np.int32)
    everywhere = jax.sharding.NamedSharding(layout.mesh, jax.sharding.PartitionSpec(layout.mesh.axis_names))
    return jax.ShapeDtypeStruct((layout.mesh.size,), np.int32, sharding=everywhere)

  def _spread(self, layout: Layout | None, wish: int) -> jax.Array:
    flags = self.abstract(layout)
    values = np.full(flags.shape, wish, flags.dtype)
    if layout is None:
      return jax.device_put(values)
    return jax.make_array_from_callback(flags.shape, flags.sharding, lambda index: values[index])
