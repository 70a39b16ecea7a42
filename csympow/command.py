"""What the command lines share: how they refuse, how they fail, and their exit codes.

0 done, 2 bad config, data or usage, 3 stopped on a loss or gradient that is not finite, 75 told to stop, 1 all else.
"""

import argparse
import errno
import os
import re
import sys
from typing import NoReturn

from csympow.config import ConfigError

EXIT_DONE, EXIT_ERROR, EXIT_USAGE, EXIT_NOT_FINITE, EXIT_STOPPED = 0, 1, 2, 3, 75


class NotFiniteError(Exception):
  """What a model says is no number; the message is one line."""


class Parser(argparse.ArgumentParser):
  """Refuses by a ConfigError, as everything else does."""

  def error(self, message: str) -> NoReturn:
    """Raises it."""
    raise ConfigError(f"{message}; see --help")


def fail(line: str, code: int) -> int:
  """Says why on standard error; returns the exit code."""
  print(f"csympow: {line}", file=sys.stderr, flush=True)
  return code


def explained(error: BaseException, where: str) -> str | None:
  """The line for an error of the machine rather than of the program: no room, no memory, a file that is in the way."""
  full = no_room(error, where)
  if full is not None:
    return f"{full}; the same command goes on from what is there"
  if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
    told = re.search(r"[Uu]sed [\d.]+\w* of [\d.]+\w* \w+|allocate [\d.,]+ ?\w+", str(error))
    return "there is not enough memory for this" + (f": {told[0]}" if told else "")
  if isinstance(error, OSError) and error.filename is not None:
    return f"{error.filename}: {error.strerror}"
  return None


def no_room(error: BaseException | None, where: str) -> str | None:
  """The line for an error that is a full disk or a failing one, however deep it lies and whoever tells of it."""
  reasons = [os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)]
  while error is not None:
    for reason in reasons:
      if reason in str(error):
        return f"writing to {where} failed: {reason}"
    error = error.__cause__ or error.__context__
  return None
