"""Multi-query associative recall: every query has the answer that the context gives, at a place by the power law."""

import numpy as np
import pytest

from csympow.config import ConfigError
from csympow.evaluate.mqar import Setting, examples, position_rule

SETTINGS = {
  "plain": Setting(length=64, pairs=8, examples=1100),
  "full": Setting(length=64, pairs=16, examples=50),
  "forgetting": Setting(length=64, pairs=12, examples=200, returning=5),
  "twice": Setting(length=64, pairs=8, examples=50, passes=2),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_every_query_asks_for_the_newest_value_of_its_key(name):
  setting, vocab = SETTINGS[name], 128
  made = examples(setting, vocab, seed=1)
  assert made.tokens.shape == (setting.examples, setting.length)
  assert made.positions.shape == made.values.shape == (setting.examples, setting.keys)
  for tokens, positions, values, returned in zip(*made, strict=True):
    context = tokens[: 2 * setting.pairs]
    keys, told = context[::2], context[1::2]
    assert len(set(told)) == setting.pairs
    assert ((told >= vocab // 2) & (told < vocab)).all()
    assert ((keys >= 1) & (keys < vocab // 2)).all()
    assert len(set(keys)) == setting.keys
    for again in range(setting.passes):
      np.testing.assert_array_equal(tokens[again * len(context) : (again + 1) * len(context)], context)
    newest = dict(zip(keys, told, strict=True))
    assert [newest[key] for key in tokens[positions]] == list(values)
    assert set(tokens[positions]) == set(keys)
    assert len(set(positions)) == setting.keys
    assert (positions >= setting.passes * len(context)).all()
    assert (positions % 2 == 0).all()
    assert [(keys == key).sum() == 2 for key in tokens[positions]] == list(returned)


def test_examples_are_a_function_of_the_seed():
  a, b, c = (examples(SETTINGS["plain"], 128, seed).tokens for seed in ((1, 2), (1, 2), (1, 3)))
  np.testing.assert_array_equal(a, b)
  assert (a != c).mean() > 0.5


def test_gaps_follow_the_power_law_without_replacement():
  setting = Setting(length=20, pairs=2, examples=40_000)
  gaps = (examples(setting, 64, seed=0).positions - 4) // 2
  weights = 0.01 * np.arange(1, 9) ** (0.01 - 1)
  p = weights / weights.sum()
  wanted = p[:, None] * p[None, :] / (1 - p[:, None]) * (1 - np.eye(8))  # of the first draw and the second
  found = np.histogram2d(*gaps.T, bins=(range(9), range(9)))[0] / len(gaps)
  np.testing.assert_allclose(found, wanted, atol=6 * np.sqrt(wanted.max() / len(gaps)))


def test_who_reads_no_key_knows_the_places_and_no_more():
  # Both slots are taken, and the first key's is the near one in 2 of 3 draws (weights 1 and nearly 1/2).
  two = Setting(length=8, pairs=2, examples=20_000)
  assert abs(position_rule(examples(two, 32, seed=0), two) - 2**0.99 / (1 + 2**0.99)) < 0.01
  forgetting = Setting(length=40, pairs=8, examples=4000, returning=4)
  assert 1 / 8 < position_rule(examples(forgetting, 64, seed=0), forgetting) < 0.4


@pytest.mark.parametrize(
  ("setting", "vocab", "line"),
  [
    ({"length": 63, "pairs": 4}, 128, "length must be even, got 63"),
    ({"length": 64, "pairs": 17}, 128, "17 pairs and their queries need a length of 68, got 64"),
    ({"length": 64, "pairs": 8, "passes": 4}, 128, "8 pairs and their queries need a length of 80, got 64"),
    ({"length": 64, "pairs": 4, "returning": 3}, 128, "at most 2 of 4 pairs can return, got 3"),
    ({"length": 64, "pairs": 0}, 128, "pairs must be at least 1, got 0"),
    ({"length": 64, "pairs": 4}, 64, "a vocabulary of 64 is too small for 4 pairs in 64 tokens"),
  ],
)
def test_what_cannot_be_made_is_refused_in_one_line(setting, vocab, line):
  with pytest.raises(ConfigError) as caught:
    examples(Setting(**setting, examples=1), vocab, seed=0)
  assert line in str(caught.value)
  assert "\n" not in str(caught.value)
