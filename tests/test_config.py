"""Configs: every file loads, overrides are typed, and what cannot work is refused in one line before anything runs."""

import dataclasses
import json
from pathlib import Path

import pytest

from csympow import overrides
from csympow.config import (
  CheckpointConfig,
  Config,
  ConfigError,
  DataConfig,
  GuardConfig,
  MeshConfig,
  OptimizerConfig,
  differences,
  to_dict,
)
from csympow.evaluate.recall_config import RecallConfig
from csympow.model import ModelConfig
from csympow.sharding import mesh_sizes

ROOT = Path(__file__).parents[1]
FILES = sorted(file for file in (ROOT / "configs").rglob("*.py") if file.name != "__init__.py")
TINY = str(ROOT / "tests" / "tiny_config.py")


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_every_config_file_loads_and_its_docstring_gives_its_command(file):
  name = str(file.relative_to(ROOT))
  assert f"--config={name}" in file.read_text().split('"""')[1], "the docstring must state the command"
  schema = RecallConfig if file.stem.startswith("recall") else Config
  assert isinstance(overrides.load(str(file), schema=schema), schema)


def test_a_config_of_another_schema_is_refused_in_one_line():
  with pytest.raises(ConfigError, match=r"must return a csympow\.config\.Config, got RecallConfig"):
    overrides.load(str(ROOT / "configs" / "recall.py"))


def test_overrides_are_read_by_the_type_of_their_field():
  given = {
    "model.power": "4",
    "model.chunk_size": "none",
    "optimizer.learning_rate": "1e-3",
    "optimizer.clip_norm": "none",
    "steps": "1e2",
    "data.shuffle": "false",
    "data.windows": "first",
    "data.train": "a path.zarr",
    "data.heldout": "none",
    "batch_tokens": "1_024",
  }
  config = overrides.load(TINY, given)
  assert (config.model.power, config.model.chunk_size) == (4, None)
  assert (config.optimizer.learning_rate, config.optimizer.clip_norm) == (1e-3, None)
  assert (config.steps, config.batch_tokens) == (100, 1024)
  assert (config.data.shuffle, config.data.windows, config.data.train) == (False, "first", "a path.zarr")


def test_overrides_that_only_make_sense_together_are_taken_together():
  config = overrides.load(TINY, {"context": "96", "batch_tokens": "960"})
  assert (config.context, config.rows) == (96, 10)


@pytest.mark.parametrize(
  ("name", "value", "told"),
  [
    ("model.powr", "4", "did you mean --config.model.power?"),
    ("modle.power", "4", "did you mean --config.model?"),
    ("power", "4", "did you mean --config.model.power?"),
    ("learning_rate", "1", "did you mean --config.optimizer.learning_rate?"),
    ("zzzz", "4", "it has model, data"),
    ("model", "4", "set one of vocab_size"),
    ("steps.more", "4", "steps is a value"),
    ("model.power", "four", "must be an integer, got 'four'"),
    ("model.power", "3", "model.power must be"),
    ("model.power", "4.5", "must be an integer"),
    ("steps", "nan", "must be an integer"),
    ("model.chunk_size", "x", "an integer or none"),
    ("data.shuffle", "maybe", "true or false"),
    ("data.windows", "some", "one of all, first"),
    ("optimizer.learning_rate", "-1", "optimizer.learning_rate must be"),
    ("optimizer.learning_rate", "nan", "optimizer.learning_rate must be"),
    ("data.train", "mine.zarr", "data.heldout=embedded is no held-out part of data.train=mine.zarr"),
    ("context", "48", "batch_tokens must be a multiple of context=48"),
    ("accumulation", "3", "accumulation must divide the 8 rows"),
    ("model.unroll", "often", "model.unroll must be true or false"),
    ("model.variant", "linear", "model.variant must be one of"),
    ("model.num_heads", "0", "model.num_heads must be"),
    ("optimizer.warmup_steps", "99", "must fit in steps=40"),
    ("steps", "1e10", "steps must be below 2^31"),
    ("batch_tokens", "1e30", "batch_tokens must be below 2^40"),
    ("model.vocab_size", "1e12", "model.vocab_size must be below 2^31"),
    ("model.max_length", "1e30", "model.max_length must be below 2**63"),
  ],
)
def test_what_means_nothing_is_refused_in_one_line(name, value, told):
  with pytest.raises(ConfigError) as caught:
    overrides.load(TINY, {name: value})
  assert told in str(caught.value)
  assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
  ("text", "told"),
  [
    ("def get_config(): return 3", "must return a csympow.config.Config, got int"),
    ("def get_confg(): return 3", "c.py has no get_config()"),
    ("syntax error here", "SyntaxError"),
    ("raise SystemError('out of\\nluck')", "SystemError: out of luck"),
    ("import sys\nsys.exit('no')", "SystemExit: no"),
  ],
)
def test_a_config_file_that_is_none_is_refused_in_one_line(tmp_path, text, told):
  (tmp_path / "c.py").write_text(text)
  with pytest.raises(ConfigError, match=r"c\.py") as caught:
    overrides.load(str(tmp_path / "c.py"))
  assert told in str(caught.value)
  assert "\n" not in str(caught.value)


def test_softmax_on_a_gpu_is_not_both_unrolled_and_deterministic():
  changes = {"model.variant": "softmax", "model.unroll": "true"}
  with pytest.raises(ConfigError, match=r"^model\.unroll=true with model\.variant=softmax: .*deterministic=false$"):
    overrides.load(TINY, changes).check_platform("gpu")
  overrides.load(TINY, changes).check_platform("tpu")
  overrides.load(TINY, changes | {"deterministic": "false"}).check_platform("gpu")
  overrides.load(TINY, changes | {"model.variant": "conformal"}).check_platform("gpu")


def test_a_missing_config_file_is_told_with_the_nearest():
  with pytest.raises(ConfigError, match=r"did you mean .*tiny_config\.py"):
    overrides.load(str(ROOT / "tests" / "tiny_confg.py"))


def test_arguments_of_the_config_are_told_from_the_others():
  rest, found = overrides.split_arguments(["--config=a.py", "--config.steps=3", "--config.seed", "4", "--dry_run"])
  assert rest == ["--config=a.py", "--dry_run"]
  assert found == {"steps": "3", "seed": "4"}
  with pytest.raises(ConfigError, match="needs a value"):
    overrides.split_arguments(["--config.steps", "--dry_run"])


@pytest.mark.parametrize(
  "make",
  [
    lambda: Config(context=0),
    lambda: Config(steps=0),
    lambda: MeshConfig(data=0),
    lambda: MeshConfig(fsdp=-1),
    lambda: CheckpointConfig(keep=1),
    lambda: GuardConfig(spike=0.5),
    lambda: DataConfig(train=""),
    lambda: OptimizerConfig(weight_decay=0.1),
    lambda: OptimizerConfig(schedule="wsd"),
    lambda: OptimizerConfig(decay_steps=10),
    lambda: OptimizerConfig(b2=1.0),
    lambda: OptimizerConfig(clip_norm=0.0),
    lambda: OptimizerConfig(eps=0.0),
  ],
)
def test_single_fields_are_checked(make):
  with pytest.raises(ConfigError):
    make()


def test_a_mesh_takes_what_the_other_axes_leave():
  assert mesh_sizes(-1, 2, 1, 2, 8) == {"data": 2, "fsdp": 2, "tensor": 1, "context": 2}
  with pytest.raises(ValueError, match="must divide the number of devices, 8"):
    mesh_sizes(-1, 3, 1, 1, 8)
  with pytest.raises(ValueError, match="must be the number of devices, 8"):
    mesh_sizes(2, 2, 1, 1, 8)


@pytest.mark.parametrize(
  ("sizes", "told"),
  [
    ({"data": 16}, "data x fsdp = 16"),
    ({"context": 3}, "context = 32 must be a multiple of the mesh's context = 3"),
    ({"tensor": 4}, "model.num_heads = 2"),
    ({"fsdp": 8, "data": 1, "context": 5}, "context"),
  ],
)
def test_the_batch_the_context_and_the_heads_must_divide_over_the_mesh(sizes, told):
  config = overrides.load(TINY)
  with pytest.raises(ConfigError) as caught:
    config.check_mesh({"data": 1, "fsdp": 1, "tensor": 1, "context": 1} | sizes)
  assert told in str(caught.value)


def test_a_chunk_must_fit_a_devices_part_of_the_context():
  config = overrides.load(TINY, {"model.chunk_size": "16"})
  config.check_mesh({"data": 1, "fsdp": 1, "tensor": 1, "context": 2})
  with pytest.raises(ConfigError, match="chunk_size must be at most a device's 8 tokens"):
    config.check_mesh({"data": 1, "fsdp": 1, "tensor": 1, "context": 4})


def test_a_config_is_the_same_run_wherever_it_runs_and_whatever_it_tells():
  config = overrides.load(TINY)
  stored = json.loads(json.dumps(to_dict(config)))
  elsewhere = {"mesh.fsdp": "2", "log.every": "7", "checkpoint.keep": "9", "data.threads": "1"}
  elsewhere |= {"data.train": "moved", "data.heldout": "none"}
  assert differences(to_dict(overrides.load(TINY, elsewhere)), stored) == {}
  other = overrides.load(TINY, {"model.power": "4", "seed": "1", "steps": "50"})
  assert differences(to_dict(other), stored) == {"model.power": (4, 2), "seed": (1, 0), "steps": (50, 40)}


def test_more_steps_are_the_same_run_where_the_rate_does_not_depend_on_them():
  constant = dataclasses.replace(Config(), model=ModelConfig())
  assert differences(to_dict(dataclasses.replace(constant, steps=2000)), to_dict(constant)) == {}


def test_the_papers_grid_is_whole_and_as_the_paper_says():
  grid = {(2, c) for c in (256, 1024, 4096, 8192)} | {(4, c) for c in (1024, 4096, 16_384, 65_536)}
  steps = {256: 195, 1024: 781, 4096: 3125, 8192: 6250, 16_384: 12_500, 65_536: 50_000}
  for power, context in grid:
    for variant in ("softmax", "sympow", "sympow+gating", "conformal"):
      config = overrides.load(str(ROOT / f"configs/paper/p{power}_{context}.py"), {"model.variant": variant})
      assert (config.model.power, config.context, config.model.variant) == (power, context, variant)
      assert (config.steps, config.batch_tokens) == (steps[context], 524_288)
      assert (config.optimizer.name, config.optimizer.learning_rate, config.model.dtype) == ("adam", 6e-4, "bfloat16")
