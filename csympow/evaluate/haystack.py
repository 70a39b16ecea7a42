"""Prompts of needles in haystacks, in the style of RULER (Hsieh et al., 2024), made offline and from a seed.

Only the original generator is RULER: its words come from a word list and its texts from essays; here words are made of
syllables and running text is a file of the user's. Kinds of prompts:

    single      one needle, one value to find
    keys        4 needles with keys of their own, one of them asked for
    values      4 needles with one key, all values asked for
    queries     4 needles with keys of their own, all asked for
    tracking    a variable that is given a value and handed on 4 times; all its names are asked for
    common      a list of words, 10 of them 30 times and all others 3 times; the 10 are asked for
    frequent    made-up words, their frequencies by the zeta law of exponent 2; the three most frequent are asked for
"""

import itertools
import math
import re
import string
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from csympow.config import ConfigError

NEEDLES = {"single": (1, 1, 1), "keys": (4, 1, 1), "values": (1, 4, 1), "queries": (4, 1, 4)}  # keys, values, queries
KINDS = (*NEEDLES, "tracking", "common", "frequent")
WITH_DEPTH = ("single", "keys")  # one needle is asked for, and stands somewhere
VALUES = ("numbers", "words", "uuids")

_NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
_CONSONANTS, _VOWELS = "bdfghjklmnprstvz", "aeiou"
_COMMON, _COMMON_TIMES, _OTHER_TIMES = 10, 30, 3
_HOPS = 4
_ZETA_2 = math.pi**2 / 6
_FREQUENT_LEAST = 100  # words, below which the fourth and the fifth may be equally frequent


class Prompt(NamedTuple):
  """What is read, what is asked at its end, and the strings that a right answer contains."""

  text: str
  question: str
  gold: tuple[str, ...]


class Haystack:
  """The lines among which needles lie: "noise", "needles" (others of them), or the sentences of a text file."""

  def __init__(self, name: str, values: str) -> None:
    self.name, self.values = name, values
    self._sentences = [] if name in ("noise", "needles") else _sentences(Path(name))
    # A file is what it holds, whatever it is called.
    self.identity = (values, self._sentences or name)

  def lines(self, size: int, rng: np.random.Generator) -> list[str]:
    """So many of them; a text begins at a random sentence, and again when it ends."""
    if self.name == "noise":
      return [_NOISE] * size
    if self.name == "needles":
      return [needle(self.values, word(rng), value(self.values, rng)) for _ in range(size)]
    first = int(rng.integers(len(self._sentences)))
    return [self._sentences[(first + i) % len(self._sentences)] for i in range(size)]


def make(kind: str, size: int, haystack: Haystack, depth: float | None, rng: np.random.Generator) -> Prompt:
  """A prompt of a kind, with a haystack of some size; `depth`, in percent, is where the needle asked for stands."""
  if kind in NEEDLES:
    return _needles(*NEEDLES[kind], size, haystack, depth, rng)
  return {"tracking": _tracking, "common": _common, "frequent": _frequent}[kind](size, rng)


def least_size(kind: str) -> int:
  """The smallest haystack of a kind."""
  return _FREQUENT_LEAST if kind == "frequent" else 1


def largest_size(kind: str, fits: Callable[[int], bool]) -> int:
  """The largest size that fits, if larger ones are longer: doubled, then halved in."""
  low = least_size(kind)
  high = 2 * low
  while fits(high):
    low, high = high, 2 * high
  while high - low > 1:
    middle = (low + high) // 2
    low, high = (middle, high) if fits(middle) else (low, middle)
  return low


def word(rng: np.random.Generator) -> str:
  """Three syllables: one of half a million."""
  return "".join(_CONSONANTS[rng.integers(16)] + _VOWELS[rng.integers(5)] for _ in range(3))


def value(values: str, rng: np.random.Generator) -> str:
  """What a needle hides."""
  if values == "numbers":
    return str(rng.integers(10**6, 10**7))
  return word(rng) if values == "words" else str(uuid.UUID(bytes=rng.bytes(16), version=4))


def needle(values: str, key: str, hidden: str) -> str:
  """The line that tells a value."""
  return f"One of the special magic {values} for {key} is: {hidden}."


def _needles(
  keys: int, each: int, queries: int, size: int, haystack: Haystack, depth: float | None, rng: np.random.Generator
) -> Prompt:
  kind = haystack.values
  names = _distinct(keys, lambda: word(rng))
  told = {name: _distinct(each, lambda: value(kind, rng)) for name in names}
  asked = [str(name) for name in rng.permutation(names)[:queries]]
  lines = haystack.lines(size, rng)
  places = []
  for name, hidden in ((key, one) for key, values in told.items() for one in values):
    fixed = depth is not None and name == asked[0]
    place = round(float(depth or 0) / 100 * size) if fixed else int(rng.integers(size + 1))
    places.append((place, needle(kind, name, hidden)))
  for place, line in sorted(places, key=lambda x: x[0], reverse=True):
    lines.insert(place, line)

  place_of = {line: place for place, line in enumerate(lines)}
  gold = tuple(one for name in asked for one in sorted(told[name], key=lambda one: place_of[needle(kind, name, one)]))
  about = asked[0] if queries == 1 else f"{', '.join(asked[:-1])}, and {asked[-1]}"
  what, verb, those = (kind[:-1], "is", "is the") if len(gold) == 1 else (kind, "are", "are all the")
  text = (
    f"Some special magic {kind} are hidden within the following text. Make sure to memorize it. I will quiz you about "
    f"the {kind} afterwards.\n" + "\n".join(lines) + "\n"
  )
  question = (
    f"What {those} special magic {what} for {about} mentioned in the provided text? "
    f"The special magic {what} for {about} mentioned in the provided text {verb}"
  )
  return Prompt(text, question, gold)


def _tracking(size: int, rng: np.random.Generator) -> Prompt:
  names = _distinct(_HOPS + 1, lambda: _letters(string.ascii_uppercase, 5, rng))
  told = str(rng.integers(10**4, 10**5))
  chain = [f"VAR {names[0]} = {told}", *(f"VAR {b} = VAR {a}" for a, b in itertools.pairwise(names))]
  lines = [_NOISE] * size
  for place, line in reversed(list(zip(np.sort(rng.integers(0, size + 1, len(chain))), chain, strict=True))):
    lines.insert(int(place), line)
  text = (
    "Memorize and track the chain of variable assignment hidden in the following text.\n\n" + "\n".join(lines) + "\n"
  )
  question = (
    f"Question: Find all variables that are assigned the value {told} in the text above. Answer: According to the "
    f"chain of variable assignment in the text above, {len(names)} variables are assigned the value {told}, they are:"
  )
  return Prompt(text, question, tuple(names))


def _common(size: int, rng: np.random.Generator) -> Prompt:
  words = _distinct(_COMMON + size, lambda: word(rng))
  listed = words[:_COMMON] * _COMMON_TIMES + words[_COMMON:] * _OTHER_TIMES
  listed = [listed[i] for i in rng.permutation(len(listed))]
  text = (
    "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that "
    "appear most often.\n" + " ".join(f"{i}. {one}" for i, one in enumerate(listed, 1)) + "\n"
  )
  question = (
    f"Question: What are the {_COMMON} most common words in the above list? Answer: The top {_COMMON} words that "
    "appear most often in the list are:"
  )
  return Prompt(text, question, tuple(words[:_COMMON]))


def _frequent(size: int, rng: np.random.Generator) -> Prompt:
  counts = [int(size / rank**2 / _ZETA_2) for rank in range(1, math.isqrt(size) + 1)]
  counts = [count for count in counts if count]
  # The most frequent is no word: half of the text is to be ignored.
  words = ["....", *_distinct(len(counts) - 1, lambda: _letters(string.ascii_lowercase, 6, rng))]
  listed = [one for one, count in zip(words, counts, strict=True) for _ in range(count)]
  listed = [listed[i] for i in rng.permutation(len(listed))]
  text = (
    "Read the following coded text and track the frequency of each coded word. Find the three most frequently appeared "
    "coded words. " + " ".join(listed) + "\n"
  )
  question = (
    "Question: Do not provide any explanation. Please ignore the dots '....'. What are the three most frequently "
    "appeared words in the above coded text? Answer: According to the coded text above, the three most frequently "
    "appeared words are:"
  )
  return Prompt(text, question, tuple(words[1:4]))


def _letters(alphabet: str, count: int, rng: np.random.Generator) -> str:
  return "".join(alphabet[i] for i in rng.integers(0, len(alphabet), count))


def _distinct(count: int, draw: Callable[[], str]) -> list[str]:
  found: dict[str, None] = {}
  while len(found) < count:
    found[draw()] = None
  return list(found)


def _sentences(path: Path) -> list[str]:
  try:
    text = path.read_text(encoding="utf-8")
  except (OSError, UnicodeDecodeError) as error:
    reason = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
    raise ConfigError(
      f"--haystack must be noise, needles or a text file, and {path} cannot be read: {reason}"
    ) from error
  sentences = [" ".join(part.split()) for part in re.split(r"(?<=[.!?])\s+|\n\s*\n", text)]
  sentences = [sentence for sentence in sentences if sentence]
  if not sentences:
    raise ConfigError(f"--haystack={path} is an empty file")
  return sentences
