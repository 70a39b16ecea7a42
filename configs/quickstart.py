"""A small conformal model of the Python standard library's sources, byte by byte, on a laptop's CPU.

    make train
    python train.py --config=configs/quickstart.py --workdir=runs/quickstart

Hardware: two CPU cores. Time: 3 min 27 s on two server cores of 2019 (Neoverse-N1) with a little other work beside it.
Score: held-out loss 1.91 nats a byte after 350 steps (2.39 after 100), and about the same at 16 times the context.
"""

from csympow.config import CheckpointConfig, Config, DataConfig, LogConfig, OptimizerConfig
from csympow.model import ModelConfig


def get_config() -> Config:
  return Config(
    model=ModelConfig(
      vocab_size=256,
      d_model=64,
      num_layers=3,
      num_heads=2,
      head_dim=32,
      power=2,
      variant="conformal",
      dtype="float32",
      remat="dots",  # on a CPU recomputing is faster than remembering
    ),
    data=DataConfig(train="embedded", heldout="embedded"),
    optimizer=OptimizerConfig(learning_rate=6e-3, schedule="cosine", warmup_steps=20, final_share=0.1, clip_norm=1.0),
    log=LogConfig(
      every=10, gates=50, heldout=100, heldout_batches=4, sample=200, context_curve=4096, context_documents=32
    ),
    checkpoint=CheckpointConfig(every=100),
    context=256,
    batch_tokens=4096,
    steps=350,
  )
