"""Eight simulated devices and exact float32 products for every test."""

import gc
import os

# Read when jax makes its first array, so it must be set before any test does.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
# On a GPU, which other workers may share, memory is taken when needed and given back.
os.environ.setdefault("XLA_PYTHON_CLIENT_ALLOCATOR", "platform")
# TPUs' compiler, where it is installed, is loaded by each worker, and asks no network what chip this is.
os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}

import hypothesis
import jax
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

# The same examples every time, and no time limit for one of them: the first of each shape compiles.
hypothesis.settings.register_profile("csympow", derandomize=True, deadline=None, database=None, print_blob=False)
hypothesis.settings.load_profile("csympow")


def by_default(config):
  """Whether those tests run that are neither slow nor for a GPU: most of their time is the compiler's and Python's."""
  return config.option.markexpr == "not slow and not gpu"


def pytest_configure(config):
  """Little of the compiler's effort."""
  if by_default(config):
    os.environ["XLA_FLAGS"] += " --xla_backend_optimization_level=0"


def pytest_collection_finish(session):
  """Python looks through all objects less often, and never through those of modules: tracing makes many."""
  if by_default(session.config):
    gc.collect()
    gc.freeze()
    gc.set_threshold(200_000, 20, 20)


@pytest.fixture
def quick_compilation():
  """Little of the compiler's effort, for tests of whole programs in which nothing is timed."""
  jax.config.update("jax_disable_most_optimizations", True)
  yield
  jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def no_races(monkeypatch):
  """In no kernel that was interpreted for a GPU, each of which has a detector of its own, was there a race."""
  from tests import comparing  # here: imported with this file, it would be before jaxtyping's hook

  found = comparing.recorded(monkeypatch, gpu_callbacks, "GPURaceDetectionState")
  yield
  assert found, "no kernel was interpreted"
  assert not any(races.races_found for races in found)


@pytest.fixture
def no_races_if_interpreted(request):
  """The same, of a test with a parameter `interpret` that is None on a chip."""
  if request.node.callspec.params["interpret"] is not None:
    request.getfixturevalue("no_races")


@pytest.fixture
def long(monkeypatch):
  """What makes sequences of a few tiles count as long, and a state cost as much as a tile."""
  from csympow.forms import visible
  from kernels_pallas.gpu.tiles import TILE

  monkeypatch.setattr(visible, "LONG", TILE)
  monkeypatch.setattr(visible, "MULTIPROCESSORS", 1)  # a chip that is always busy
  monkeypatch.setattr(visible, "cost_of_states", lambda states, *rest: 1.0 * states)


@pytest.fixture(autouse=True)
def exact_products():
  """The default rounds float32 products on GPU and TPU; every tolerance here assumes that it does not."""
  with jax.default_matmul_precision("highest"):
    yield
