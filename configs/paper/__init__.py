"""The paper's grid: GPT-2's 124M on LongCrawl64, 400,000 documents each, whatever the context.

One file per power and context; the four variants differ in `--config.model.variant` alone:
`softmax`, `sympow`, `sympow+gating` or `conformal`.
"""

from csympow.config import CheckpointConfig, Config, DataConfig, LogConfig, OptimizerConfig
from csympow.model import ModelConfig

DOCUMENTS = 400_000
BATCH_TOKENS = 524_288


def paper(power: int, context: int, variant: str = "conformal") -> Config:
  """A run of the grid: Adam at a constant 6e-4, bfloat16 products, the first window of each document, as stored.

  LongCrawl64's rows are in random order already, so reading them in order is shuffling enough. Its public bucket has
  gone: put a mirror where data.train says, or override that.
  """
  return Config(
    model=ModelConfig(power=power, variant=variant, remat="dots" if context < 16_384 else "full"),
    data=DataConfig(
      train="data/longcrawl64/train.zarr",
      heldout="data/longcrawl64/heldout.zarr",
      windows="first",
      shuffle=False,
      cache_mb=4096,
    ),
    optimizer=OptimizerConfig(name="adam", learning_rate=6e-4, schedule="constant"),
    checkpoint=CheckpointConfig(every=500, keep=3, keep_every=5000),
    log=LogConfig(every=10, gates=500, heldout=500, heldout_batches=4, context_curve=65_536, context_documents=32),
    context=context,
    batch_tokens=BATCH_TOKENS,
    steps=DOCUMENTS * context // BATCH_TOKENS,
  )
