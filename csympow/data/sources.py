"""The texts that `csympow.data.prepare` reads: a file is a document, or a manifest says which bytes of one file are."""

import csv
import dataclasses
import fnmatch
import gzip
import hashlib
import io
import itertools
import lzma
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal, get_args

Split = Literal["train", "heldout"]
SPLITS: tuple[Split, ...] = get_args(Split)

_OPENERS: dict[str, Callable[[Path], io.BufferedIOBase]] = {".xz": lzma.LZMAFile, ".gz": gzip.GzipFile}
_BAD_STREAM = (lzma.LZMAError, gzip.BadGzipFile, zlib.error, EOFError)
_SKIP_BYTES = 1 << 20


class Refused(ValueError):
  """What the user asked cannot be done; the message is one line."""


@dataclasses.dataclass(frozen=True)
class Document:
  """A text as it was found.

  Attributes:
    place: where it was found.
    content: its bytes.
    split: what it is for.
    weight: bytes of input that it stands for, compressed where the input is.
    offset: where in its file it starts.
  """

  place: str
  content: bytes
  split: Split
  weight: int
  offset: int = 0

  @property
  def sha256(self) -> str:
    """Of its bytes, in hexadecimal."""
    return hashlib.sha256(self.content).hexdigest()

  @property
  def text(self) -> str:
    """Its characters: none are changed, line ends included."""
    try:
      return self.content.decode()
    except UnicodeDecodeError as error:
      raise Refused(f"{self.place} is not UTF-8: {error.reason} at byte {self.offset + error.start}") from error


@dataclasses.dataclass(frozen=True)
class Files:
  """Each file a document, held out by a hash of its bytes."""

  names: tuple[str, ...]  # below what the user gave, so that they are the same wherever it lies
  paths: tuple[Path, ...]
  heldout: float

  def __len__(self) -> int:
    return len(self.paths)

  @property
  def weight(self) -> int:
    """Of all documents."""
    return sum(_size(path) for path in self.paths)

  def __iter__(self) -> Iterator[Document]:
    for path in self.paths:
      with _opened(path) as file:
        content = file.read()
      share = int.from_bytes(hashlib.sha256(content).digest()[:8]) / 2**64
      yield Document(str(path), content, "heldout" if share < self.heldout else "train", _size(path))


@dataclasses.dataclass(frozen=True)
class _Range:
  line: int
  offset: int
  size: int
  split: Split
  sha256: str


@dataclasses.dataclass(frozen=True)
class Manifest:
  """Ranges of bytes of one file, each a document; the manifest says which are held out."""

  names: tuple[str, ...]
  paths: tuple[Path, ...]  # the file and the manifest
  ranges: tuple[_Range, ...]

  def __len__(self) -> int:
    return len(self.ranges)

  @property
  def weight(self) -> int:
    """Of all documents."""
    return sum(r.size for r in self.ranges)

  def __iter__(self) -> Iterator[Document]:
    path, manifest = self.paths
    with _opened(path) as file:
      at = 0
      for r in self.ranges:
        place = f"{path} (line {r.line} of {manifest})"
        while at < r.offset and (skipped := len(file.read(min(r.offset - at, _SKIP_BYTES)))):
          at += skipped
        content = file.read(r.size)
        at += len(content)
        if len(content) < r.size:
          raise Refused(f"{place} ends at byte {at}, before byte {r.offset + r.size}")
        if r.sha256 and hashlib.sha256(content).hexdigest() != r.sha256:
          raise Refused(f"{place}: bytes {r.offset} to {r.offset + r.size} do not have the sha256 of the manifest")
        yield Document(place, content, r.split, r.size, r.offset)


Corpus = Files | Manifest


def find_files(given: Sequence[Path], glob: str, heldout: float, leave_out: Path) -> Files:
  """The files given and, sorted, those below the directories given whose names fit; nothing below `leave_out`."""
  found: dict[Path, tuple[str, Path]] = {}  # a file that was given twice is one document
  for path in given:
    if path.is_dir():
      inside = [file for file in path.rglob("*") if _fits(file.name, glob) and file.is_file()]
      inside = sorted(file for file in inside if not file.resolve().is_relative_to(leave_out.resolve()))
      if not inside:
        raise Refused(f"no file below {path} has a name like {glob!r}; --glob sets another")
      for file in inside:
        found.setdefault(file.resolve(), (file.relative_to(path).as_posix(), file))
    else:
      _require_file(path)
      found.setdefault(path.resolve(), (path.name, path))
  names, paths = zip(*found.values(), strict=True)
  return Files(names, paths, heldout)


def read_manifest(given: Sequence[Path], manifest: Path) -> Manifest:
  """The ranges that a manifest names, in the order in which they lie."""
  if len(given) != 1:
    raise Refused(f"--manifest describes one file, got {len(given)}")
  _require_file(given[0])
  _require_file(manifest)
  try:
    with manifest.open(newline="", encoding="utf-8") as lines:
      reader = csv.DictReader(lines)
      absent = {"byte_offset", "bytes", "split"} - set(reader.fieldnames or ())
      if absent:
        raise Refused(f"{manifest} has no column {', '.join(sorted(absent))}")
      ranges = sorted((_range(manifest, reader.line_num, row) for row in reader), key=lambda r: (r.offset, r.line))
  except (OSError, UnicodeDecodeError, csv.Error) as error:
    raise Refused(f"{manifest} is not a CSV file that can be read: {error}") from error
  if not ranges:
    raise Refused(f"{manifest} names no document")
  for before, after in itertools.pairwise(ranges):
    if after.offset < before.offset + before.size:
      raise Refused(f"{manifest}: the documents of lines {before.line} and {after.line} overlap")
  return Manifest((given[0].name, manifest.name), (given[0], manifest), tuple(ranges))


def listing(corpus: Corpus) -> dict[str, int | str]:
  """What tells these inputs from others without reading them."""
  sizes = [_size(path) for path in corpus.paths]
  digest = hashlib.sha256(repr(list(zip(corpus.names, sizes, strict=True))).encode())
  return {"files": len(sizes), "bytes": sum(sizes), "sha256": digest.hexdigest()}


def _range(manifest: Path, line: int, row: dict[str, str]) -> _Range:
  try:
    offset, size = int(row["byte_offset"]), int(row["bytes"])
  except (TypeError, ValueError):
    offset, size = -1, -1
  if offset < 0 or size < 0:
    raise Refused(f"{manifest}, line {line}: byte_offset and bytes must be integers of at least 0")
  for split in SPLITS:
    if row["split"] == split:
      return _Range(line, offset, size, split, (row.get("sha256") or "").lower())
  raise Refused(f"{manifest}, line {line}: split must be train or heldout, got {row['split']!r}")


def _fits(name: str, glob: str) -> bool:
  """Whether a name, less the suffix of compression, is like the pattern."""
  stem = name[: name.rindex(".")] if Path(name).suffix in _OPENERS else name
  return fnmatch.fnmatchcase(name, glob) or fnmatch.fnmatchcase(stem, glob)


def _require_file(path: Path) -> None:
  if not path.is_file():
    raise Refused(f"{path} is no file or directory" if path.exists() else f"there is no file {path}")


def _size(path: Path) -> int:
  try:
    return path.stat().st_size
  except OSError as error:
    raise Refused(f"cannot read {path}: {error.strerror or error}") from error


class _opened:
  """A file's bytes, decompressed; what goes wrong while they are read names the file."""

  def __init__(self, path: Path):
    self._path = path

  def __enter__(self) -> io.BufferedIOBase:
    opener = _OPENERS.get(self._path.suffix)
    try:
      self._file: io.BufferedIOBase = opener(self._path) if opener else self._path.open("rb")
    except OSError as error:
      raise Refused(f"cannot read {self._path}: {error.strerror or error}") from error
    return self._file

  def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
    self._file.close()
    if isinstance(error, _BAD_STREAM):
      raise Refused(f"{self._path} cannot be decompressed: {error}") from error
    if isinstance(error, OSError):
      raise Refused(f"cannot read {self._path}: {error.strerror or error}") from error
