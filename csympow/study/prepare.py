"""The study's dataset from a directory of books: `python -m csympow.study.prepare --corpus=DIR --out=data/study`.

DIR holds the books, one after the other, in `books.txt.xz`; where each lies and which are held out in `manifest.csv`;
and the tokenizer, `bpe8192.json`. Of the books to train on, in an order that their checksums decide, as many are taken
as fill --train_rows rows; all that are held out are. A row is 65,536 tokens of one book: what does not fill one is left
out, so that every window of every run lies in one book and the arrays need no segments. `OUT/manifest.csv` lists what
was taken. The rest is `csympow.data.prepare`'s: it can be stopped and goes on, with the same exit codes.
"""

import csv
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from csympow.command import EXIT_USAGE, Parser, fail
from csympow.config import ConfigError
from csympow.data import prepare
from csympow.data.output import replace_file

BOOKS, MANIFEST, TOKENIZER = "books.txt.xz", "manifest.csv", "bpe8192.json"
ROW_LENGTH = 65_536
_TOKENS = "bpe8192_tokens"  # the manifest's count of a book's tokens, without the end of text before it
_ROWS_PER_CHUNK = 128  # a chunk this large compresses by a seventh better than a single row


def main(arguments: Sequence[str] | None = None) -> int:
  """Runs the command; returns its exit code."""
  parser = Parser(prog="csympow.study.prepare", description=__doc__, allow_abbrev=False)
  parser.add_argument("--corpus", required=True, type=Path, metavar="DIR", help="the books")
  parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="where the dataset goes")
  parser.add_argument(
    "--train_rows", type=int, default=512, metavar="N", help="rows of 65,536 tokens to train on (%(default)s)"
  )
  try:
    options = parser.parse_args(arguments)
    chosen = choose(_read(options.corpus / MANIFEST), options.train_rows)
    options.out.mkdir(parents=True, exist_ok=True)
    replace_file(options.out / MANIFEST, _written(chosen))
  except ConfigError as error:
    return fail(str(error), EXIT_USAGE)
  except OSError as error:
    return fail(f"{error.filename}: {error.strerror}", EXIT_USAGE)
  except SystemExit as error:  # argparse
    return error.code if isinstance(error.code, int) else EXIT_USAGE
  return prepare.main(
    [
      str(options.corpus / BOOKS),
      f"--manifest={options.out / MANIFEST}",
      f"--tokenizer={options.corpus / TOKENIZER}",
      f"--out={options.out}",
      f"--row_length={ROW_LENGTH}",
      f"--rows_per_chunk={_ROWS_PER_CHUNK}",
      "--whole_rows",
      "--compression=zstd",
    ]
  )


def choose(books: list[dict[str, str]], train_rows: int) -> list[dict[str, str]]:
  """The books to use, in their order: all that are held out, and others until they fill `train_rows` rows."""
  if train_rows < 1:
    raise ConfigError(f"--train_rows must be at least 1, got {train_rows}")
  fills = {book["sha256"]: (int(book[_TOKENS]) + 1) // ROW_LENGTH for book in books if book["split"] == "train"}
  if (most := sum(fills.values())) < train_rows:
    raise ConfigError(f"--train_rows={train_rows} is more than the books fill: {most} rows of {ROW_LENGTH:,} tokens")
  taken: set[str] = set()
  for sha256, rows in sorted(fills.items()):
    if sum(fills[other] for other in taken) + rows <= train_rows:
      taken.add(sha256)
  return [book for book in books if book["split"] != "train" or book["sha256"] in taken]


def _read(manifest: Path) -> list[dict[str, str]]:
  with manifest.open(newline="", encoding="utf-8") as lines:
    books = list(csv.DictReader(lines))
  absent = {"byte_offset", "bytes", "sha256", "split", _TOKENS} - set(books[0] if books else ())
  if absent:
    raise ConfigError(f"{manifest} has no column {', '.join(sorted(absent))}")
  return books


def _written(books: list[dict[str, str]]) -> bytes:
  text = io.StringIO()
  writer = csv.DictWriter(text, list(books[0]), lineterminator="\n")
  writer.writeheader()
  writer.writerows(books)
  return text.getvalue().encode()


if __name__ == "__main__":
  prepare.stop_on_signals()
  code = main()
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(code)  # as csympow.data.prepare ends
