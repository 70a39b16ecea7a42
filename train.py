"""Trains a model: `python train.py --config=configs/X.py --workdir=runs/X [--config.NAME=VALUE ...]`."""

import os
import signal

# Until the program listens itself, there is nothing to save.
for _signal in (signal.SIGTERM, signal.SIGINT):
  signal.signal(_signal, lambda *_: os._exit(75))

from csympow.train.program import main  # noqa: E402

if __name__ == "__main__":
  main()
