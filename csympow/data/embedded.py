"""The corpus that is always there: the sources of the Python standard library, as bytes.

Real text, long documents, nothing to download. A document is a package, its files in order of their names; a module
that stands alone is a document of its own. Tests of the library and what others installed are left out. One in
ten is held out, by a hash of its name, so that the split is the same on every machine.
"""

import hashlib
import sysconfig
from pathlib import Path
from typing import Literal

import numpy as np

from csympow.data.documents import DataError, InMemory

_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "__phello__", "lib2to3"}
_HELD_OUT_SHARE = 10  # one in so many
# Always held out: long enough for the longest contexts of the quickstart, and of the three kinds of source there are:
# a library of its own, a wrapper of C, plain utilities.
_HELD_OUT = {"asyncio", "ctypes", "email"}


def embedded(split: Literal["train", "heldout"], root: str | None = None) -> InMemory:
  """The documents of one split of the standard library at `root`, by default the running Python's."""
  library = Path(root or sysconfig.get_paths()["stdlib"])
  sources: dict[str, list[Path]] = {}
  for file in sorted(library.rglob("*.py")):
    parts = file.relative_to(library).parts
    fits = _LEFT_OUT.isdisjoint(parts) and not parts[0].startswith("config-")
    if fits and file.is_file():  # Debian has links there that lead nowhere
      sources.setdefault(parts[0].removesuffix(".py"), []).append(file)
  chosen = {name: files for name, files in sources.items() if _held_out(name) == (split == "heldout")}
  texts = (b"".join(file.read_bytes() for file in files) for files in chosen.values())
  documents = [np.frombuffer(text, np.uint8) for text in texts if text]
  if not documents:
    raise DataError(f"no Python sources under {library} to train on; give data.train a dataset instead")
  return InMemory(f"the Python standard library ({split})", documents)


def _held_out(name: str) -> bool:
  return name in _HELD_OUT or hashlib.sha256(name.encode()).digest()[0] % _HELD_OUT_SHARE == 0
