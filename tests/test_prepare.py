"""Preparing a dataset: no token is lost, and nothing but the input decides the result."""

import csv
import gzip
import hashlib
import json
import lzma
from collections import Counter

import hypothesis
import hypothesis.strategies as st
import numpy as np

from csympow.data.packing import OPEN_ROWS, Piece, pack
from csympow.data.zarr_writer import write_rows
from tests.preparing import ROW, SPLITS, expected_segments, load, prose, read_split, refuse, snapshot, succeed, write

documents = st.lists(st.text(st.sampled_from("ab\r\n\0é猫"), max_size=3 * ROW), min_size=1, max_size=12)


@hypothesis.given(documents, st.integers(1, 3))
@hypothesis.settings(max_examples=25)
def test_every_token_of_every_document_comes_back(tmp_path_factory, texts, rows_per_chunk):
  hypothesis.assume(any(texts))
  base = tmp_path_factory.mktemp("round_trip")
  out = base / "out"
  sizes = (f"--row_length={ROW}", f"--rows_per_chunk={rows_per_chunk}")
  succeed(write(base / "in", texts), f"--out={out}", *sizes, "--heldout=0")
  found = read_split(out, "train")
  wanted = [piece for text in texts for piece in expected_segments(list(text.encode()), ROW)]
  assert Counter(found) == Counter(wanted)
  whole = [piece for piece in wanted if len(piece) == ROW]
  assert [piece for piece in found if len(piece) == ROW] == whole, "rows of a document follow one another"


@hypothesis.given(st.lists(st.integers(0, 40), max_size=300))
def test_packing_puts_each_token_in_one_place_and_wastes_little(lengths):
  rows = pack(lengths, ROW)
  places = Counter((p.document, i) for row in rows for p in row for i in range(p.start, p.stop))
  assert places == Counter((document, i) for document, length in enumerate(lengths) for i in range(length))
  sizes = [sum(p.stop - p.start for p in row) for row in rows]
  assert all(0 < size <= ROW for size in sizes)
  # First fit leaves no two open rows half empty; with few rows none is closed early.
  if len(rows) <= OPEN_ROWS:
    assert sum(size <= ROW // 2 for size in sizes) <= 1


def test_the_split_is_decided_by_a_hash_of_the_bytes_alone(tmp_path):
  texts = [prose(seed, 6) for seed in range(200)]
  succeed(write(tmp_path / "a", texts), f"--out={tmp_path / 'x'}", "--heldout=0.25", "--row_length=64")
  succeed(write(tmp_path / "b", texts[::-1]), f"--out={tmp_path / 'y'}", "--heldout=0.25", "--row_length=64")
  splits = [{split: Counter(read_split(tmp_path / out, split)) for split in SPLITS} for out in "xy"]
  assert splits[0] == splits[1]
  assert 25 <= splits[0]["heldout"].total() <= 80
  assert (splits[0]["train"] + splits[0]["heldout"]).total() == len(texts)


def test_the_same_input_gives_the_same_bytes_wherever_it_lies(tmp_path):
  texts = [prose(seed, 20 * seed) for seed in range(1, 20)]
  for name in "ab":
    succeed(write(tmp_path / name / "in", texts), f"--out={tmp_path / name / 'out'}", "--row_length=100")
  assert snapshot(tmp_path / "a" / "out") == snapshot(tmp_path / "b" / "out")


def test_compressed_files_are_documents_like_others(tmp_path):
  texts = [prose(seed, 30) for seed in range(3)]
  plain = write(tmp_path / "plain", texts)
  packed = tmp_path / "packed"
  packed.mkdir()
  (packed / "00000.txt").write_text(texts[0])
  (packed / "00001.txt.xz").write_bytes(lzma.compress(texts[1].encode()))
  (packed / "00002.txt.gz").write_bytes(gzip.compress(texts[2].encode()))
  for directory in (plain, packed):
    succeed(directory, f"--out={tmp_path / directory.name}.out", "--row_length=64", "--heldout=0")
  arrays = [load(tmp_path / f"{name}.out" / "train.zarr") for name in ("plain", "packed")]
  np.testing.assert_array_equal(*arrays)
  (packed / "00001.txt.xz").write_bytes(lzma.compress(texts[1].encode())[:-20])
  assert "00001.txt.xz" in refuse(packed, f"--out={tmp_path / 'torn'}")


def write_manifest(path, texts, **changes):
  rows, offset = [], 0
  for i, text in enumerate(texts):
    sha256 = hashlib.sha256(text.encode()).hexdigest()
    split = "heldout" if i % 3 == 2 else "train"
    rows.append({"byte_offset": offset, "bytes": len(text.encode()), "split": split, "sha256": sha256})
    offset += len(text.encode())
  rows[-1] |= changes
  with path.open("w", newline="") as file:
    writer = csv.DictWriter(file, rows[0])
    writer.writeheader()
    writer.writerows(rows[::-1])
  return path


def test_a_manifest_cuts_one_file_and_decides_the_split(tmp_path):
  texts = [prose(seed, 20) + "é" for seed in range(7)]
  books = tmp_path / "books.txt.xz"
  books.write_bytes(lzma.compress("".join(texts).encode()))
  out = tmp_path / "out"
  manifest = write_manifest(tmp_path / "m.csv", texts)
  succeed(books, f"--manifest={manifest}", f"--out={out}", f"--row_length={ROW}")
  for split in SPLITS:
    chosen = [text for i, text in enumerate(texts) if (i % 3 == 2) == (split == "heldout")]
    wanted = [piece for text in chosen for piece in expected_segments(list(text.encode()), ROW)]
    assert Counter(read_split(out, split)) == Counter(wanted)
  for change, words in (
    ({"sha256": "0" * 64}, "sha256"),
    ({"bytes": 10**6}, "ends at byte"),
    ({"split": "test"}, "train or heldout"),
    ({"bytes": "x"}, "integers"),
    ({"byte_offset": 1}, "overlap"),
  ):
    manifest = write_manifest(tmp_path / "bad.csv", texts, **change)
    assert words in refuse(books, f"--manifest={manifest}", f"--out={tmp_path / 'bad'}")


def test_whole_rows_are_one_document_each_and_the_rest_is_left_out(tmp_path):
  texts = [prose(seed, words) for seed, words in enumerate((1, 40, 3, 25, 1))]
  out = tmp_path / "out"
  directory = write(tmp_path / "in", texts)
  flags = (f"--row_length={ROW}", "--heldout=0", "--whole_rows")
  succeed(directory, f"--out={out}", *flags, "--compression=zstd", "--rows_per_chunk=4")
  wanted = [list(text.encode()[i : i + ROW]) for text in texts for i in range(0, len(text) - ROW + 1, ROW)]
  assert load(out / "train.zarr").tolist() == wanted
  assert {path.name for path in out.iterdir()} == {"train.zarr", "dataset.json"}
  assert json.loads((out / "train.zarr" / ".zarray").read_text())["compressor"] == {"id": "zstd", "level": 22}
  assert "whole_rows is True there, False here" in refuse(directory, f"--out={out}", *flags[:2], "--compression=zstd")
  short = write(tmp_path / "short", ["brief"])
  assert "no document fills a row of 16 tokens" in refuse(short, f"--out={tmp_path / 'none'}", *flags)


def test_the_format_is_that_of_longcrawl64_and_chunks_of_zeros_are_there(tmp_path):
  out = tmp_path / "out"
  succeed(write(tmp_path / "in", [b"\0" * 64, b"\0" * 40]), f"--out={out}", "--row_length=32", "--heldout=0")
  stored = json.loads((out / "train.zarr" / ".zarray").read_text())
  assert (stored["zarr_format"], stored["dtype"], stored["shape"], stored["chunks"]) == (2, "<u2", [4, 32], [1, 32])
  assert (stored["compressor"]["id"], stored["compressor"]["cname"]) == ("blosc", "lz4")
  for array in ("train.zarr", "train.segments.zarr"):
    assert {p.name for p in (out / array).iterdir()} == {".zarray", "0.0", "1.0", "2.0", "3.0"}
    load(out / array)
  assert {p.name for p in out.iterdir()} == {"train.zarr", "train.segments.zarr", "dataset.json"}


def test_long_rows_are_several_chunks_and_many_segments_have_a_wider_type(tmp_path):
  length = 70_000
  out = tmp_path / "out"
  file = write(tmp_path / "in", ["x" * length]) / "00000.txt"
  succeed(file, f"--out={out}", f"--row_length={length}", "--heldout=0")
  assert {p.name for p in (out / "train.zarr").iterdir()} == {".zarray", "0.0", "0.1"}
  assert (load(out / "train.zarr") == ord("x")).all()
  assert load(out / "train.segments.zarr").dtype == np.int16

  rows = [[Piece(0, i, i + 1) for i in range(40_000)]]
  paths = tmp_path / "a.zarr", tmp_path / "a.segments.zarr"
  write_rows(*paths, rows, 40_000, 1, lambda _: np.ones(40_000, np.uint16), lambda _: None)
  segments = load(paths[1])
  assert segments.dtype == np.int32
  np.testing.assert_array_equal(segments[0], np.arange(40_000))


def test_without_held_out_documents_it_says_so(tmp_path):
  out = tmp_path / "out"
  text = succeed(write(tmp_path / "in", [prose(0, 9), ""]), f"--out={out}", "--heldout=0", "--row_length=8")
  assert "no document fell to the split heldout" in text
  assert "--config.data.heldout=none" in text
  assert "1 empty" in text
  dataset = json.loads((out / "dataset.json").read_text())
  assert dataset["splits"]["heldout"]["array"] is None
  assert dataset["documents"] == 1
  assert not (out / "heldout.zarr").exists()


def test_a_finished_dataset_is_left_alone_and_other_settings_are_refused_by_name(tmp_path):
  directory, out = write(tmp_path / "in", [prose(seed, 30) for seed in range(9)]), tmp_path / "out"
  arguments = (directory, f"--out={out}", "--row_length=32")
  assert "train.py --config=configs/quickstart.py --workdir=runs/out" in succeed(*arguments)
  before = snapshot(out)
  assert "is finished" in succeed(*arguments)
  assert "row_length is 32 there, 16 here" in refuse(directory, f"--out={out}", "--row_length=16")
  assert "tokenizer is bytes there" in refuse(*arguments, "--train_bpe=300")
  assert "heldout is 0.02 there, 0.5 here" in refuse(*arguments, "--heldout=0.5")
  write(directory, [prose(99, 31)])
  assert "inputs are 9 files" in refuse(*arguments)
  assert snapshot(out) == before


def test_bad_input_is_refused_in_one_line(tmp_path):
  directory = write(tmp_path / "in", [prose(seed, 5) for seed in range(3)])
  out = f"--out={tmp_path / 'out'}"
  assert "no file" in refuse(tmp_path / "absent.txt", out)
  assert "--glob" in refuse(directory, out, "--glob=*.md")
  assert "--out" in refuse(directory)
  assert "--rows" in refuse(directory, out, "--rows=3")
  assert "--row_length" in refuse(directory, out, "--row_length=0")
  assert "--row_length" in refuse(directory, out, "--row_length=many")
  assert "--heldout" in refuse(directory, out, "--heldout=nan")
  assert "--train_bpe" in refuse(directory, out, "--train_bpe=70000")
  assert "exclude" in refuse(directory, out, "--train_bpe=300", "--tokenizer=bytes")
  assert "absent.json" in refuse(directory, out, f"--tokenizer={tmp_path / 'absent.json'}")
  (tmp_path / "bad.json").write_text('{"model": 1}')
  assert "bad.json" in refuse(directory, out, f"--tokenizer={tmp_path / 'bad.json'}")
  vocabulary = {str(i): i for i in range(65_537)}
  (tmp_path / "big.json").write_text(
    json.dumps({"version": "1.0", "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "0"}})
  )
  assert "65537 tokens" in refuse(directory, out, f"--tokenizer={tmp_path / 'big.json'}")
  assert not (tmp_path / "out").exists()
  assert "no text" in refuse(write(tmp_path / "empty", ["", ""]), out)
  assert "cannot write" in refuse(directory, f"--out={directory / '00000.txt'}")
  assert "cannot write" in refuse(directory, f"--out={directory / '00000.txt' / 'out'}")
  assert "--heldout" in refuse(directory / "00000.txt", out, "--heldout=0.999999")
  (tmp_path / "foreign" / "train.zarr").mkdir(parents=True)
  assert "train.zarr" in refuse(directory, f"--out={tmp_path / 'foreign'}")


def test_a_file_that_is_not_utf8_is_named_with_the_byte_and_once_mended_the_work_goes_on(tmp_path):
  texts = [prose(seed, 30).encode() for seed in range(5)]
  directory = write(tmp_path / "in", [*texts[:4], texts[4] + b"\xff"])
  out = tmp_path / "out"
  arguments = (directory, f"--out={out}", "--row_length=32")
  error = refuse(*arguments)
  assert "00004.txt" in error
  assert f"at byte {len(texts[4])}" in error
  assert not (out / "dataset.json").exists()
  assert "begun otherwise: row_length is 32 there" in refuse(directory, f"--out={out}")
  write(directory, texts)
  succeed(*arguments)
  succeed(directory, f"--out={tmp_path / 'fresh'}", "--row_length=32")
  assert snapshot(out) == snapshot(tmp_path / "fresh")
