"""What a model keeps: the memory of a head is what its gates say, and a constant gate is what training logs."""

import argparse
import csv
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from csympow.config import ConfigError
from csympow.data.progress import Progress
from csympow.evaluate import caches, memory
from csympow.evaluate.kept import Kept
from csympow.evaluate.runs import open_run
from csympow.evaluate.stretches import common_stretches
from csympow.gates import memory_length
from csympow.train.stop import Stop
from tests import running
from tests.comparing import quick_jit


@pytest.fixture(scope="module", autouse=True)
def quick_compilation():
  """What is compiled here runs for moments."""
  piece, caches.PIECE = caches.PIECE, 16
  jax.config.update("jax_disable_most_optimizations", True)
  yield
  jax.config.update("jax_disable_most_optimizations", False)
  caches.PIECE = piece


def test_a_token_fades_when_the_gates_after_it_have_multiplied_up_to_1_over_e():
  log_gate = np.log(np.random.default_rng(0).uniform(0.5, 1.0, (2, 3, 200, 2)))
  found = memory.fading(log_gate)
  for place in [(0, 0, 0, 0), (1, 2, 50, 1), (0, 1, 120, 1)]:
    layer, row, token, head = place
    faded = np.cumsum(log_gate[layer, row, token + 1 :, head])
    after = found[place]
    whole = int(np.floor(after))
    assert (faded[whole - 1] if whole else 0) > -1 >= faded[whole]
  assert np.isinf(found[:, :, -1]).all()
  constant = memory.fading(np.full((1, 1, 500, 1), -0.01))
  np.testing.assert_allclose(constant[0, 0, :399, 0], memory_length(jnp.float32(-0.01)), rtol=1e-5)
  assert np.isinf(constant[0, 0, 401:]).all()
  np.testing.assert_allclose(memory.fading(np.full((1, 1, 9, 1), -4.0))[0, 0, :8], 0.25)


@pytest.mark.slow
def test_streamed_gates_are_those_of_one_pass_and_their_statistics_those_of_training(tmp_path):
  running.untrained(tmp_path / "run")
  run = open_run(tmp_path / "run", None)
  stretches = common_stretches([run], None, 40, 3)
  tokens, _ = stretches.rows([0, 1, 2])
  kept = Kept(tmp_path, "memory")
  group = memory.Group(run, tokens, caches.shape_for(run.model, 40, 3), kept, "key", Progress(1))
  group.read()
  wanted = quick_jit(lambda model, tokens: model.gates(tokens))(run.model, tokens)
  np.testing.assert_allclose(group.log_gate, wanted[0], rtol=1e-4)
  np.testing.assert_allclose(group.beta, wanted[1], rtol=1e-4)
  heads = memory.measure(run, stretches, kept, Progress(1))
  np.testing.assert_allclose(heads.at_mean_gate, memory_length(wanted[0].mean((1, 2))), rtol=1e-4)
  np.testing.assert_allclose(heads.beta_spread, np.std(wanted[1], axis=(1, 2)), rtol=1e-3)

  args = {"workdir": [tmp_path / "run"], "step": None, "max_context": 40, "out": tmp_path, "stop": Stop()}
  memory.run(argparse.Namespace(**args, documents=3, heldout=None))
  record = json.loads((tmp_path / "memory.json").read_text())["runs"][0]
  np.testing.assert_allclose(record["beta"], heads.beta, rtol=1e-5)
  assert np.shape(record["radians_per_token"]) == (5, 2, 2, 4)
  rows = list(csv.DictReader((tmp_path / "memory.csv").read_text().splitlines()))
  assert [(row["layer"], row["head"]) for row in rows] == [("0", "0"), ("0", "1"), ("1", "0"), ("1", "1")]
  assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")


def test_a_model_without_gates_is_refused(tmp_path):
  running.untrained(tmp_path / "run", **{"model.variant": "sympow"})
  args = {"workdir": [tmp_path / "run"], "step": None, "max_context": 40, "out": tmp_path, "stop": Stop()}
  with pytest.raises(ConfigError, match="is a sympow model, which has no gates"):
    memory.run(argparse.Namespace(**args, documents=3, heldout=None))
