"""Runs that need no training, and the arguments of tasks, for tests of evaluation."""

import argparse
import contextlib
import functools
import io
import pathlib

from flax import nnx

from csympow import weights
from csympow.config import CheckpointConfig, Config, DataConfig
from csympow.model import ModelConfig, Transformer
from tests.comparing import quick_jit

SHAPE = {"vocab_size": 256, "d_model": 16, "num_layers": 2, "num_heads": 2, "head_dim": 8, "mlp_ratio": 2}


class NeverStop:
  """Nobody asks to stop."""

  def check(self):
    """Goes on."""


def config_of(**shape):
  """A byte model's config."""
  return Config(
    model=ModelConfig(**SHAPE | {"dtype": "float32"} | shape),
    data=DataConfig(train="embedded"),
    checkpoint=CheckpointConfig(),
    context=32,
    batch_tokens=64,
  )


@functools.cache
def make_weights(seed=0, **shape):
  """A model as it is before training."""
  config = config_of(**shape)
  make = functools.partial(Transformer, config.model)
  graphdef = nnx.split(nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0))))[0]
  parameters = quick_jit(lambda: nnx.to_pure_dict(nnx.split(make(rngs=nnx.Rngs(seed)))[1]))()
  return weights.Weights(nnx.merge(graphdef, parameters), config, 3, "data", "bytes")


def make_run(directory, **shape):
  """A run in a directory, of a model that was never trained; returns the directory."""
  directory = pathlib.Path(directory)
  directory.mkdir(parents=True, exist_ok=True)
  file = directory.with_suffix(".safetensors")
  weights.save(file, make_weights(**shape))
  with contextlib.redirect_stdout(io.StringIO()):
    assert weights.main(["import", f"--file={file}", f"--workdir={directory}"]) == 0
  return directory


def arguments(task, out, *flags, workdir=(), max_context=65_536, stop=None):
  """What eval.py would give a task for these flags."""
  parser = argparse.ArgumentParser()
  task.add_options(parser)
  args = parser.parse_args(flags)
  out.mkdir(parents=True, exist_ok=True)
  given = {"workdir": list(workdir), "step": None, "max_context": max_context, "out": out}
  return argparse.Namespace(**vars(args) | given, stop=stop or NeverStop())
