"""Prompts in a run's own tokens, and the lengths that they are made in."""

import argparse

import numpy as np
from jaxtyping import Int

from csympow.config import ConfigError
from csympow.evaluate.runs import Run


def begin(run: Run) -> Int[np.ndarray, "n"]:
  """What stands before every document in the run's data: the end of text, where its tokenizer has one."""
  run.encode("")  # refuses a run without a tokenizer
  end = run.tokenizer.end_of_text if run.tokenizer is not None else None
  return np.array([] if end is None else [end], np.int32)


def split_answer(run: Run, question: str, answer: str) -> tuple[Int[np.ndarray, "n"], Int[np.ndarray, "m"]]:
  """The tokens of a question and of the answer after it, which begins with a space.

  A tokenizer that has the space as a token of its own leaves it to the question: the answer's likelihood is then that
  of its own characters. One that joins it to the word leaves it there.
  """
  spaced = run.encode(f"{question} ")
  whole = run.encode(question + answer)
  if np.array_equal(whole[: len(spaced)], spaced):
    return spaced, whole[len(spaced) :]
  asked = run.encode(question)
  return asked, whole[len(asked) :] if np.array_equal(whole[: len(asked)], asked) else run.encode(answer)


def lengths_of(args: argparse.Namespace, run: Run, shortest: int, task: str) -> list[int]:
  """The lengths to make prompts in: those given, or powers of two from the shortest that holds one to the longest."""
  longest = args.max_context
  if args.lengths:
    small = [length for length in args.lengths if length < shortest]
    if small:
      raise ConfigError(
        f"--lengths: {small[0]} is too short for {task} with {run.label}, which needs {shortest} tokens"
      )
    if max(args.lengths) > longest:
      raise ConfigError(f"--lengths: {max(args.lengths)} is more than --max_context={longest}; raise that")
    return sorted(set(args.lengths))
  found = [1 << n for n in range((shortest - 1).bit_length(), longest.bit_length()) if 1 << n <= longest]
  if not found:
    first = 1 << (shortest - 1).bit_length()
    raise ConfigError(f"--max_context={longest} is too short for {task} with {run.label}: it begins at {first} tokens")
  return found
