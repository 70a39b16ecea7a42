"""A workdir that others have been at: what cannot be used is refused in one line, and what is not ours stays."""

import pytest

from csympow import overrides
from csympow.command import explained
from csympow.config import CheckpointConfig, ConfigError
from csympow.train import flops, workdir
from csympow.train.checkpoint import Checkpoints, finished_steps
from csympow.train.metrics import Journal, read
from tests.test_config import TINY


@pytest.mark.parametrize(
  "line", ["[" * 200_000, "[1]", "5", "{}", '{"step": "x"}', "\xff", '{"step": 4, "loss'], ids=lambda line: line[:9]
)
def test_metrics_end_at_the_first_line_that_is_no_record(tmp_path, line):
  path = tmp_path / "metrics.jsonl"
  path.write_bytes(b'{"step": 1}\n' + line.encode("latin-1") + b"\n")
  (tmp_path / "postponed.json").write_bytes(line.encode("latin-1"))
  journal = Journal(tmp_path, 3, tensorboard=False)
  assert journal.postponed is None
  journal.write({"step": 4})
  journal.close()
  assert read(path) == [{"step": 1}, {"step": 4}]


def test_a_workdir_that_cannot_be_is_refused(tmp_path):
  config = overrides.load(TINY)
  (tmp_path / "loop").symlink_to(tmp_path / "loop")
  (tmp_path / "run").mkdir()
  (tmp_path / "run" / "checkpoints").touch()
  for name, told in (
    ("loop", "is a file"),
    ("x" * 300, "File name too long"),
    ("run", "its checkpoints are no directory"),
  ):
    with pytest.raises(ConfigError, match=told):
      workdir.check(tmp_path / name, config, "fingerprint")


def test_only_steps_are_steps_and_only_what_was_cut_off_is_removed(tmp_path):
  for name in ("3", "7", "007", "²", "9" * 200, "2024-notes", "5.orbax-checkpoint-tmp"):
    (tmp_path / name).mkdir()
    (tmp_path / name / "file").touch()
    if name not in ("7", "2024-notes"):
      (tmp_path / name / "MANIFEST.json").touch()
  assert finished_steps(tmp_path) == [3]
  told = Checkpoints(tmp_path, CheckpointConfig())._clear_unfinished()
  assert [line.split()[4] for line in told] == ["5", "7"]
  assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["007", "2024-notes", "3", "9" * 200, "²"])


def test_an_implementation_that_is_not_to_be_had_is_refused_before_anything_compiles():
  config = overrides.load(TINY, {"model.implementation": "pallas"})
  one = {"data": 1, "fsdp": 1, "tensor": 1, "context": 1}
  with pytest.raises(ConfigError) as caught:
    flops.explanation(config, one, "cpu")
  assert str(caught.value).startswith("model.implementation='pallas' has kernels for NVIDIA Hopper GPUs")


def test_an_error_of_the_machine_is_a_line_and_one_of_the_program_is_not():
  assert explained(IsADirectoryError(21, "Is a directory", "x/.lock"), "the workdir") == "x/.lock: Is a directory"
  assert "No space left" in explained(OSError(28, "No space left on device"), "the workdir")
  assert "memory" in explained(RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes"), "the workdir")
  assert explained(ValueError("x"), "the workdir") is None
