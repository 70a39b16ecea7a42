"""Being told to stop: SIGTERM or SIGINT at any moment leads to a save; a second one ends the process at once.

Python runs signal handlers on its main thread between two instructions, so that one is not heard while XLA compiles. A
thread of its own hears them at once, through the file descriptor that Python's C handler writes to. It only raises a
flag: who works in steps looks at it between them, and what cannot be interrupted runs in `interruptible`.
"""

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Stopped(Exception):
  """The work was given up because the run was told to stop."""


class Stop:
  """The flag, and the thread that raises it."""

  def __init__(self) -> None:
    self._event = threading.Event()
    self._listening = False

  @property
  def requested(self) -> bool:
    """Whether a signal has come."""
    return self._event.is_set()

  def install(self) -> None:
    """Begins to listen. To be called on the main thread, again after anyone else took the signals."""
    for number in SIGNALS:
      signal.signal(number, lambda *_: None)
    if self._listening:
      return
    self._listening = True
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    self._sockets = (ours, theirs)
    threading.Thread(target=self._listen, args=(ours,), daemon=True, name="signals").start()

  def _listen(self, incoming: socket.socket) -> None:
    while received := incoming.recv(1):
      if received[0] not in SIGNALS:
        continue
      name = signal.Signals(received[0]).name
      if self._event.is_set():
        _say(f"\n{name} again: ending at once")
        os._exit(1)
      _say(f"\n{name}: saving, then stopping (once more to end at once)")
      self._event.set()

  def check(self) -> None:
    """Raises Stopped if a signal has come."""
    if self.requested:
      raise Stopped

  def interruptible[R](self, work: Callable[[], R]) -> R:
    """The result of `work`, done on another thread; raises Stopped as soon as a signal comes, and lets it go on.

    For what changes nothing and may take minutes, such as compiling. A process that gives up such work must end by
    `os._exit`: Python would wait for the thread.
    """
    self.check()
    outcome: list[R] = []
    failure: list[BaseException] = []
    done = threading.Event()

    def run() -> None:
      try:
        outcome.append(work())
      except BaseException as error:
        failure.append(error)
      finally:
        done.set()

    threading.Thread(target=run, daemon=True, name="interruptible").start()
    while not done.wait(0.05):
      self.check()
    if failure:
      raise failure[0]
    return outcome[0]


def _say(text: str) -> None:
  print(text, file=sys.stderr, flush=True)
