"""124M, conformal, p=2, at 1,048,576 tokens of context: 1 sequence a step.

    python train.py --config=configs/long/p2_1048576.py --workdir=runs/long/p2_1048576

Hardware: 64 TPU v6e, such as --config.mesh.fsdp=2 --config.mesh.tensor=2 --config.mesh.context=16
--config.batch_tokens=4194304: 10.1 GiB of a chip's 32 by the compiler's count. Time and score: not yet measured.
"""

from configs.long import long
from csympow.config import Config


def get_config() -> Config:
  return long(context=1_048_576, steps=1_000)
