"""The study: its plan is the paper's grid, what is kept decides what is done, and the command does what is missing."""

import csv
import dataclasses
import json
import math
import re
import shutil

import numpy as np
import pytest

from csympow import overrides
from csympow.command import EXIT_DONE, EXIT_NOT_FINITE, EXIT_STOPPED
from csympow.config import ConfigError, to_dict
from csympow.data.tokenizer import find_tokenizer
from csympow.evaluate import results
from csympow.study import figures, paper, plan, program, records, report, tables
from csympow.study.config import GATED, StudyConfig
from csympow.study.prepare import ROW_LENGTH, choose
from csympow.study.workers import Workers, done
from csympow.study.workers import kept as kept_of
from csympow.train.checkpoint import MANIFEST
from csympow.train.stop import Stop
from tests import running
from tests.preparing import prose, succeed, write

CONFIG = """
import dataclasses
from tests.tiny_config import get_config as tiny

def get_config():
  base = tiny()
  log = dataclasses.replace(base.log, heldout=1000, gates=1000)
  optimizer = dataclasses.replace(base.optimizer, schedule="constant")
  checkpoint = dataclasses.replace(base.checkpoint, every=1000)
  return dataclasses.replace(
    base, log=log, optimizer=optimizer, checkpoint=checkpoint, context={}, batch_tokens=256, steps=1000
  )
"""


@pytest.fixture
def tiny(tmp_path):
  """A study of two contexts and one variant, its config files, and the study as a file for the command."""
  configs = tmp_path / "configs"
  configs.mkdir()
  for context in (16, 32):
    (configs / f"p2_{context}.py").write_text(CONFIG.format(context))
  study = StudyConfig(
    configs=str(configs),
    grid=((2, 32), (2, 16)),
    evaluated=((2, 32),),
    variants=("conformal",),
    tokens=256 * 20,
    max_context=64,
    documents=2,
    sweep=(2, 32),
    rates=(1e-2,),
    offsets=(0.0, 2.0),
    clock=(),
    speed=(),
  )
  (tmp_path / "study.py").write_text(
    f"from csympow.study.config import StudyConfig\ndef get_config():\n  return {study!r}\n"
  )
  return study


CHOICE = {"conformal": plan.Settings(1e-2, 0.0)}


def keep(out, run, losses, *, outcome="done", heldout=2.0, evaluated=None, seconds=10.0, step_s=0.1):
  """Keeps a run that nobody trained, with these training losses."""
  workdir = out / ".fabricated" / run.name
  fabricate(workdir, run, losses, heldout=heldout, step_s=step_s)
  if evaluated is not None:
    fabricate_evaluation(workdir, evaluated)
  told = {"name": run.name, "kind": run.kind, "outcome": outcome, "evaluated": evaluated is not None, "device": "chip"}
  told |= {"workers": 2, "train_seconds": seconds, "evaluate_seconds": 3.0 if evaluated else 0.0}
  return records.save(out, run.name, workdir, None if evaluated is None else workdir, told)


def fabricate(workdir, run, losses, *, heldout=2.0, step_s=0.1):
  """What train.py leaves."""
  workdir.mkdir(parents=True)
  (workdir / "config.json").write_text(json.dumps({"config": to_dict(run.config), "data": "x"}))
  lines = [{"step": n, "loss": loss, "grad_norm": 1.0, "step_s": step_s} for n, loss in enumerate(losses, 1)]
  lines[-1] |= {"heldout_loss": heldout, "memory_bytes": 2**30}
  if run.config.model.variant in GATED:
    lines[-1]["gates"] = {"memory_median": 2.0, "memory_max": 3000.0, "memory_by_head": [[2.0]]}
  (workdir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
  checkpoint = workdir / "checkpoints" / str(len(losses))
  checkpoint.mkdir(parents=True)
  (checkpoint / MANIFEST).write_text("{}")


def fabricate_evaluation(directory, by_context):
  """What eval.py leaves."""
  directory.mkdir(exist_ok=True)
  with (directory / "context.csv").open("w", newline="") as file:
    writer = csv.DictWriter(file, ["measure", "first", "context", "loss", "standard_error", "stretches", "state_bytes"])
    writer.writeheader()
    for measure in ("position", "window"):
      for context, loss in by_context.items():
        row = {"measure": measure, "first": 1, "context": context, "loss": loss, "standard_error": 0.01}
        writer.writerow(row | {"stretches": 35, "state_bytes": 2**20})


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


def test_the_final_loss_is_of_the_last_steps_and_differences_are_paired(tmp_path, tiny):
  sweep = plan.sweep(tiny)
  noise = np.random.default_rng(0).normal(size=100)
  ours = keep(tmp_path, sweep[0], [*(3 + noise)])
  theirs = keep(tmp_path, sweep[1], [*(3.5 + noise)])
  tail = 3 + noise[-5:]
  np.testing.assert_allclose(ours.final_loss, (tail.mean(), tail.std(ddof=1) / np.sqrt(5)), rtol=1e-5)
  np.testing.assert_allclose(tables.difference(ours, theirs), (-0.5, 0), atol=1e-4)
  with pytest.raises(ConfigError, match="different numbers of steps"):
    tables.difference(ours, keep(tmp_path, plan.grid(tiny, CHOICE)[0], [3.0] * 20))
  assert ours.heldout_loss == 2.0
  assert ours.summary["memory_bytes"] == 2**30
  assert ours.summary["gates"] == {"memory_median": 2.0, "memory_max": 3000.0}


def test_what_was_run_twice_tells_what_rounding_is_worth(tmp_path, tiny):
  same, other = plan.sweep(tiny)
  keep(tmp_path, same, [9.0] * 30 + [4.0] * 10)
  keep(tmp_path, other, [9.0] * 30 + [3.0] * 10)  # with another offset than was chosen
  keep(tmp_path, plan.grid(tiny, CHOICE)[0], [9.0] * 30 + [4.125] * 10 + [2.0] * 40)
  told = tables.twice(tiny, records.load_all(tmp_path))
  assert told.splitlines()[2:] == ["| conformal | 4.000 ± 0.000 | 4.125 ± 0.000 | +0.125 ± 0.000 |"]


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


def test_the_report_keeps_prose_and_has_the_papers_numbers_beside_ours(tmp_path):
  study, out, docs = StudyConfig(), tmp_path / "out", tmp_path / "docs"
  out.mkdir()
  choice = {variant: plan.Settings(1e-3, 0.0) for variant in study.variants}
  for run in [*plan.grid(study, choice), *plan.sweep(study)]:
    if run.config.context in (4096, 16_384):
      lost = {"sympow": 0.3}.get(run.config.model.variant, 0.0)
      curve = {2**n: 4.5 - 0.02 * n + 10 * lost * (n > 14) for n in range(17)} if run.evaluated else None
      keep(out, run, [5 + lost] * 40 + [4 + lost] * 20, evaluated=curve)
  for run in plan.timed(study):
    keep(out, run, [5.0 - 0.01 * n for n in range(100)])
  line = report.write(study, out, docs)
  assert "results.csv, images/study_training.png, images/study_past_context.png, images/study_clock.png" in line
  text = (docs / "results.md").read_text()
  assert "| p=4 | 4,096 | 16,384 |" in text
  assert "| softmax | 4.000 ± 0.000 (3.660) | 4.000 ± 0.000 (2.969) |" in text
  assert "| sympow | +0.300 ± 0.000 (\N{MINUS SIGN}0.107) | +0.300 ± 0.000 (\N{MINUS SIGN}0.068) |" in text
  assert "| sympow | 4.220 ± 0.010 | 7.180 ± 0.010 | 4.220 ± 0.010 | 7.180 ± 0.010 | 1 MiB | 7.10 |" in text
  assert "| sympow | 4.340 ± 0.010 | 4.320 ± 0.010 |" in text, "from 256 tokens on"
  assert "| conformal | 2.0; 3,000 | 2.0; 3,000 |" in text
  assert "| 1 x 1,048,576 | 100 | 0.10 | 10,485,760 | 1 GiB |" in text
  for name in ("training", "past_context", "clock"):
    assert (docs / "images" / f"study_{name}.png").read_bytes().startswith(b"\x89PNG")
  with (docs / "results.csv").open(newline="") as lines:
    assert len(list(csv.DictReader(lines))) == len(records.load_all(out))
  written = text.replace("# Results", "# Results\n\nProse by hand.")
  (docs / "results.md").write_text(written)
  report.write(study, out, docs)
  assert (docs / "results.md").read_text() == written


def test_the_report_leaves_out_what_was_not_run_and_says_so_in_one_line(tmp_path):
  study = StudyConfig()
  runs = {run.name: run for run in plan.grid(study, dict.fromkeys(study.variants, plan.Settings(1e-3, 0.0)))}
  curve = {2**n: 4.0 for n in range(17)}
  keep(tmp_path, runs["softmax_16384"], [4.0] * 20, evaluated=curve)
  keep(tmp_path, runs["softmax_4096"], [4.0] * 20, evaluated=curve)
  kept = records.load_all(tmp_path)
  assert tables.training(study, kept) == "p=2: not run yet.\n\np=4: not run yet.", "softmax has no power"
  unevaluated = "p=2, trained at 4,096: not evaluated yet.\n\np=4, trained at 16,384: not evaluated yet."
  assert tables.past_context(study, kept) == unevaluated
  assert tables.window(study, kept) == tables.sweep(study, kept) == "Not run yet."
  for draw in (figures.training, figures.past_context, figures.clock):
    assert draw(study, kept) is None

  keep(tmp_path, runs["p2_4096_conformal"], [3.0] * 20, evaluated=curve)
  keep(tmp_path, runs["p4_1024_sympow"], [9.0] * 20, outcome="diverged")
  kept = records.load_all(tmp_path)
  for table in (tables.training, tables.over_softmax, tables.heldout):
    told = table(study, kept)
    assert "| p=2 | 4,096 |\n" in told
    assert "p=2 at 256, 1,024 and 8,192: not run yet." in told
    assert "| p=4 | 1,024 |\n" in told, "a run that diverged was run"
  past = tables.past_context(study, kept)
  assert "| sympow | - | - | - | - | - |\n" in past, "one run of those that were compared is a dash"
  assert past.endswith("\n\np=4, trained at 16,384: not evaluated yet.")
  assert "position 0" not in past
  titles = [axes.get_title() for axes in figures.training(study, kept).axes]
  assert titles == ["p = 2, without sympow, sympow+gating"], "there is no point at p=4"
  assert [axes.get_title() for axes in figures.past_context(study, kept).axes] == ["p = 2, trained at 4,096"]


def test_what_the_repository_keeps_can_be_gone_on_from_and_is_what_its_report_shows():
  kept = records.load_all(running.ROOT / "docs/study")
  tokens = {len(record.steps["step"]) * 65_536 for record in kept if record.kind == "grid"}
  study = StudyConfig(configs=str(running.ROOT / "configs/study"), tokens=tokens.pop())
  assert not tokens
  choice = plan.read_choice(study, running.ROOT / "docs/study")
  runs = [*plan.sweep(study), *plan.grid(study, choice), *plan.timed(study)]
  found = [kept_of(running.ROOT / "docs/study", run) for run in runs]
  assert {record.name for record in found if record} == {record.name for record in kept}
  text = (running.ROOT / "docs/results.md").read_text()
  for name, (_, make) in report._PARTS.items():
    assert report.replaced(text, name, make(study, kept)) == text, f"--report has not been made anew: {name}"


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
