"""Prompts being continued by a run: the text is shown as it comes, and kept every few seconds."""

import math
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Int

from csympow.data.progress import Progress
from csympow.evaluate.generation import Room, Sampling, generate
from csympow.evaluate.kept import Kept, digest
from csympow.evaluate.runs import Run

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_WINDOW = 64  # tokens that are decoded again with each new one
_KEPT_EVERY_S = 5.0


class TextStream:
  """Text of tokens as they come: of a character whose bytes are not all there, nothing is shown yet."""

  def __init__(self, decode: Callable[[list[int]], str]) -> None:
    self._decode = decode
    self._tokens: list[int] = []
    self._shown = 0  # characters of their text

  def add(self, token: int) -> str:
    """What can be shown now that this token has come."""
    self._tokens.append(token)
    text = self._decode(self._tokens)
    whole = text.removesuffix(_REPLACEMENT)
    new = whole[self._shown :]
    self._shown = max(self._shown, len(whole))
    if whole == text and len(self._tokens) > _WINDOW:
      # Some tokens stay: what a decoder makes of the next may depend on them.
      self._tokens = self._tokens[-8:]
      self._shown = len(self._decode(self._tokens))
    return new

  def end(self) -> str:
    """What is left: an unfinished character."""
    return self._decode(self._tokens)[self._shown :]


class Writer:
  """Some prompts being continued, side by side.

  Args:
    run: who writes.
    prompts: what is continued.
    count: tokens for each.
    sampling: how they are drawn.
    room: for as many and as long prompts as any group of the command has.
    first_row: the number of the first prompt among all of the command.
    alone: whether it is the only one: then its text is shown as it comes.
    kept: where what is written is kept, to go on from if it is cut off.
    progress: of the command.
  """

  def __init__(
    self,
    run: Run,
    prompts: list[Int[np.ndarray, "_"]],
    count: int,
    sampling: Sampling,
    room: Room,
    first_row: int,
    alone: bool,
    kept: Kept,
    progress: Progress,
  ) -> None:
    self._run, self._prompts, self._count, self._sampling = run, prompts, count, sampling
    self._room, self._first_row, self._alone, self._kept, self._progress = room, first_row, alone, kept, progress
    self._key = digest(
      run.identity, run.config.model, run.config.data.tokenizer, count, sampling._asdict(), first_row, *prompts
    )
    self._end = None if run.tokenizer is None else run.tokenizer.end_of_text
    self.shown = False

  def written(self) -> dict[str, Any]:
    """`tokens` and their `log_p`, step by step and row by row; `first_s`, the time to the first; `step_s`, of each."""
    work = sum(map(len, self._prompts)) + self._count * len(self._prompts)
    found: dict[str, Any] = self._kept.once(self._key, self._write, self._progress, work)
    self._kept.drop_arrays(self._key)
    return found

  def _write(self) -> dict[str, Any]:
    found = self._begun()
    before, rows = len(found["tokens"]), len(self._prompts)
    self._progress.add(rows * before, fresh=False)
    stream = TextStream(self._run.decode)
    drawn = generate(
      self._run.model,
      self._prompts,
      self._count,
      self._sampling,
      room=self._room,
      first_row=self._first_row,
      written=np.asarray(found["tokens"], np.int32).reshape(before, rows),
      check=self._reading,
    )
    began = last = kept_at = time.perf_counter()
    for number, one in enumerate(drawn, before):
      now = time.perf_counter()
      # The first step compiles its program, and the one behind it waits for that.
      found["step_s"].append(now - last if number > before + 1 else math.nan)
      found["first_s"], last = found["first_s"] or now - began, now
      found["tokens"].append(one.tokens.tolist())
      found["log_p"].append(one.log_p.tolist())
      self._tell(stream, found["tokens"], number == before)
      if now - kept_at >= _KEPT_EVERY_S:
        self._kept.put_arrays(self._key, {name: np.asarray(value) for name, value in found.items()})
        kept_at = now
      if self._end is not None and all(self._end in row for row in zip(*found["tokens"], strict=True)):
        break
    if before and len(found["tokens"]) == before:  # all of it was written before
      self._tell(stream, found["tokens"], True)
    if self._alone:
      show(stream.end() + "\n")
      self.shown = True
    return found

  def _begun(self) -> dict[str, Any]:
    """What was written before the last command was cut off."""
    stored = self._kept.arrays(self._key)
    if stored is None:
      return {"tokens": [], "log_p": [], "step_s": [], "first_s": 0.0}
    return {name: array.tolist() for name, array in stored.items()}

  def _reading(self, tokens: int) -> None:
    self._progress.add(tokens)
    self._progress.show(f"{self._run.label}: reading prompts")

  def _tell(self, stream: TextStream, tokens: list[list[int]], first: bool) -> None:
    self._progress.add(len(self._prompts))
    if not self._alone:
      self._progress.show(f"{self._run.label}: {len(tokens):,} of {self._count:,} tokens, {len(self._prompts)} rows")
      return
    if first:
      self._progress.clear()
      show(self._run.decode(self._prompts[0]))
    for (token,) in tokens if first else tokens[-1:]:
      show("" if token == self._end else stream.add(token))


def show(text: str) -> None:
  """Writes to the terminal at once, as it is."""
  sys.stdout.write(text)
  sys.stdout.flush()
