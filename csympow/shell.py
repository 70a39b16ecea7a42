"""How to start Python from the shell that this process was started from."""

import os
import shutil
import sys


def python() -> str:
  """`python` where that is the running interpreter, and else its path."""
  found = shutil.which("python")
  if found is not None and os.path.abspath(found) == os.path.abspath(sys.executable):
    return "python"
  relative = os.path.relpath(sys.executable)
  return sys.executable if relative.startswith("..") else relative
