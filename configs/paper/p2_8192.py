"""The paper's p=2 at a training context of 8,192 tokens: 6,250 steps of 524,288 tokens.

    python train.py --config=configs/paper/p2_8192.py --workdir=runs/paper/p2_8192

Hardware: meant for 8 GPUs of 80 GB or 8 TPU v5p; on one GPU add --config.accumulation=8. Other variants:
--config.model.variant=softmax (or sympow, sympow+gating) and a workdir of its own.
Time: not yet measured here. The paper's training loss after 400,000 documents:

    softmax 3.113    sympow 3.535    sympow+gating 3.121    conformal 3.044
"""

from configs.paper import paper
from csympow.config import Config


def get_config() -> Config:
  return paper(power=2, context=8_192)
