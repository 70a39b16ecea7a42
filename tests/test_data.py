"""The data: their order is a function of seed and step, and what is not there is an error that names the place."""

import dataclasses
import shutil

import jax
import numpy as np
import pytest
import tensorstore as ts

from csympow import overrides
from csympow.config import DataConfig
from csympow.data.documents import DataError, InMemory, Joined, Zarr, spec
from csympow.data.embedded import embedded
from csympow.data.loader import Steps, Windows, batches, open_documents, rows_here
from csympow.sharding import Layout, make_mesh
from tests.test_config import TINY


def store(path, tokens, segments=None, chunks=(1, 16), dtype="<u2"):
  """A zarr v2 array as LongCrawl64's, and its segments beside it."""
  for name, array, kind in ((path, tokens, dtype), (path.with_suffix(".segments.zarr"), segments, "<i2")):
    if array is None:
      continue
    metadata = {"shape": list(np.shape(array)), "chunks": list(chunks), "dtype": kind, "compressor": {"id": "blosc"}}
    description = spec(str(name)) | {"metadata": metadata, "store_data_equal_to_fill_value": True}
    ts.open(description, create=True).result().write(np.asarray(array).astype(kind)).result()
  return str(path)


@pytest.fixture
def rows(tmp_path):
  """12 documents of 64 tokens, each token its own number."""
  tokens = np.arange(12 * 64).reshape(12, 64)
  return store(tmp_path / "train.zarr", tokens), tokens


def config_of(**changes):
  changes = {"optimizer__warmup_steps": 0} | changes
  return overrides.load(TINY, {name.replace("__", "."): str(value) for name, value in changes.items()})


def all_rows(found):
  return np.concatenate([np.asarray(batch.tokens) for batch in found])


def test_a_row_comes_back_as_it_was_stored(rows):
  path, tokens = rows
  found, segments = Zarr(path).read(3, 5, 40)
  np.testing.assert_array_equal(found, tokens[3, 5:40])
  assert found.dtype == np.int32
  assert segments is None


def test_windows_cover_every_document_once_with_the_token_after_each(rows):
  path, tokens = rows
  windows = Windows(Zarr(path), 32, 1000)
  assert len(windows) == 24
  for index in range(24):
    document, half = divmod(index, 2)
    found, targets, _ = windows[index]
    np.testing.assert_array_equal(found, tokens[document, 32 * half : 32 * half + 32])
    np.testing.assert_array_equal(targets[:31], found[1:])
    assert targets[31] == (tokens[document, 32] if half == 0 else -1)


def test_first_windows_are_one_a_document(rows):
  windows = Windows(Zarr(rows[0]), 32, 1000, first_only=True)
  assert len(windows) == 12
  np.testing.assert_array_equal(windows[5][0], rows[1][5, :32])


@pytest.mark.parametrize("scanned", [0, 1000])  # whether padding is looked for when the dataset is opened
def test_no_target_crosses_a_segment_or_lies_in_padding(tmp_path, monkeypatch, scanned):
  monkeypatch.setattr("csympow.data.documents._SCANNED", scanned)
  tokens = np.arange(16).reshape(1, 16)
  segments = np.array([[0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 2, -1, -1, -1, -1]])
  length = 12 if scanned else 16
  windows = Windows(Zarr(store(tmp_path / "x.zarr", tokens, segments)), length, 100)
  _, targets, found = windows[0]
  np.testing.assert_array_equal(found, segments[0, :length])
  np.testing.assert_array_equal(targets, [1, 2, -1, 4, 5, 6, -1, 8, 9, 10, 11, -1, -1, -1, -1, -1][:length])


def test_an_absent_chunk_is_an_error_and_not_zeros(rows, tmp_path):
  (tmp_path / "train.zarr" / "4.1").unlink()
  documents = Zarr(rows[0])
  documents.read(4, 0, 16)
  with pytest.raises(DataError, match=r"train\.zarr: row 4, tokens 10 to 20 cannot be read: a chunk is absent"):
    documents.read(4, 10, 20)


def test_a_torn_chunk_is_an_error(rows, tmp_path):
  chunk = tmp_path / "train.zarr" / "4.1"
  chunk.write_bytes(chunk.read_bytes()[:-5])
  with pytest.raises(DataError, match="row 4, tokens 10 to 20 cannot be read"):
    Zarr(rows[0]).read(4, 10, 20)


def test_a_token_outside_the_vocabulary_is_named_with_its_place(rows):
  windows = Windows(Zarr(rows[0]), 32, 300)
  with pytest.raises(DataError, match=r"document 4, token 63 has id 319, outside .*vocab_size=300"):
    windows[9]


def test_the_error_of_a_reading_thread_reaches_the_loop(rows):
  config = config_of(model__vocab_size=300, batch_tokens=256)
  with pytest.raises(DataError, match="outside the vocabulary"):
    list(batches(Windows(Zarr(rows[0]), 32, 300), config, None))


@pytest.mark.parametrize("what", ["nothing", "text", "flat", "floats", "empty", "segments"])
def test_what_is_no_dataset_is_refused_in_one_line(tmp_path, what):
  path = tmp_path / "x.zarr"
  if what == "text":
    path.write_text("hello")
  elif what == "flat":
    store(path, np.arange(16), chunks=(16,))
  elif what == "floats":
    store(path, np.ones((2, 16)), dtype="<f4")
  elif what == "empty":
    store(path, np.ones((0, 16)))
  elif what == "segments":
    store(path, np.ones((2, 16)), np.ones((3, 16)))
  with pytest.raises(DataError) as caught:
    open_documents(str(path), "train", DataConfig(), 8)
  assert "x." in str(caught.value)
  assert "\n" not in str(caught.value)


def test_documents_shorter_than_the_context_are_refused_unless_joining_is_allowed(rows):
  with pytest.raises(DataError, match=r"too short for 100 tokens: its longest document has 64; data.join=true joins"):
    open_documents(rows[0], "train", DataConfig(), 100)
  joined = open_documents(rows[0], "train", DataConfig(join=True), 100)
  np.testing.assert_array_equal(joined.lengths, [128] * 6)
  np.testing.assert_array_equal(joined.read(1, 50, 80)[0], rows[1][2:4].ravel()[50:80])
  with pytest.raises(DataError, match="its documents joined have fewer"):
    open_documents(rows[0], "train", DataConfig(join=True), 10_000)


def test_joined_documents_of_unequal_length_are_read_across_their_borders():
  parts = [np.arange(5), np.arange(5, 7), np.arange(7, 20), np.arange(20, 23)]
  joined = Joined(InMemory("x", parts), 2)
  np.testing.assert_array_equal(joined.lengths, [7, 16])
  np.testing.assert_array_equal(joined.read(0, 3, 7)[0], [3, 4, 5, 6])
  np.testing.assert_array_equal(joined.read(1, 0, 16)[0], np.arange(7, 23))


def test_an_epoch_has_every_window_once_and_the_next_has_them_in_another_order():
  windows = Windows(InMemory("x", [np.arange(320)]), 32, 1000)
  config = config_of(batch_tokens=64, steps=10)
  found = all_rows(batches(windows, config, None))[:, 0]
  first, second = found[:10].tolist(), found[10:].tolist()
  assert sorted(first) == sorted(second) == list(range(0, 320, 32))
  assert first != second


def test_the_order_depends_on_the_seed_and_on_nothing_else():
  windows = Windows(embedded("train"), 32, 256)
  base = config_of(steps=6)
  whole = all_rows(batches(windows, base, None))
  later = all_rows(batches(windows, base, None, first_step=4))
  np.testing.assert_array_equal(whole[4 * base.rows :], later)
  threads = dataclasses.replace(base, data=DataConfig(threads=1, prefetch=1), steps=9)
  np.testing.assert_array_equal(all_rows(batches(windows, threads, None))[: len(whole)], whole)
  other = dataclasses.replace(base, seed=1)
  assert (all_rows(batches(windows, other, None)) != whole).any()


def test_unshuffled_windows_come_as_stored(rows):
  windows = Windows(Zarr(rows[0]), 64, 1000)
  config = config_of(context=64, batch_tokens=256, steps=3, data__shuffle=False)
  np.testing.assert_array_equal(all_rows(batches(windows, config, None)), rows[1])


@pytest.mark.parametrize("sizes", [(8, 1, 1, 1), (2, 2, 1, 2), (1, 2, 2, 2), (1, 1, 1, 8)])
def test_the_mesh_changes_nothing_of_a_batch(sizes):
  windows = Windows(embedded("train"), 32, 256)
  config = config_of(steps=2)
  layout = Layout(make_mesh(dict(zip(("data", "fsdp", "tensor", "context"), sizes, strict=True))))
  spread = list(batches(windows, config, layout.sharding("batch", "time")))
  assert len(spread[0].tokens.sharding.device_set) == 8
  np.testing.assert_array_equal(all_rows(spread), all_rows(batches(windows, config, None)))


def test_a_process_reads_the_rows_of_its_own_devices_only():
  reads = []

  class Watched(InMemory):
    def read(self, document, start, stop):
      reads.append(document)
      return super().read(document, start, stop)

  windows = Windows(Watched("x", [np.full(32, n) for n in range(16)]), 32, 1000)
  config = config_of(steps=2, data__shuffle=False)
  tokens, _, _ = Steps(windows, config, rows=np.array([4, 5]))[1]
  np.testing.assert_array_equal(tokens[:, 0], [12, 13])
  assert reads == [12, 13]


def test_a_process_needs_the_rows_of_which_its_devices_hold_a_part():
  layout = Layout(make_mesh({"data": 2, "fsdp": 2, "tensor": 1, "context": 2}))
  sharding = layout.sharding("batch", "time")

  class OfSecondProcess(jax.sharding.Sharding):
    """What the second of two processes of four devices each sees."""

    def addressable_devices_indices_map(self, shape):
      whole = sharding.addressable_devices_indices_map(shape)
      return {device: whole[device] for device in jax.devices()[4:]}

  np.testing.assert_array_equal(rows_here(OfSecondProcess(), (8, 32)), [4, 5, 6, 7])
  np.testing.assert_array_equal(rows_here(sharding, (8, 32)), range(8))


def test_the_embedded_corpus_is_real_text_and_its_parts_share_no_document():
  train, heldout = embedded("train"), embedded("heldout")
  assert train.lengths.sum() > 5e6
  assert heldout.lengths.sum() > 2e5
  assert heldout.lengths.max() > 65_536
  assert b"import" in train.read(0, 0, 5000)[0].astype(np.uint8).tobytes()
  starts = [{tuple(part.read(i, 0, 2000)[0]) for i in range(len(part.lengths))} for part in (train, heldout)]
  assert not starts[0] & starts[1]


def test_a_fingerprint_changes_with_the_data(rows, tmp_path):
  before = Zarr(rows[0]).fingerprint
  assert Zarr(rows[0]).fingerprint == before
  shutil.rmtree(rows[0])
  assert Zarr(store(tmp_path / "train.zarr", rows[1] + 1)).fingerprint != before


def test_no_sources_are_an_error(tmp_path):
  with pytest.raises(DataError, match="no Python sources under"):
    embedded("train", str(tmp_path))


def test_padding_at_the_end_of_rows_makes_no_windows(tmp_path):
  segments = np.zeros((3, 32))
  segments[0, 20:], segments[1, 5:], segments[2] = -1, -1, -1
  windows = Windows(Zarr(store(tmp_path / "x.zarr", np.ones((3, 32)), segments)), 10, 100)
  assert len(windows) == 2
  assert all((windows[index][2] >= 0).all() for index in range(2))


def test_packed_rows_are_not_joined(tmp_path):
  path = store(tmp_path / "x.zarr", np.ones((4, 16)), np.zeros((4, 16)))
  with pytest.raises(DataError, match="packed and padded and cannot be joined; prepare them with --row_length=32"):
    open_documents(path, "train", DataConfig(join=True), 32)


def test_links_that_lead_nowhere_are_left_out(tmp_path):
  (tmp_path / "module.py").write_text("import this")
  (tmp_path / "gone.py").symlink_to(tmp_path / "nothing")
  np.testing.assert_array_equal(embedded("train", str(tmp_path)).lengths, [11])
