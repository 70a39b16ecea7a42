"""Text files to a dataset for train.py: `python -m csympow.data.prepare FILES_OR_DIRS... --out=DIR`.

Each file is a document, plain or compressed (.xz, .gz), in UTF-8. DIR gets, for each of `train` and `heldout`:

    X.zarr            rows x row_length of tokens: zarr v2, uint16, blosc, LongCrawl64's format
    X.segments.zarr   for each token the number of its document within the row; -1 for padding
    dataset.json      the tokenizer, counts and checksums; written last
    tokenizer.json    unless tokens are bytes

Documents of at least a row are cut into rows of their own, shorter ones and remainders share rows, or with --whole_rows
are left out: each row is then one document's, and there are no segments. Interrupted at any
moment, the same command goes on, to the same result byte for byte.

Exit codes: 0 done, 2 bad usage or input, 75 told to stop (SIGTERM, SIGINT), 1 anything else.
"""

import argparse
import dataclasses
import functools
import hashlib
import json
import os
import shlex
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np

from csympow.data import sources, zarr_writer
from csympow.data.output import DATASET, TOKENIZER, Output, TokenCache, replace_file, to_json
from csympow.data.packing import pack, whole_rows
from csympow.data.progress import Progress
from csympow.data.sources import SPLITS, Corpus, Refused, Split
from csympow.data.tokenizer import SMALLEST_BPE, BPETokenizer, ByteTokenizer, Tokenizer, load_tokenizer, train_bpe
from csympow.shell import python

LARGEST_VOCABULARY = 1 << 16  # tokens are uint16
_BATCH_CHARACTERS, _BATCH_DOCUMENTS = 1 << 20, 256  # tokenised at once, on all cores
_STOPPED = 75


class Tokenised(NamedTuple):
  """A document whose tokens are in the cache."""

  sha256: str
  length: int
  split: Split


def main(arguments: Sequence[str] | None = None) -> int:
  """Runs the command; returns its exit code."""
  try:
    _prepare(_parse(arguments))
  except Refused as error:
    return _fail(2, str(error))
  except OSError as error:
    return _fail(1, f"{error.filename or 'failed'}: {error.strerror or error}; the same command goes on from here")
  return 0


def stop_on_signals() -> None:
  """On SIGTERM or SIGINT says so and exits with code 75.

  A thread waits for them, since Python's own handlers wait for calls into libraries to return, and training a tokenizer
  is one of minutes. It may exit there and then: what is on disk is fit to go on from at every moment.
  """
  reader, writer = os.pipe()
  os.set_blocking(writer, False)
  signal.set_wakeup_fd(writer)  # gets the signal's number at once, in whichever thread it arrives
  for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda *_: None)

  def wait() -> NoReturn:
    name = signal.Signals(os.read(reader, 1)[0]).name
    os.write(2, f"{_line_start()}prepare: stopped by {name}; the same command goes on from here\n".encode())
    os._exit(_STOPPED)

  threading.Thread(target=wait, daemon=True).start()


def _fail(code: int, message: str) -> int:
  print(f"{_line_start()}prepare:", " ".join(message.split()), file=sys.stderr)
  return code


def _line_start() -> str:
  """What clears a line of progress, should there be one."""
  return "\r\033[K" if sys.stdout.isatty() and sys.stderr.isatty() else ""


class _Parser(argparse.ArgumentParser):
  def error(self, message: str) -> NoReturn:
    raise Refused(f"{message}; --help lists what there is")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
  description = (__doc__ or "").partition("\n")[2]
  parser = _Parser(
    "prepare", description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
  )
  parser.add_argument("inputs", metavar="FILES_OR_DIRS", nargs="+", type=Path)
  parser.add_argument("--out", metavar="DIR", type=Path, required=True, help="where the dataset goes")
  parser.add_argument(
    "--tokenizer", metavar="bytes|FILE.json", help="bytes (default) or a Hugging Face tokenizers file"
  )
  parser.add_argument("--train_bpe", metavar="VOCAB_SIZE", type=int, help="train a BPE on the training documents")
  parser.add_argument("--row_length", type=int, default=65_536, help="tokens of a row (%(default)s)")
  parser.add_argument("--rows_per_chunk", type=int, default=1, help="rows of a file of the dataset (%(default)s)")
  parser.add_argument("--whole_rows", action="store_true", help="leave out what does not fill a row")
  parser.add_argument(
    "--compression",
    choices=zarr_writer.COMPRESSORS,
    default="lz4",
    help="zstd is small and slow to write (%(default)s)",
  )
  parser.add_argument("--heldout", type=float, help="share of documents held out, by a hash of their bytes (0.02)")
  parser.add_argument("--glob", default="*.txt", help="names of files taken from directories (%(default)s)")
  manifest = "CSV of the documents in one file, with columns byte_offset, bytes, split and perhaps sha256"
  parser.add_argument("--manifest", metavar="FILE.csv", type=Path, help=manifest)
  options = parser.parse_args(arguments)

  for name in ("row_length", "rows_per_chunk"):
    if getattr(options, name) < 1:
      raise Refused(f"--{name} must be at least 1, got {getattr(options, name)}")
  if options.heldout is not None and not 0 <= options.heldout <= 1:
    raise Refused(f"--heldout must be a share between 0 and 1, got {options.heldout}")
  if options.heldout is not None and options.manifest is not None:
    raise Refused("--heldout and --manifest exclude each other: the manifest says what is held out")
  if options.tokenizer is not None and options.train_bpe is not None:
    raise Refused("--tokenizer and --train_bpe exclude each other")
  if options.train_bpe is not None and not SMALLEST_BPE <= options.train_bpe <= LARGEST_VOCABULARY:
    raise Refused(f"--train_bpe must be {SMALLEST_BPE} to {LARGEST_VOCABULARY} tokens, got {options.train_bpe}")
  return options


def _prepare(options: argparse.Namespace) -> None:
  output = Output(options.out)
  heldout = 0.02 if options.heldout is None else options.heldout
  corpus: Corpus = (
    sources.read_manifest(options.inputs, options.manifest)
    if options.manifest
    else sources.find_files(options.inputs, options.glob, heldout, leave_out=options.out)
  )
  tokenizer = None if options.train_bpe else _load(options.tokenizer or ByteTokenizer.name)
  settings = {
    "tokenizer": _identity(tokenizer) if tokenizer else f"a BPE of {options.train_bpe} trained on the inputs",
    "row_length": options.row_length,
    "rows_per_chunk": options.rows_per_chunk,
    "heldout": "by manifest" if options.manifest else heldout,
    "whole_rows": options.whole_rows,
    "compression": options.compression,
  }
  inputs = sources.listing(corpus)

  if dataset := output.finished(settings, inputs):
    output.clean()
    print(f"{output.path} is finished: nothing to do")
    return _summarise(output, dataset)
  with output.begun(settings) as resumed:
    print(f"{len(corpus):,} documents to {output.path}{', going on where it stopped' * resumed}", flush=True)
    tokenizer = tokenizer or _trained(output, corpus, options.train_bpe)
    cache = TokenCache(output.partial / f"tokens-{tokenizer.sha256[:16]}")
    documents = _tokenise(corpus, tokenizer, cache)
    _require_documents(output, corpus, documents, options.row_length if options.whole_rows else 1)
    identity = json.dumps([settings, tokenizer.sha256, documents])
    rows = output.rows(hashlib.sha256(identity.encode()).hexdigest())
    splits: dict[str, dict[str, Any]] = {split: _write(rows, split, documents, cache, options) for split in SPLITS}
    dataset = _describe(tokenizer, settings, inputs, splits)
    output.publish(rows, tokenizer.content if isinstance(tokenizer, BPETokenizer) else None, dataset)
    output.clean()
  if empty := len(corpus) - len(documents):
    print(f"{empty} empty documents were left out")
  return _summarise(output, dataset)


def _load(name_or_path: str) -> Tokenizer:
  try:
    tokenizer = load_tokenizer(name_or_path)
  except ValueError as error:
    raise Refused(str(error)) from error
  if tokenizer.vocab_size > LARGEST_VOCABULARY:
    size = f"{tokenizer.vocab_size} tokens"
    raise Refused(f"{name_or_path} has {size}; the format, uint16, allows at most {LARGEST_VOCABULARY}")
  return tokenizer


def _identity(tokenizer: Tokenizer) -> str:
  return tokenizer.name if isinstance(tokenizer, ByteTokenizer) else f"the file of sha256 {tokenizer.sha256[:16]}"


def _trained(output: Output, corpus: Corpus, vocab_size: int) -> Tokenizer:
  """A tokenizer of the training documents; one that these very files have been used for is used again."""
  identity = json.dumps([sources.listing(corpus), [path.stat().st_mtime_ns for path in corpus.paths]])
  path = output.partial / f"tokenizer-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.json"
  if not path.exists():
    progress = Progress(corpus.weight)

    def texts() -> Iterator[str]:
      for i, document in enumerate(corpus):
        if document.split == "train":
          yield document.text
        progress.add(document.weight)
        progress.show(f"reading for the tokenizer: document {i + 1:,} of {len(corpus):,}")
      progress.end("all read; now training the tokenizer")

    replace_file(path, train_bpe(texts(), vocab_size).to_str().encode())
  return _load(str(path))


def _tokenise(corpus: Corpus, tokenizer: Tokenizer, cache: TokenCache) -> list[Tokenised]:
  """Every document's tokens into the cache, unless they are there; empty documents are left out."""
  found: list[tuple[str, Split]] = []
  lengths: dict[str, int] = {}
  waiting: dict[str, str] = {}
  first = [] if tokenizer.end_of_text is None else [np.array([tokenizer.end_of_text])]
  progress = Progress(corpus.weight)
  total = fresh = 0

  def flush() -> None:
    nonlocal total, fresh
    for sha256, tokens in zip(waiting, tokenizer.encode_batch(list(waiting.values())), strict=True):
      cache.put(sha256, np.concatenate([*first, tokens]))
      lengths[sha256] = len(first) + len(tokens)
      total, fresh = total + lengths[sha256], fresh + lengths[sha256]
    waiting.clear()

  for i, document in enumerate(corpus):
    cached = None
    sha256 = document.sha256
    if document.content:
      found.append((sha256, document.split))
      if sha256 not in lengths and sha256 not in waiting:
        cached = cache.get(sha256)
        if cached is None:
          waiting[sha256] = document.text
        else:
          lengths[sha256] = len(cached)
          total += len(cached)
    if len(waiting) >= _BATCH_DOCUMENTS or sum(map(len, waiting.values())) >= _BATCH_CHARACTERS:
      flush()
    progress.add(document.weight, fresh=cached is None)
    rate = f"{fresh / progress.seconds:,.0f} tokens/s"
    progress.show(f"document {i + 1:,} of {len(corpus):,}, {total:,} tokens, {rate}")
  flush()
  progress.end(f"{len(corpus):,} documents, {total:,} tokens, {fresh / progress.seconds:,.0f} tokens/s")
  return [Tokenised(sha256, lengths[sha256], split) for sha256, split in found]


def _require_documents(output: Output, corpus: Corpus, documents: Sequence[Tokenised], shortest: int) -> None:
  """There must be something to train on, unless the user said that there should not."""
  if not sum(document.length for document in documents):
    output.clean()
    raise Refused(f"there is no text in the input: {len(corpus)} documents, all empty")
  if (longest := max(document.length for document in documents)) < shortest:
    output.clean()
    raise Refused(f"no document fills a row of {shortest} tokens, as --whole_rows asks: the longest has {longest}")
  if isinstance(corpus, sources.Files) and corpus.heldout < 1 and all(d.split == "heldout" for d in documents):
    output.clean()
    raise Refused(f"all {len(documents)} documents fall to the held-out split; give another --heldout, 0 for none")


def _write(
  rows: Path, split: Split, documents: Sequence[Tokenised], cache: TokenCache, options: argparse.Namespace
) -> dict[str, Any]:
  """Writes one split's arrays, unless it has no tokens; returns what dataset.json says of it."""
  chosen = [document for document in documents if document.split == split]
  plan = (whole_rows if options.whole_rows else pack)((document.length for document in chosen), options.row_length)
  if not plan:
    return {"array": None, "documents": len(chosen), "tokens": 0, "rows": 0, "padding": 0.0}
  progress = Progress(len(plan))

  @functools.lru_cache(maxsize=2)
  def read(document: int) -> np.ndarray:
    tokens = cache.get(chosen[document].sha256)
    if tokens is None:
      raise OSError(f"the tokens of document {document} of {split} are lost")
    return tokens

  def on_progress(done: int) -> None:
    progress.add(done - progress.done)
    progress.show(f"{split}: row {done:,} of {len(plan):,}")

  name, segments = f"{split}.zarr", None if options.whole_rows else f"{split}.segments.zarr"
  written = zarr_writer.write_rows(
    rows / name,
    rows / segments if segments else None,
    plan,
    options.row_length,
    options.rows_per_chunk,
    read,
    on_progress,
    options.compression,
  )
  progress.end(f"{split}: {written.rows:,} rows")
  padding = 1 - written.tokens / (written.rows * options.row_length)
  described = dataclasses.asdict(written) | {"padding": round(padding, 6)}
  return {"array": name, "segments": segments, "documents": len(chosen)} | described


def _describe(
  tokenizer: Tokenizer, settings: Mapping[str, Any], inputs: Mapping[str, Any], splits: Mapping[str, dict[str, Any]]
) -> dict[str, Any]:
  """What dataset.json says; the fingerprint is that of all that a model sees."""
  of_file = isinstance(tokenizer, BPETokenizer)
  described: dict[str, Any] = {
    "tokenizer": {
      "name": "bpe" if of_file else tokenizer.name,
      "file": TOKENIZER if of_file else None,
      "sha256": tokenizer.sha256,
      "end_of_text": tokenizer.end_of_text,
    },
    "vocab_size": tokenizer.vocab_size,
    "row_length": settings["row_length"],
    **{count: sum(split[count] for split in splits.values()) for count in ("documents", "tokens", "rows")},
    "splits": splits,
  }
  fingerprint = hashlib.sha256(to_json(described)).hexdigest()
  return {"fingerprint": fingerprint, **described, "settings": settings, "inputs": inputs}


def _summarise(output: Output, dataset: Mapping[str, Any]) -> None:
  tokenizer = dataset["tokenizer"]["file"] or dataset["tokenizer"]["name"]
  print(f"\n{'split':8} {'documents':>10} {'tokens':>15} {'rows':>10} {'padding':>8}")
  for name, split in dataset["splits"].items():
    counts = f"{split['documents']:10,} {split['tokens']:15,} {split['rows']:10,} {split['padding']:8.2%}"
    print(f"{name:8} {counts}")
  print(f"\nvocabulary of {dataset['vocab_size']:,} ({tokenizer}), rows of {dataset['row_length']:,} tokens")
  print(f"all of it: {output.path / DATASET}")
  flags = []
  for name, split in dataset["splits"].items():
    if not split["array"]:
      print(f"no document fell to the split {name}: there is no {name}.zarr")
    value = str(output.path / split["array"]) if split["array"] else "none"
    flags.append(f"--config.data.{name}={shlex.quote(value)}")
  if dataset["vocab_size"] != ByteTokenizer.vocab_size:  # the quickstart's
    flags.append(f"--config.model.vocab_size={dataset['vocab_size']}")
  if dataset["splits"]["train"]["array"]:
    workdir = shlex.quote(f"runs/{output.path.resolve().name}")
    print(f"\nnext: {python()} train.py --config=configs/quickstart.py --workdir={workdir} {' '.join(flags)}")


if __name__ == "__main__":
  stop_on_signals()
  code = main()
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(code)  # Python would first give the signals back, and die of one that comes then
