"""eval.py: any checkpoint is read as it was written, work is kept, and what cannot be done is one line."""

import argparse
import csv
import json
import os
import shutil
import signal
import time

import jax
import numpy as np
import pytest
from flax import nnx
from orbax.checkpoint import v1 as ocp

from csympow.config import ConfigError
from csympow.data.progress import Progress
from csympow.evaluate import caches, context, curves, streaming
from csympow.evaluate.kept import Kept
from csympow.evaluate.runs import open_run
from csympow.evaluate.stretches import common_stretches
from csympow.sharding import Layout, make_mesh, mesh_sizes
from csympow.train.checkpoint import write_manifest
from csympow.train.stop import Stop
from tests import running
from tests.comparing import quick_jit


@pytest.fixture(scope="module", autouse=True)
def quick_compilation():
  """What is compiled here runs for moments: small pieces, and no time spent on making them fast."""
  piece, caches.PIECE = caches.PIECE, 64
  jax.config.update("jax_disable_most_optimizations", True)
  yield
  jax.config.update("jax_disable_most_optimizations", False)
  caches.PIECE = piece


@pytest.fixture(scope="module")
def run_directory(tmp_path_factory):
  workdir = tmp_path_factory.mktemp("runs") / "tiny"
  running.untrained(workdir)
  return workdir


QUICK = "export JAX_DISABLE_MOST_OPTIMIZATIONS=1"


@quick_jit
def logits_of(model, tokens):
  return model(tokens)


def arguments(out, *workdirs, **changes):
  common = {"step": None, "max_context": 320, "out": out, "stop": Stop(), "documents": 3, "heldout": None}
  return argparse.Namespace(**common | {"workdir": list(workdirs)} | changes)


def test_a_run_saved_on_eight_devices_opens_on_one_as_it_was(tmp_path):
  layout = Layout(make_mesh(mesh_sizes(-1, 2, 1, 1, 8), jax.devices()))
  parameters = running.untrained(tmp_path / "run", layout)
  run = open_run(tmp_path / "run", None)
  found = nnx.to_pure_dict(nnx.split(run.model)[1])
  assert jax.tree.structure(found) == jax.tree.structure(parameters)
  for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(parameters), strict=True):
    assert len(ours.devices()) == 1
    np.testing.assert_array_equal(ours, theirs)
  assert run.step == 0
  assert run.decode(run.encode("héllo")) == "héllo"


@pytest.mark.parametrize(
  ("spoil", "told"),
  [
    ("nothing there", "there is none"),
    ("no run", "no config.json"),
    ("no checkpoint", "no finished checkpoint"),
    ("truncated", "checkpoint 0 in .* is damaged"),
    ("another config", r"is not of the config beside it: embedding.embedding is float32\[256, 16\] there"),
    ("another variant", "layers.attention.beta.kernel is .* there, absent by the config"),
    ("another version", "no field model.colour"),
    ("nothing vouched for", "MANIFEST.json vouches for no file"),
    ("a bomb", "MANIFEST.json cannot be read"),
    ("foreign", "is no checkpoint of this program"),
    ("step", "--step=7 must be one of 0"),
  ],
)
def test_what_is_no_run_of_its_config_is_refused_in_one_line(run_directory, tmp_path, spoil, told):
  workdir = tmp_path / "run"
  shutil.copytree(run_directory, workdir)
  config = json.loads((workdir / "config.json").read_text())
  if spoil == "nothing there":
    shutil.rmtree(workdir)
  elif spoil == "no run":
    shutil.rmtree(workdir / "checkpoints")
    (workdir / "config.json").unlink()
  elif spoil == "no checkpoint":
    (workdir / "checkpoints" / "0" / "MANIFEST.json").unlink()
  elif spoil == "truncated":
    largest = max((file for file in workdir.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)
  elif spoil == "nothing vouched for":
    (workdir / "checkpoints" / "0" / "MANIFEST.json").write_text('{"sha256": {}}')
  elif spoil == "a bomb":
    (workdir / "checkpoints" / "0" / "MANIFEST.json").write_text("[" * 200_000)
  elif spoil == "foreign":
    shutil.rmtree(workdir / "checkpoints" / "0")
    ocp.save(workdir.absolute() / "checkpoints" / "0", {"theirs": jax.numpy.ones(3)})
    write_manifest(workdir / "checkpoints" / "0")
  elif spoil == "another config":
    config["config"]["model"]["d_model"] = 32
  elif spoil == "another variant":
    config["config"]["model"]["variant"] = "sympow+gating"
  elif spoil == "another version":
    config["config"]["model"]["colour"] = "red"
  if workdir.exists() and spoil != "no run":
    (workdir / "config.json").write_text(json.dumps(config))
  with pytest.raises(ConfigError, match=told) as refusal:
    open_run(workdir, 7 if spoil == "step" else None)
  assert "\n" not in str(refusal.value)


def test_the_newest_checkpoint_that_is_whole_is_taken_and_a_damaged_one_left_where_it_is(
  run_directory, tmp_path, capsys
):
  workdir = tmp_path / "run"
  shutil.copytree(run_directory, workdir)
  shutil.copytree(workdir / "checkpoints" / "0", workdir / "checkpoints" / "5")
  (workdir / "checkpoints" / "5" / "MANIFEST.json").write_text("{")
  assert open_run(workdir, None).step == 0
  assert "checkpoint 5 in" in capsys.readouterr().err
  assert (workdir / "checkpoints" / "5").is_dir()


def test_the_context_task_measures_what_a_single_pass_gives(run_directory, tmp_path, capsys):
  running.untrained(tmp_path / "softmax", **{"model.variant": "softmax"})
  context.run(arguments(tmp_path, run_directory, tmp_path / "softmax"))
  record = json.loads((tmp_path / "context.json").read_text())
  rows = list(csv.DictReader((tmp_path / "context.csv").read_text().splitlines()))
  assert (tmp_path / "context.png").read_bytes().startswith(b"\x89PNG")
  assert (record["length"], record["stretches"], record["joined"]) == (320, 3, False)
  printed = capsys.readouterr().out
  assert "no interpolation" in printed
  assert "no interpolation" in record["runs"][1]["rotary"]

  stretches = common_stretches([open_run(run_directory, None)], None, 320, 3)
  tokens, targets = stretches.rows([0, 1, 2])
  for found, workdir in zip(record["runs"], (run_directory, tmp_path / "softmax"), strict=True):
    model = open_run(workdir, None).model
    log_p = jax.nn.log_softmax(logits_of(model, tokens))
    whole = -np.take_along_axis(np.asarray(log_p), targets[..., None], axis=-1)[..., 0]
    assert found["cumulative"]["context"] == [1, 2, 4, 8, 16, 32, 64, 128, 256, 320]
    wanted = [whole[:, :last].mean() for last in found["cumulative"]["context"]]
    np.testing.assert_allclose(found["cumulative"]["loss"], wanted, rtol=1e-4)
    np.testing.assert_allclose(found["window"]["loss"][-1], whole[:, -256:].mean(), rtol=1e-4)
    blocks = logits_of(model, tokens[:, -256:].reshape(-1, 32))
    few = -np.take_along_axis(
      np.asarray(jax.nn.log_softmax(blocks)), targets[:, -256:].reshape(-1, 32)[..., None], axis=-1
    )
    np.testing.assert_allclose(found["window"]["loss"][5], few.mean(), rtol=1e-4)
    np.testing.assert_allclose(found["gain"]["loss"][5], few.mean() - whole[:, -256:].mean(), atol=1e-4)
  near = jax.nn.log_softmax(logits_of(open_run(run_directory, None).model, tokens[:, -256:]))
  near = -np.take_along_axis(np.asarray(near), targets[:, -256:, None], axis=-1)[..., 0]
  np.testing.assert_allclose(record["runs"][0]["window"]["loss"][-2], near.mean(), rtol=1e-4)
  sizes = {(row["run"], row["context"]): int(row["state_bytes"]) for row in rows}
  assert len({size for (run, _), size in sizes.items() if "conformal" in run}) == 1
  assert sizes["softmax, softmax", "256"] > 1.9 * sizes["softmax, softmax", "128"]


def test_one_program_serves_every_length_in_memory_that_does_not_grow(run_directory):
  run = open_run(run_directory, None)
  before = streaming.advance._cache_size()
  alive = {}
  for length in (256, 512, 4096):
    tokens, targets = common_stretches([run], None, length, 2).rows([0, 1])
    shape = caches.shape_for(run.model, length, 2)
    alive[length] = 0
    for _ in streaming.stream(run.model, tokens, targets, shape):
      alive[length] = max(alive[length], sum(array.nbytes for array in jax.live_arrays()))
  assert streaming.advance._cache_size() == before + 1
  assert alive[4096] == alive[512] == alive[256]


def test_kept_results_are_used_again_but_not_for_another_checkpoint_or_other_text(run_directory, tmp_path, monkeypatch):
  passes = []
  real = context.Pass.results
  monkeypatch.setattr(context.Pass, "results", lambda self: passes.append(self) or real(self))

  def measured(workdir, first=0):
    run = open_run(workdir, None)
    stretches = common_stretches([run], None, 40, 2)
    stretches = stretches._replace(tokens=[np.roll(tokens, first) for tokens in stretches.tokens])
    return context.measure(run, stretches, Kept(tmp_path, "context"), Progress(1))

  one = measured(run_directory)
  assert len(passes) == len(curves.contexts(40))
  again = measured(run_directory)
  assert len(passes) == len(curves.contexts(40))
  jax.tree.map(np.testing.assert_array_equal, one, again)
  with (tmp_path / ".kept" / "context.jsonl").open("a") as opened:
    opened.write('{"key": "abc", "resu')  # killed while it wrote
  measured(run_directory, first=1)
  assert len(passes) == 2 * len(curves.contexts(40))
  running.untrained(tmp_path / "other", seed=1)
  other = measured(tmp_path / "other")
  assert len(passes) == 3 * len(curves.contexts(40))
  assert (other.sums != one.sums).any()
  measured(run_directory)
  assert len(passes) == 3 * len(curves.contexts(40))


@pytest.mark.slow
def test_an_interrupted_evaluation_keeps_what_it_has_and_goes_on_to_the_same_result(run_directory, tmp_path):
  command = ("--task=context", f"--workdir={run_directory}", "--max_context=8192", "--documents=2")
  kept = tmp_path / "out" / ".kept" / "context.jsonl"
  process = running.begin("eval.py", *command, f"--out={tmp_path / 'out'}", before=QUICK)
  while not (kept.exists() and kept.read_text().count("\n") > 1):
    assert process.poll() is None, process.communicate()
    time.sleep(0.02)
  process.send_signal(signal.SIGINT)
  output, errors = process.communicate(timeout=60)
  assert process.returncode == 75, errors + output
  assert "the same command goes on" in output
  assert "SIGINT" in errors
  first = kept.read_text()
  assert not (tmp_path / "out" / "context.json").exists()
  running.evaluate(*command, f"--out={tmp_path / 'out'}", before=QUICK)
  assert kept.read_text().startswith(first[: first.rindex("\n") + 1])
  keys = [json.loads(line)["key"] for line in kept.read_text().splitlines()]
  assert len(keys) == len(set(keys)) == 2 * 14
  found = json.loads((tmp_path / "out" / "context.json").read_text())["runs"][0]
  run = open_run(run_directory, None)
  stretches = common_stretches([run], None, 8192, 2)
  whole = context.measure(run, stretches, Kept(tmp_path, "context"), Progress(1))
  wanted = curves.by_position(whole.sums, whole.counts, 8192)
  assert found["position"]["context"] == wanted.last
  np.testing.assert_allclose(found["position"]["loss"], wanted.loss, rtol=1e-4)
  np.testing.assert_allclose(found["window"]["loss"], whole.windows.mean(axis=0), rtol=1e-4)


@pytest.mark.parametrize(
  ("given", "told"),
  [
    (("--task=context", "--out={out}"), "--workdir=DIR must name at least one run"),
    (("--out={out}",), "the following arguments are required: --task"),
    (("--task=dance", "--out={out}"), "invalid choice: 'dance'"),
    (("--task=context", "--workdir={run}"), "the following arguments are required: --out"),
    (("--task=context", "--workdir={run}", "--out={run}/config.json"), "cannot be written to: File exists"),
    (("--task=context", "--workdir={run}", "--out={out}", "--max_context=1"), "--max_context must be from 2 to"),
    (("--task=context", "--workdir={run}", "--out={out}", "--documents=0"), "--documents: must be a positive integer"),
    (("--task=context", "--workdir={run}", "--out={out}", "--heldout=/nowhere"), "there is no dataset at /nowhere"),
    (("--task=context", "--workdir=/nowhere", "--out={out}"), "there is none"),
    (("--task=context", "--workdir={run}", "--workdir={run}/../{name}", "--out={out}"), "is given twice"),
    (("--task=context", "--workdir={run}", "--out={run}"), "is the directory of a run, which has results of its own"),
    (("--task=context", "--workdir={run}", "--out={out}", "--max_context=4294967296"), "--max_context must be from 2"),
    (("--task=recall", "--out={out}", "--workdir={run}"), "--workdir is for tasks that read runs; --task=recall"),
    (("--task=recall", "--out={out}", "--step=3"), "--step is for tasks that read runs"),
    (("--task=recall", "--out={out}", "--max_context=99"), "--max_context is for tasks that read runs"),
    (("--task=recall", "--out={out}", "--seed=99999999999999999999"), "--seed: must be below 2^31"),
    (("--task=sample", "--out={out}", "--workdir={run}", "--tokens=0"), "--tokens: must be a positive integer"),
    (("--task=sample", "--out={out}", "--workdir={run}", "--prompts={out}/bomb.json"), "bomb.json cannot be read"),
    (("--task=memory", "--out={out}/taken", "--workdir={run}", "--max_context=9"), "cannot be kept there"),
    (("--task=memory", "--out={out}/full", "--workdir={run}"), "memory.png would be written there, and it is a dir"),
  ],
)
def test_a_command_that_cannot_work_is_one_line_and_exit_code_2(run_directory, tmp_path, capfd, given, told):
  from csympow.evaluate import program

  out = tmp_path / "out"
  (out / "taken").mkdir(parents=True)
  (out / "taken" / ".kept").touch()
  (out / "full" / "memory.png").mkdir(parents=True)
  (out / "bomb.json").write_text("[" * 200_000)
  line = [part.format(out=out, run=run_directory, name=run_directory.name) for part in given]
  assert program._run(line, Stop()) == 2
  errors = capfd.readouterr().err
  assert told in errors
  assert errors.startswith("csympow: ")
  assert errors.count("\n") == 1


def test_runs_on_different_text_are_not_compared(run_directory, tmp_path):
  running.untrained(tmp_path / "other")
  config = json.loads((tmp_path / "other" / "config.json").read_text())
  config["config"]["data"]["heldout"] = None
  (tmp_path / "other" / "config.json").write_text(json.dumps(config))
  runs = [open_run(run_directory, None), open_run(tmp_path / "other", None)]
  with pytest.raises(ConfigError, match="no held-out data"):
    common_stretches(runs, None, 20, 2)
  common_stretches(runs, "embedded", 20, 2)
