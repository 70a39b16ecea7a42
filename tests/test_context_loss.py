"""Held-out loss against context: streamed through the state it is what one pass gives, whatever the pieces."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from csympow.data.documents import InMemory
from csympow.data.loader import Windows
from csympow.evaluate import context
from csympow.evaluate.sample import continuation
from csympow.model import ModelConfig, Transformer
from csympow.train.loss import token_losses
from tests.comparing import quick_jit

SHAPE = {"vocab_size": 50, "d_model": 16, "num_layers": 2, "num_heads": 2, "head_dim": 8, "mlp_ratio": 2}


def windows_of(length, documents):
  rng = np.random.default_rng(0)
  return Windows(InMemory("x", [rng.integers(0, 50, length + 1) for _ in range(documents)]), length, 50)


@pytest.mark.parametrize("variant", ["conformal", "softmax"])
def test_streamed_losses_are_those_of_one_pass(monkeypatch, variant):
  monkeypatch.setattr(context, "_PIECE", 8)
  monkeypatch.setattr(context, "_TOKENS_AT_ONCE", 60)  # groups of 3 documents of 20 tokens: the last is padded
  model = Transformer(ModelConfig(**SHAPE, variant=variant, dtype="float32"), rngs=nnx.Rngs(0))
  windows = windows_of(20, 4)
  seen = []
  found = context.position_losses(model, windows, [0, 1, 2, 3], seen.append)
  tokens, targets = (np.stack([windows[i][part] for i in range(4)]) for part in (0, 1))
  logits = quick_jit(lambda model, tokens: model(tokens))(model, tokens)
  np.testing.assert_allclose(found, token_losses(logits, jnp.asarray(targets))[0], rtol=1e-4)
  assert len(seen) == 6


def test_a_curve_averages_documents_by_powers_of_two(tmp_path):
  losses = np.stack([np.arange(1.0, 9.0), np.arange(3.0, 11.0)])
  losses[:, 7] = np.nan  # nothing to predict
  result = context.curve(losses)
  assert result.context == [1, 2, 4, 8]
  np.testing.assert_allclose(result.loss, [2, 3, 4.5, 7])
  np.testing.assert_allclose(result.error, [1, 1, 1, 1])
  assert "<- training context" in context.table(result, 8)
  picture = context.write(result, tmp_path, 4, 30, "conformal, p=2")
  assert picture.read_bytes().startswith(b"\x89PNG")
  assert json.loads((tmp_path / "context.json").read_text())["trained_at"] == 4
  assert context.made_at(tmp_path) == 30
  assert context.made_at(tmp_path / "nowhere") is None
  assert (tmp_path / "context.csv").read_text().count("\n") == 5


def test_the_likeliest_continuation_is_that_of_the_whole_sequence_each_time():
  model = Transformer(ModelConfig(**SHAPE, dtype="float32"), rngs=nnx.Rngs(0))
  prompt = np.arange(5)
  found = continuation(model, prompt, 6, 0.0, seed=0)
  whole = list(prompt)
  for _ in range(6):
    padded = np.pad(whole, (0, 11 - len(whole)))[None]
    logits = quick_jit(lambda model, tokens: model(tokens))(model, padded)
    whole.append(int(np.argmax(logits[0, len(whole) - 1])))
  np.testing.assert_array_equal(found, whole[5:])


def test_samples_are_drawn_by_their_seed():
  model = Transformer(ModelConfig(**SHAPE, dtype="float32"), rngs=nnx.Rngs(0))
  a, b, c = (continuation(model, np.arange(3), 20, 1.0, seed) for seed in (1, 1, 2))
  np.testing.assert_array_equal(a, b)
  assert (a != c).any()
  assert a.max() < 50
