"""Real runs of train.py and eval.py, as processes; and runs that nobody trained, for what needs only their shape."""

import atexit
import json
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp

from csympow import overrides
from csympow.train.checkpoint import Checkpoints, finished_steps
from csympow.train.metrics import read
from csympow.train.step import Program
from csympow.train.workdir import claim

ROOT = Path(__file__).parents[1]
TINY = "tests/tiny_config.py"
# One for all runs of a session: each program is compiled once.
_CACHE = tempfile.mkdtemp(prefix="csympow-compiled-")
atexit.register(shutil.rmtree, _CACHE, ignore_errors=True)
TIMINGS = ("tokens_per_s", "step_s", "eta_s")


def start(workdir, *arguments, devices=1, config=TINY, before=""):
  """A run under way; `before` is for the shell that starts it."""
  return begin("train.py", f"--config={config}", f"--workdir={workdir}", *arguments, devices=devices, before=before)


def begin(*command, devices=1, before=""):
  """A program of the root directory under way."""
  environment = os.environ | {
    # Little of the compiler's effort: these runs take moments.
    "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0",
    "JAX_PLATFORMS": "cpu",
    "JAX_COMPILATION_CACHE_DIR": _CACHE,
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
  }
  command = ["bash", "-c", f'{before}\nexec "$@"', "bash", sys.executable, *map(str, command)]
  return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def as_a_user():
  """The environment without what makes this suite fast and its programs slow."""
  return {name: value for name, value in os.environ.items() if not name.startswith("XLA_")}


def run(workdir, *arguments, expect=0, **options):
  """A run to its end: what it printed, on standard output and on standard error."""
  return finish(start(workdir, *arguments, **options), expect)


def evaluate(*arguments, expect=0, **options):
  """An evaluation to its end: what it printed, on standard output and on standard error."""
  return finish(begin("eval.py", *arguments, **options), expect)


def finish(process, expect=0):
  """What a program printed, on standard output and on standard error."""
  output, errors = process.communicate(timeout=300)
  assert process.returncode == expect, f"exit code {process.returncode}, not {expect}\n{output}\n{errors}"
  return output, errors


def untrained(workdir, layout=None, seed=0, **changes):
  """The directory of a run of the tiny config that was saved before its first step; returns its parameters."""
  config = overrides.load(TINY, changes | {"seed": str(seed)})
  workdir.mkdir(parents=True, exist_ok=True)
  claim(workdir, config, "fingerprint")
  program = Program(config, layout)
  shardings = jax.tree.map(lambda x: x.sharding, program.abstract_state())
  state = jax.jit(program.init, out_shardings=shardings)()
  checkpoints = Checkpoints(workdir.absolute() / "checkpoints", config.checkpoint)
  checkpoints.save(state)
  checkpoints.wait()
  return state.parameters


def wait_for(process, text):
  """Reads what a run prints until a line has the text; returns all lines so far."""
  lines = []
  for line in process.stdout:
    lines.append(line)
    if text in line:
      return lines
  raise AssertionError(f"the run ended without {text!r}:\n{''.join(lines)}\n{process.stderr.read()}")


def steps(workdir):
  """The steps of the finished checkpoints."""
  return finished_steps(Path(workdir) / "checkpoints")


def metrics(workdir):
  """The metrics that a run is answerable for: all but timings."""
  records = read(Path(workdir) / "metrics.jsonl")
  return [{name: value for name, value in record.items() if name not in TIMINGS} for record in records]


def state(workdir, step=None):
  """The arrays of a checkpoint by name."""
  step = steps(workdir)[-1] if step is None else step
  with warnings.catch_warnings(action="ignore"):  # that the arrays go where they were saved from: here they may
    tree = ocp.load(Path(workdir).absolute() / "checkpoints" / str(step))
  flat, queue = {}, [("", tree)]
  while queue:
    name, node = queue.pop()
    if isinstance(node, dict):
      queue += [(f"{name}/{key}", inner) for key, inner in node.items()]
    elif isinstance(node, (list, tuple)):
      queue += [(f"{name}/{key}", inner) for key, inner in enumerate(node)]
    elif node is not None:
      flat[name] = np.asarray(node)
  return flat


def assert_same_run(a, b):
  """Two runs are one, to the last bit of parameters, optimizer and metrics."""
  ours, theirs = state(a), state(b)
  assert ours.keys() == theirs.keys()
  assert len(ours) > 20
  for name, array in ours.items():
    assert array.tobytes() == theirs[name].tobytes(), name
  assert metrics(a) == metrics(b)


def config_of(workdir):
  """The config.json of a run."""
  return json.loads((Path(workdir) / "config.json").read_text())["config"]
