"""Held-out loss against context: streamed through the state it is what one pass gives, whatever the pieces."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from csympow.data.documents import InMemory
from csympow.data.loader import Windows
from csympow.evaluate import caches, octaves, streaming
from csympow.model import ModelConfig, Transformer
from csympow.train.loss import token_losses
from tests.comparing import quick_jit

SHAPE = {"vocab_size": 50, "d_model": 16, "num_layers": 2, "num_heads": 2, "head_dim": 8, "mlp_ratio": 2}


def windows_of(length, documents):
  rng = np.random.default_rng(0)
  return Windows(InMemory("x", [rng.integers(0, 50, length + 1) for _ in range(documents)]), length, 50)


# At p=4 the keys and values of so few tokens are fewer bytes than the state, and are what is kept.
@pytest.mark.parametrize(
  ("variant", "power"), [pytest.param("conformal", 2, marks=pytest.mark.slow), ("conformal", 4), ("softmax", 2)]
)
def test_streamed_losses_are_those_of_one_pass(monkeypatch, variant, power):
  monkeypatch.setattr(caches, "PIECE", 8)
  monkeypatch.setattr(caches, "_TOKENS_AT_ONCE", 60)  # groups of 3 documents of 20 tokens: the last is padded
  model = Transformer(ModelConfig(**SHAPE, variant=variant, power=power, dtype="float32"), rngs=nnx.Rngs(0))
  assert caches.shape_for(model, 20, 4).keep_keys == (power == 4)
  windows = windows_of(20, 4)
  seen = []
  found = streaming.position_losses(model, windows, [0, 1, 2, 3], seen.append)
  tokens, targets = (np.stack([windows[i][part] for i in range(4)]) for part in (0, 1))
  logits = quick_jit(lambda model, tokens: model(tokens))(model, tokens)
  np.testing.assert_allclose(found, token_losses(logits, jnp.asarray(targets))[0], rtol=1e-4)
  assert len(seen) == 6


def test_a_curve_averages_documents_by_powers_of_two(tmp_path):
  losses = np.stack([np.arange(1.0, 9.0), np.arange(3.0, 11.0)])
  losses[:, 7] = np.nan  # nothing to predict
  result = octaves.curve(losses)
  assert result.context == [1, 2, 4, 8]
  np.testing.assert_allclose(result.loss, [2, 3, 4.5, 7])
  np.testing.assert_allclose(result.error, [1, 1, 1, 1])
  assert "<- training context" in octaves.table(result, 8)
  picture = octaves.write(result, tmp_path, 4, 30, "conformal, p=2")
  assert picture.read_bytes().startswith(b"\x89PNG")
  assert json.loads((tmp_path / "context.json").read_text())["trained_at"] == 4
  assert octaves.made_at(tmp_path) == 30
  assert octaves.made_at(tmp_path / "nowhere") is None
  assert (tmp_path / "context.csv").read_text().count("\n") == 5
