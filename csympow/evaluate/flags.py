"""What the values of flags must be: functions for argparse's `type`, which refuse in a few words."""

import argparse
import re


def positive(text: str) -> int:
  """A flag's number, at least 1."""
  if not natural(text):
    raise argparse.ArgumentTypeError(f"must be a positive integer, got {text!r}")
  return int(text)


def natural(text: str) -> int:
  """A flag's number, at least 0."""
  if re.fullmatch("[0-9]{1,100}", text) is None:
    raise argparse.ArgumentTypeError(f"must be a natural number, got {text!r:.80}")
  return int(text)


def seed(text: str) -> int:
  """A flag's seed, which fits every random generator."""
  found = natural(text)
  if found >= 2**31:
    raise argparse.ArgumentTypeError(f"must be below 2^31, got {text:.40}")
  return found


def positives(text: str) -> list[int]:
  """A flag's numbers, with commas between, each once."""
  return list(dict.fromkeys(positive(part) for part in text.split(",")))


def words(text: str) -> list[str]:
  """A flag's words, with commas between, each once."""
  return list(dict.fromkeys(text.split(",")))


def numbers(text: str) -> list[float]:
  """A flag's numbers, whole or not, with commas between."""
  try:
    return [float(part) for part in text.split(",")]
  except ValueError as error:
    raise argparse.ArgumentTypeError(f"must be numbers with commas between, got {text!r}") from error


def share(text: str) -> float:
  """A flag's share of something."""
  found = numbers(text)
  if len(found) != 1 or not 0 < found[0] <= 1:
    raise argparse.ArgumentTypeError(f"must be above 0 and at most 1, got {text!r}")
  return found[0]
