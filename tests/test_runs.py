"""Whole runs, as processes: what a user relies on when a run takes a month and machines do not last that long."""

import itertools
import json
import os
import random
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from tests import running
from tests.running import run, start, wait_for


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
  """A run that nothing disturbed."""
  workdir = tmp_path_factory.mktemp("whole") / "run"
  output, _ = run(workdir)
  return workdir, output


# At the rate of the other runs, rounding grows to a percent of the loss within 40 steps.
GENTLE = "--config.optimizer.learning_rate=1e-3"


@pytest.fixture(scope="module")
def gentle(tmp_path_factory):
  """A run on one device to compare those on many with."""
  workdir = tmp_path_factory.mktemp("gentle") / "run"
  run(workdir, GENTLE)
  return running.metrics(workdir)


def assert_same_but_for_rounding(found, wanted):
  assert [record["step"] for record in found] == list(range(1, 41))
  np.testing.assert_allclose([r["loss"] for r in found], [r["loss"] for r in wanted], rtol=1e-4)
  np.testing.assert_allclose([r["grad_norm"] for r in found], [r["grad_norm"] for r in wanted], rtol=1e-2)


def line(errors):
  """The one line that a run leaves on standard error."""
  assert errors.count("\n") == 1, errors
  assert errors.startswith("csympow: ")
  assert "Traceback" not in errors
  return errors


def test_a_run_leaves_what_it_promised(whole):
  workdir, output = whole
  records = running.metrics(workdir)
  assert [record["step"] for record in records] == list(range(1, 41))
  for record in (json.loads(text) for text in (workdir / "metrics.jsonl").read_text().splitlines()):
    assert {"step", "loss", "lr", "grad_norm", "tokens", "tokens_per_s", "step_s"} <= record.keys()
  assert records[-1]["loss"] < records[0]["loss"] - 1
  assert records[-1]["tokens"] == 40 * 256
  assert records[9]["heldout_loss"] > 0
  assert len(records[9]["gates"]["memory_by_head"]) == 2
  assert running.steps(workdir) == [30, 35, 40]
  assert running.config_of(workdir)["model"]["d_model"] == 16
  for told in (
    "parameters",
    "tokens in all",
    "attention form, xla",
    "a sequence of any length",
    "memory",
    "one device",
  ):
    assert told in output


def test_a_finished_run_says_so(whole):
  before = running.state(whole[0])
  output, errors = run(whole[0])
  assert "this run is done: 40 steps" in output
  assert errors == ""
  assert before.keys() == running.state(whole[0]).keys()


def test_seventeen_steps_kill_9_and_twenty_three_more_are_forty(whole, tmp_path):
  process = start(tmp_path / "run")
  wait_for(process, "step 17/40")
  process.kill()
  process.communicate()
  assert running.steps(tmp_path / "run")[-1] < 40
  output, _ = run(tmp_path / "run")
  assert "going on from step" in output
  running.assert_same_run(tmp_path / "run", whole[0])


@pytest.mark.parametrize("number", [pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGINT])
def test_a_signal_while_stepping_saves_and_the_rest_is_the_same_run(whole, tmp_path, number):
  process = start(tmp_path / "run")
  wait_for(process, "step 12/40")
  process.send_signal(number)
  output, errors = process.communicate(timeout=60)
  assert process.returncode == 75, errors
  stopped = running.steps(tmp_path / "run")[-1]
  assert 12 <= stopped < 40
  assert f"stopped and saved at step {stopped}" in output
  assert number.name in errors
  run(tmp_path / "run")
  running.assert_same_run(tmp_path / "run", whole[0])


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["compile", "evaluate", "save"])
def test_a_signal_is_heard_while_compiling_evaluating_and_saving(tmp_path, phase):
  """Each phase is made long, and the signal sent when it has begun."""
  slow = {
    # A program that no cache has: another width.
    "compile": (["--config.model.d_model=24", f"--config.seed={os.getpid()}"], "workdir", 40),
    "evaluate": (["--config.log.heldout=2", "--config.log.heldout_batches=5000"], "step 2/40", 40),
    "save": (["--config.checkpoint.every=1", "--config.log.heldout=0"], "step 5/40", 40),
  }
  arguments, seen, _ = slow[phase]
  process = start(tmp_path / "run", *arguments)
  wait_for(process, seen)
  time.sleep({"compile": 2.0, "evaluate": 1.0, "save": 0.0}[phase])
  began = time.monotonic()
  process.send_signal(signal.SIGTERM)
  output, errors = process.communicate(timeout=60)
  assert process.returncode == 75, errors + output
  assert time.monotonic() - began < 30
  assert running.steps(tmp_path / "run"), "nothing was saved"
  saved = running.steps(tmp_path / "run")[-1]
  assert f"stopped and saved at step {saved}" in output
  again = [] if phase == "save" else arguments
  output, _ = run(tmp_path / "run", *again, "--config.log.heldout=0")
  assert "step 40/40" in output


def test_a_second_signal_ends_a_run_at_once(tmp_path):
  process = start(tmp_path / "run", "--config.log.heldout=2", "--config.log.heldout_batches=5000")
  wait_for(process, "step 1/40")
  process.send_signal(signal.SIGTERM)
  process.send_signal(signal.SIGINT)
  began = time.monotonic()
  process.communicate(timeout=30)
  assert process.returncode in (1, 75)
  assert time.monotonic() - began < 10


@pytest.mark.parametrize(
  "damage", ["flip", *(pytest.param(x, marks=pytest.mark.slow) for x in ("remove", "truncate", "manifest"))]
)
def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_is_used(whole, tmp_path, damage):
  workdir = tmp_path / "run"
  shutil.copytree(whole[0], workdir)
  newest = workdir / "checkpoints" / "40"
  largest = max((file for file in newest.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)
  if damage == "flip":
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 4
    largest.write_bytes(content)
  elif damage == "truncate":
    os.truncate(largest, largest.stat().st_size // 2)
  elif damage == "remove":
    largest.unlink()
  else:
    (newest / "MANIFEST.json").write_text("{")
  output, errors = run(workdir)
  assert "checkpoint 40 is damaged" in errors
  assert "checkpoints.damaged/40" in errors
  assert "going on from checkpoint 35" in errors
  assert "going on from step 35" in output
  assert (workdir / "checkpoints.damaged" / "40").is_dir()
  running.assert_same_run(workdir, whole[0])


def test_a_torn_save_counts_for_nothing(whole, tmp_path):
  workdir = tmp_path / "run"
  shutil.copytree(whole[0], workdir)
  shutil.copytree(workdir / "checkpoints" / "40", workdir / "checkpoints" / "41.orbax-checkpoint-tmp")
  (workdir / "checkpoints" / "40" / "MANIFEST.json").unlink()
  with (workdir / "metrics.jsonl").open("a") as opened:
    opened.write('{"step": 41, "lo')
  output, errors = run(workdir)
  assert "going on from step 35" in output
  assert "the save of checkpoint 40 was cut off" in errors
  assert "the save of checkpoint 41 was cut off" in errors
  running.assert_same_run(workdir, whole[0])


def test_a_run_whose_checkpoints_are_all_damaged_does_not_begin_anew(whole, tmp_path):
  workdir = tmp_path / "run"
  shutil.copytree(whole[0], workdir)
  for step in running.steps(workdir):
    (workdir / "checkpoints" / str(step) / "MANIFEST.json").write_text('{"sha256": {"x": "y"}}')
  for _ in range(2):  # a script that tries again does not, either
    _, errors = run(workdir, expect=2)
    assert "no other is left" in line(errors)
  assert running.metrics(workdir) == running.metrics(whole[0])


@pytest.mark.slow
def test_a_run_goes_on_elsewhere_with_the_same_data(gentle, tmp_path):
  """17 steps on 8 devices, then on 4, then on 1: the losses are those of one device, to rounding."""
  workdir = tmp_path / "run"
  for devices, stop in ((8, "step 7/40"), (4, "step 22/40")):
    process = start(workdir, GENTLE, "--config.mesh.fsdp=2", devices=devices)
    wait_for(process, stop)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 75
  run(workdir, GENTLE)
  assert_same_but_for_rounding(running.metrics(workdir), gentle)


def test_a_workdir_of_another_config_is_refused_with_the_keys_that_differ(whole):
  before = running.metrics(whole[0])
  _, errors = run(whole[0], "--config.model.power=4", "--config.seed=7", expect=2)
  assert "model.power is 2 there, 4 here; seed is 0 there, 7 here" in line(errors)
  assert running.metrics(whole[0]) == before


def test_what_is_refused_leaves_the_config_as_it_was(whole, tmp_path):
  workdir = tmp_path / "run"
  shutil.copytree(whole[0], workdir)
  found = json.loads((workdir / "config.json").read_text())
  found["config"]["optimizer"]["schedule"] = "constant"  # by which a run may be made longer
  (workdir / "config.json").write_text(json.dumps(found))
  _, errors = run(workdir, "--config.optimizer.schedule=constant", "--config.steps=20", expect=2)
  assert "is at step 40, beyond steps=20" in line(errors)
  assert json.loads((workdir / "config.json").read_text()) == found


@pytest.mark.parametrize(
  ("arguments", "told"),
  [
    (["--config.model.powr=4"], "did you mean --config.model.power?"),
    (["--config.mesh.tensor=3"], "must divide the number of devices, 1"),
    (["--config.data.train=nowhere.zarr", "--config.data.heldout=none"], "there is no dataset at nowhere.zarr"),
    (["--config.context=100000000", "--config.batch_tokens=100000000"], "too short for 100000000 tokens"),
    (["--config.data.tokenizer=none.json", "--config.log.sample=1"], "data.tokenizer"),
    (["--topology=v5p:4x4x4"], "--topology needs --dry_run"),
    (["--profile=1"], "--profile must be FIRST:COUNT"),
    (["--num_processes=2"], "must be given together"),
    (["--wrong"], "unrecognized arguments: --wrong"),
  ],
  ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_work_is_told_in_a_line_with_exit_code_2(tmp_path, arguments, told):
  _, errors = run(tmp_path / "run", *arguments, expect=2)
  assert told in errors
  assert "Traceback" not in errors
  assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_workdir_that_cannot_be_is_told_with_exit_code_2(tmp_path):
  (tmp_path / "file").write_text("")
  _, errors = run(tmp_path / "file", expect=2)
  assert "is a file" in line(errors)
  _, errors = run("/proc/here", expect=2)
  assert "cannot be written to" in line(errors)


def test_a_full_disk_is_told_in_a_line_and_nothing_is_damaged(whole, tmp_path):
  workdir = tmp_path / "run"
  _, errors = run(workdir, expect=1, before="ulimit -f 20")  # KiB a file, and a checkpoint needs more
  assert "writing to the workdir failed: File too large" in line(errors)
  assert "Traceback" not in errors
  run(workdir)
  running.assert_same_run(workdir, whole[0])


@pytest.mark.slow
def test_a_loss_that_is_not_finite_stops_the_run_before_the_update(tmp_path):
  wild = ["--config.optimizer.learning_rate=1e30", "--config.checkpoint.every=1"]
  _, errors = run(tmp_path / "run", *wild, expect=3)
  assert "stopped before the update of step" in line(errors)
  assert "not finite" in errors
  kept = running.steps(tmp_path / "run")
  assert f"step {kept[-1]}, is kept" in errors
  assert all(np.isfinite(array).all() for array in running.state(tmp_path / "run").values())


def test_a_dry_run_compiles_and_writes_nothing(tmp_path):
  output, _ = run(tmp_path / "run", "--dry_run")
  assert "temporaries" in output
  assert "dry run: nothing was written" in output
  assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_profile_is_written(tmp_path):
  output, _ = run(tmp_path / "run", "--profile=3:2", "--config.steps=6", "--config.log.heldout=0")
  assert "profile from step 3 to 4" in output
  assert list((tmp_path / "run" / "tensorboard").rglob("*.xplane.pb"))


def test_a_second_run_in_a_workdir_is_refused_and_harms_nothing(tmp_path):
  process = start(tmp_path / "run", "--config.log.heldout=2", "--config.log.heldout_batches=5000")
  wait_for(process, "step 2/40")
  process.send_signal(signal.SIGSTOP)  # it holds the workdir all the same, and takes no time from the other
  try:
    _, errors = run(tmp_path / "run", expect=2)
    assert "is in use by another run" in line(errors)
  finally:
    process.send_signal(signal.SIGCONT)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
  assert process.returncode == 75
  run(tmp_path / "run", "--config.log.heldout=0")
  assert [record["step"] for record in running.metrics(tmp_path / "run")] == list(range(1, 41))


@pytest.mark.slow
def test_a_profile_past_the_end_or_before_the_beginning_does_no_harm(tmp_path):
  short = ["--config.optimizer.schedule=constant", "--config.log.heldout=0"]
  run(tmp_path / "run", "--config.steps=6", "--profile=5:9", *short)
  assert list((tmp_path / "run" / "tensorboard").rglob("*.xplane.pb"))
  run(tmp_path / "run", "--config.steps=9", "--profile=2:3", *short)
  _, errors = run(tmp_path / "run", "--config.steps=4", *short, expect=2)
  assert "is at step 9, beyond steps=4" in line(errors)


def campaign(tmp_path, whole, kills, seed):
  """Kills a run again and again at random moments until it has been killed so often; then lets it end."""
  rng = random.Random(seed)
  workdir = tmp_path / "run"
  began = time.monotonic()
  run(tmp_path / "timed", "--config.checkpoint.every=2")
  took = time.monotonic() - began  # as busy as the machine is
  reached = []
  for _ in range(kills):
    process = start(workdir, "--config.checkpoint.every=2")
    deadline = time.monotonic() + rng.uniform(0.1, 1.0) * took
    while time.monotonic() < deadline and process.poll() is None:
      time.sleep(0.01)
    process.send_signal(rng.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM]))
    process.communicate(timeout=60)
    assert process.returncode in (0, 75, -signal.SIGKILL)
    reached.append((running.steps(workdir) or [0])[-1])
    if reached[-1] == 40:
      running.assert_same_run(workdir, whole)
      shutil.rmtree(workdir)
  assert all(later >= earlier or earlier == 40 for earlier, later in itertools.pairwise(reached)), reached
  run(workdir, "--config.checkpoint.every=2")
  running.assert_same_run(workdir, whole)
  return reached


@pytest.mark.slow
def test_a_run_killed_at_a_random_moment_loses_nothing(whole, tmp_path):
  campaign(tmp_path, whole[0], kills=1, seed=0)


@pytest.mark.slow
def test_a_run_killed_sixty_times_at_random_moments_loses_nothing(whole, tmp_path):
  reached = campaign(tmp_path, whole[0], kills=60, seed=1)
  assert len(set(reached)) > 5, "too few of the kills met a run under way"


@pytest.mark.slow
def test_two_processes_of_four_devices_are_one_run(gentle, tmp_path):
  """On loopback; the second is told to stop, both do at the same step, and both go on."""
  port = 20_000 + os.getpid() % 20_000
  workdir = tmp_path / "run"

  def both():
    return [
      start(
        workdir,
        GENTLE,
        "--config.mesh.fsdp=2",
        "--config.log.context_curve=64",
        f"--coordinator=127.0.0.1:{port}",
        "--num_processes=2",
        f"--process_id={n}",
        devices=4,
      )
      for n in range(2)
    ]

  processes = both()
  wait_for(processes[0], "step 11/40")
  processes[1].send_signal(signal.SIGTERM)
  for process in processes:
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 75, errors
  assert 11 <= running.steps(workdir)[-1] < 40
  port += 1
  for process in both():
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
  assert_same_but_for_rounding(running.metrics(workdir), gentle)
  assert Path(workdir, "checkpoints", "40", "MANIFEST.json").exists()
  assert Path(workdir, "context.png").exists()
