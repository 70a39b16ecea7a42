"""The directory of a run: what it must be before anything is written to it, and the config it belongs to."""

import fcntl
import json
import os
import shutil
from pathlib import Path
from typing import Any, TextIO

from csympow.config import Config, ConfigError, differences, to_dict
from csympow.disk import require_writable
from csympow.train.checkpoint import finished_steps
from csympow.train.metrics import size


def check(workdir: Path, config: Config, fingerprint: str) -> None:
  """Raises a ConfigError unless the run may use the directory: writable, and empty or of the same run."""
  try:
    writable = workdir if workdir.is_dir() else next(parent for parent in workdir.absolute().parents if parent.exists())
    if os.path.lexists(workdir) and not workdir.is_dir():
      raise ConfigError(f"--workdir={workdir} is a file")
  except OSError as error:
    raise ConfigError(f"--workdir={workdir} cannot be written to: {os.strerror(error.errno or 0)}") from error
  require_writable(writable, f"--workdir={workdir}")
  if os.path.lexists(workdir / "checkpoints") and not (workdir / "checkpoints").is_dir():
    raise ConfigError(f"--workdir={workdir} cannot be used: its checkpoints are no directory")
  found = stored(workdir)
  if found is None:
    return
  differing = differences(to_dict(config), found["config"])
  if differing:
    told = "; ".join(f"{name} is {theirs!r} there, {ours!r} here" for name, (ours, theirs) in sorted(differing.items()))
    raise ConfigError(f"--workdir={workdir} holds a run of another config: {told}. Give this one a workdir of its own")
  if found["data"] != fingerprint:
    raise ConfigError(f"--workdir={workdir} holds a run on other data: {config.data.train} has changed since")


def claim(workdir: Path, config: Config, fingerprint: str) -> None:
  """Writes config.json, which makes the directory this run's."""
  workdir.mkdir(parents=True, exist_ok=True)
  temporary = workdir / ".config.json"
  with temporary.open("w") as opened:
    json.dump({"config": to_dict(config), "data": fingerprint}, opened, indent=1)
    opened.flush()
    os.fsync(opened.fileno())
  temporary.rename(workdir / "config.json")


def lock(workdir: Path) -> None:
  """Keeps a second run out of the directory for as long as this process lives; raises a ConfigError if it is one."""
  workdir.mkdir(parents=True, exist_ok=True)
  file = (workdir / ".lock").open("w")
  try:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError as error:
    raise ConfigError(f"--workdir={workdir} is in use by another run") from error
  _locks.append(file)


_locks: list[TextIO] = []  # closing the file would give the lock away


def check_room(workdir: Path, checkpoint_bytes: int, keep: int) -> None:
  """Raises a ConfigError if the disk has no room for the checkpoints that are still to come to lie there at once."""
  free = shutil.disk_usage(workdir).free
  missing = max(1, keep + 1 - len(finished_steps(workdir / "checkpoints")))
  needed = checkpoint_bytes * missing
  if free < needed:
    raise ConfigError(
      f"--workdir={workdir} has {size(free)} free, and {missing} more checkpoints of {size(checkpoint_bytes)} need "
      f"{size(needed)}"
    )


def stored(workdir: Path) -> dict[str, Any] | None:
  """What config.json says: the `config` and the fingerprint of the `data`; None if there is no run yet."""
  path = workdir / "config.json"
  if not path.exists():
    if (workdir / "checkpoints").exists():
      raise ConfigError(f"--workdir={workdir} has checkpoints and no config.json to tell whose they are")
    return None
  try:
    found: dict[str, Any] = json.loads(path.read_text())
    found["config"]["model"], found["data"]
  except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
    raise ConfigError(f"{path} cannot be read as the config of a run") from error
  return found
