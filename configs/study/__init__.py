"""The study: the four variants in small, on books, at every context of the paper's grid; `python -m csympow.study`.

The grid in small (`configs/small`) on the study's own data, without what would take its time: every run reads the same
number of tokens, once, in the same order for all variants of a context. Seed 0 for parameters and data. The dataset is
made by `python -m csympow.study.prepare`.
"""

import dataclasses

from configs.small import small
from csympow.config import CheckpointConfig, Config, DataConfig, LogConfig, OptimizerConfig

TOKENS = 2**25  # of a run: 512 steps
_ALL_HELDOUT = 64  # batches, more than there are: the held-out loss is of the same tokens at every context
_DATA = DataConfig(train="data/study/train.zarr", heldout="data/study/heldout.zarr")


def study(power: int, context: int) -> Config:
  """A run of the grid; the variant, the learning rate and the gate's offset are the command line's."""
  base = small(power, context)
  steps = TOKENS // base.batch_tokens
  return dataclasses.replace(
    base,
    data=_DATA,
    checkpoint=CheckpointConfig(every=steps),
    log=LogConfig(every=1, gates=steps, heldout=steps, heldout_batches=_ALL_HELDOUT, tensorboard=False),
    steps=steps,
    deterministic=False,  # which is faster; a run that is resumed differs in rounding
  )


def large(context: int) -> Config:
  """GPT-2's 124M shape (91M parameters with this vocabulary), p=2, a sequence a step, for loss against time."""
  base = study(power=2, context=context)
  model = dataclasses.replace(base.model, d_model=768, num_layers=12, num_heads=12, remat="full")
  return dataclasses.replace(
    base,
    model=model,
    optimizer=OptimizerConfig(warmup_steps=20, clip_norm=1.0),
    log=dataclasses.replace(base.log, gates=0, heldout=50, heldout_batches=8),
    checkpoint=CheckpointConfig(every=10_000),
    steps=10_000,
  )


def million(context: int, steps: int) -> Config:
  """The study's model, conformal, p=2, with 1,048,576 tokens a step, in one sequence or in many."""
  base = study(power=2, context=context)
  return dataclasses.replace(
    base,
    model=dataclasses.replace(base.model, remat="full"),
    data=dataclasses.replace(_DATA, join=True),
    log=dataclasses.replace(base.log, gates=0, heldout=steps, heldout_batches=1),
    batch_tokens=2**20,
    steps=steps,
  )
