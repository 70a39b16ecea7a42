"""The grid in small: p=2 at 4,096 tokens of context, 500 steps of 65,536 tokens.

    python train.py --config=configs/small/p2_4096.py --workdir=runs/small/p2_4096

Hardware: one GPU. Time and score: not yet measured. Other variants:
--config.model.variant=softmax (or sympow, sympow+gating) and a workdir of its own.
"""

from configs.small import small
from csympow.config import Config


def get_config() -> Config:
  return small(power=2, context=4_096)
