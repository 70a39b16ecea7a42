"""Weights as a safetensors file, and back: plain arrays, no code, and all that is needed to use them in the metadata.

    python -m csympow.weights export --workdir=runs/X --out=model.safetensors [--step=N]
    python -m csympow.weights import --file=model.safetensors --workdir=runs/Y
    python -m csympow.weights show --file=model.safetensors

`export` takes the newest whole checkpoint of a run, or the one of a step. `import` makes a run that eval.py evaluates
and train.py goes on with, its optimizer fresh. In Python, `csympow.weights.load("model.safetensors")` is the model.
docs/weights.md names every tensor. Exit codes are those of `csympow.command`.
"""

import argparse
import dataclasses
import json
import logging
import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy
from flax import nnx

from csympow.command import EXIT_DONE, EXIT_ERROR, EXIT_STOPPED, EXIT_USAGE, Parser, fail, no_room
from csympow.config import Config, ConfigError, from_dict, to_dict
from csympow.disk import require_writable, sync_directory
from csympow.model import ModelConfig, Transformer
from csympow.train.metrics import size

FORMAT, VERSION = "csympow", "1"
_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "float64": "F64"}
_LAYERS = "layers."


class Weights(NamedTuple):
  """What a file holds.

  Attributes:
    model: with the weights in it.
    config: of the run that they are from.
    step: of its checkpoint.
    data: the fingerprint of what it was trained on.
    tokenizer: "bytes", a Hugging Face tokenizers file's text, or "" where the run has none.
  """

  model: Transformer
  config: Config
  step: int
  data: str
  tokenizer: str


def save(path: str | Path, weights: Weights) -> None:
  """Writes a file, which is there as a whole or not at all."""
  path = Path(path)
  metadata = {
    "format": FORMAT,
    "version": VERSION,
    "config": json.dumps(to_dict(weights.config)),
    "step": str(weights.step),
    "data": weights.data,
    "tokenizer": weights.tokenizer,
  }
  temporary = path.with_name(f".{path.name}.unfinished")
  try:
    temporary.open("wb").close()  # an OSError that says why, where safetensors has an error of its own for everything
    safetensors.numpy.save_file(to_tensors(weights.model), temporary, metadata)
    with temporary.open("rb") as opened:
      os.fsync(opened.fileno())
    temporary.rename(path)
  finally:
    temporary.unlink(missing_ok=True)
  sync_directory(path.absolute().parent)


def load(path: str | Path) -> Transformer:
  """The model in a file, on the default device; raises a ConfigError, in one line, if it holds none."""
  return read(path).model


def read(path: str | Path) -> Weights:
  """All that a file holds. Whatever is wrong with it is a ConfigError, before anything of its size is allocated."""
  if not Path(path).is_file():
    raise ConfigError(f"{path} must be a safetensors file, and there is none")
  try:
    with safetensors.safe_open(path, framework="np") as file:
      metadata = file.metadata() or {}
      config = _config(path, metadata)
      graphdef, parameters = _expected(path, config.model, set(file.keys()))
      for name, x in _tensors(parameters).items():
        kept = file.get_slice(name)
        there, here = (kept.get_dtype(), list(kept.get_shape())), (_DTYPES[str(x.dtype)], list(x.shape))
        _require(there == here, f"{path}: {name} must be {here[0]}{here[1]} by its config, and is {there[0]}{there[1]}")
      tensors = {name: np.asarray(file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118, it is no dictionary
  except (safetensors.SafetensorError, OSError) as error:
    raise ConfigError(f"{path} is no safetensors file that can be read: {_one_line(error)}") from error
  stacked = jax.tree_util.tree_map_with_path(lambda at, _: jnp.asarray(_stacked(_name(at), tensors)), parameters)
  told = (metadata.get("step", "0"), metadata.get("data", ""), metadata.get("tokenizer", ""))
  _require(re.fullmatch("[0-9]{1,9}", told[0]) is not None, f"{path}: step must be a number, got {told[0]!r:.40}")
  return Weights(nnx.merge(graphdef, stacked), config, int(told[0]), *told[1:])


def to_tensors(model: Transformer) -> dict[str, np.ndarray]:
  """The parameters by name, those of each layer apart, such as `layers.3.attention.query.kernel`."""
  found = _tensors(nnx.to_pure_dict(nnx.split(model)[1]))
  return {name: np.ascontiguousarray(x) for name, x in found.items()}


def _tensors(parameters: Any) -> dict[str, Any]:
  """Arrays or their shapes, by the file's names."""
  tensors = {}
  for at, x in jax.tree_util.tree_flatten_with_path(parameters)[0]:
    name = _name(at)
    if not name.startswith(_LAYERS):
      tensors[name] = x
      continue
    for layer in range(x.shape[0]):
      part = jax.ShapeDtypeStruct(x.shape[1:], x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else x[layer]
      tensors[f"{_LAYERS}{layer}.{name.removeprefix(_LAYERS)}"] = part
  return tensors


def _stacked(name: str, tensors: dict[str, np.ndarray]) -> np.ndarray:
  if not name.startswith(_LAYERS):
    return tensors[name]
  ending = name.removeprefix(_LAYERS)
  layers = sum(other.startswith(_LAYERS) and other.split(".", 2)[2] == ending for other in tensors)
  return np.stack([tensors[f"{_LAYERS}{layer}.{ending}"] for layer in range(layers)])


def _name(path: Any) -> str:
  return jax.tree_util.keystr(path, simple=True, separator=".")


def _config(path: str | Path, metadata: dict[str, str]) -> Config:
  _require(metadata.get("format") == FORMAT, f"{path} was not made by csympow: its metadata has no format={FORMAT}")
  version = metadata.get("version")
  _require(version == VERSION, f"{path} is of version {version!r:.40} of the format; this program reads {VERSION}")
  try:
    return from_dict(json.loads(metadata.get("config", "")))
  except (ConfigError, ValueError, RecursionError) as error:
    raise ConfigError(f"{path}: its config cannot be used: {_one_line(error)}") from error


def _expected(path: str | Path, shape: ModelConfig, names: set[str]) -> tuple[Any, Any]:
  """The model's graph and the shapes of its parameters; raises a ConfigError unless the file has just their names."""
  # Counted first: a config may claim more layers than can be listed.
  layers = {name.split(".")[1] for name in names if name.startswith(_LAYERS)}
  _require(
    len(layers) == shape.num_layers,
    f"{path} has tensors of {len(layers)} layers, and its config says {shape.num_layers}",
  )
  try:
    graphdef, state = nnx.split(nnx.eval_shape(lambda: Transformer(shape, rngs=nnx.Rngs(0))))
  except (ValueError, TypeError, OverflowError, MemoryError) as error:  # sizes that no array can have
    raise ConfigError(f"{path}: its config cannot be used: {_one_line(error)}") from error
  parameters = nnx.to_pure_dict(state)
  wanted = set(_tensors(parameters))
  for name in sorted(wanted ^ names):
    _require(name in names, f"{path} lacks the tensor {name}, which its config needs")
    raise ConfigError(f"{path} has a tensor {name!r:.80}, of which its config knows nothing")
  return graphdef, parameters


def main(arguments: Sequence[str] | None = None) -> int:
  """Runs the command; returns its exit code."""
  logging.getLogger("absl").setLevel(logging.CRITICAL)  # Orbax explains at length what `fail` says in a line
  try:
    options = _parse(arguments)
    {"export": _export, "import": _import, "show": _show}[options.command](options)
  except ConfigError as error:
    return fail(str(error), EXIT_USAGE)
  except Exception as error:
    full = no_room(error, "the disk")
    if full is not None:
      return fail(full, EXIT_ERROR)
    if isinstance(error, OSError):
      return fail(f"{error.filename or 'failed'}: {error.strerror or error}", EXIT_USAGE)
    if isinstance(error, safetensors.SafetensorError):  # of a write that failed
      return fail(_one_line(error), EXIT_ERROR)
    raise
  return EXIT_DONE


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
  parser = Parser(prog="csympow.weights", description="Weights as a safetensors file, and back.", allow_abbrev=False)
  commands = parser.add_subparsers(dest="command", required=True)
  export = commands.add_parser("export", help="a run's weights to a file")
  export.add_argument("--workdir", type=Path, required=True, metavar="DIR", help="the run")
  export.add_argument("--step", type=int, metavar="N", help="of the checkpoint; by default the newest that is whole")
  export.add_argument("--out", type=Path, required=True, metavar="FILE", help="the file, by custom X.safetensors")
  back = commands.add_parser("import", help="a file to a run")
  back.add_argument("--file", type=Path, required=True, metavar="FILE")
  back.add_argument("--workdir", type=Path, required=True, metavar="DIR", help="of the run to be")
  show = commands.add_parser("show", help="what a file holds")
  show.add_argument("--file", type=Path, required=True, metavar="FILE")
  return parser.parse_args(arguments)


def _export(options: argparse.Namespace) -> None:
  from csympow.data.tokenizer import BPETokenizer
  from csympow.evaluate.runs import open_run
  from csympow.train import workdir

  if options.out.is_dir():
    raise ConfigError(f"--out={options.out} must be a file to write, and is a directory")
  require_writable(options.out.parent, f"--out={options.out}")
  run = open_run(options.workdir, options.step)
  stored = workdir.stored(options.workdir)
  assert stored is not None
  tokenizer = run.tokenizer.content.decode() if isinstance(run.tokenizer, BPETokenizer) else ""
  tokenizer = tokenizer or (run.tokenizer.name if run.tokenizer is not None else "")
  save(options.out, Weights(run.model, run.config, run.step, str(stored["data"]), tokenizer))
  print(f"wrote {options.out}, {size(options.out.stat().st_size)}: {run.label}, step {run.step:,}")


def _import(options: argparse.Namespace) -> None:
  from csympow.data.tokenizer import BPETokenizer
  from csympow.train import workdir
  from csympow.train.checkpoint import Checkpoints, finished_steps
  from csympow.train.step import Program

  weights = read(options.file)
  directory = options.workdir
  if finished_steps(directory / "checkpoints"):
    raise ConfigError(f"--workdir={directory} holds a run already: give the imported one a workdir of its own")
  if directory.exists() and any(directory.iterdir()):
    raise ConfigError(f"--workdir={directory} is not empty: give the imported run a directory of its own")
  config = weights.config
  workdir.check(directory, config, weights.data)
  tokenizer = weights.tokenizer
  if tokenizer not in ("", "bytes"):
    with tempfile.TemporaryDirectory() as scratch:
      file = Path(scratch) / "tokenizer.json"
      file.write_text(tokenizer)
      try:
        BPETokenizer(file)
      except ValueError as error:
        raise ConfigError(f"{options.file}: its tokenizer cannot be used: {error}") from error
    tokenizer = str(directory.absolute() / "tokenizer.json")
  if tokenizer:
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, tokenizer=tokenizer))
  # In a directory beside it that gets its name at the end: half an import is none.
  unfinished = directory.absolute().with_name(f".{directory.absolute().name}.unfinished")
  shutil.rmtree(unfinished, ignore_errors=True)
  unfinished.mkdir(parents=True)
  try:
    if weights.tokenizer not in ("", "bytes"):
      (unfinished / "tokenizer.json").write_text(weights.tokenizer)
    workdir.claim(unfinished, config, weights.data)
    state = jax.jit(Program(config, None).init)()._replace(
      step=jnp.asarray(weights.step, jnp.int32), parameters=nnx.to_pure_dict(nnx.split(weights.model)[1])
    )
    checkpoints = Checkpoints(unfinished / "checkpoints", config.checkpoint)
    checkpoints.save(state)
    checkpoints.wait()
    unfinished.rename(directory)
    sync_directory(directory.absolute().parent)
  finally:
    shutil.rmtree(unfinished, ignore_errors=True)
  print(f"imported {options.file} to {directory}, step {weights.step:,}")


def _show(options: argparse.Namespace) -> None:
  weights = read(options.file)
  tensors = to_tensors(weights.model)
  count = sum(x.size for x in tensors.values())
  print(f"{options.file}: step {weights.step:,}, {count:,} parameters in {len(tensors)} tensors")
  print(json.dumps(dataclasses.asdict(weights.config.model), indent=1))
  for name, x in sorted(tensors.items(), key=lambda item: (item[0].split(".")[1].zfill(6), item[0])):
    print(f"  {name:<44} {x.dtype}{list(x.shape)}")


def _require(condition: bool, message: str) -> None:
  if not condition:
    raise ConfigError(message)


def _one_line(error: BaseException) -> str:
  return " ".join(str(error).split())[:300] or type(error).__name__


def _stopped(*_: Any) -> None:
  """On a signal there is nothing to save: a file or a run is there as a whole or not at all."""
  os.write(2, b"csympow: stopped; the same command begins anew\n")
  os._exit(EXIT_STOPPED)


if __name__ == "__main__":
  for _signal in (signal.SIGTERM, signal.SIGINT):
    signal.signal(_signal, _stopped)
  _code = main()
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(_code)  # Python would first give the signals back, and die of one that comes then
