"""Weights in a file are the model, to the bit; a file that is anything else is refused in one line."""

import dataclasses
import errno
import json
import os
import pathlib
import re

import jax
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from flax import nnx

from csympow import weights
from csympow.config import ConfigError, to_dict
from csympow.data.tokenizer import train_bpe
from csympow.evaluate.runs import open_run
from csympow.nn import VARIANTS
from csympow.train.checkpoint import Checkpoints
from tests.comparing import quick_jit
from tests.evaluating import make_run, make_weights

pytestmark = pytest.mark.usefixtures("quick_compilation")

DOCS = pathlib.Path(__file__).parents[1] / "docs"


def same(a, b):
  ours, theirs = weights.to_tensors(a), weights.to_tensors(b)
  return ours.keys() == theirs.keys() and all(ours[name].tobytes() == theirs[name].tobytes() for name in ours)


def rewritten(path, tensors=None, **metadata):
  """The file with some metadata replaced, and its tensors by what `tensors` makes of them."""
  with safetensors.safe_open(path, framework="np") as file:
    kept, told = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
  kept = kept if tensors is None else tensors(kept)
  told = {name: value for name, value in (told | metadata).items() if value is not None}
  safetensors.numpy.save_file(kept, path, told)


@pytest.mark.parametrize(
  "shape",
  [*({"variant": variant} for variant in VARIANTS), {"param_dtype": "bfloat16"}, {"num_heads": 4, "num_kv_heads": 2}],
)
def test_a_file_gives_back_the_model_to_the_bit(tmp_path, shape):
  kept = make_weights(**shape)
  weights.save(tmp_path / "m.safetensors", kept)
  found = weights.read(tmp_path / "m.safetensors")
  assert same(kept.model, found.model)
  assert found[1:] == kept[1:]
  assert jax.tree.structure(nnx.split(found.model)[1]) == jax.tree.structure(nnx.split(kept.model)[1])


def test_a_loaded_model_gives_the_same_logits(tmp_path):
  kept, tokens = make_weights(), jax.numpy.arange(12)[None]
  weights.save(tmp_path / "m.safetensors", kept)
  forward = quick_jit(lambda model, tokens: model(tokens))
  np.testing.assert_array_equal(forward(weights.load(tmp_path / "m.safetensors"), tokens), forward(kept.model, tokens))


def test_an_imported_file_is_a_run_and_exports_to_the_same_file(tmp_path, capsys):
  directory = make_run(tmp_path / "run")
  run = open_run(directory, None)
  assert run.step == 3
  config = make_weights().config
  assert run.config == dataclasses.replace(config, data=dataclasses.replace(config.data, tokenizer="bytes"))
  assert same(run.model, make_weights().model)
  assert weights.main(["export", f"--workdir={directory}", f"--out={tmp_path / 'new' / 'again.safetensors'}"]) == 0
  ours, theirs = (weights.read(tmp_path / name) for name in ("new/again.safetensors", "run.safetensors"))
  assert same(ours.model, theirs.model)
  assert ours[2:] == theirs[2:]
  assert ours.config == run.config
  assert weights.main(["show", f"--file={tmp_path / 'run.safetensors'}"]) == 0
  assert "layers.1.attention.gamma.kernel" in capsys.readouterr().out
  assert weights.main(["import", f"--file={tmp_path / 'run.safetensors'}", f"--workdir={directory}"]) == 2
  assert "holds a run already" in capsys.readouterr().err


def test_a_used_directory_is_not_imported_into(file, tmp_path, capsys):
  (tmp_path / "mine").mkdir()
  (tmp_path / "mine" / "thesis.tex").write_text("important")
  assert weights.main(["import", f"--file={file}", f"--workdir={tmp_path / 'mine'}"]) == 2
  assert "is not empty" in capsys.readouterr().err
  assert [(path.name, path.read_text()) for path in (tmp_path / "mine").iterdir()] == [("thesis.tex", "important")]


def test_an_import_that_fails_leaves_nothing(file, tmp_path, capsys, monkeypatch):
  def full(*_):  # as Orbax tells of it
    raise ValueError(f"RESOURCE_EXHAUSTED: Failed writing: {os.strerror(errno.ENOSPC)}")

  monkeypatch.setattr(Checkpoints, "save", full)
  before = sorted(tmp_path.iterdir())
  assert weights.main(["import", f"--file={file}", f"--workdir={tmp_path / 'run'}"]) == 1
  assert "No space left on device" in capsys.readouterr().err
  assert sorted(tmp_path.iterdir()) == before


def test_where_nothing_can_be_written_is_known_before_anything_is_read(tmp_path, capsys):
  (tmp_path / "file").touch()
  for out, told in ((tmp_path / "file" / "m.safetensors", "File exists"), (tmp_path, "is a directory")):
    assert weights.main(["export", "--workdir=/nowhere", f"--out={out}"]) == 2
    errors = capsys.readouterr().err
    assert told in errors
    assert errors.count("\n") == 1


def test_the_tokenizer_travels_with_the_weights(tmp_path):
  text = train_bpe(["low lower lowest"] * 50, 280).to_str()
  kept = make_weights(vocab_size=280)._replace(tokenizer=text)
  weights.save(tmp_path / "m.safetensors", kept)
  assert weights.main(["import", f"--file={tmp_path / 'm.safetensors'}", f"--workdir={tmp_path / 'run'}"]) == 0
  run = open_run(tmp_path / "run", None)
  assert run.decode(run.encode("lower")) == "lower"
  assert len(run.encode("lower")) < 5


def test_the_docs_name_every_tensor(tmp_path):
  told = (DOCS / "weights.md").read_text()
  for variant in VARIANTS:
    for name in weights.to_tensors(make_weights(variant=variant).model):
      general = re.sub(r"^layers\.\d+\.", "layers.N.", name)
      assert f"`{general}`" in told, f"docs/weights.md does not name {general}"


@pytest.fixture
def file(tmp_path):
  path = tmp_path / "m.safetensors"
  weights.save(path, make_weights())
  return path


def refused(path, capsys):
  """The line that the program refuses a file by."""
  assert weights.main(["show", f"--file={path}"]) == 2
  told = capsys.readouterr()
  assert told.out == ""
  assert told.err.startswith("csympow: ")
  assert told.err.count("\n") == 1
  assert len(told.err) < 600
  return told.err


def test_a_file_cut_off_anywhere_is_refused(file, capsys):
  whole = file.read_bytes()
  for length in (0, 1, 7, 8, 9, 500, len(whole) // 2, len(whole) - 1):
    file.write_bytes(whole[:length])
    assert "no safetensors file that can be read" in refused(file, capsys)
  file.write_bytes(whole + b"more")
  assert "no safetensors file that can be read" in refused(file, capsys)


def test_noise_in_the_header_is_refused_in_one_line_or_makes_another_model(file):
  whole = bytearray(file.read_bytes())
  header = 8 + int.from_bytes(whole[:8], "little")
  rng = np.random.default_rng(0)
  for _ in range(60):
    damaged = bytearray(whole)
    damaged[int(rng.integers(header))] ^= 1 << int(rng.integers(8))
    file.write_bytes(damaged)
    told = ""
    try:
      weights.read(file)
    except ConfigError as error:
      told = str(error)
    assert "\n" not in told


def altered(**model):
  tree = to_dict(make_weights().config)
  return json.dumps(tree | {"model": tree["model"] | model})


@pytest.mark.parametrize(
  ("change", "line"),
  [
    ({"format": None}, "was not made by csympow"),
    ({"version": "7"}, "is of version '7' of the format; this program reads 1"),
    ({"config": None}, "its config cannot be used"),
    ({"config": "[" * 100_000}, "its config cannot be used"),
    ({"config": "[1, 2]"}, "its config cannot be used"),
    ({"config": '{"model": 5}'}, "its config cannot be used"),
    ({"config": '{"mesh": 5}'}, "its config cannot be used"),
    ({"config": '{"model": {"attack": 5}}'}, "no field model.attack"),
    ({"config": altered(d_model=17)}, "by its config, and is"),
    ({"config": altered(d_model=2**70)}, "m.safetensors"),
    ({"config": altered(d_model="16")}, "d_model"),
    ({"config": altered(num_layers=10**9)}, "has tensors of 2 layers, and its config says 1000000000"),
    (
      {"config": altered(variant="softmax")},
      "has a tensor 'layers.0.attention.beta.kernel', of which its config knows",
    ),
    ({"config": altered(param_dtype="float16")}, "embedding.embedding must be F16"),
    ({"step": "minus one"}, "step must be a number"),
    ({"step": "9" * 5000}, "step must be a number"),
  ],
)
def test_metadata_that_does_not_fit_is_refused(file, capsys, change, line):
  rewritten(file, **change)
  assert line in refused(file, capsys)


@pytest.mark.parametrize(
  ("change", "line"),
  [
    (lambda t: {n: x for n, x in t.items() if n != "final_norm.scale"}, "lacks the tensor final_norm.scale"),
    (lambda t: t | {"layers.0.bias": np.zeros(3, np.float32)}, "has a tensor 'layers.0.bias'"),
    (lambda t: t | {"layers..x": np.zeros(3, np.float32)}, "has tensors of 3 layers"),
    (lambda t: t | {"layers.": np.zeros(3, np.float32)}, "has tensors of 3 layers"),
    (lambda t: t | {"final_norm.scale": np.zeros(17, np.float32)}, "final_norm.scale must be F32[16] by its config"),
    (lambda t: t | {"final_norm.scale": np.zeros(16, np.int8)}, "and is I8[16]"),
  ],
)
def test_tensors_that_do_not_fit_are_refused(file, capsys, change, line):
  rewritten(file, change)
  assert line in refused(file, capsys)


def test_what_is_not_there_is_refused(tmp_path, capsys):
  assert "there is none" in refused(tmp_path / "nothing", capsys)
  assert "there is none" in refused(tmp_path, capsys)
  assert weights.main(["export", f"--workdir={tmp_path}", f"--out={tmp_path / 'x'}"]) == 2
  assert "holds no run" in capsys.readouterr().err
  assert weights.main(["export"]) == 2
  assert weights.main([]) == 2


def test_a_hostile_tokenizer_is_refused(tmp_path, capsys):
  kept = make_weights()._replace(tokenizer="{")
  weights.save(tmp_path / "m.safetensors", kept)
  assert weights.main(["import", f"--file={tmp_path / 'm.safetensors'}", f"--workdir={tmp_path / 'run'}"]) == 2
  assert "its tokenizer cannot be used" in capsys.readouterr().err


def test_a_config_that_was_exported_is_the_config(file):
  assert dataclasses.asdict(weights.read(file).config) == dataclasses.asdict(make_weights().config)
