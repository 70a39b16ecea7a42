"""Checkpoints: written by Orbax in the background, believed only when a manifest vouches for every byte.

`checkpoints/STEP/` is an Orbax checkpoint and, last of all and by an atomic rename, `MANIFEST.json`: the SHA-256 of
each of its files. One without a manifest was never finished and does not count; one that does not match its manifest is
damaged, is moved to `checkpoints.damaged/`, and the one before it is used. Nothing here unpickles.
"""

import dataclasses
import hashlib
import json
import os
import re
import shutil
import threading
from pathlib import Path
from typing import Any

import jax
from jax.experimental import multihost_utils
from orbax.checkpoint import v1 as ocp

from csympow.config import CheckpointConfig, ConfigError
from csympow.disk import sync_directory
from csympow.train.step import TrainState

MANIFEST = "MANIFEST.json"
_STEP = re.compile("0|[1-9][0-9]{0,17}")
_TEMPORARY = re.compile(r"[0-9]+\.orbax")  # what Orbax writes to before it commits


class DamagedError(Exception):
  """A checkpoint is not what was written."""


@dataclasses.dataclass
class _Saving:
  thread: threading.Thread
  step: int
  error: BaseException | None = None


class Checkpoints:
  """The checkpoints of one run. All processes call the same methods in the same order."""

  def __init__(self, directory: Path, config: CheckpointConfig) -> None:
    self._directory, self._config = directory, config
    self._saving: _Saving | None = None
    self.last_step: int | None = None

  def restore(self, abstract: TrainState) -> tuple[TrainState | None, list[str]]:
    """The newest state that is whole, on the devices of `abstract`, or None; and what was found on the way."""
    step, error = -1, ""
    remarks: list[str] = []
    if jax.process_index() == 0:
      try:
        step, remarks = self._newest_whole()
      except ConfigError as failure:
        error = str(failure)
    if jax.process_count() > 1:
      step = int(multihost_utils.broadcast_one_to_all(jax.numpy.int32(-2 if error else step)))
    if error or step == -2:
      raise ConfigError(error or "the first process found no usable checkpoint; its own line says why")
    if step < 0:
      return None, remarks
    path = self._directory / str(step)
    _check_parameters(path, abstract.parameters)
    state = ocp.load(path, abstract)
    self.last_step = step
    return TrainState(*state), remarks

  def save(self, state: TrainState) -> None:
    """Begins to write the state and returns when its buffers may be given away; waits for a save under way first."""
    self.wait()
    step = int(state.step)
    if step == self.last_step:
      return
    # On a CPU, Orbax would read the very buffers that the next step is given to write into.
    snapshot = jax.tree.map(jax.numpy.copy, state) if jax.default_backend() == "cpu" else state
    response = ocp.save_async(self._directory / str(step), snapshot)
    saving = _Saving(threading.Thread(), step)

    def finish() -> None:
      try:
        response.result()
        if jax.process_index() == 0:
          write_manifest(self._directory / str(step))
          self._delete_old(step)
      except BaseException as error:
        saving.error = error

    saving.thread = threading.Thread(target=finish, name=f"save-{step}")
    saving.thread.start()
    self._saving = saving

  def look(self) -> None:
    """Raises what a save failed by that has ended since."""
    if self._saving is not None and not self._saving.thread.is_alive():
      self.wait()

  def wait(self) -> None:
    """Returns when no save is under way; raises what the last one failed by."""
    if self._saving is None:
      return
    self._saving.thread.join()
    saving, self._saving = self._saving, None
    if saving.error is not None:
      raise saving.error
    self.last_step = saving.step

  def _newest_whole(self) -> tuple[int, list[str]]:
    remarks = self._clear_unfinished()
    damage: dict[int, str] = {}
    for step in reversed(finished_steps(self._directory)):
      try:
        verify(self._directory / str(step))
      except DamagedError as error:
        damage[step] = f"checkpoint {step} is damaged ({error})"
        continue
      remarks += [f"{told}; moved to {_set_aside(self._directory / str(bad))}" for bad, told in damage.items()]
      if damage:
        remarks.append(f"going on from checkpoint {step}")
      return step, remarks
    if damage:  # and stay where they are, or the same command again would begin anew
      told = "; ".join([*remarks, *damage.values()])
      raise ConfigError(f"{told}; no other is left: move {self._directory} away to start over")
    return -1, remarks

  def _clear_unfinished(self) -> list[str]:
    """Removes what a save that was cut off has left, and tells of it."""
    remarks = []
    for path in sorted(self._directory.iterdir()) if self._directory.is_dir() else []:
      unfinished = _STEP.fullmatch(path.name) and not (path / MANIFEST).exists()
      if path.is_dir() and (unfinished or _TEMPORARY.match(path.name)):
        shutil.rmtree(path)
        remarks.append(f"the save of checkpoint {path.name.split('.')[0]} was cut off; what there was of it is removed")
    return remarks

  def _delete_old(self, newest: int) -> None:
    period = self._config.keep_every
    steps = [step for step in finished_steps(self._directory) if step <= newest]
    for step in steps[: -self._config.keep]:
      if period is None or step % period:
        # The manifest goes first: half a deletion is then an unfinished checkpoint, not a damaged one.
        (self._directory / str(step) / MANIFEST).unlink()
        shutil.rmtree(self._directory / str(step))


def finished_steps(directory: Path) -> list[int]:
  """The steps that have a manifest, in order, read from the disk each time."""
  if not directory.is_dir():
    return []
  return sorted(int(p.name) for p in directory.iterdir() if _STEP.fullmatch(p.name) and (p / MANIFEST).exists())


def load_parameters(path: Path, abstract: Any) -> Any:
  """The parameters alone of a checkpoint, on the devices of `abstract`; raises a ConfigError if they are not of it."""
  _check_parameters(path, abstract)
  context = ocp.Context()
  context.pytree.loading.partial_load = True
  with context:
    return ocp.load(path, {"parameters": abstract})["parameters"]


def _check_parameters(path: Path, abstract: Any) -> None:
  try:
    kept = _shapes(ocp.metadata(path).metadata["parameters"])
  except Exception as error:  # whatever Orbax makes of a directory that it did not write
    raise ConfigError(f"{path} has a manifest that is right, and yet is no checkpoint of this program") from error
  wanted = _shapes(abstract)
  for name in sorted({*kept, *wanted}):
    if kept.get(name) != wanted.get(name):
      there, here = (found.get(name, "absent") for found in (kept, wanted))
      raise ConfigError(f"{path} is not of the config beside it: {name} is {there} there, {here} by the config")


def _shapes(tree: Any) -> dict[str, str]:
  leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
  return {jax.tree_util.keystr(path, simple=True, separator="."): f"{x.dtype}{list(x.shape)}" for path, x in leaves}


def write_manifest(path: Path) -> None:
  """Vouches for what the directory holds now, down to the disk."""
  files = {}
  for file in _files(path):
    with file.open("rb") as opened:
      os.fsync(opened.fileno())
    files[str(file.relative_to(path))] = _digest(file)
  temporary = path / f".{MANIFEST}"
  with temporary.open("w") as opened:
    json.dump({"sha256": files}, opened, indent=1)
    opened.flush()
    os.fsync(opened.fileno())
  for directory in (*(inner for inner in path.rglob("*") if inner.is_dir()), path, path.parent):
    sync_directory(directory)
  temporary.rename(path / MANIFEST)
  sync_directory(path)


def verify(path: Path) -> None:
  """Raises DamagedError, naming the file, unless the directory holds what its manifest says."""
  try:
    wanted: dict[str, Any] = json.loads((path / MANIFEST).read_text())["sha256"]
    names = dict(wanted.items())
  except (ValueError, KeyError, TypeError, AttributeError, OSError, RecursionError) as error:
    raise DamagedError(f"{MANIFEST} cannot be read") from error
  if not names:
    raise DamagedError(f"{MANIFEST} vouches for no file")
  for name, digest in names.items():
    if not (path / name).is_file():
      raise DamagedError(f"{name} is missing")
    try:
      found = _digest(path / name)
    except OSError as error:
      raise DamagedError(f"{name} cannot be read: {os.strerror(error.errno or 0)}") from error
    if found != digest:
      raise DamagedError(f"{name} is not what was written")


def _files(path: Path) -> list[Path]:
  return sorted(file for file in path.rglob("*") if file.is_file() and file.name not in (MANIFEST, f".{MANIFEST}"))


def _digest(file: Path) -> str:
  with file.open("rb") as opened:
    return hashlib.file_digest(opened, "sha256").hexdigest()


def _set_aside(path: Path) -> Path:
  target = path.parent.with_name(path.parent.name + ".damaged") / path.name
  target.parent.mkdir(exist_ok=True)
  free, n = target, 1
  while free.exists():
    free, n = target.with_name(f"{target.name}.{n}"), n + 1
  return path.rename(free)
