"""The recall experiment: rates trained together are those trained alone, and a grid that was stopped goes on."""

import dataclasses
import json
from typing import ClassVar

import numpy as np
import pytest

from csympow.config import ConfigError
from csympow.evaluate import recall, recall_training
from csympow.evaluate.mqar import Setting
from csympow.evaluate.recall_config import RecallConfig
from csympow.evaluate.recall_training import Answers, Learner, tokens_of
from csympow.model import Transformer
from tests.evaluating import NeverStop, arguments

TINY = RecallConfig(
  vocab_size=32,
  train=((8, 2, 40), (16, 4, 16)),
  test=((8, 2, 20), (16, 4, 7)),
  variants=("softmax", "conformal"),
  powers=(2,),
  widths=(8,),
  heads=2,
  rates=(1e-3, 1e-2),
  epochs=2,
  batch=16,
)


def learner(seen=lambda done: None, shape=0, **changes):
  config = dataclasses.replace(TINY, **changes)
  return Learner(config.models()[shape], config, 0, seen)


@pytest.mark.slow
def test_a_rate_learns_as_it_would_alone_even_beside_one_that_diverges(monkeypatch):
  traced, seen = [], []
  hidden = Transformer.hidden
  monkeypatch.setattr(
    Transformer, "hidden", lambda self, tokens: (traced.append(tokens.shape), hidden(self, tokens))[1]
  )
  small = {"train": ((8, 2, 40), (8, 1, 24)), "test": ((8, 2, 20), (8, 1, 7)), "layers": 1}
  both, alone = learner(seen.append, rates=(1e-2, 1e30), **small), learner(rates=(1e-2,), **small)
  losses = both.train()
  assert traced == [(16, 8)], "one program for a length"
  answers = both.test()
  assert traced[1:] == [(20, 8)], "and one to ask"
  assert sum(seen) == 2 * 64 * 8 + 27 * 8 == tokens_of(both.config)
  np.testing.assert_allclose(losses[0], alone.train()[0], rtol=1e-3)
  assert not losses[1] < 1e3
  for found in answers:
    assert found.accuracy.shape == (2,)


@pytest.mark.usefixtures("quick_compilation")
def test_a_training_of_two_steps_has_a_loss():
  few = learner(train=((4, 1, 32),), test=((4, 1, 4),), rates=(1e-2,), epochs=1, batch=16, layers=1)
  assert np.isfinite(few.train()).all()


@pytest.mark.slow
def test_a_model_learns_to_recall_the_only_pair_there_is():
  one = learner(train=((4, 1, 2048),), test=((4, 1, 100),), rates=(1e-2,), epochs=8, batch=64, widths=(16,))
  one.train()
  (answers,) = one.test()
  assert answers.accuracy[0] > 0.9  # 1 in 16 by chance


def test_the_accuracy_of_keys_with_a_new_value_is_told_apart():
  right = np.array([[[True, True, False], [True, False, False]]])
  returned = np.array([[True, False, False], [True, False, False]])
  found = recall_training._summary(right, returned)
  np.testing.assert_allclose(found.accuracy, 0.5)
  np.testing.assert_allclose(found.returned, 1.0)
  np.testing.assert_allclose(found.error, np.std([2 / 3, 1 / 3], ddof=1) / np.sqrt(2))


class Instant:
  """A learner that has learnt: how well depends on its variant, its rate and the length."""

  trained: ClassVar[list] = []

  def __init__(self, shape, config, seed, check):
    self._shape, self._config, self._check = shape, config, check
    self.trained.append(shape.variant)

  def train(self):
    self._check(10)
    return np.array(self._config.rates)

  def test(self):
    best = np.array([0.5, 0.9]) if self._shape.variant == "softmax" else np.array([0.8, 0.2])
    nothing = np.full(2, np.nan)
    return [Answers(best * 8 / length, nothing, nothing) for length, _, _ in self._config.test]


class StopsAtTheSecond(NeverStop):
  def check(self):
    if len(Instant.trained) == 2:
      raise InterruptedError


def test_a_grid_that_was_stopped_goes_on(tmp_path, monkeypatch, capsys):
  monkeypatch.setattr(recall, "Learner", Instant)
  file = tmp_path / "config.py"
  file.write_text(f"from csympow.evaluate.recall_config import RecallConfig\ndef get_config():\n  return {TINY!r}\n")
  out = tmp_path / "stopped"
  Instant.trained.clear()
  with pytest.raises(InterruptedError):
    recall.run(arguments(recall, out, f"--config={file}", stop=StopsAtTheSecond()))
  Instant.trained.clear()
  recall.run(arguments(recall, out, f"--config={file}"))
  assert Instant.trained == ["conformal"]
  recall.run(arguments(recall, tmp_path / "whole", f"--config={file}"))
  ours, theirs = (json.loads((tmp_path / name / "recall.json").read_text()) for name in ("stopped", "whole"))
  assert ours == theirs
  found = [(record["variant"], record["pairs"], record["rate"], record["accuracy"]) for record in ours["results"]]
  assert found == [
    *(("softmax", 2, 1e-2, 0.9), ("softmax", 4, 1e-2, 0.45)),
    *(("conformal", 2, 1e-3, 0.8), ("conformal", 4, 1e-3, 0.4)),
  ]
  assert (out / "recall.csv").read_text().count("\n") == 5
  assert (out / "recall.png").read_bytes().startswith(b"\x89PNG")
  assert "conformal p=2" in capsys.readouterr().out
  Instant.trained.clear()
  for flag in ("--seed=1", "--epochs=1", "--forgetting=0.25"):  # each another experiment
    recall.run(arguments(recall, out, f"--config={file}", "--variants=softmax", flag))
  assert Instant.trained == ["softmax"] * 3


def test_flags_scale_the_grid(tmp_path):
  flags = ("--variants=conformal", "--powers=2,4", "--widths=32", "--rates=1e-3", "--examples=0.01", "--epochs=3")
  config = recall._config(arguments(recall, tmp_path, *flags))
  assert [(shape.variant, shape.power, shape.d_model) for shape in config.models()] == [
    ("conformal", 2, 32),
    ("conformal", 4, 32),
  ]
  assert config.train[0] == (64, 4, 1000)
  assert config.test[-1] == (1024, 256, 10)
  assert (config.rates, config.epochs) == ((1e-3,), 3)


def test_the_default_is_the_grid_of_the_literature():
  config = RecallConfig()
  np.testing.assert_allclose(config.rates, np.logspace(-3, -1.5, 4))
  assert len(config.models()) == 3 * (1 + 3 * 2)
  assert config.settings(config.test)[-1] == Setting(1024, 256, 1000)
  forgetting = dataclasses.replace(config, forgetting=0.25)
  assert forgetting.settings(config.train)[-1] == Setting(256, 64, 20_000, returning=16)


def test_the_state_is_counted_in_bytes():
  softmax, conformal = TINY.models()
  assert recall.state_bytes(softmax, 10) == 2 * 10 * 2 * 2 * 4 * 4 + 2 * 4  # k and v, layers, heads, float32; lengths
  features = 4 * 5 // 2
  assert recall.state_bytes(conformal, 10) == 2 * 2 * (features * 4 + features + 2) * 4


@pytest.mark.parametrize(
  ("changes", "line"),
  [
    ({"widths": (9,)}, "widths must be multiples of heads=2, got 9"),
    ({"powers": (3,)}, "power"),
    ({"variants": ("linear",)}, "linear"),
    ({"rates": (0.0,)}, "rates must be positive, got 0.0"),
    ({"forgetting": 0.8}, "forgetting must be from 0 to 0.5, got 0.8"),
    ({"vocab_size": 8}, "a vocabulary of 8 is too small"),
    ({"powers": (), "variants": ("conformal",)}, "powers must not be empty"),
  ],
)
def test_a_grid_that_cannot_be_is_refused_in_one_line(changes, line):
  with pytest.raises(ConfigError) as caught:
    dataclasses.replace(TINY, **changes)
  assert line in str(caught.value)
  assert "\n" not in str(caught.value)
