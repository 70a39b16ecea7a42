"""The study: p=2 at 256 tokens of context, 512 steps of 65,536 tokens.

    python train.py --config=configs/study/p2_256.py --workdir=runs/study/p2_256

Hardware: one GPU. Time and score, of 384 steps: docs/results.md. Other variants:
--config.model.variant=softmax (or sympow, sympow+gating) and a workdir of its own.
"""

from configs.study import study
from csympow.config import Config


def get_config() -> Config:
  return study(power=2, context=256)
