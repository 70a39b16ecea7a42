"""The study: GPT-2's 124M shape, p=2, at 65,536 tokens of context, a sequence a step, for loss against time.

    python train.py --config=configs/study/large_65536.py --workdir=runs/study/large_65536

Hardware: one GPU (6.4 GiB of an H200). 467 steps in 101 s, held-out loss 4.95: docs/results.md. It has more steps than
anyone will wait for: stop it by Ctrl-C. Softmax beside it: --config.model.variant=softmax and a workdir of its own.
"""

from configs.study import large
from csympow.config import Config


def get_config() -> Config:
  return large(context=65_536)
