"""A training run from beginning to end; `main` is what `train.py` calls.

Exit codes: 0 done, 2 bad config, data or usage, 3 stopped on a loss or gradient that is not finite, 75 told to stop
after saving, 1 anything else.
"""

import argparse
import errno
import os
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jax
import numpy as np

from csympow import overrides
from csympow.config import Config, ConfigError
from csympow.data.loader import Batch, Windows, batches, open_documents
from csympow.sharding import Layout, make_mesh, mesh_sizes
from csympow.train import banner, launch, workdir
from csympow.train.checkpoint import Checkpoints
from csympow.train.metrics import Journal, Progress
from csympow.train.reports import Reports
from csympow.train.step import Metrics, Program, TrainState
from csympow.train.stop import EXIT_STOPPED, Stop, Stopped

EXIT_DONE, EXIT_ERROR, EXIT_USAGE, EXIT_NOT_FINITE = 0, 1, 2, 3


class HaltedError(Exception):
  """The guard let no further step pass."""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
  """Runs the command line and ends the process with its exit code."""
  stop = Stop()
  stop.install()
  code = _run(list(sys.argv[1:] if arguments is None else arguments), stop)
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(code)  # a compilation that was given up may still be under way, and Python would wait for it


def _run(arguments: list[str], stop: Stop) -> int:
  try:
    rest, changes = overrides.split_arguments(arguments)
    options = _parse(rest)
    run(options, changes, stop)
  except ConfigError as error:
    return _fail(str(error), EXIT_USAGE)
  except Stopped:
    return EXIT_STOPPED
  except HaltedError as error:
    return _fail(str(error), EXIT_NOT_FINITE)
  except SystemExit as error:  # argparse
    return error.code if isinstance(error.code, int) else EXIT_USAGE
  except Exception as error:
    full = _no_room(error)
    if full is not None:
      return _fail(f"{full}; the last finished checkpoint is whole, and the same command goes on from it", EXIT_ERROR)
    traceback.print_exc()
    return EXIT_ERROR
  return EXIT_DONE


def _parse(arguments: list[str]) -> argparse.Namespace:
  parser = argparse.ArgumentParser(
    prog="train.py",
    description="Trains a model. The same command again goes on where the last one stopped.",
    epilog="Any field of the config can be set: --config.model.power=4 --config.steps=1000",
  )
  parser.add_argument("--config", required=True, metavar="FILE", help="a Python file with get_config()")
  parser.add_argument("--workdir", metavar="DIR", help="where the run lives; by default runs/NAME-OF-CONFIG")
  parser.add_argument("--dry_run", action="store_true", help="stop after compiling the step and reading its memory")
  parser.add_argument("--topology", metavar="NAME", help="with --dry_run: compile for these TPUs, such as v5p:4x4x4")
  parser.add_argument("--profile", metavar="FIRST:COUNT", help="trace these steps for TensorBoard's profiler")
  parser.add_argument("--coordinator", metavar="HOST:PORT", help="of the first process, where nothing tells by itself")
  parser.add_argument("--num_processes", type=int, metavar="N")
  parser.add_argument("--process_id", type=int, metavar="N")
  options = parser.parse_args(arguments)
  if options.topology and not options.dry_run:
    parser.error("--topology needs --dry_run: there is nothing to run on")
  options.window = _window(parser, options.profile)
  return options


def _window(parser: argparse.ArgumentParser, text: str | None) -> range:
  if text is None:
    return range(0)
  first, colon, count = text.partition(":")
  if not (colon and first.isdigit() and count.isdigit() and int(count)):
    parser.error(f"--profile must be FIRST:COUNT, such as 10:5, got {text}")
  return range(int(first), int(first) + int(count))


def run(options: argparse.Namespace, changes: dict[str, str], stop: Stop) -> None:
  """The run."""
  config = overrides.load(options.config, changes)
  launch.set_flags(config.deterministic)
  if not options.topology:
    launch.join_processes(options.coordinator, options.num_processes, options.process_id)
    stop.install()  # joining may have taken the signals
  directory = Path(options.workdir or Path("runs") / Path(options.config).stem)
  devices = _devices(options.topology)
  layout, sizes = _layout(config, devices)
  lead = jax.process_index() == 0

  documents = open_documents(config.data.train, "train", config.data, config.context)
  windows = Windows(documents, config.context, config.model.vocab_size, config.data.windows == "first")
  heldout = _heldout(config)
  fingerprint = documents.fingerprint
  workdir.check(directory, config, fingerprint)
  jax.config.update("jax_compilation_cache_dir", os.environ.get("JAX_COMPILATION_CACHE_DIR") or str(directory / "xla"))

  program = Program(config, layout)
  abstract = program.abstract_state()
  say = print if lead else _silent
  say(f"csympow, {options.config}\n{banner.describe(config, abstract, sizes, devices, windows, directory)}", flush=True)
  if options.dry_run:
    compiled = stop.interruptible(lambda: _compile(program, abstract, windows))
    say(f"  memory     {banner.memory(compiled)[1]}\ndry run: nothing was written", flush=True)
    return

  workdir.claim(directory, config, fingerprint)
  workdir.check_room(directory, _bytes(abstract), config.checkpoint.keep)
  checkpoints = Checkpoints(directory.absolute() / "checkpoints", config.checkpoint)
  state, remarks = checkpoints.restore(abstract)
  for remark in remarks:
    print(f"csympow: {remark}", file=sys.stderr, flush=True)
  if state is None:
    state = stop.interruptible(lambda: jax.jit(program.init, out_shardings=_shardings(abstract))())
  first = int(state.step)
  if first:
    say(f"going on from step {first:,} of {config.steps:,}", flush=True)
  journal = Journal(directory, first, config.log.tensorboard) if lead else None
  reports = Reports(program, config, heldout, directory, stop)
  try:
    if first < config.steps:
      began = time.monotonic()
      compiled = stop.interruptible(lambda: _compile(program, abstract, windows))
      say(f"  memory     {banner.memory(compiled)[1]}; compiled in {time.monotonic() - began:.0f} s", flush=True)
      loop = Loop(config, layout, compiled, checkpoints, journal, reports, options.window, directory, stop)
      state = loop.run(state, batches(windows, config, _batch_sharding(layout), first))
    elif not reports.unfinished:
      say(f"this run is done: {first:,} steps, in {directory}")
      return
    reports.final(state)
  except Stopped:
    latest = loop.state if "loop" in locals() else state
    checkpoints.save(latest)
    checkpoints.wait()
    say(f"stopped and saved at step {int(latest.step):,}; the same command goes on from there", flush=True)
    raise
  finally:
    if journal is not None:
      journal.close()


class Loop:
  """The steps of a run. The host is one step ahead of what it knows of the devices, so that they never wait for it."""

  def __init__(
    self,
    config: Config,
    layout: Layout | None,
    compiled: Any,
    checkpoints: Checkpoints,
    journal: Journal | None,
    reports: Reports,
    profiled: range,
    directory: Path,
    stop: Stop,
  ) -> None:
    self._config, self._compiled, self._checkpoints = config, compiled, checkpoints
    self._journal, self._reports, self._stop = journal, reports, stop
    self._profiled, self._directory = profiled, directory
    self._flags = _StopFlags(layout)
    self.state: TrainState

  def run(self, state: TrainState, data: Iterator[Batch]) -> TrainState:
    """All steps from the state's on; raises Stopped or HaltedError."""
    config = self._config
    self.state = state
    first = int(state.step)
    self._progress = Progress(config.steps, first, config.batch_tokens)
    self._since, self._at = time.monotonic(), first
    pending: tuple[int, Metrics] | None = None
    for step, batch in enumerate(data, start=first + 1):
      self._profile(step)
      self.state, metrics = self._compiled(self.state, batch, self._flags(self._stop.requested))
      if pending is not None:
        self._look(*pending)
      pending = (step, metrics)
      if step == first + 1 or self._due(step):
        self._look(*pending)
        self._report(step, metrics, batch)
        pending = None
    return self.state

  def _look(self, step: int, metrics: Metrics) -> None:
    """Waits for a step, and gives up where it says so."""
    if metrics.halted:
      config, found = self._config.guard, f"loss {float(metrics.loss)}, gradient norm {float(metrics.grad_norm)}"
      why = "a spike of the loss" if metrics.spike else "not finite"
      after = f" after {config.skip_limit} bad steps in a row were skipped" if config.skip_limit else ""
      kept = self._checkpoints.last_step
      where = "no checkpoint was due before it" if kept is None else f"the last checkpoint, step {kept}, is kept"
      self._checkpoints.wait()
      raise HaltedError(f"stopped before the update of step {step}{after}: {found} ({why}); {where}")
    if metrics.bad:
      self._say(f"step {step} skipped: loss {float(metrics.loss)}, gradient norm {float(metrics.grad_norm)}")
    if metrics.stop:
      raise Stopped

  def _due(self, step: int) -> bool:
    config = self._config
    periods = (config.log.every, config.log.gates, config.log.heldout, config.log.sample, config.checkpoint.every)
    return step == config.steps or any(period and step % period == 0 for period in periods)

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
    used = self._reports.utilisation(speed)
    record |= {} if used is None else {"mfu": used}
    self._progress.step(step, record["loss"], speed, due=self._journal is not None)
    record |= self._reports.due(step, self.state, batch, self._say, self._journal)
    if self._journal is not None:
      self._journal.write(record)
    if step % config.checkpoint.every == 0 or step == config.steps:
      if self._journal is not None:
        self._journal.sync()
      self._checkpoints.save(self.state)
      if step == config.steps:
        self._checkpoints.wait()
    self._since, self._at = time.monotonic(), step

  def _profile(self, step: int) -> None:
    if step - 1 == self._profiled.start and self._profiled:
      jax.profiler.start_trace(str(self._directory / "tensorboard"))
    if step - 1 == self._profiled.stop and self._profiled:
      jax.block_until_ready(self.state)
      jax.profiler.stop_trace()
      self._say(f"profile of steps {self._profiled.start} to {step - 1} in {self._directory / 'tensorboard'}")

  def _say(self, text: str) -> None:
    if self._journal is not None:
      self._progress.say(text)


class _StopFlags:
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


def _compile(program: Program, abstract: TrainState, windows: Windows) -> Any:
  config, layout = program.config, program.layout
  tokens = jax.ShapeDtypeStruct((config.rows, config.context), np.int32, sharding=_batch_sharding(layout))
  batch: Any = Batch(tokens, tokens, tokens if windows.has_segments else None)  # type: ignore[arg-type]
  step = jax.jit(program.step, donate_argnums=0, out_shardings=(_shardings(abstract), None))
  return step.lower(abstract, batch, _StopFlags.abstract(layout)).compile()


def _devices(topology: str | None) -> list[Any]:
  if topology is None:
    return jax.devices()
  from jax.experimental import topologies

  os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
  try:
    return list(topologies.get_topology_desc(topology, "tpu").devices)
  except Exception as error:  # whatever libtpu raises, or its absence
    line = str(error).splitlines()[0]
    raise ConfigError(
      f"--topology={topology} needs libtpu (pip install 'csympow[tpu]') and a name it knows: {line}"
    ) from error


def _layout(config: Config, devices: list[Any]) -> tuple[Layout | None, dict[str, int]]:
  mesh = config.mesh
  try:
    sizes = mesh_sizes(mesh.data, mesh.fsdp, mesh.tensor, mesh.context, len(devices))
  except ValueError as error:
    raise ConfigError(str(error)) from error
  config.check_mesh(sizes)
  return (Layout(make_mesh(sizes, devices)) if len(devices) > 1 else None), sizes


def _heldout(config: Config) -> Windows | None:
  if config.data.heldout is None:
    return None
  documents = open_documents(config.data.heldout, "heldout", config.data, config.context)
  return Windows(documents, config.context, config.model.vocab_size)


def _batch_sharding(layout: Layout | None) -> jax.sharding.Sharding | None:
  return None if layout is None else layout.sharding("batch", "time")


def _shardings(abstract: Any) -> Any:
  return jax.tree.map(lambda x: x.sharding, abstract)


def _bytes(abstract: Any) -> int:
  return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(abstract))


def _no_room(error: BaseException | None) -> str | None:
  """The line for an error that is a full disk or a failing one, however deep it lies."""
  while error is not None:
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO):
      return f"writing to {error.filename or 'the workdir'} failed: {os.strerror(error.errno)}"
    if "No space left on device" in str(error) or ("RESOURCE_EXHAUSTED: " in str(error) and "write" in str(error)):
      return "writing to the workdir failed: No space left on device"
    error = error.__cause__ or error.__context__
  return None


def _fail(line: str, code: int) -> int:
  print(f"csympow: {line}", file=sys.stderr, flush=True)
  return code


def _silent(*_: Any, **__: Any) -> None:
  pass
