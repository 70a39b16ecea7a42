"""Loss against context: the four curves are what their definitions say, of text that is what it is said to be."""

import numpy as np
import pytest

from csympow.data.documents import DataError, InMemory
from csympow.evaluate import curves
from csympow.evaluate.stretches import choose


def bucket_sums(losses, piece=7):
  found = curves.BucketSums(*losses.shape)
  for start in range(0, losses.shape[1], piece):
    found.add(start, losses[:, start : start + piece])
  return found.sums, found.counts, losses.shape[1]


@pytest.mark.parametrize("length", [2, 3, 100, 1000, 4096])
def test_buckets_cover_every_position_once_and_end_at_powers_of_two(length):
  ends = curves.bucket_ends(length)
  assert ends[-1] == length
  assert (np.diff([0, *ends]) > 0).all()
  assert {2**n for n in range(13) if 2**n <= length} <= set(ends.tolist())
  octave = ends[(ends > length // 4) & (ends <= length // 2)]
  assert length < 512 or len(octave) in (8, 9)


def test_means_by_position_and_up_to_a_context_are_those_of_the_losses():
  losses = np.random.default_rng(0).random((5, 1000))
  losses[2, -1] = np.nan  # a document's last token has nothing after it
  by_position = curves.by_position(*bucket_sums(losses))
  for first, last, loss, error in zip(*by_position, strict=True):
    by_document = np.nanmean(losses[:, first - 1 : last], axis=1)
    np.testing.assert_allclose([loss, error], [by_document.mean(), by_document.std(ddof=1) / np.sqrt(5)])
  cumulative = curves.cumulative(*bucket_sums(losses))
  assert cumulative.last == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1000]
  for last, loss in zip(cumulative.last, cumulative.loss, strict=True):
    np.testing.assert_allclose(loss, np.nanmean(losses[:, :last], axis=1).mean())


def test_the_gain_is_paired_so_that_differences_between_documents_do_not_count():
  by_context = np.asarray([[5.0, 4.5, 4.0], [1.0, 0.5, 0.0], [3.0, 2.5, 2.0]])
  found = curves.gain(by_context, 4)
  assert found.loss == [1.0, 0.5, 0.0]
  assert found.error == [0.0, 0.0, 0.0]
  assert curves.window_matched(by_context, 4).error[0] > 1


def test_one_document_has_no_standard_error():
  assert np.isnan(curves.by_position(*bucket_sums(np.ones((1, 8)))).error).all()


def texts(*lengths):
  ends = np.cumsum(lengths)
  return InMemory("x", [np.arange(end - length, end) for end, length in zip(ends, lengths, strict=True)])


def test_documents_come_whole_first_then_their_later_parts():
  found = choose(texts(50, 5, 31, 10), 10, 8)
  assert [tokens[0] for tokens in found.tokens] == [0, 55, 86, 10, 65, 20, 75, 30]
  assert [len(tokens) for tokens in found.tokens] == [11, 11, 10, 11, 11, 11, 11, 11]
  assert (found.length, found.documents, found.joined) == (10, 3, False)
  tokens, targets = found.rows([2, 3])
  assert targets[0].tolist() == [87, 88, 89, 90, 91, 92, 93, 94, 95, -1]
  assert (targets[1] == tokens[1] + 1).all()
  assert found.describe() == "8 stretches of 10 tokens, of 3 documents"
  assert choose(texts(50, 5, 31, 10), 10, 2).describe() == "2 documents of 10 tokens"


def test_documents_are_joined_only_if_none_is_long_enough_and_it_is_said():
  found = choose(texts(4, 4, 4, 4, 4, 4), 10, 8)
  assert [tokens.tolist() for tokens in found.tokens] == [list(range(11)), list(range(12, 23))]
  assert found.joined
  assert "documents joined" in found.describe()


def test_less_text_than_asked_for_makes_shorter_stretches():
  assert choose(texts(4, 4, 4), 1000, 8).length == 8
  with pytest.raises(DataError, match="no text"):
    choose(texts(1), 10, 8)


def test_of_packed_rows_each_document_is_one_and_padding_is_none():
  class Packed(InMemory):
    def read(self, document, start, stop):
      return super().read(document, start, stop)[0], np.asarray([0, 0, 0, 0, 1, 1, 2, 2, 2, -1])[start:stop]

  found = choose(Packed("x", [np.arange(10), np.arange(10, 20)]), 3, 9)
  assert [tokens.tolist() for tokens in found.tokens] == [[0, 1, 2, 3], [6, 7, 8], [10, 11, 12, 13], [16, 17, 18]]
