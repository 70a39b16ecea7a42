"""The smallest run that has everything: for tests of the program, not of the model."""

from csympow.config import CheckpointConfig, Config, DataConfig, LogConfig, OptimizerConfig
from csympow.model import ModelConfig


def get_config() -> Config:
  return Config(
    model=ModelConfig(
      vocab_size=256, d_model=16, num_layers=2, num_heads=2, head_dim=8, mlp_ratio=2, dtype="float32", form="attention"
    ),
    data=DataConfig(train="embedded", heldout="embedded"),
    optimizer=OptimizerConfig(learning_rate=1e-2, schedule="cosine", warmup_steps=3, clip_norm=1.0),
    checkpoint=CheckpointConfig(every=5),
    log=LogConfig(every=1, gates=10, heldout=10, heldout_batches=1, sample=0, tensorboard=False),
    context=32,
    batch_tokens=256,
    steps=40,
  )
