"""Tokenizers: bytes, and BPEs, lose nothing and are the same every time."""

import json
from collections import Counter

import numpy as np
import pytest

from csympow.data.tokenizer import END_OF_TEXT, BPETokenizer, ByteTokenizer, load_tokenizer, train_bpe
from tests.preparing import expected_segments, prose, read_split, succeed, write


def test_bytes_and_text_are_each_others_inverse():
  tokenizer = load_tokenizer("bytes")
  assert isinstance(tokenizer, ByteTokenizer)
  assert tokenizer.vocab_size == 256
  text = "naïve 猫\r\n\0"
  assert tokenizer.encode(text).tolist() == list(text.encode())
  assert tokenizer.decode(tokenizer.encode(text)) == text
  assert tokenizer.decode([0xFF, 65]) == "\N{REPLACEMENT CHARACTER}A"


def test_a_trained_bpe_is_the_same_every_time_and_loses_nothing(tmp_path):
  texts = [prose(seed, 400) for seed in range(10)]
  files = [train_bpe(iter(texts), 320).to_str() for _ in range(3)]
  assert len(set(files)) == 1
  path = tmp_path / "bpe.json"
  path.write_text(files[0])
  tokenizer = load_tokenizer(path)
  assert tokenizer.vocab_size <= 320
  assert tokenizer.end_of_text == 0
  for text in (texts[0], "猫 é\r\n\0", f"a{END_OF_TEXT}b", ""):
    ids = tokenizer.encode(text)
    assert ids.dtype == np.uint16
    assert 0 not in ids, "the name of the end of text is text"
    assert tokenizer.decode(ids) == text
  assert tokenizer.decode([0]) == END_OF_TEXT
  assert len(tokenizer.encode(texts[0])) < len(texts[0]) / 2
  with pytest.raises(ValueError, match="at least 257"):
    train_bpe(texts, 100)


def test_texts_cut_for_speed_and_settings_of_the_file_change_no_token(tmp_path, monkeypatch):
  library = train_bpe([prose(0, 2000)], 300)
  library.enable_truncation(8)
  library.enable_padding(length=4096)
  path = tmp_path / "bpe.json"
  path.write_text(library.to_str())
  tokenizer = BPETokenizer(path)
  library.no_truncation()
  library.no_padding()
  monkeypatch.setattr("csympow.data.tokenizer._PIECE_CHARACTERS", 5)
  for text in (prose(1, 300), "one  two   \n three.  4 5\t6  ", "'s  it 's it's\n\n\n  x _ y_ z"):
    assert tokenizer.encode(text).tolist() == library.encode(text).ids


def test_a_dataset_of_bpe_tokens_has_its_tokenizer_and_an_end_of_text_before_each_document(tmp_path):
  texts = [prose(seed, 10 * seed) for seed in range(1, 12)]
  directory, out = write(tmp_path / "in", texts), tmp_path / "out"
  text = succeed(directory, f"--out={out}", "--row_length=32", "--train_bpe=300", "--heldout=0.3")
  dataset = json.loads((out / "dataset.json").read_text())
  assert dataset["tokenizer"]["file"] == "tokenizer.json"
  assert f"--config.model.vocab_size={dataset['vocab_size']}" in text
  tokenizer = load_tokenizer(out / "tokenizer.json")
  assert tokenizer.vocab_size == dataset["vocab_size"]
  found = Counter(read_split(out, "train") + read_split(out, "heldout"))
  assert found == Counter(p for t in texts for p in expected_segments([0, *tokenizer.encode(t).tolist()], 32))
  again = tmp_path / "again"
  tokenizer_file = f"--tokenizer={out / 'tokenizer.json'}"
  succeed(directory, f"--out={again}", "--row_length=32", tokenizer_file, "--heldout=0.3")
  assert json.loads((again / "dataset.json").read_text())["fingerprint"] == dataset["fingerprint"]
