"""The runs that an evaluation looks at: parameters of a checkpoint on one device, whatever mesh trained them."""

import argparse
import dataclasses
import hashlib
import itertools
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jaxtyping import Int

from csympow.config import Config, ConfigError, from_dict
from csympow.data.tokenizer import Tokenizer, find_tokenizer
from csympow.evaluate.caches import cache_bytes
from csympow.model import ModelConfig, Transformer
from csympow.train import workdir as run_directory
from csympow.train.checkpoint import MANIFEST, DamagedError, finished_steps, load_parameters, verify


class Run(NamedTuple):
  """A trained model.

  Attributes:
    label: what figures and tables call it.
    directory: where it lies.
    config: as it was trained.
    step: of the checkpoint.
    identity: a hash of the checkpoint's own checksums.
    model: its parameters on the first device. How it computes (form, chunks, implementation) is left to that device.
    tokenizer: None if the dataset names none; ids are then all there is.
  """

  label: str
  directory: Path
  config: Config
  step: int
  identity: str
  model: Transformer
  tokenizer: Tokenizer | None

  def state_bytes(self, length: int) -> int:
    """`cache_bytes` of its model."""
    return cache_bytes(self.model, length)

  def encode(self, text: str) -> Int[np.ndarray, "n"]:
    """The tokens of a text."""
    if self.tokenizer is None:
      raise ConfigError(
        f"{self.directory}: text needs a tokenizer, and neither the run's config nor its dataset names one"
      )
    try:
      return self.tokenizer.encode(text).astype(np.int32)
    except UnicodeEncodeError as error:
      raise ConfigError(f"a text must be valid Unicode, got {error.object[error.start : error.end]!a}") from error

  def decode(self, tokens: Iterable[int] | np.ndarray) -> str:
    """The text of tokens; those that the vocabulary has and the tokenizer does not become U+FFFD."""
    ids = [int(token) for token in tokens]
    if self.tokenizer is None:
      return " ".join(map(str, ids))
    size = self.tokenizer.vocab_size
    parts = itertools.groupby(ids, lambda token: token < size)
    return "".join(self.tokenizer.decode(list(part)) if known else "\N{REPLACEMENT CHARACTER}" for known, part in parts)


def open_runs(args: argparse.Namespace) -> list[Run]:
  """The runs that a command line names, each with a label of its own."""
  if not args.workdir:
    raise ConfigError("--workdir=DIR must name at least one run")
  places = [os.path.realpath(directory) for directory in args.workdir]
  for place, directory in zip(places, args.workdir, strict=True):
    if places.count(place) > 1:
      raise ConfigError(f"--workdir={directory} is given twice")
  runs = [open_run(directory, args.step) for directory in args.workdir]
  labels = [run.label for run in runs]
  unclear = {label for label in labels if labels.count(label) > 1}
  return [
    run._replace(label=f"{run.directory}, {describe(run.config.model)}") if run.label in unclear else run
    for run in runs
  ]


def open_run(workdir: Path, step: int | None) -> Run:
  """The run in a directory at a step, or at the newest whose checkpoint is whole.

  Raises a ConfigError, in one line, if there is none. Nothing in the directory is changed: it may be training still.
  """
  if not workdir.is_dir():
    raise ConfigError(f"--workdir={workdir} must be the directory of a run, and there is none")
  stored = run_directory.stored(workdir)
  if stored is None:
    raise ConfigError(f"--workdir={workdir} holds no run: it has no config.json")
  try:
    config = from_dict(stored["config"])
  except ConfigError as error:
    raise ConfigError(f"{workdir / 'config.json'} cannot be used: {error}") from error
  found = _whole_checkpoint(workdir / "checkpoints", step)
  return Run(
    label=f"{workdir.absolute().name}, {describe(config.model)}",
    directory=workdir,
    config=config,
    step=found,
    identity=hashlib.sha256((workdir / "checkpoints" / str(found) / MANIFEST).read_bytes()).hexdigest()[:16],
    model=_model(config, workdir.absolute() / "checkpoints" / str(found)),
    tokenizer=find_tokenizer(config.data),
  )


def describe(model: ModelConfig) -> str:
  """The variant and its power."""
  return model.variant if model.variant == "softmax" else f"{model.variant} p={model.power}"


def _whole_checkpoint(directory: Path, step: int | None) -> int:
  finished = finished_steps(directory)
  if not finished:
    raise ConfigError(f"--workdir={directory.parent} has no finished checkpoint yet")
  if step is not None and step not in finished:
    raise ConfigError(f"--step={step} must be one of {', '.join(map(str, finished))} in {directory}")
  damage = []
  for candidate in reversed(finished) if step is None else [step]:
    try:
      verify(directory / str(candidate))
    except DamagedError as error:
      damage.append(f"checkpoint {candidate} in {directory} is damaged ({error})")
      continue
    for line in damage:
      print(f"csympow: {line}; evaluating checkpoint {candidate}", file=sys.stderr, flush=True)
    return candidate
  raise ConfigError("; ".join(damage))


def _model(config: Config, checkpoint: Path) -> Transformer:
  # What may differ between the parts of a run says how to train fast where it was trained.
  how: dict[str, Any] = {"remat": "none", "unroll": False, "form": "auto", "chunk_size": None, "implementation": None}
  shape = dataclasses.replace(config.model, **how)
  graphdef, parameters = nnx.split(nnx.eval_shape(lambda: Transformer(shape, rngs=nnx.Rngs(0))))
  device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
  abstract: Any = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), nnx.to_pure_dict(parameters)
  )
  return nnx.merge(graphdef, load_parameters(checkpoint, abstract))
