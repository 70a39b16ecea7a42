"""Text to token ids and back: UTF-8 bytes, or a byte-pair encoding in a Hugging Face `tokenizers` file."""

import hashlib
import importlib.util
import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from csympow.config import ConfigError, DataConfig

if TYPE_CHECKING:
  import tokenizers

END_OF_TEXT = "<|endoftext|>"
SMALLEST_BPE = 257  # every byte, and the end of text

# The library keeps over 100 bytes for a token of one call, and shares a batch among the cores: so long texts are cut.
_PIECE_CHARACTERS = 1 << 16
_SPACE_AFTER_A_WORD = re.compile(r"(?<=\w) ")


@runtime_checkable
class Tokenizer(Protocol):
  """What the rest of the library asks of a tokenizer."""

  name: str
  vocab_size: int
  end_of_text: int | None  # the id put before every document, if there is one
  sha256: str  # of what determines the ids

  def encode(self, text: str) -> np.ndarray:
    """The ids of a text, with none added: uint16, or int32 where the vocabulary needs it."""
    ...

  def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
    """The ids of each text, on all cores."""
    ...

  def decode(self, ids: Iterable[int] | np.ndarray) -> str:
    """The text of ids; bytes that are no UTF-8 become U+FFFD."""
    ...


class ByteTokenizer:
  """The 256 bytes of UTF-8."""

  name = "bytes"
  vocab_size = 256
  end_of_text: int | None = None
  sha256 = hashlib.sha256(b"bytes").hexdigest()

  def encode(self, text: str) -> np.ndarray:
    """The bytes of a text."""
    return np.frombuffer(text.encode(), np.uint8).astype(np.uint16)

  def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
    """The bytes of each text."""
    return [self.encode(text) for text in texts]

  def decode(self, ids: Iterable[int] | np.ndarray) -> str:
    """The text of bytes."""
    return bytes(int(i) for i in ids).decode(errors="replace")


class BPETokenizer:
  """A Hugging Face `tokenizers` JSON file, whatever model it holds.

  A file's settings for truncation, padding and added special tokens are not used, and the names of special tokens in a
  text are ordinary text: no document is cut short, and none contains an end of text of its own.
  """

  def __init__(self, path: str | Path):
    try:
      content = Path(path).read_bytes()
    except OSError as error:
      raise ValueError(f"cannot read the tokenizer file {path}: {error.strerror}") from error
    try:
      self._tokenizer = _library().Tokenizer.from_str(content.decode())
    except Exception as error:  # the library raises nothing narrower
      raise ValueError(f"{path} is not a Hugging Face tokenizers file: {_one_line(error)}") from error
    self._tokenizer.no_truncation()
    self._tokenizer.no_padding()
    self._tokenizer.encode_special_tokens = True
    self.name = Path(path).stem
    self.content = content
    self.sha256 = hashlib.sha256(content).hexdigest()
    self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    self.end_of_text: int | None = self._tokenizer.token_to_id(END_OF_TEXT)
    self._dtype = np.uint16 if self.vocab_size <= 1 << 16 else np.int32
    self._may_cut = _splits_before_spaces(json.loads(content))
    if not self.vocab_size:
      raise ValueError(f"{path} is a tokenizer of no tokens")

  def encode(self, text: str) -> np.ndarray:
    """The ids of a text."""
    return self.encode_batch([text])[0]

  def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
    """The ids of each text."""
    cut = [list(_pieces(text)) if self._may_cut else [text] for text in texts]
    encodings = iter(self._tokenizer.encode_batch_fast([p for pieces in cut for p in pieces], add_special_tokens=False))
    return [
      np.concatenate([np.zeros(0, self._dtype), *(np.array(next(encodings).ids, self._dtype) for _ in pieces)])
      for pieces in cut
    ]

  def decode(self, ids: Iterable[int] | np.ndarray) -> str:
    """The text of ids, special tokens by name."""
    return str(self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False))


def load_tokenizer(name_or_path: str | Path) -> Tokenizer:
  """The tokenizer "bytes", or that of a JSON file."""
  return ByteTokenizer() if str(name_or_path) == ByteTokenizer.name else BPETokenizer(name_or_path)


def find_tokenizer(data: DataConfig) -> Tokenizer | None:
  """The tokenizer that the config names, or else the dataset itself; None if neither does.

  A dataset's own is None, too, where the library that reads it is not installed: only texts need it.
  """
  if data.tokenizer is not None:
    try:
      return load_tokenizer(data.tokenizer)
    except ValueError as error:
      raise ConfigError(f"data.tokenizer: {error}") from error
  if data.train == "embedded":
    return load_tokenizer("bytes")
  described = Path(data.train).parent / "dataset.json"
  if "://" in data.train or not described.exists():
    return None
  try:
    told = json.loads(described.read_text())["tokenizer"]
    if told["name"] != "bytes" and importlib.util.find_spec("tokenizers") is None:
      print("csympow: the tokenizers library is not installed: ids instead of text", file=sys.stderr, flush=True)
      return None
    return load_tokenizer("bytes" if told["name"] == "bytes" else str(described.parent / told["file"]))
  except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
    raise ConfigError(f"{described} names no tokenizer that can be read: {error}") from error


def train_bpe(texts: Iterable[str], vocab_size: int) -> "tokenizers.Tokenizer":
  """A byte-level BPE of at most `vocab_size` tokens, `<|endoftext|>` being id 0. Its `to_str()` is the file's text."""
  if vocab_size < SMALLEST_BPE:
    raise ValueError(f"vocab_size must be at least {SMALLEST_BPE} (every byte and {END_OF_TEXT}), got {vocab_size}")
  library = _library()
  tokenizer = library.Tokenizer(library.models.BPE())
  tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer.decoder = library.decoders.ByteLevel()
  trainer = library.trainers.BpeTrainer(
    vocab_size=vocab_size,
    special_tokens=[END_OF_TEXT],
    initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
    show_progress=False,
  )
  tokenizer.train_from_iterator((piece for text in texts for piece in _pieces(text)), trainer)
  return tokenizer


def _library() -> Any:
  try:
    import tokenizers
    import tokenizers.decoders
    import tokenizers.models
    import tokenizers.pre_tokenizers
    import tokenizers.trainers
  except ImportError as error:
    raise ValueError("BPE needs the tokenizers library: pip install tokenizers") from error
  return tokenizers


def _splits_before_spaces(settings: Any) -> bool:
  """Whether no token of this tokenizer reaches from a word over the space after it, so that texts may be cut there."""
  pre_tokenizer = settings.get("pre_tokenizer") or {}
  return (
    settings.get("normalizer") is None
    and pre_tokenizer.get("type") == "ByteLevel"
    and pre_tokenizer.get("use_regex", True)
    and all(token.get("special") for token in settings.get("added_tokens", ()))
  )


def _pieces(text: str) -> Iterator[str]:
  start = 0
  while start < len(text):
    space = _SPACE_AFTER_A_WORD.search(text, start + _PIECE_CHARACTERS)
    stop = space.start() if space else len(text)
    yield text[start:stop]
    start = stop


def _one_line(error: Exception) -> str:
  return " ".join(str(error).split()) or type(error).__name__
