"""The study: one sequence of 1,048,576 tokens a step, 100 steps, on one GPU.

    python train.py --config=configs/study/million_1048576.py --workdir=runs/study/million_1048576

Hardware: one GPU of 80 GB (34.9 GiB of an H200). 87 s, held-out loss 5.62: docs/results.md.
"""

from configs.study import million
from csympow.config import Config


def get_config() -> Config:
  return million(context=1_048_576, steps=100)
