"""RULER-style needles: every prompt holds its answer, fills its length, and is scored by what is written."""

import collections
import json
import re
import uuid

import numpy as np
import pytest

from csympow.config import ConfigError
from csympow.evaluate import caches, haystack, needles
from csympow.evaluate.answers import Answerer, Reply
from csympow.evaluate.haystack import KINDS, NEEDLES, Haystack
from csympow.evaluate.runs import open_run
from tests.evaluating import arguments, make_run

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture(scope="module")
def run_directory(tmp_path_factory):
  return make_run(tmp_path_factory.mktemp("needles") / "run")


def made(kind, size=40, hay=None, depth=None, seed=0):
  return haystack.make(kind, size, hay or Haystack("noise", "numbers"), depth, np.random.default_rng(seed))


@pytest.mark.parametrize("kind", NEEDLES)
@pytest.mark.parametrize("values", haystack.VALUES)
@pytest.mark.parametrize("where", ["noise", "needles", "text"])
def test_needles_tell_what_is_asked(tmp_path, kind, values, where):
  (tmp_path / "text").write_text("It was night. Nobody slept!\n\nWho could? A dog barked. " * 5)
  prompt = made(kind, hay=Haystack(str(tmp_path / "text") if where == "text" else where, values))
  keys, each, queries = NEEDLES[kind]
  told = re.findall(rf"One of the special magic {values} for (\w+) is: ([\w-]+)\.", prompt.text)
  assert len(told) == keys * each + (40 if where == "needles" else 0)
  asked = re.search(r"for (.*?) mentioned", prompt.question)[1].replace(", and ", ", ").split(", ")
  assert len(asked) == queries
  assert prompt.gold == tuple(value for name in asked for key, value in told if key == name)
  assert len(prompt.gold) == each * queries
  assert prompt.text.count("It was night.") == (10 if where == "text" else 0)
  if values == "uuids":
    assert all(str(uuid.UUID(value)) == value for value in prompt.gold)


@pytest.mark.parametrize("kind", haystack.WITH_DEPTH)
def test_the_needle_asked_for_stands_at_its_depth(kind):
  for depth in (0.0, 30.0, 100.0):
    prompt = made(kind, size=100, depth=depth)
    before = prompt.text.split(prompt.gold[0])[0]
    assert before.count("The grass is green") == depth


def test_a_variable_is_handed_on_in_order():
  prompt = made("tracking")
  chain = re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", prompt.text)
  assert [name for name, _ in chain] == list(prompt.gold)
  assert len(chain) == 5
  assert chain[0][1] in prompt.question
  assert [source for _, source in chain[1:]] == [name for name, _ in chain[:-1]]


def test_common_words_are_the_common_ones():
  prompt = made("common")
  counts = collections.Counter(re.findall(r"\d+\. (\w+)", prompt.text))
  assert collections.Counter(counts.values()) == {30: 10, 3: 40}
  assert {word for word, count in counts.items() if count == 30} == set(prompt.gold)


@pytest.mark.parametrize("size", [100, 2000])
def test_frequent_words_follow_the_zeta_law(size):
  prompt = made("frequent", size=size)
  counts = collections.Counter(prompt.text.split("coded words. ")[1].split())
  ranked = [word for word, _ in counts.most_common()]
  assert ranked[0] == "...."
  assert tuple(ranked[1:4]) == prompt.gold
  assert counts[ranked[3]] > counts[ranked[4]]
  for rank in (1, 2, 3, 4):
    assert abs(counts[ranked[rank - 1]] / size - 6 / np.pi**2 / rank**2) <= 1 / size


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_fill_their_length_and_leave_room_to_write(run_directory, kind):
  run = open_run(run_directory, None)
  task = needles.Needles(run, kind, Haystack("noise", "numbers"))
  length = 8192
  assert task.shortest <= length
  size = task.size(length)
  rng = np.random.default_rng(1)
  for depth in needles._depths(kind)[:3]:
    question, gold = task.question(length, size, depth, rng)
    assert length - 128 - 600 < len(question.prompt) <= length - 128
    assert run.decode(question.answers[0]) == ", ".join(gold)
    assert len(question.answers[0]) <= task.answer_tokens
    assert not np.array_equal(*(np.resize(answer, 50) for answer in question.answers))
  rng = np.random.default_rng(0)
  larger = haystack.make(kind, size + 1, Haystack("noise", "numbers"), None, rng)
  assert len(run.encode(larger.text + larger.question)) + 1 + 128 > length


def test_the_score_is_the_share_of_gold_strings_in_either_case():
  assert needles.share_of_gold("bAba and 12", ("BABA", "12", "13", "x")) == 0.5


def test_who_finds_needles_scores(run_directory, tmp_path, monkeypatch, capsys):
  run = open_run(run_directory, None)

  def oracle(self, questions, check):
    for question in questions:
      check(len(question.prompt))
      written = run.decode(question.answers[0]).upper() if len(question.answers[0]) < 32 else "nothing"
      yield Reply(np.array([2.0, 4.0]), np.array([True, False]), run.encode(written.ljust(128))[:128])

  monkeypatch.setattr(Answerer, "replies", oracle)
  flags = ("--trials=2", "--kinds=single,values,tracking", "--values=words", "--lengths=1024,2048")
  needles.run(arguments(needles, tmp_path, *flags, workdir=[run_directory]))
  cells = json.loads((tmp_path / "needles.json").read_text())["cells"]
  scores = {(cell["kind"], cell["length"], cell["depth"]): cell["score"] for cell in cells}
  assert len(scores) == 2 * (11 + 1 + 1)
  assert {scores["single", length, 10.0 * tenth] for length in (1024, 2048) for tenth in range(11)} == {1.0}
  assert scores["values", 1024, None] == 1.0
  assert scores["tracking", 2048, None] == 0.0
  assert (tmp_path / "needles.png").read_bytes().startswith(b"\x89PNG")
  assert (tmp_path / "needles.csv").read_text().count("\n") == 27
  assert "tracking" in capsys.readouterr().out


@pytest.mark.slow
def test_a_real_model_is_asked_and_what_was_computed_is_kept(run_directory, tmp_path, monkeypatch):
  monkeypatch.setattr(caches, "PIECE", 64)
  flags = ("--trials=2", "--kinds=queries", "--lengths=1000")
  needles.run(arguments(needles, tmp_path, *flags, workdir=[run_directory]))
  monkeypatch.setattr(Answerer, "replies", None)
  needles.run(arguments(needles, tmp_path, *flags, workdir=[run_directory]))
  (cell,) = json.loads((tmp_path / "needles.json").read_text())["cells"]
  assert (cell["kind"], cell["length"], cell["depth"]) == ("queries", 1000, None)
  assert 0 < cell["nll"] < 20


@pytest.mark.parametrize(
  ("flags", "line"),
  [
    (["--kinds=common", "--lengths=1024"], "1024 is too short for needles of kind common"),
    (["--kinds=queries", "--values=uuids"], "the answer of queries is 150 tokens long"),
    (["--haystack=/nowhere/book.txt"], "must be noise, needles or a text file, and /nowhere/book.txt cannot be read"),
  ],
)
def test_what_cannot_be_asked_is_refused_in_one_line(run_directory, tmp_path, flags, line):
  with pytest.raises(ConfigError) as caught:
    needles.run(arguments(needles, tmp_path, *flags, workdir=[run_directory]))
  assert line in str(caught.value)
  assert "\n" not in str(caught.value)


def test_a_haystack_needs_text(tmp_path):
  (tmp_path / "empty").write_text(" \n ")
  (tmp_path / "noise").write_bytes(b"\xff\xfe\x00")
  for name in ("empty", "noise"):
    with pytest.raises(ConfigError, match="--haystack"):
      Haystack(str(tmp_path / name), "numbers")
