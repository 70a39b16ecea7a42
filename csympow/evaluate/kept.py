"""Results that took long, kept as they come, each under a hash of everything it was made from.

What depends on a checkpoint or on data that have changed is then not found, and nothing has to be thrown away.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from csympow.data.output import replace_file


def kept_file(directory: Path, task: str) -> Path:
  """Where a task keeps its results."""
  return directory / ".kept" / f"{task}.jsonl"


class Kept:
  """One JSON object a line in `kept_file`; a line that a killed process left unfinished is dropped."""

  def __init__(self, directory: Path, task: str) -> None:
    path = kept_file(directory, task)
    path.parent.mkdir(exist_ok=True)
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    whole = [line for line in lines if line.endswith(b"\n") and _parsed(line) is not None]
    if len(whole) < len(lines):
      replace_file(path, b"".join(whole))
    self._results = dict(entry for entry in map(_parsed, whole) if entry is not None)
    self._path = path

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


def digest(*parts: Any) -> str:
  """A hash of values and arrays."""
  found = hashlib.sha256()
  for part in parts:
    content = part.tobytes() if isinstance(part, np.ndarray) else repr(part).encode()
    found.update(len(content).to_bytes(8, "little") + content)
  return found.hexdigest()[:32]


def _parsed(line: bytes) -> tuple[str, Any] | None:
  try:
    entry = json.loads(line)
    return str(entry["key"]), entry["result"]
  except (ValueError, KeyError, TypeError):
    return None
