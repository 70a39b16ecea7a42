"""Long contexts, which is what the chunked form is for: 124M, p=2, cost linear in the length."""

import dataclasses

from configs.paper import paper
from csympow.config import Config, DataConfig


def long(context: int, steps: int) -> Config:
  """The paper's model and optimizer; every window of the documents, joined where the context is longer than one."""
  base = paper(power=2, context=65_536)
  data = DataConfig(
    train=base.data.train, heldout=base.data.heldout, shuffle=False, join=context > 65_536, cache_mb=base.data.cache_mb
  )
  log = dataclasses.replace(base.log, context_curve=context, context_documents=8, heldout_batches=1)
  model = dataclasses.replace(base.model, form="chunked", remat="full")
  return dataclasses.replace(
    base, model=model, data=data, log=log, context=context, batch_tokens=max(524_288, context), steps=steps
  )
