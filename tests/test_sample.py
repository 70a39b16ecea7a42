"""Text from a model: the token that the attention form finds likeliest, whatever the cache, the batch or the prompt."""

import argparse
import csv
import json

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from csympow.config import ConfigError
from csympow.data.tokenizer import ByteTokenizer
from csympow.evaluate import caches, generation, sample, writing
from csympow.evaluate.generation import Sampling, continuation, generate, likeliest
from csympow.model import ModelConfig, Transformer
from csympow.train.stop import Stop
from tests import running
from tests.comparing import quick_jit

SHAPE = {"vocab_size": 50, "d_model": 16, "num_layers": 2, "num_heads": 2, "head_dim": 8, "mlp_ratio": 2}


@pytest.fixture(scope="module", autouse=True)
def quick_compilation():
  """What is compiled here runs for moments."""
  jax.config.update("jax_disable_most_optimizations", True)
  yield
  jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def run_directory(tmp_path_factory):
  workdir = tmp_path_factory.mktemp("runs") / "tiny"
  running.untrained(workdir)
  return workdir


def make(**options):
  """A model whose layers have their say: a fresh one would repeat the token it has just read."""
  graphdef, parameters = nnx.split(Transformer(ModelConfig(**SHAPE, **options, dtype="float32"), rngs=nnx.Rngs(0)))
  parameters = nnx.to_pure_dict(parameters)
  parameters["layers"] = jax.tree.map(lambda x: 20 * x, parameters["layers"])
  return nnx.merge(graphdef, parameters)


@quick_jit
def logits_of(model, tokens):
  return model(tokens)


def by_attention(model, prompt, count):
  """The likeliest tokens by the whole sequence each time."""
  whole = list(prompt)
  for _ in range(count):
    logits = logits_of(model, np.pad(whole, (0, 24 - len(whole)))[None])
    whole.append(int(np.argmax(logits[0, len(whole) - 1])))
  return whole[len(prompt) :]


@pytest.mark.slow
@pytest.mark.parametrize(("variant", "cache"), [("conformal", "folded"), ("conformal", "state"), ("softmax", "keys")])
def test_greedy_text_is_the_attention_forms_token_by_token_for_prompts_of_any_lengths(monkeypatch, variant, cache):
  monkeypatch.setattr(caches, "PIECE", 4)  # the longest prompt takes three pieces
  model = make(variant=variant, form="attention")
  worth = {"keys": 0, "folded": 13, "state": 5}[cache]
  monkeypatch.setattr(type(model.layers.attention), "tokens_of_a_state", worth)
  rng = np.random.default_rng(0)
  prompts = [rng.integers(0, 50, length) for length in (3, 10, 1)]
  folds = []
  monkeypatch.setattr(generation, "_fold", lambda model, cache: folds.append(1) or model.fold(cache))
  found = np.stack([drawn.tokens for drawn in generate(model, prompts, 9, Sampling())], axis=1)
  assert len(folds) == (cache == "folded")
  assert len(np.unique(found)) > 5
  for row, prompt in zip(found, prompts, strict=True):
    assert row.tolist() == by_attention(model, prompt, 9)


@pytest.mark.slow
def test_samples_are_drawn_by_their_seed_and_a_row_does_not_depend_on_the_others():
  model = make()
  a, b, c = (continuation(model, np.arange(3), 12, 1.0, seed) for seed in (1, 1, 2))
  np.testing.assert_array_equal(a, b)
  assert (a != c).any()
  assert a.max() < 50
  both = generate(model, [np.arange(3), np.arange(5)], 12, Sampling(1.0, seed=1))
  np.testing.assert_array_equal([drawn.tokens[0] for drawn in both], a)


def test_top_k_and_top_p_leave_the_likeliest():
  probability, chosen = jnp.asarray([[0.1, 0.4, 0.2, 0.3]]), quick_jit(likeliest)

  def left(top_k, top_p):
    found = chosen(jnp.log(probability), jnp.int32(top_k), jnp.float32(top_p))
    return np.flatnonzero(found[0] > -1e29).tolist()

  assert left(0, 1.0) == [0, 1, 2, 3]
  assert left(2, 1.0) == [1, 3]
  assert left(0, 0.5) == [1, 3]
  assert left(0, 0.39) == [1]
  assert left(0, 1e-9) == [1]
  assert left(3, 0.7) == [1, 3]  # 4/9 and 3/9 of what the three leave
  assert left(99, 1.0) == [0, 1, 2, 3]
  model = make()
  greedy = continuation(model, np.arange(4), 8, 0.0, seed=0)
  for sampling in (Sampling(1.0, top_k=1), Sampling(1.0, top_p=1e-6)):
    drawn = [one.tokens[0] for one in generate(model, [np.arange(4)], 8, sampling)]
    np.testing.assert_array_equal(drawn, greedy)


@hypothesis.given(st.one_of(st.binary(max_size=200), st.text(max_size=120).map(str.encode)))
def test_a_stream_shows_the_text_and_never_half_a_character(content):
  stream = writing.TextStream(ByteTokenizer().decode)
  shown = []
  for byte in content:
    shown.append(stream.add(byte))
  text = content.decode(errors="replace")
  assert text.startswith("".join(shown))
  assert "".join(shown) + stream.end() == text


def arguments(out, workdir, **changes):
  common = {"workdir": [workdir], "step": None, "max_context": 1000, "out": out, "stop": Stop(), "prompts": None}
  chosen = {"prompt": ["def "], "tokens": 6, "temperature": 0.8, "top_k": 0, "top_p": 1.0, "seed": 0}
  return argparse.Namespace(**common | chosen | changes)


def test_the_task_writes_what_it_shows(run_directory, tmp_path, capsys):
  (tmp_path / "prompts.txt").write_text("class A:\n\nimport os\n")
  sample.run(arguments(tmp_path, run_directory, prompts=tmp_path / "prompts.txt"))
  record = json.loads((tmp_path / "sample.json").read_text())
  rows = list(csv.DictReader((tmp_path / "sample.csv").read_text().splitlines()))
  assert [found["prompt"] for found in record["runs"][0]["samples"]] == ["def ", "class A:", "import os"]
  assert [len(found["token_ids"]) for found in record["runs"][0]["samples"]] == [6, 6, 6]
  assert len(rows) == 3
  assert (tmp_path / "sample.png").read_bytes().startswith(b"\x89PNG")
  shown = capsys.readouterr().out
  assert "class A:" in shown
  assert "tokens/s" in shown


@pytest.mark.parametrize(
  ("changes", "told"),
  [
    ({"prompt": []}, "--prompt=TEXT or --prompts=FILE must say"),
    ({"prompt": [""]}, "--prompt must not be empty"),
    ({"temperature": float("nan")}, "--temperature must be from 0 to 1e9"),
    ({"top_p": 0.0}, "--top_p must be above 0"),
    ({"max_context": 9}, "do not fit in --max_context"),
  ],
)
def test_what_cannot_be_continued_is_refused_in_one_line(run_directory, tmp_path, changes, told):
  with pytest.raises(ConfigError, match=told):
    sample.run(arguments(tmp_path, run_directory, **changes))
