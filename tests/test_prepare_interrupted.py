"""Preparing a dataset: no interruption, full disk or damage harms it."""

import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from csympow.data import output, prepare
from csympow.data.zarr_writer import write_rows
from tests.preparing import prose, refuse, run, snapshot, succeed, write


def test_two_at_once_in_one_directory_are_refused(tmp_path):
  directory, out = write(tmp_path / "in", [prose(0, 9)]), tmp_path / "out"
  settings = {"tokenizer": "bytes", "row_length": 65_536, "rows_per_chunk": 1, "heldout": 0.02}
  with output.Output(out).begun(settings):
    assert "another prepare" in refuse(directory, f"--out={out}")


def test_a_full_disk_is_one_line_and_the_work_goes_on_when_there_is_room(tmp_path, monkeypatch):
  directory = write(tmp_path / "in", [random.Random(s).randbytes(3000).hex() for s in range(4)])
  arguments = (directory, "--row_length=4096", "--heldout=0")
  limits = resource.getrlimit(resource.RLIMIT_FSIZE)
  # A limit on the size of files stands in for it: at the first document, and at the first chunk of the array.
  for limit, out in ((1000, tmp_path / "early"), (2000, tmp_path / "late")):
    if out.name == "late":

      def limited(*a, limit=limit):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
        return write_rows(*a)

      monkeypatch.setattr(prepare.zarr_writer, "write_rows", limited)
    else:
      resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
    try:
      error = refuse(*arguments, f"--out={out}", code=1)
    finally:
      resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    monkeypatch.undo()
    assert "File too large" in error
    assert not (out / "dataset.json").exists()
    succeed(*arguments, f"--out={out}")
  assert snapshot(tmp_path / "early") == snapshot(tmp_path / "late")


def test_damaged_work_is_done_again(tmp_path, monkeypatch):
  directory, out = write(tmp_path / "in", [prose(seed, 30) for seed in range(4)]), tmp_path / "out"
  monkeypatch.setattr(prepare.zarr_writer, "write_rows", lambda *_: 1 / 0)
  with pytest.raises(ZeroDivisionError):
    run(directory, f"--out={out}", "--row_length=32")
  monkeypatch.undo()
  kept = [p for p in (out / ".partial").rglob("*") if p.is_file() and len(p.name) == 64]
  assert len(kept) == 4
  kept[0].write_bytes(kept[0].read_bytes()[:-3])
  kept[1].write_bytes(b"")
  flipped = bytearray(kept[2].read_bytes())
  flipped[40] ^= 1
  kept[2].write_bytes(flipped)
  succeed(directory, f"--out={out}", "--row_length=32")
  succeed(directory, f"--out={tmp_path / 'fresh'}", "--row_length=32")
  assert snapshot(out) == snapshot(tmp_path / "fresh")


@pytest.mark.parametrize("stop_at", range(6))
def test_stopped_between_any_two_steps_of_publishing_it_goes_on(tmp_path, monkeypatch, stop_at):
  directory = write(tmp_path / "in", [prose(seed, 30) for seed in range(8)])
  arguments = (directory, "--row_length=32", "--heldout=0.4", "--train_bpe=280")
  succeed(*arguments, f"--out={tmp_path / 'fresh'}")
  out, renames, rename = tmp_path / "out", [], Path.rename

  def counted(path, target):
    if Path(target).parent == out:
      renames.append(target)
      if len(renames) > stop_at:
        raise KeyboardInterrupt
    return rename(path, target)

  monkeypatch.setattr(Path, "rename", counted)
  with pytest.raises(KeyboardInterrupt):
    run(*arguments, f"--out={out}")
  monkeypatch.undo()
  assert not (out / "dataset.json").exists()
  assert "going on" in succeed(*arguments, f"--out={out}")
  assert snapshot(out) == snapshot(tmp_path / "fresh")


def start(*arguments):
  """The command in a process of its own."""
  command = [sys.executable, "-m", "csympow.data.prepare", *map(str, arguments)]
  environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1]), "RAYON_NUM_THREADS": "1"}
  return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, text=True)


@pytest.mark.slow
def test_killed_or_told_to_stop_at_any_moment_it_goes_on_to_the_same_bytes(tmp_path):
  directory = write(tmp_path / "in", [prose(seed, 6000) for seed in range(40)])
  arguments = (directory, "--row_length=1024", "--heldout=0.1", "--train_bpe=400")
  begun = time.monotonic()
  succeed(*arguments, f"--out={tmp_path / 'fresh'}")
  takes = time.monotonic() - begun
  moments, out = random.Random(0), tmp_path / "out"
  for stop in (signal.SIGTERM, signal.SIGKILL, signal.SIGINT, signal.SIGKILL):
    process = start(*arguments, f"--out={out}")
    assert "40 documents" in process.stdout.readline()
    time.sleep(moments.uniform(0, takes / 2))
    process.send_signal(stop)
    _, err = process.communicate(timeout=60)
    if process.returncode == 0:
      break
    assert process.returncode == (-stop if stop == signal.SIGKILL else 75)
    if stop != signal.SIGKILL:
      assert err == f"prepare: stopped by {stop.name}; the same command goes on from here\n"
  assert stop != signal.SIGTERM, "it must be stopped at least once"
  succeed(*arguments, f"--out={out}")
  assert snapshot(out) == snapshot(tmp_path / "fresh")
