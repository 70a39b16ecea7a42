"""124M, conformal, p=2, at 65,536 tokens of context: 8 sequences a step.

    python train.py --config=configs/long/p2_65536.py --workdir=runs/long/p2_65536

Hardware: 8 GPUs, or 64 TPU v5p with --config.mesh.context=8. Time and score: not yet measured.
"""

from configs.long import long
from csympow.config import Config


def get_config() -> Config:
  return long(context=65_536, steps=10_000)
