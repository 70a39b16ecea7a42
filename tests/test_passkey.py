"""The passkey task: prompts are what they say, and a model that knows the number scores."""

import json
import re

import numpy as np
import pytest
from PIL import Image

from csympow import weights
from csympow.command import NotFiniteError
from csympow.config import ConfigError
from csympow.data.tokenizer import train_bpe
from csympow.evaluate import caches, passkey
from csympow.evaluate.answers import Answerer, Reply
from csympow.evaluate.prompts import split_answer
from csympow.evaluate.runs import open_run
from tests.evaluating import arguments, make_run, make_weights

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture(scope="module")
def byte_run(tmp_path_factory):
  return make_run(tmp_path_factory.mktemp("bytes") / "run")


@pytest.fixture(scope="module")
def bpe_run(tmp_path_factory):
  directory = tmp_path_factory.mktemp("bpe")
  texts = [f"{passkey._INSTRUCTIONS} {passkey._FILLER} {passkey._LINE.format(number=n)}" for n in range(0, 50_000, 100)]
  kept = make_weights(vocab_size=400)._replace(tokenizer=train_bpe(texts, 400).to_str())
  weights.save(directory / "m.safetensors", kept)
  assert weights.main(["import", f"--file={directory / 'm.safetensors'}", f"--workdir={directory / 'run'}"]) == 0
  return directory / "run"


@pytest.mark.parametrize("tokens", ["byte_run", "bpe_run"])
def test_a_prompt_has_its_length_and_the_number_its_depth(request, tokens):
  run = open_run(request.getfixturevalue(tokens), None)
  task = passkey.Passkey(run)
  places = {}
  for depth in (0.0, 50.0, 100.0):
    question = task.question(1000, depth, 47_113, 20_304)
    assert len(question.prompt) == 1000 - 10
    text = run.decode(question.prompt)
    assert text.count("47113") == 2
    assert "20304" not in text
    assert text.endswith(("The pass key is", "The pass key is "))
    assert [run.decode(answer).strip() for answer in question.answers] == ["47113", "20304"]
    assert run.decode(np.concatenate([question.prompt, question.answers[0]])).endswith("The pass key is 47113")
    before, _, after = text.partition("\nThe pass key is 47113")
    places[depth] = (before.count("grass"), after.count("grass"))
  assert places[0.0][0] == 0
  assert places[100.0][1] == 0
  assert abs(places[50.0][0] - places[50.0][1]) <= 1
  if run.tokenizer.end_of_text is not None:
    assert question.prompt[0] == run.tokenizer.end_of_text


@pytest.mark.parametrize("tokens", ["byte_run", "bpe_run"])
def test_every_number_fits_the_shortest_prompt(request, tokens):
  run = open_run(request.getfixturevalue(tokens), None)
  task = passkey.Passkey(run)
  for number in range(1, 50_001, 499):
    question = task.question(task.shortest, 50.0, number, 1)
    assert len(question.prompt) == task.shortest - 10
    assert len(question.answers[0]) <= passkey._NUMBER_TOKENS


def test_a_space_of_its_own_belongs_to_the_question(byte_run, bpe_run):
  asked, answer = split_answer(open_run(byte_run, None), "The pass key is", " 12")
  assert (asked[-1:].tolist(), answer.tolist()) == ([ord(" ")], [ord("1"), ord("2")])
  run = open_run(bpe_run, None)
  asked, answer = split_answer(run, "The pass key is", " 12")
  assert run.decode(asked) == "The pass key is"
  assert run.decode(answer) == " 12"


def test_who_knows_the_number_scores_and_who_does_not_does_not(byte_run, tmp_path, monkeypatch, capsys):
  run = open_run(byte_run, None)

  def oracle(self, questions, check):
    for question in questions:
      check(len(question.prompt))
      text = run.decode(question.prompt)
      knows = text.index("Remember") > len(text) / 2  # only of what came late
      written = f" {text.split(' is the pass key')[0].split()[-1]}. " if knows else " none of 12"
      yield Reply(np.array([1.0, 9.0]), np.array([True, False]), run.encode(written.ljust(10))[:10])

  monkeypatch.setattr(Answerer, "replies", oracle)
  passkey.run(arguments(passkey, tmp_path, "--trials=3", workdir=[byte_run], max_context=1024))
  found = json.loads((tmp_path / "passkey.json").read_text())
  by_depth = {(cell["length"], cell["depth"]): cell["exact_match"] for cell in found["cells"]}
  assert set(by_depth) == {(length, 10.0 * tenth) for length in (512, 1024) for tenth in range(11)}
  assert by_depth[1024, 100.0] == 1.0
  assert by_depth[1024, 0.0] == 0.0
  assert {(cell["nll"], cell["nll_other"]) for cell in found["cells"]} == {(1.0, 9.0)}
  colours = Image.open(tmp_path / "passkey.png").convert("RGB").getcolors(2**24)
  assert len(colours) > 256, "a heat map of few colours"
  printed = capsys.readouterr().out
  assert "a guess from 1 to 50,000 is 10.8 nats" in printed
  assert re.search(r"length +state +exact match", printed)
  assert printed.count(" KiB ") == 2


@pytest.mark.slow
def test_a_real_model_is_asked_once_and_the_rest_is_kept(byte_run, tmp_path, monkeypatch):
  monkeypatch.setattr(caches, "PIECE", 64)
  args = arguments(passkey, tmp_path, "--trials=2", "--lengths=333", workdir=[byte_run])
  passkey.run(args)
  first = (tmp_path / "passkey.json").read_text()
  assert len(json.loads(first)["cells"]) == 11
  monkeypatch.setattr(Answerer, "replies", None)
  passkey.run(args)
  assert (tmp_path / "passkey.json").read_text() == first


def test_answers_of_another_config_are_not_those_kept(tmp_path, monkeypatch):
  directory, asked = make_run(tmp_path / "run"), []

  def oracle(self, questions, check):
    asked.extend(questions)
    yield from (Reply(np.array([1.0, np.nan]), np.array([True, False]), np.zeros(10, int)) for _ in questions)

  monkeypatch.setattr(Answerer, "replies", oracle)
  args = arguments(passkey, tmp_path / "out", "--trials=1", "--lengths=400", workdir=[directory])
  passkey.run(args)
  passkey.run(args)
  assert len(asked) == 11
  config = json.loads((directory / "config.json").read_text())
  config["config"]["model"]["gate_offset"] = 1.0
  (directory / "config.json").write_text(json.dumps(config))
  passkey.run(args)
  assert len(asked) == 22


def test_a_model_without_numbers_is_told_of_when_all_is_written(byte_run, tmp_path, monkeypatch, capsys):
  def lost(self, questions, check):
    yield from (Reply(np.array([np.nan, np.nan]), np.array([False, False]), np.zeros(10, int)) for _ in questions)

  monkeypatch.setattr(Answerer, "replies", lost)
  with pytest.raises(NotFiniteError, match="run, conformal p=2: likelihoods are not finite"):
    passkey.run(arguments(passkey, tmp_path, "--trials=2", "--lengths=400", workdir=[byte_run]))
  assert {cell["nll"] for cell in json.loads((tmp_path / "passkey.json").read_text())["cells"]} == {None}
  assert " nan" in capsys.readouterr().out


def test_the_first_integer_counts():
  assert passkey.first_integer(" 123, or 45") == 123
  assert passkey.first_integer("-7") == 7
  assert passkey.first_integer("none") is None


def test_the_number_to_compare_with_is_another_of_as_many_digits():
  rng = np.random.default_rng(0)
  for number in (1, 9, 10, 99, 10_000, 50_000):
    others = [passkey._unlike(number, rng) for _ in range(200)]
    assert number not in others
    assert {len(str(other)) for other in others} == {len(str(number))}
    assert max(others) <= 50_000


def test_lengths_that_hold_no_passkey_are_refused(byte_run, tmp_path):
  for flags, longest in ((["--lengths=100"], 65_536), ([], 256)):
    with pytest.raises(ConfigError, match="too short for a passkey") as caught:
      passkey.run(arguments(passkey, tmp_path, *flags, workdir=[byte_run], max_context=longest))
    assert "\n" not in str(caught.value)
  with pytest.raises(ConfigError, match="--lengths: 2000 is more than --max_context=1000; raise that"):
    passkey.run(arguments(passkey, tmp_path, "--lengths=500,2000", workdir=[byte_run], max_context=1000))
