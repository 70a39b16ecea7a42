"""The study: its plan is the paper's grid, what is kept decides what is done, and the command does what is missing."""

import dataclasses
import json
import math
import re
import shutil

import pytest

from csympow import overrides
from csympow.command import EXIT_DONE, EXIT_NOT_FINITE, EXIT_STOPPED
from csympow.config import ConfigError
from csympow.data.tokenizer import find_tokenizer
from csympow.evaluate import results
from csympow.study import figures, paper, plan, program, records, tables
from csympow.study.config import StudyConfig
from csympow.study.prepare import ROW_LENGTH, choose
from csympow.study.workers import Workers, done
from csympow.train.stop import Stop
from tests import running
from tests.preparing import prose, succeed, write
from tests.studying import CHOICE, fabricate, fabricate_evaluation, keep, tiny_study


@pytest.fixture
def tiny(tmp_path):
  return tiny_study(tmp_path)


class Scripted(Workers):
  """Workers whose train.py and eval.py are these functions of the workdir, which return exit codes."""

  def __init__(self, tmp_path, study, **programs):
    super().__init__(study, tmp_path, tmp_path / "runs", tmp_path, 1, 1e6, Stop())
    self._programs = programs

  def _process(self, run, command, seconds):
    self._log(run).parent.mkdir(parents=True, exist_ok=True)
    self._log(run).write_text("")
    return self._programs[command[0].removesuffix(".py")](self._workdir(run))


def test_the_grid_is_the_papers_and_its_runs_differ_in_nothing_but_what_is_compared():
  study = StudyConfig()
  cells = {(power, context) for power, by in paper.TRAINING_LOSS.items() for context in by["softmax"]}
  assert set(study.grid) == cells
  choice = {variant: plan.Settings(1e-3, 0.0) for variant in study.variants}
  runs = plan.grid(study, choice)
  assert len(runs) == 3 * len(cells) + len({context for _, context in cells})
  for run in [*runs, *plan.sweep(study)]:
    config = run.config
    assert (config.batch_tokens, config.seed, config.model.d_model, config.model.num_layers) == (65_536, 0, 384, 6)
    assert run.tokens == (study.tokens if run.kind == "grid" else study.tokens // 2)
    assert re.fullmatch(r"[\w.-]+", run.name)
  same = [dataclasses.replace(run.config, model=runs[0].config.model, context=256) for run in runs]
  assert all(config == same[0] for config in same)
  evaluated = [run.name for run in runs if run.evaluated]
  assert sorted(evaluated) == sorted(
    ["softmax_4096", "softmax_16384"]
    + [f"{cell}_{name}" for cell in ("p2_4096", "p4_16384") for name in ("sympow", "gating", "conformal")]
  )
  assert [run.name for run in plan.timed(study)][-2:] == ["million_1048576", "million_4096"]
  assert len({run.name for run in [*plan.sweep(study), *runs, *plan.timed(study)]}) == 18 + 30 + 4


def test_the_sweep_chooses_the_lowest_final_loss_and_never_a_run_that_diverged(tmp_path, tiny):
  runs = plan.sweep(tiny)
  assert [run.config.model.gate_offset for run in runs] == [0.0, 2.0]
  keep(tmp_path, runs[0], [1.0] * 20, outcome="diverged")
  keep(tmp_path, runs[1], [9.0] * 39 + [4.0])
  choice = plan.choose(tiny, records.load_all(tmp_path))
  assert choice == {"conformal": plan.Settings(1e-2, 2.0)}
  plan.write_choice(tmp_path, choice)
  assert plan.read_choice(tiny, tmp_path) == choice
  (tmp_path / plan.CHOICE).write_text('{"softmax": {"rate": 1, "offset": 0}}')
  with pytest.raises(ConfigError, match=r"choice\.json must hold"):
    plan.read_choice(tiny, tmp_path)


def test_a_run_counts_as_done_only_with_its_evaluation_and_as_it_is_now(tmp_path, tiny):
  run, other = plan.grid(tiny, CHOICE)
  assert run.evaluated
  assert not other.evaluated
  assert done(tmp_path, run) is None
  keep(tmp_path, run, [3.0] * 20)
  assert done(tmp_path, run) is None, "its evaluation is missing"
  keep(tmp_path, other, [3.0] * 20)
  assert done(tmp_path, other) is not None
  longer = plan.grid(dataclasses.replace(tiny, tokens=256 * 40), CHOICE)[1]
  with pytest.raises(ConfigError, match="holds another p2_16_conformal: steps is 20 there, 40 here"):
    done(tmp_path, longer)
  (tmp_path / "p2_16_conformal.csv").write_text("step\n1\n")
  with pytest.raises(ConfigError, match="damaged"):
    done(tmp_path, other)


def test_a_run_of_less_time_is_another_run_and_all_its_calls_count(tmp_path, tiny):
  (run, *_) = plan.grid(tiny, CHOICE)
  timed = dataclasses.replace(run, evaluated=False, seconds=0.5)
  keep(tmp_path, timed, [3.0] * timed.config.steps, step_s=1.0 / timed.config.steps)
  assert done(tmp_path, timed) is not None
  with pytest.raises(ConfigError, match=r"seconds of training is 1 there, 9.0 here"):
    done(tmp_path, dataclasses.replace(timed, seconds=9.0))
  assert [records.seconds_in_all(tmp_path, seconds) for seconds in (3.0, 4.5)] == [3.0, 7.5]


def test_what_is_trained_is_kept_before_it_is_evaluated_and_until_another_is_trained(tmp_path, tiny, capsys):
  run = plan.grid(tiny, CHOICE)[0]
  plan.write_choice(tmp_path, CHOICE)

  def training(losses):
    return lambda workdir: fabricate(workdir, run, losses) or EXIT_DONE

  def evaluation(workdir):
    fabricate_evaluation(workdir / "evaluation", {16: 3.5, 32: 3.25, 64: 3.5})
    return EXIT_DONE

  def interrupted(workdir):
    return EXIT_STOPPED

  def listed():
    paths = {"config": "study.py", "out": "", "workdirs": "runs"}
    command = [*(f"--{name}={tmp_path / path}" for name, path in paths.items()), f"--only={run.name}", "--list"]
    capsys.readouterr()
    assert program._run(command, Stop()) == 0
    return capsys.readouterr().out.splitlines()[0]

  Scripted(tmp_path, tiny, train=training([3.0] * 20), eval=interrupted).perform([run])
  assert "of its evaluation; its training is kept" in capsys.readouterr().out
  assert done(tmp_path, run) is None
  first = {path: path.read_bytes() for path in tmp_path.glob("p2_32*")}
  kept = records.load_all(tmp_path)
  assert "| conformal | 3.000 |" in tables.training(tiny, kept)
  assert figures.training(tiny, kept) is not None
  assert tables.past_context(tiny, kept) == "p=2, trained at 32: not evaluated yet."
  assert "trained: loss 3.0000, held-out 2.0000" in listed()
  assert listed().endswith(f"; not evaluated: its model lies in {tmp_path}/runs/p2_32_conformal")

  # On another machine, which has no workdir.
  (tmp_path / "runs").rename(tmp_path / "elsewhere")
  assert listed().endswith("p2_32_conformal, and is trained again for it")
  Scripted(tmp_path, tiny, train=interrupted).perform([run])
  assert {path: path.read_bytes() for path in tmp_path.glob("p2_32*")} == first
  Scripted(tmp_path, tiny, train=training([2.0] * 20), eval=interrupted).perform([run])
  assert records.load(tmp_path, run.name).final_loss.mean == 2.0
  assert done(tmp_path, run) is None

  # Back where the first was trained: what is kept is of the second, and the evaluation must be of what is kept.
  shutil.rmtree(tmp_path / "runs" / run.name)
  (tmp_path / "elsewhere" / run.name).rename(tmp_path / "runs" / run.name)
  assert listed().endswith("and is trained again for it")
  Scripted(tmp_path, tiny, train=lambda workdir: EXIT_DONE, eval=interrupted).perform([run])
  kept = records.load(tmp_path, run.name)
  Scripted(tmp_path, tiny, eval=evaluation).perform([run])  # which would fail if it trained
  found = done(tmp_path, run)
  assert found.losses == kept.losses == [3.0] * 20
  assert found.summary["train_seconds"] == kept.summary["train_seconds"]
  assert max(tables.measured(found, "position")) == 64
  assert "done: loss 3.0000" in listed()


def test_a_model_that_breaks_past_its_training_context_is_evaluated(tmp_path, tiny):
  run = plan.grid(tiny, CHOICE)[0]

  def evaluation(workdir):
    fabricate_evaluation(workdir / "evaluation", {16: 3.5, 32: 3.25, 64: math.inf})
    return EXIT_NOT_FINITE

  workers = Scripted(tmp_path, tiny, train=lambda w: fabricate(w, run, [3.0] * 20) or EXIT_DONE, eval=evaluation)
  workers.perform([run])
  assert not workers.failed
  found = done(tmp_path, run)
  assert not found.diverged, "its training did not"
  assert found.final_loss.mean == 3.0
  assert "| conformal | 3.250 ± 0.010 | diverged | 3.250 ± 0.010 | diverged | 1 MiB |" in tables.past_context(
    tiny, [found]
  )
  assert results.png(figures.past_context(tiny, [found])).startswith(b"\x89PNG")


def test_a_run_is_expected_to_take_what_its_neighbours_took(tmp_path, tiny):
  run, other = plan.grid(tiny, CHOICE)
  workers = Workers(tiny, tmp_path, tmp_path / "runs", tmp_path, 1, 1e6, Stop())
  assert workers._expected(run) == 0
  keep(tmp_path, plan.sweep(tiny)[0], [3.0] * 20, seconds=10.0, step_s=0.2)  # half the tokens, 4 s of them steps
  assert workers._expected(run) == pytest.approx(6 + 2 * 4)
  keep(tmp_path, other, [3.0] * 20, seconds=50.0)
  assert workers._expected(other) == pytest.approx(50)


def test_books_fill_the_rows_that_were_asked_for_and_all_that_are_held_out_are_taken():
  books = [
    {
      "sha256": f"{n:03}",
      "split": "heldout" if n % 5 == 0 else "train",
      "bpe8192_tokens": str(ROW_LENGTH * (1 + n % 3)),
    }
    for n in range(50)
  ]
  chosen = choose(books, 20)
  assert [book for book in chosen if book["split"] == "heldout"] == books[::5]
  rows = [(int(book["bpe8192_tokens"]) + 1) // ROW_LENGTH for book in chosen if book["split"] == "train"]
  assert sum(rows) == 20
  assert [book for book in books if book in chosen] == chosen
  with pytest.raises(ConfigError, match="more than the books fill: 80 rows"):
    choose(books, 1000)


@pytest.mark.parametrize(
  ("flags", "line"),
  [
    (["--budget=0"], "--budget must be positive"),
    (["--workers=0"], "--workers must be at least 1"),
    (["--tokens=0"], "tokens must be at least 1, got 0"),
    (["--config=none.py"], "there is no none.py"),
    (["--data=nowhere"], "--data=nowhere has no train.zarr; `python -m csympow.study.prepare` makes it"),
    (["--report=docs"], "keeps no run that is done"),
  ],
)
def test_what_cannot_work_is_refused_in_one_line(flags, line, tmp_path, capsys):
  assert program._run([f"--out={tmp_path}", *flags], Stop()) == 2
  told = capsys.readouterr().err
  assert line in told
  assert told.count("\n") == 1


@pytest.mark.slow
def test_the_command_trains_evaluates_and_does_only_what_is_missing(tmp_path, tiny, monkeypatch, capsys):
  texts = write(tmp_path / "texts", [prose(seed, 200) for seed in range(8)])
  succeed(texts, f"--out={tmp_path / 'data'}", "--row_length=128", "--heldout=0.4", "--whole_rows")
  (tmp_path / "out").mkdir()
  paths = {"config": "study.py", "data": "data", "out": "out", "workdirs": "runs"}
  command = [*(f"--{name}={tmp_path / path}" for name, path in paths.items()), "--only=p2_*"]
  monkeypatch.chdir(running.ROOT)
  monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")  # nothing is timed
  assert program._run(command, Stop()) == 2
  assert "has no choice.json for the grid" in capsys.readouterr().err
  plan.write_choice(tmp_path / "out", CHOICE)
  assert program._run([*command, "--budget=10"], Stop()) == 75
  assert "left to do, by the same command: p2_32_conformal, p2_16_conformal (2 of 2)" in capsys.readouterr().out
  assert not (tmp_path / "runs").exists(), "there was no time to begin"

  told = running.finish(running.begin("-m", "csympow.study", *command, "--workers=2"))[0]
  assert "done: all of 2" in told
  kept = {record.name: record for record in records.load_all(tmp_path / "out")}
  assert set(kept) == {"p2_32_conformal", "p2_16_conformal"}
  for record in kept.values():
    assert record.steps["step"] == list(range(1, 21))
    assert record.summary["device"] == "cpu"
    assert record.heldout_loss is not None
  assert max(tables.measured(kept["p2_32_conformal"], "position")) == 64
  assert not kept["p2_16_conformal"].context

  for lost in ("p2_16_conformal.json", "p2_16_conformal.csv"):
    (tmp_path / "out" / lost).unlink()
  told = running.finish(running.begin("-m", "csympow.study", *command))[0]
  assert "p2_16_conformal: going on" in told
  assert "p2_32_conformal" not in told
  assert "done: all of 2" in told


def test_without_their_libraries_there_is_no_text_and_no_picture_but_all_else(tmp_path, monkeypatch, capsys):
  out = tmp_path / "data"
  succeed(
    write(tmp_path / "in", [prose(seed, 300) for seed in range(3)]), f"--out={out}", "--train_bpe=300", "--heldout=0"
  )
  data = dataclasses.replace(overrides.load(running.TINY).data, train=str(out / "train.zarr"), heldout=None)
  assert find_tokenizer(data) is not None
  monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
  assert find_tokenizer(data) is None
  assert "ids instead of text" in capsys.readouterr().err
  assert not results.can_draw()
  line = results.write(tmp_path, "context", [{"loss": 1.0}], {}, None)
  assert line.endswith("context.csv and .json, no .png: matplotlib is not installed")
  assert json.loads((tmp_path / "context.json").read_text())["task"] == "context"
  assert not (tmp_path / "context.png").exists()
