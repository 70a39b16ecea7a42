"""Eight simulated devices and exact float32 products for every test."""

import os

# Read when jax makes its first array, so it must be set before any test does.
FLAGS = {
  "--xla_force_host_platform_device_count": "8",
  # Most of the suite's time is compilation for the CPU, which XLA's older code generator does three times faster.
  # `XLA_FLAGS=--xla_backend_extra_options= make test` runs with the newer one.
  "--xla_backend_extra_options": "xla_cpu_disable_new_fusion_emitters",
}
given = os.environ.get("XLA_FLAGS", "")
os.environ["XLA_FLAGS"] = " ".join([given, *(f"{flag}={v}" for flag, v in FLAGS.items() if flag not in given)]).strip()

import hypothesis
import jax
import pytest

# The same examples every time, and no time limit for one of them: the first of each shape compiles.
hypothesis.settings.register_profile("csympow", derandomize=True, deadline=None, database=None, print_blob=False)
hypothesis.settings.load_profile("csympow")


@pytest.fixture(autouse=True)
def exact_products():
  """The default rounds float32 products on GPU and TPU; every tolerance here assumes that it does not."""
  with jax.default_matmul_precision("highest"):
    yield
