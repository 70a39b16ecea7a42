"""Running `csympow.data.prepare`, and reading what it made."""

import contextlib
import hashlib
import io
import json
import random

import numpy as np
import tensorstore as ts

from csympow.data import prepare

ROW = 16
SPLITS = ("train", "heldout")
WORDS = (
  "the",
  "quick",
  "brown",
  "fox",
  "jumps",
  "over",
  "lazy",
  "dogs",
  "while",
  "snow",
  "falls",
  "on",
  "old",
  "roofs",
)


def run(*arguments):
  """The command in this process: exit code, stdout, stderr."""
  out, err = io.StringIO(), io.StringIO()
  with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
    code = prepare.main([str(a) for a in arguments])
  return code, out.getvalue(), err.getvalue()


def succeed(*arguments):
  code, out, err = run(*arguments)
  assert (code, err) == (0, "")
  return out


def refuse(*arguments, code=2):
  """The one line that a command is refused with."""
  got, _, err = run(*arguments)
  assert got == code, err
  assert err.count("\n") == 1
  assert "Traceback" not in err
  return err


def write(directory, texts):
  """Each text as a file; returns the directory."""
  directory.mkdir(parents=True, exist_ok=True)
  for i, text in enumerate(texts):
    (directory / f"{i:05}.txt").write_bytes(text if isinstance(text, bytes) else text.encode())
  return directory


def prose(seed, words):
  return " ".join(random.Random(seed).choices(WORDS, k=words))


def load(path):
  """An array, as the loader reads it: an absent chunk is an error."""
  spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": f"{path}/"}, "fill_missing_data_reads": False}
  return ts.open(spec, read=True).result().read().result()


def read_split(out, split):
  """Its segments in order of rows, as tuples; checks what is true of every row."""
  described = json.loads((out / "dataset.json").read_text())["splits"][split]
  if described["array"] is None:
    assert not (out / f"{split}.zarr").exists()
    return []
  tokens, segments = load(out / f"{split}.zarr"), load(out / f"{split}.segments.zarr")
  assert tokens.dtype == np.uint16
  assert tokens.shape == segments.shape
  assert described["rows"] == len(tokens)
  assert described["tokens"] == (segments >= 0).sum()
  assert described["tokens_sha256"] == hashlib.sha256(tokens.tobytes()).hexdigest()
  assert described["segments_sha256"] == hashlib.sha256(segments.tobytes()).hexdigest()
  found = []
  for row, ids in zip(tokens, segments, strict=True):
    used = ids[ids >= 0]
    assert (ids[len(used) :] == -1).all()
    assert (row[len(used) :] == 0).all()
    assert sorted(set(used.tolist())) == list(range(used[-1] + 1))
    assert (np.diff(used) >= 0).all()
    found.extend(tuple(row[ids == segment].tolist()) for segment in range(used[-1] + 1))
  return found


def expected_segments(tokens, row_length):
  """Rows of its own, and the remainder."""
  return [tuple(tokens[i : i + row_length]) for i in range(0, len(tokens), row_length)]


def snapshot(directory):
  """Every file below a directory, and its bytes."""
  return {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}
