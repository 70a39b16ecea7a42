"""Where long work stands and how long it will take, for a terminal or a log."""

import sys
import time


class Progress:
  """One line on a terminal, a line now and then in a log."""

  def __init__(self, total: int):
    self._total, self._fresh, self.done = total, 0, 0
    self._start = time.monotonic()
    self._pieces = 0
    self._first_done = self._start
    self._terminal = sys.stdout.isatty()
    self._interval = 0.1 if self._terminal else 5.0
    self._shown = self._start

  @property
  def seconds(self) -> float:
    """Since the beginning."""
    return max(time.monotonic() - self._start, 1e-3)

  def add(self, weight: int, fresh: bool = True) -> None:
    """Counts work as done, or as about to be; time is predicted from what was not found done already.

    The first two pieces do not count for that: what happens once, such as compiling, happens before they are done.
    """
    self.done += weight
    if fresh:
      self._pieces += 1
      self._fresh += weight if self._pieces > 2 else 0
      self._first_done = time.monotonic() if self._pieces <= 2 else self._first_done

  def show(self, text: str) -> None:
    """Says so, if it is time to."""
    if time.monotonic() - self._shown >= self._interval:
      self._shown = time.monotonic()
      left = None
      if self._fresh:
        left = (time.monotonic() - self._first_done) * (self._total - self.done) / self._fresh
      self._print(f"{text}, {'?' if left is None else _duration(left)} left", end="" if self._terminal else "\n")

  def clear(self) -> None:
    """Makes room for other text on a terminal."""
    if self._terminal:
      print("\r\033[K", end="", flush=True)

  def end(self, text: str) -> None:
    """Says what was done."""
    self._print(f"{text}, {_duration(self.seconds)}", end="\n")

  def _print(self, text: str, end: str) -> None:
    print(f"\r{text}\033[K" if self._terminal else text, end=end, flush=True)


def _duration(seconds: float) -> str:
  minutes, rest = divmod(round(seconds), 60)
  hours, minutes = divmod(minutes, 60)
  return f"{hours}h {minutes}m" if hours else f"{minutes}m {rest}s" if minutes else f"{rest}s"
