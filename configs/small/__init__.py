"""The paper's grid in small: 6 layers, 384 wide, heads of 64, on books; one GPU, minutes.

The dataset is made of the project's books, or of texts of your own, by

    python -m csympow.data.prepare TEXTS --out=data/books --tokenizer=bpe8192.json
"""

from csympow.config import CheckpointConfig, Config, DataConfig, LogConfig, OptimizerConfig
from csympow.model import ModelConfig

BATCH_TOKENS = 65_536


def small(power: int, context: int, variant: str = "conformal", steps: int = 500) -> Config:
  """33 million tokens at every context."""
  return Config(
    model=ModelConfig(
      vocab_size=8192, d_model=384, num_layers=6, num_heads=6, head_dim=64, power=power, variant=variant
    ),
    data=DataConfig(train="data/books/train.zarr", heldout="data/books/heldout.zarr"),
    optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=20, clip_norm=1.0),
    checkpoint=CheckpointConfig(every=250),
    log=LogConfig(every=10, gates=100, heldout=250, heldout_batches=8, sample=250, context_curve=65_536),
    context=context,
    batch_tokens=max(BATCH_TOKENS, context),
    steps=steps,
  )
