"""Held-out loss against context: streamed through the state it is what one pass gives, whatever the pieces."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from csympow import cost, softmax
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
@pytest.mark.parametrize(("variant", "power"), [("conformal", 2), ("conformal", 4), ("softmax", 2)])
@pytest.mark.slow
def test_streamed_losses_are_those_of_one_pass(monkeypatch, variant, power):
  monkeypatch.setattr(caches, "PIECE", 8)
  monkeypatch.setattr(caches, "TOKENS_AT_ONCE", 60)  # groups of 3 documents of 20 tokens: the last is padded
  model = Transformer(ModelConfig(**SHAPE, variant=variant, power=power, dtype="float32"), rngs=nnx.Rngs(0))
  assert caches.shape_for(model, 20, 4).keep_keys == (power == 4)
  windows = windows_of(20, 4)
  seen = []
  found = streaming.position_losses(model, windows, [0, 1, 2, 3], seen.append)
  tokens, targets = (np.stack([windows[i][part] for i in range(4)]) for part in (0, 1))
  logits = quick_jit(lambda model, tokens: model(tokens))(model, tokens)
  np.testing.assert_allclose(found, token_losses(logits, jnp.asarray(targets))[0], rtol=1e-4)
  assert len(seen) == 6


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize(("variant", "power"), [("conformal", 4), pytest.param("softmax", 2, marks=pytest.mark.slow)])
def test_what_is_read_at_once_has_the_losses_of_what_is_streamed_by_few_programs(monkeypatch, variant, power):
  monkeypatch.setattr(caches, "PIECE", 8)
  monkeypatch.setattr(streaming, "_has_kernel", lambda model, length: True)
  model = Transformer(ModelConfig(**SHAPE, variant=variant, power=power, dtype="float32"), rngs=nnx.Rngs(0))
  windows = windows_of(64, 3)
  tokens, targets = (np.stack([windows[i][part] for i in range(3)]) for part in (0, 1))
  streamed, whole = caches.shape_for(model, 64, 4), streaming.shape_for(model, 64, 4)
  assert (streamed.at_once, whole.at_once) == (False, True)
  before = streaming.at_once._cache_size()
  for read, block in ((64, 64), (33, 33), (9, 9), (8, 4)):
    parts = (model, tokens[:, -read:], targets[:, -read:])
    segments = np.arange(read, dtype=np.int32) // block
    expected = np.concatenate([losses for _, losses in streaming.stream(*parts, streamed, segments)], axis=1)
    ((start, found),) = streaming.stream(*parts, whole, segments)
    assert start == 0
    np.testing.assert_allclose(found, expected, rtol=1e-4)
  assert streaming.at_once._cache_size() == before + 3, "for 64, 16 and 8 tokens"


def test_texts_are_read_at_once_where_a_kernel_attends_to_all_of_them_and_memory_allows(monkeypatch):
  def of(**options):
    return nnx.eval_shape(lambda: Transformer(ModelConfig(**options), rngs=nnx.Rngs(0)))

  two, four, baseline, exact = of(), of(power=4), of(variant="softmax"), of(power=4, dtype="float32")
  for model in (two, four, baseline):
    assert streaming.shape_for(model, 65_536, 16) == caches.shape_for(model, 65_536, 16), "there is none for a CPU"
  monkeypatch.setattr(cost, "named", lambda: "gpu")
  monkeypatch.setattr(softmax, "_traces", lambda *call: True)  # as where cuDNN is installed
  for model in (four, baseline):
    assert streaming.shape_for(model, 65_536, 16).rows == 2
    assert streaming.shape_for(model, 65_536, 16).at_once
    assert not streaming.shape_for(model, 2**20, 16).at_once, "its activations would take 26 GB"
  assert not streaming.shape_for(two, 65_536, 16).at_once, "it has a state"
  assert not streaming.shape_for(exact, 65_536, 16).at_once, "kernels are for 16 bits"
  for other in ({"variant": "softmax", "implementation": "xla"}, {"implementation": "xla"}, {"form": "recurrent"}):
    assert not streaming.shape_for(of(**{"power": 4} | other), 65_536, 16).at_once, "the model asks for another way"


@pytest.mark.gpu
@pytest.mark.parametrize(("variant", "power"), [("conformal", 4), ("sympow", 4), ("softmax", 2)])
def test_kernels_give_the_losses_that_are_streamed(variant, power):
  shape = SHAPE | {"d_model": 128, "head_dim": 64}
  model = Transformer(ModelConfig(**shape, variant=variant, power=power), rngs=nnx.Rngs(0))
  windows = windows_of(4096, 2)
  tokens, targets = (np.stack([windows[i][part] for i in range(2)]) for part in (0, 1))
  streamed, whole = caches.shape_for(model, 4096, 2), streaming.shape_for(model, 4096, 2)
  assert whole.at_once
  for read in (4096, 600):
    parts = (model, tokens[:, -read:], targets[:, -read:])
    expected = np.concatenate([losses for _, losses in streaming.stream(*parts, streamed)], axis=1)
    ((_, found),) = streaming.stream(*parts, whole)
    np.testing.assert_allclose(found, expected, atol=0.03)  # of bfloat16 activations
    np.testing.assert_allclose(found.mean(), expected.mean(), atol=1e-3)


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
