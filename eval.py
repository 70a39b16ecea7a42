"""Evaluates runs: `python eval.py --workdir=runs/X [--workdir=runs/Y ...] --task=TASK --out=DIR`."""

import os
import signal

# Until the program listens itself, there is nothing to keep.
for _signal in (signal.SIGTERM, signal.SIGINT):
  signal.signal(_signal, lambda *_: os._exit(75))

from csympow.evaluate.program import main  # noqa: E402

if __name__ == "__main__":
  main()
