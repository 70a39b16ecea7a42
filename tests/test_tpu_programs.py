"""What is compiled for real TPUs, on a host that has none: every kernel, and the training step of the 124M model.

libtpu, which compiles for them, exists for Linux on x86-64 only; without it what is compiled here is skipped.
"""

import itertools
import math

import jax
import jax.numpy as jnp
import pytest

from benchmarks import tpu_static
from csympow import cost, overrides
from csympow.data.loader import Batch
from csympow.sharding import Layout, make_mesh, mesh_sizes
from csympow.train import flops
from csympow.train.step import Program
from tests import comparing, running
from tests.comparing import Case
from tests.test_tpu_kernels import KERNELS

GIB = {"v5e": 16, "v5p": 95, "v6e": 32}


@pytest.fixture
def libtpu():
  """The compiler."""
  return pytest.importorskip("libtpu", reason="libtpu, for Linux on x86-64, is not installed")


def compiled():
  """Every kernel for every chip in heads of 64 and of 128: at p=2 one of the two by default, by turns."""
  for (n, kernel), (m, chip), (i, head_dim) in itertools.product(
    enumerate(tpu_static.kernels(64)), enumerate(tpu_static.CHIPS), enumerate((64, 128))
  ):
    yield pytest.param(
      kernel, chip, head_dim, marks=() if (n + m + i) % 2 and "p=4" not in kernel else pytest.mark.slow
    )


@pytest.mark.usefixtures("libtpu")
@pytest.mark.parametrize(("kernel", "chip", "head_dim"), list(compiled()))
def test_kernels_compile_for_every_chip(kernel, chip, head_dim):
  tpu_static.compile_for(chip, *tpu_static.kernels(head_dim)[kernel])


@pytest.mark.slow
@pytest.mark.usefixtures("libtpu")
@pytest.mark.parametrize("chip", tpu_static.CHIPS)
@pytest.mark.parametrize(
  ("form", "case"),
  [
    ("chunked", Case(T=1100, B=1, H=2, groups=3, d=64, dv=128, segments="padded", dtype="bfloat16")),
    ("chunked", Case(T=600, B=1, H=1, groups=32, d=128, dv=64, entry="attention", dtype="float16")),  # fills the memory
    ("attention", Case(T=1100, B=1, H=2, groups=3, d=64, dv=128, segments="padded", dtype="bfloat16")),
    ("attention", Case(T=600, B=1, H=1, groups=32, d=128, dv=64, power=4, entry="attention", dtype="float16")),
  ],
  ids=str,
)
def test_calls_with_all_there_is_compile_for_every_chip(form, case, chip):
  """On a host that has no such chip the mesh says what the call is for."""
  options = {"entry": case.entry, "power": case.power, "form": form, "implementation": "pallas"}

  def call(x, rest, weights):
    return comparing.with_gradients(lambda x: comparing.call(x, rest, **options), x, weights)

  tpu_static.compile_for(chip, call, (*comparing.inputs(case), comparing.cotangents(case)))


@pytest.mark.slow
def test_the_training_step_of_the_124m_model_lowers_with_the_kernels(monkeypatch):
  monkeypatch.setattr(cost, "named", lambda: "tpu")
  config = overrides.load("configs/long/p2_65536.py", {})
  layout = Layout(make_mesh(mesh_sizes(2, 2, 2, 1, devices=8), jax.devices()[:8]))
  program = Program(config, layout)
  rows = jax.ShapeDtypeStruct((8, 65_536), jnp.int32, sharding=layout.sharding("batch", "time"))
  step = jax.jit(program.step, donate_argnums=0)
  everywhere = jax.sharding.NamedSharding(layout.mesh, jax.P(layout.mesh.axis_names))
  stop = jax.ShapeDtypeStruct((8,), jnp.int32, sharding=everywhere)
  traced = step.trace(program.abstract_state(), Batch(rows, rows, None), stop)
  text = traced.lower(lowering_platforms=("tpu",)).as_text()
  assert all(f'kernel_name = "{kernel}"' in text for kernel in KERNELS["chunked"])


@pytest.mark.slow
@pytest.mark.usefixtures("libtpu")
@pytest.mark.parametrize(
  ("topology", "mesh", "context"),
  [
    ("v5e:4x4", {"fsdp": 4, "tensor": 2}, 65_536),
    ("v5p:4x4x4", {"fsdp": 4, "tensor": 2}, 65_536),
    ("v6e:8x8", {"fsdp": 4, "tensor": 2}, 65_536),
    ("v5e:4x4", {"tensor": 2, "context": 8}, 1_048_576),
    ("v5p:4x4x4", {"fsdp": 2, "tensor": 2, "context": 8}, 1_048_576),
    ("v6e:8x8", {"fsdp": 2, "tensor": 2, "context": 16}, 1_048_576),
  ],
)
def test_the_training_step_of_the_124m_model_fits_the_chip(topology, mesh, context, tmp_path):
  chips = math.prod(map(int, topology.split(":")[1].split("x")))
  changes = {"data.train": "embedded", "data.heldout": "none", "batch_tokens": max(chips * 65_536, context)}
  changes |= {f"mesh.{axis}": size for axis, size in mesh.items()}
  process = running.begin(
    "train.py",
    f"--config=configs/long/p2_{context}.py",
    "--dry_run",
    f"--topology={topology}",
    f"--workdir={tmp_path}",
    *(f"--config.{name}={value}" for name, value in changes.items()),
  )
  output, errors = process.communicate(timeout=3600)
  assert process.returncode == 0, errors
  assert "chunked form, pallas" in output
  needed, unit = output.split("  memory ")[-1].split()[:2]
  bytes_of = {"GiB": 2**30, "MiB": 2**20}
  assert float(needed) * bytes_of[unit] < GIB[topology.split(":")[0]] * 2**30


def test_a_run_over_a_split_sequence_says_what_it_is_run_by():
  config = overrides.load("configs/long/p2_65536.py", {})
  whole = {"data": 1, "fsdp": 1, "tensor": 1, "context": 1}
  assert flops.explanation(config, whole, "tpu").implementation == "pallas"
  assert flops.explanation(config, whole | {"context": 8}, "tpu").implementation == "pallas"
  config = overrides.load("configs/long/p2_65536.py", {"model.form": "attention"})
  assert flops.explanation(config, whole | {"context": 8}, "tpu").implementation == "xla"
