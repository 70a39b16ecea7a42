"""The study: 1,048,576 tokens a step in sequences of 4,096, to compare that of one sequence with.

    python train.py --config=configs/study/million_4096.py --workdir=runs/study/million_4096

Hardware: one GPU of 80 GB (26.8 GiB of an H200). 12 s, held-out loss 6.80: docs/results.md.
"""

from configs.study import million
from csympow.config import Config


def get_config() -> Config:
  return million(context=4_096, steps=20)
