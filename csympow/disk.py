"""What it takes for a file's name, not only its bytes, to survive a crash of the machine."""

import os
from pathlib import Path


def sync_directory(path: Path) -> None:
  """Brings the names in a directory to the disk."""
  descriptor = os.open(path, os.O_RDONLY)
  try:
    os.fsync(descriptor)
  finally:
    os.close(descriptor)
