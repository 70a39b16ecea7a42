"""Answers do not depend on how prompts were put together, and no length needs a program of its own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from csympow.evaluate import caches, reading
from csympow.evaluate.answers import Answerer, Question
from csympow.model import ModelConfig, Transformer
from csympow.train.loss import token_losses
from tests.comparing import quick_jit

pytestmark = pytest.mark.usefixtures("quick_compilation")

SHAPE = {"vocab_size": 50, "d_model": 16, "num_layers": 2, "num_heads": 2, "head_dim": 8, "mlp_ratio": 2}


def model_of(variant, power=2):
  return Transformer(ModelConfig(**SHAPE, variant=variant, power=power, dtype="float32"), rngs=nnx.Rngs(0))


def questions(lengths):
  rng = np.random.default_rng(0)
  return [Question(rng.integers(0, 50, n), (rng.integers(0, 50, 5), rng.integers(0, 50, 1 + n % 3))) for n in lengths]


# At p=4 the keys and values of so few tokens are fewer bytes than the state, and are what is kept.
@pytest.mark.slow
@pytest.mark.parametrize(("variant", "power"), [("conformal", 2), ("conformal", 4), ("softmax", 2)])
def test_replies_are_those_of_each_prompt_alone(monkeypatch, variant, power):
  monkeypatch.setattr(caches, "PIECE", 4)  # of prompts and of answers
  monkeypatch.setattr(caches, "_ROWS", 3)
  model, asked = model_of(variant, power), questions([1, 4, 7, 13, 16, 9, 3])
  seen = []
  replies = list(Answerer(model, 16, 5, 4).replies(asked, seen.append))
  assert sum(seen) == sum(len(question.prompt) for question in asked)
  whole = quick_jit(lambda tokens: model(tokens))
  for question, reply in zip(asked, replies, strict=True):
    for answer, nll in zip(question.answers, reply.nll, strict=True):
      text = np.concatenate([question.prompt, answer])
      logits = whole(jnp.asarray(np.pad(text, (0, 24 - len(text)))[None]))[0]
      span = slice(len(question.prompt) - 1, len(text) - 1)
      np.testing.assert_allclose(nll, token_losses(logits[span], jnp.asarray(answer))[0].sum(), rtol=1e-4)
    text = list(question.prompt)
    for token in reply.written:
      logits = whole(jnp.asarray(np.pad(text, (0, 24 - len(text)))[None]))[0]
      assert token == np.argmax(logits[len(text) - 1])
      text.append(int(token))
  # What a model writes itself is its likeliest answer.
  own = [q._replace(answers=(r.written, (r.written + 1) % 50)) for q, r in zip(asked, replies, strict=True)]
  for reply in Answerer(model, 16, 5, 4).replies(own):
    assert reply.likeliest.tolist() == [True, False]


def test_all_lengths_share_one_program(monkeypatch):
  traced = []
  prefill = Transformer.prefill_hidden
  monkeypatch.setattr(Transformer, "prefill_hidden", lambda self, *a: (traced.append(a[0].shape), prefill(self, *a))[1])
  monkeypatch.setattr(caches, "PIECE", 11)  # of this test only: no other has compiled for it
  before = reading._advance._cache_size()
  # Committed to a device, as the parameters of a checkpoint are.
  model = jax.device_put(model_of("conformal"), jax.devices()[0])
  answerer = Answerer(model, 40, 2, 1, together=2)
  for lengths in ([3, 5], [40, 38], [12, 20]):
    list(answerer.replies([q._replace(answers=(np.arange(2),)) for q in questions(lengths)]))
  assert sorted(set(traced)) == [(2, 2), (2, 11)]
  assert len(traced) == 2
  assert reading._advance._cache_size() == before + 1
