"""A model's answers to prompts of many lengths: what it writes next, and how likely it finds what should come.

Prompts enter the state in pieces of one size, side by side in rows of one number, padded in front where they are
shorter. So three programs do for all of them, whatever their lengths: one that reads a piece, one that weighs answers
and one that writes.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from csympow.evaluate import caches
from csympow.evaluate.reading import prefill_padded, read_prompts
from csympow.model import Transformer
from csympow.nn import Cache
from csympow.train.loss import token_losses

_TOGETHER = 32  # questions, where nobody says how many
_LOGIT_BYTES = 2**30  # of the answers that are weighed


class Question(NamedTuple):
  """What a model reads, and what might come next.

  Attributes:
    prompt: its tokens, at least one.
    answers: continuations whose likelihood is wanted; every question of a task has the same number of them.
  """

  prompt: Int[np.ndarray, "n"]
  answers: tuple[Int[np.ndarray, "_"], ...] = ()


class Reply(NamedTuple):
  """What the model makes of a question.

  Attributes:
    nll: -log of each answer's probability, in nats, over all its tokens.
    likeliest: whether each answer is what the model would write itself, the likeliest token at every place.
    written: what it does write, taking the likeliest token every time.
  """

  nll: Float[np.ndarray, "answers"]
  likeliest: Bool[np.ndarray, "answers"]
  written: Int[np.ndarray, "count"]


class Answerer:
  """A model that is asked.

  Args:
    model: the model.
    longest: tokens of the longest prompt to come.
    answer_tokens: tokens of the longest answer to come.
    count: tokens to write after each prompt.
    together: how many questions at most will be asked in one call.
  """

  def __init__(
    self, model: Transformer, longest: int, answer_tokens: int = 1, count: int = 0, together: int = _TOGETHER
  ) -> None:
    self._model, self._count = model, count
    self._answer_piece = min(caches.PIECE, answer_tokens)
    weighed = -(-answer_tokens // self._answer_piece) * self._answer_piece
    fitting = max(1, _LOGIT_BYTES // (4 * self._answer_piece * model.config.padded_vocab_size))
    self._shape = caches.shape_for(model, longest, min(together, fitting), max(weighed, count))

  def replies(self, questions: Sequence[Question], check: Callable[[int], None] = lambda done: None) -> Iterator[Reply]:
    """The reply to each question, in order; the nearer their lengths, the less work is lost to padding.

    `check` is called before each piece of a prompt with the tokens that it has.
    """
    rows = self._shape.rows
    for first in range(0, len(questions), rows):
      group = questions[first : first + rows]
      prompts = [question.prompt for question in group]
      cache = caches.empty_cache(self._model, self._shape)
      logits, cache = read_prompts(self._model, prompts, cache, self._shape, check)
      weighed = [self._weigh(cache, logits, answers) for answers in zip(*(q.answers for q in group), strict=True)]
      nll, likeliest = (np.array([found[i] for found in weighed]).reshape(-1, rows).T for i in (0, 1))
      written = np.asarray(_write(self._model, cache, logits, self._count))
      for row in range(len(group)):
        yield Reply(nll[row].astype(np.float32), likeliest[row].astype(bool), written[row])

  def _weigh(self, cache: Cache, logits: Array, answers: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    length = max(len(answer) for answer in answers)
    tokens = np.full((self._shape.rows, length + -length % self._answer_piece), -1, np.int32)
    for row, answer in zip(tokens, answers, strict=False):
      row[: len(answer)] = answer
    nll, likeliest = np.zeros(len(tokens), np.float32), np.ones(len(tokens), bool)
    for start in range(0, tokens.shape[1], self._answer_piece):
      part = tokens[:, start : start + self._answer_piece]
      cache, logits, more, still = _weigh(self._model, cache, logits, part)
      nll, likeliest = nll + np.asarray(more), likeliest & np.asarray(still)
    return nll, likeliest


@jax.jit
def _weigh(
  model: Transformer, cache: Cache, logits: Float[Array, "B V"], answer: Int[Array, "B a"]
) -> tuple[Cache, Float[Array, "B V"], Float[Array, "B"], Bool[Array, "B"]]:
  hidden, cache = prefill_padded(model, cache, answer)
  after = jnp.concatenate([logits[:, None], model.logits(hidden)], axis=1)
  nll, _ = token_losses(after[:, :-1], answer)
  likeliest = jnp.all((jnp.argmax(after[:, :-1], axis=-1) == answer) | (answer < 0), axis=1)
  return cache, after[:, -1], nll.sum(axis=1), likeliest


@functools.partial(jax.jit, static_argnames="count")
def _write(model: Transformer, cache: Cache, logits: Float[Array, "B V"], count: int) -> Int[Array, "B count"]:
  def advance(carry: tuple[Array, Cache], _: None) -> tuple[tuple[Array, Cache], Array]:
    logits, cache = carry
    token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    return model.step(token, cache), token

  _, tokens = lax.scan(advance, (logits, cache), None, count)
  return jnp.swapaxes(tokens, 0, 1)
