"""A training run from beginning to end; `main` is what `train.py` calls.

Exit codes: 0 done, 2 bad config, data or usage, 3 stopped on a loss or gradient that is not finite, 75 told to stop
after saving, 1 anything else.
"""

import argparse
import functools
import logging
import os
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import jax
import numpy as np

from csympow import overrides
from csympow.command import EXIT_DONE, EXIT_ERROR, EXIT_NOT_FINITE, EXIT_STOPPED, EXIT_USAGE, Parser, explained, fail
from csympow.config import Config, ConfigError
from csympow.data.loader import Batch, Windows, batches, open_documents
from csympow.data.tokenizer import find_tokenizer
from csympow.sharding import Layout, make_mesh, mesh_sizes
from csympow.train import banner, launch, workdir
from csympow.train.checkpoint import Checkpoints
from csympow.train.loop import HaltedError, Loop, Profile, StopFlags
from csympow.train.metrics import Journal, size
from csympow.train.reports import Reports
from csympow.train.step import Program, TrainState
from csympow.train.stop import Stop, Stopped

_MOST_BYTES = 2**50  # beyond which XLA's own arithmetic ends


def main(arguments: Sequence[str] | None = None) -> NoReturn:
  """Runs the command line and ends the process with its exit code."""
  stop = Stop()
  stop.install()
  logging.getLogger("absl").setLevel(
    logging.CRITICAL
  )  # Orbax tells of a failing save at length; so does `main`, in a line
  code = _run(list(sys.argv[1:] if arguments is None else arguments), stop)
  if code in (EXIT_DONE, EXIT_STOPPED, EXIT_NOT_FINITE):
    launch.leave_processes()
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(code)  # a compilation that was given up may still be under way, and Python would wait for it


def _run(arguments: list[str], stop: Stop) -> int:
  try:
    rest, changes = overrides.split_arguments(arguments)
    options = _parse(rest)
    run(options, changes, stop)
  except ConfigError as error:
    return fail(str(error), EXIT_USAGE)
  except Stopped:
    return EXIT_STOPPED
  except HaltedError as error:
    return fail(str(error), EXIT_NOT_FINITE)
  except SystemExit as error:  # argparse
    return error.code if isinstance(error.code, int) else EXIT_USAGE
  except Exception as error:
    line = explained(error, "the workdir")
    if line is not None:
      return fail(f"{line}; the last finished checkpoint is whole", EXIT_ERROR)
    traceback.print_exc()
    return EXIT_ERROR
  return EXIT_DONE


def _parse(arguments: list[str]) -> argparse.Namespace:
  parser = Parser(
    prog="train.py",
    allow_abbrev=False,
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
  config.check_platform(devices[0].platform)
  layout, sizes = _layout(config, devices)
  lead = jax.process_index() == 0

  documents = open_documents(config.data.train, "train", config.data, config.context)
  windows = Windows(documents, config.context, config.model.vocab_size, config.data.windows == "first")
  heldout = _heldout(config)
  tokenizer = find_tokenizer(config.data)
  if tokenizer is not None and tokenizer.vocab_size > config.model.vocab_size:
    needed = f"the {tokenizer.vocab_size:,} tokens of {tokenizer.name}"
    raise ConfigError(f"model.vocab_size must be at least {needed}, got {config.model.vocab_size:,}")
  fingerprint = documents.fingerprint
  workdir.check(directory, config, fingerprint)
  if not options.dry_run and not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
    jax.config.update("jax_compilation_cache_dir", str(directory / "xla"))

  program = Program(config, layout)
  abstract = program.abstract_state()
  if _bytes(abstract) > _MOST_BYTES:
    raise ConfigError(f"model: its parameters and optimizer would take {size(_bytes(abstract))}; no machine has that")
  say = print if lead else _silent
  say(f"csympow, {options.config}\n{banner.describe(config, abstract, sizes, devices, windows, directory)}", flush=True)
  if options.dry_run:
    compiled = stop.interruptible(lambda: _compile(program, abstract, windows))
    say(f"  memory     {banner.memory(compiled)[1]}\ndry run: nothing was written", flush=True)
    return

  if lead:
    workdir.lock(directory)
    workdir.check(directory, config, fingerprint)  # again: nobody else can change it now
    workdir.check_room(directory, _bytes(abstract), config.checkpoint.keep)
    if workdir.stored(directory) is None:
      workdir.claim(directory, config, fingerprint)
  checkpoints = Checkpoints(directory.absolute() / "checkpoints", config.checkpoint)
  state, remarks = checkpoints.restore(abstract)
  for remark in remarks:
    print(f"csympow: {remark}", file=sys.stderr, flush=True)
  if state is None:
    state = jax.jit(program.init, out_shardings=_shardings(abstract))()
  first = int(state.step)
  if first > config.steps:
    raise ConfigError(f"--workdir={directory} is at step {first:,}, beyond steps={config.steps:,}")
  if lead:
    workdir.claim(directory, config, fingerprint)  # nothing refuses what may have changed in it, such as steps
  if first:
    say(f"going on from step {first:,} of {config.steps:,}", flush=True)
  journal = Journal(directory, first, config.log.tensorboard) if lead else None
  arguments = [f"--config={options.config}", *(f"--config.{name}={value}" for name, value in changes.items())]
  reports = Reports(program, heldout, tokenizer, directory, stop, arguments)
  source = functools.partial(batches, windows, config, _batch_sharding(layout))
  loop = Loop(program, state, source, checkpoints, journal, reports, stop)
  try:
    loop.finish_postponed()
    if first == config.steps and not reports.unfinished:
      say(f"this run is done: {first:,} steps, in {directory}")
      return
    if first < config.steps:
      began = time.monotonic()
      compile_step = functools.partial(_compile, program, abstract, windows)
      # With several processes the first step tells all of them to stop, or none would know where the others are.
      compiled = stop.interruptible(compile_step) if jax.process_count() == 1 else compile_step()
      say(f"  memory     {banner.memory(compiled)[1]}; compiled in {time.monotonic() - began:.0f} s", flush=True)
      with Profile(options.window, directory / "tensorboard") as profile:
        loop.run(compiled, profile)
    reports.final(loop.state)
  except Stopped:
    checkpoints.save(loop.state)
    checkpoints.wait()
    say(f"stopped and saved at step {int(loop.state.step):,}; the same command goes on from there", flush=True)
    raise
  finally:
    if journal is not None:
      journal.close()


def _compile(program: Program, abstract: TrainState, windows: Windows) -> Any:
  config, layout = program.config, program.layout
  tokens = jax.ShapeDtypeStruct((config.rows, config.context), np.int32, sharding=_batch_sharding(layout))
  batch: Any = Batch(tokens, tokens, tokens if windows.has_segments else None)  # type: ignore[arg-type]
  step = jax.jit(program.step, donate_argnums=0, out_shardings=(_shardings(abstract), None))
  return step.lower(abstract, batch, StopFlags.abstract(layout)).compile()


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


def _silent(*_: Any, **__: Any) -> None:
  pass
