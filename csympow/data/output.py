"""The directory that `csympow.data.prepare` fills, so that it may be stopped at any moment, kill -9 included.

    DIR/.partial/settings.json      what the work was begun with
    DIR/.partial/tokens-T/xx/S      tokens of the document with sha256 S, by the tokenizer T
    DIR/.partial/tokenizer-K.json   a tokenizer trained on the inputs K
    DIR/.partial/rows-R/            arrays of the documents R
    DIR/dataset.json                written last: without it a dataset is unfinished

Every name below .partial states what the content was made from, and files get their names when they are complete: what
is there can be used, in whatever order things were stopped and begun again.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from csympow.data.sources import SPLITS, Refused
from csympow.disk import sync_directory

DATASET = "dataset.json"
TOKENIZER = "tokenizer.json"
_ARRAYS = tuple(f"{split}{kind}.zarr" for split in SPLITS for kind in ("", ".segments"))
_UNWRITABLE = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG}


class Output:
  """A dataset's directory and the unfinished work in it."""

  def __init__(self, path: Path):
    self.path = path
    self.partial = path / ".partial"

  def finished(self, settings: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any] | None:
    """What dataset.json says, if it is there; it must be of these settings and inputs."""
    dataset = self._load(self.path / DATASET)
    if dataset is None:
      return None
    differences = _differences(dataset.get("settings", {}), settings)
    if dataset.get("inputs") != dict(inputs):
      there, here = ("{files} files of {bytes} bytes".format(**i) for i in (dataset["inputs"], inputs))
      differences.append(f"inputs are {there} there, {here if here != there else 'others of that size'} here")
    if differences:
      raise Refused(f"{self.path} was made otherwise: {'; '.join(differences)}; give another --out")
    return dataset

  @contextlib.contextmanager
  def begun(self, settings: Mapping[str, Any]) -> Iterator[bool]:
    """Begins the work, or goes on with it (True), alone; it must be of these settings."""
    try:
      self.path.mkdir(parents=True, exist_ok=True)
      descriptor = os.open(self.path, os.O_RDONLY)
    except OSError as error:
      raise _unwritable(self.path, error) from error
    try:
      with contextlib.suppress(OSError):  # some network file systems lock no directories
        try:
          fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
          raise Refused(f"another prepare is at work in {self.path}") from error
      yield self._settle(settings)
    finally:
      os.close(descriptor)

  def _settle(self, settings: Mapping[str, Any]) -> bool:
    if (self.path / DATASET).exists():
      raise Refused(f"another prepare has just finished {self.path}")
    before = self._load(self.partial / "settings.json")
    there = [name for name in (*_ARRAYS, TOKENIZER) if (self.path / name).exists()]
    if before is None:
      if there:
        raise Refused(f"{self.path} holds {there[0]}, which is not of this program's making; give another --out")
      try:
        self.partial.mkdir(exist_ok=True)
        replace_file(self.partial / "settings.json", to_json(settings))
      except OSError as error:
        raise _unwritable(self.path, error) from error
      return False
    if differences := _differences(before, settings):
      remedy = f"give another --out or remove {self.partial}"
      raise Refused(f"{self.path} was begun otherwise: {'; '.join(differences)}; {remedy}")
    for name in there:  # stopped between the first of these and dataset.json
      _remove(self.path / name)
    return True

  def rows(self, documents: str) -> Path:
    """The directory for the arrays of these documents; those of others are removed."""
    kept = self.partial / f"rows-{documents[:16]}"
    for other in self.partial.glob("rows-*"):
      if other != kept:
        _remove(other)
    kept.mkdir(exist_ok=True)
    return kept

  def publish(self, rows: Path, tokenizer: bytes | None, dataset: Mapping[str, Any]) -> None:
    """Puts everything in its place, dataset.json last."""
    for array in sorted(rows.iterdir()):
      array.rename(self.path / array.name)
    if tokenizer is not None:
      replace_file(self.partial / TOKENIZER, tokenizer, durable=True)
      (self.partial / TOKENIZER).rename(self.path / TOKENIZER)
    sync_directory(self.path)
    replace_file(self.partial / DATASET, to_json(dataset), durable=True)
    (self.partial / DATASET).rename(self.path / DATASET)
    sync_directory(self.path)

  def clean(self) -> None:
    """Removes what served the work only."""
    shutil.rmtree(self.partial, ignore_errors=True)

  def _load(self, path: Path) -> dict[str, Any] | None:
    try:
      content = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
      return None
    except OSError as error:
      raise Refused(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError):
      content = None
    if not isinstance(content, dict):
      raise Refused(f"{path} is damaged; give another --out or remove {self.path}")
    return content


class TokenCache:
  """The tokens of documents by the sha256 of their text, each behind a checksum of its own."""

  def __init__(self, directory: Path):
    self._directory = directory

  def get(self, document: str) -> np.ndarray | None:
    """The tokens as uint16, if they are there and whole."""
    try:
      content = self._path(document).read_bytes()
    except FileNotFoundError:
      return None
    checksum, tokens = content[:32], content[32:]
    return np.frombuffer(tokens, "<u2") if checksum == hashlib.sha256(tokens).digest() else None

  def put(self, document: str, tokens: np.ndarray) -> None:
    """Keeps a document's tokens."""
    path = self._path(document)
    path.parent.mkdir(parents=True, exist_ok=True)
    content = tokens.astype("<u2").tobytes()
    replace_file(path, hashlib.sha256(content).digest() + content)

  def _path(self, document: str) -> Path:
    return self._directory / document[:2] / document


def replace_file(path: Path, content: bytes | memoryview, durable: bool = False) -> None:
  """Writes a file that is there whole or not at all."""
  unfinished = path.with_name(f"{path.name}.unfinished")
  try:
    with unfinished.open("wb") as file:
      file.write(content)
      if durable:
        file.flush()
        os.fsync(file.fileno())
  except OSError as error:
    unfinished.unlink(missing_ok=True)
    raise OSError(error.errno, error.strerror, str(path)) from error  # a failed write does not name its file
  unfinished.rename(path)


def to_json(content: Mapping[str, Any]) -> bytes:
  """For people to read."""
  return (json.dumps(content, indent=2) + "\n").encode()


def _differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
  return [f"{key} is {there.get(key)} there, {value} here" for key, value in here.items() if there.get(key) != value]


def _unwritable(path: Path, error: OSError) -> Exception:
  return Refused(f"cannot write to {path}: {error.strerror}") if error.errno in _UNWRITABLE else error


def _remove(path: Path) -> None:
  if path.is_dir():
    shutil.rmtree(path)
  else:
    path.unlink()
