"""Processes and devices: one process alone, or many that find each other."""

import os

import jax
from jax.experimental import multihost_utils

from csympow.config import ConfigError


def set_flags(deterministic: bool) -> None:
  """What XLA must be told before it starts."""
  if deterministic:
    flag = "--xla_gpu_deterministic_ops=true"
    flags = os.environ.get("XLA_FLAGS", "")
    if "xla_gpu_deterministic_ops" not in flags:
      os.environ["XLA_FLAGS"] = f"{flags} {flag}".strip()


def join_processes(coordinator: str | None, processes: int | None, process: int | None) -> None:
  """Joins the other processes: as told, or as Slurm, MPI, GKE or a TPU pod tell; alone if nobody does."""
  # SIGTERM is ours: csympow.train.stop agrees on a step with all processes.
  jax.config.update("jax_enable_preemption_service", False)
  told = (coordinator, processes, process)
  if any(value is not None for value in told):
    if any(value is None for value in told):
      raise ConfigError("--coordinator, --num_processes and --process_id must be given together")
    jax.distributed.initialize(coordinator, processes, process)
    return
  try:
    jax.distributed.initialize()
  except ValueError as error:
    if "coordinator_address" not in str(error):  # which is how JAX says that it found no cluster
      raise ConfigError(f"processes could not find each other: {str(error).splitlines()[0]}") from error


def leave_processes() -> None:
  """Waits until all processes are done: the first to end would take the others' coordinator away."""
  if jax.process_count() > 1:
    multihost_utils.sync_global_devices("csympow is done")
    jax.distributed.shutdown()
