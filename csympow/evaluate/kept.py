"""Results that took long, kept as they come, each under a hash of everything it was made from.

What depends on a checkpoint or on data that have changed is then not found, and nothing has to be thrown away.

    DIR/.kept/TASK.jsonl      results, one JSON object a line
    DIR/.kept/TASK-KEY.npz    arrays of work that is half done; removed when its result is there
"""

import hashlib
import io
import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from csympow.config import ConfigError
from csympow.data.output import replace_file
from csympow.data.progress import Progress

_FORMAT = 2  # of what is kept: another is not found


class Kept:
  """What a task has computed; a line that a killed process left unfinished is dropped."""

  def __init__(self, directory: Path, task: str) -> None:
    self._directory, self._task = directory / ".kept", task
    self._path = self._directory / f"{task}.jsonl"
    try:
      self._directory.mkdir(exist_ok=True)
      lines = self._path.read_bytes().splitlines(keepends=True) if self._path.exists() else []
      whole = [line for line in lines if line.endswith(b"\n") and _parsed(line) is not None]
      if len(whole) < len(lines):
        replace_file(self._path, b"".join(whole))
      self._path.open("a").close()
    except (FileExistsError, NotADirectoryError, IsADirectoryError, PermissionError) as error:
      told = f"{error.filename or self._directory}: {error.strerror}"
      raise ConfigError(f"--out={directory}: what was computed cannot be kept there ({told})") from error
    self._results = dict(entry for entry in map(_parsed, whole) if entry is not None)

  def get(self, key: str) -> Any | None:
    """The result under a key, if it is there."""
    return self._results.get(key)

  def put(self, key: str, result: Any) -> None:
    """Keeps a result, down to the disk."""
    self._results[key] = result
    with self._path.open("a") as opened:
      opened.write(json.dumps({"key": key, "result": result}) + "\n")
      opened.flush()
      os.fsync(opened.fileno())

  def once(self, key: str, work: Callable[[], Any], progress: Progress, weight: int) -> Any:
    """The result under a key, whose weight then counts as done; or what the work gives, which is kept."""
    result = self.get(key)
    if result is None:
      result = work()
      self.put(key, result)
    else:
      progress.add(weight, fresh=False)
    return result

  def arrays(self, key: str) -> dict[str, np.ndarray] | None:
    """The arrays under a key, if they are there and whole."""
    try:
      with self._arrays_path(key).open("rb") as opened, np.load(opened, allow_pickle=False) as stored:
        return dict(stored)
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile):
      return None

  def put_arrays(self, key: str, arrays: dict[str, np.ndarray]) -> None:
    """Keeps arrays in place of those that were there."""
    content = io.BytesIO()
    np.savez(content, **arrays)  # type: ignore[arg-type]
    replace_file(self._arrays_path(key), content.getbuffer(), durable=True)

  def drop_arrays(self, key: str) -> None:
    """Removes arrays, if there are any."""
    self._arrays_path(key).unlink(missing_ok=True)

  def _arrays_path(self, key: str) -> Path:
    return self._directory / f"{self._task}-{key}.npz"


def anything_kept(directory: Path, task: str) -> bool:
  """Whether there is something of a task to go on from."""
  path = directory / ".kept" / f"{task}.jsonl"
  return (path.is_file() and path.stat().st_size > 0) or any(path.parent.glob(f"{task}-*.npz"))


def digest(*parts: Any) -> str:
  """A hash of values and arrays."""
  found = hashlib.sha256()
  for part in (_FORMAT, *parts):
    content = part.tobytes() if isinstance(part, np.ndarray) else repr(part).encode()
    found.update(len(content).to_bytes(8, "little") + content)
  return found.hexdigest()[:32]


def _parsed(line: bytes) -> tuple[str, Any] | None:
  try:
    entry = json.loads(line)
    return str(entry["key"]), entry["result"]
  except (ValueError, KeyError, TypeError, RecursionError):
    return None
