"""The paper's p=4 at a training context of 1,024 tokens: 781 steps of 524,288 tokens.

    python train.py --config=configs/paper/p4_1024.py --workdir=runs/paper/p4_1024

Hardware: meant for 8 GPUs of 80 GB or 8 TPU v5p; on one GPU add --config.accumulation=8. Other variants:
--config.model.variant=softmax (or sympow, sympow+gating) and a workdir of its own.
Time: not yet measured here. The paper's training loss after 400,000 documents:

    softmax 4.885    sympow 4.794    sympow+gating 4.724    conformal 4.737
"""

from configs.paper import paper
from csympow.config import Config


def get_config() -> Config:
  return paper(power=4, context=1_024)
