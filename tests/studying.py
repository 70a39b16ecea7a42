"""A study too small to take time, and runs of it that nobody trained."""

import csv
import json

from csympow.config import to_dict
from csympow.study import plan, records
from csympow.study.config import GATED, StudyConfig
from csympow.train.checkpoint import MANIFEST

CHOICE = {"conformal": plan.Settings(1e-2, 0.0)}

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


def tiny_study(tmp_path):
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
    longest = by_context[max(by_context)]
    for measure in ("position", "window", "gain"):
      for context, at in by_context.items():
        loss = at - longest if measure == "gain" else at
        row = {"measure": measure, "first": 1, "context": context, "loss": loss, "standard_error": 0.01}
        writer.writerow(row | {"stretches": 35, "state_bytes": 2**20})
