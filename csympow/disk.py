"""Writing to the disk: what must be known before, and what it takes for a name to survive a crash of the machine."""

import os
import tempfile
from pathlib import Path

from csympow.config import ConfigError


def require_writable(directory: Path, told: str) -> None:
  """Makes the directory; raises a ConfigError that begins with `told` unless files can be made in it.

  Trying is all that tells: a root user may write anywhere but to a disk that is read-only.
  """
  try:
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=directory):
      pass
  except OSError as error:
    raise ConfigError(f"{told} cannot be written to: {os.strerror(error.errno or 0)}") from error


def sync_directory(path: Path) -> None:
  """Brings the names in a directory to the disk."""
  descriptor = os.open(path, os.O_RDONLY)
  try:
    os.fsync(descriptor)
  finally:
    os.close(descriptor)
