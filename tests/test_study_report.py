"""The study's report: its tables and figures are of what is kept, its prose stays, and the repository's own is new."""

import csv

import numpy as np
import pytest

from csympow.config import ConfigError
from csympow.study import figures, plan, records, report, tables
from csympow.study.config import StudyConfig
from csympow.study.workers import kept as kept_of
from tests import running
from tests.studying import CHOICE, keep, tiny_study


@pytest.fixture
def tiny(tmp_path):
  return tiny_study(tmp_path)


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
  names = ("training", "past_context", "window", "clock")
  assert f"results.csv, {', '.join(f'images/study_{name}.png' for name in names)} in" in line
  text = (docs / "results.md").read_text()
  assert "| p=4 | 4,096 | 16,384 |" in text
  assert "| softmax | 4.000 ± 0.000 (3.660) | 4.000 ± 0.000 (2.969) |" in text
  assert "| sympow | +0.300 ± 0.000 (\N{MINUS SIGN}0.107) | +0.300 ± 0.000 (\N{MINUS SIGN}0.068) |" in text
  assert "| sympow | 4.220 ± 0.010 | 7.180 ± 0.010 | 4.220 ± 0.010 | 7.180 ± 0.010 | 1 MiB | 7.10 |" in text
  assert "| sympow | 4.340 ± 0.010 | 4.320 ± 0.010 |" in text, "from 256 tokens on"
  assert "| p=4, trained at 16,384 | 512 tokens instead of 256 | 16,384 tokens instead of 512 |" in text
  assert "| sympow | +0.020 | +0.100 | \N{MINUS SIGN}2.960 ± 0.010 |" in text
  assert "| conformal | 2.0; 3,000 | 2.0; 3,000 |" in text
  assert "| 1 x 1,048,576 | 100 | 0.10 | 10,485,760 | 1 GiB |" in text
  for name in names:
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
  for draw in (figures.training, figures.past_context, figures.window, figures.clock):
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
