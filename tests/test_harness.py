"""The adapter to the lm-evaluation-harness gives the model's own likelihoods.

Without the harness installed, its three modules are stood in for by what its documentation says of them.
"""

import importlib
import importlib.util
import sys
import types

import jax.numpy as jnp
import numpy as np
import pytest

from csympow.evaluate.runs import open_run
from csympow.train.loss import token_losses
from tests.comparing import quick_jit
from tests.evaluating import make_run

pytestmark = [pytest.mark.usefixtures("quick_compilation"), pytest.mark.slow]

INSTALLED = importlib.util.find_spec("lm_eval") is not None


class StandInLM:
  def __init__(self):
    self.cache_hook = None


class StandInInstance:
  def __init__(self, request_type, doc, arguments, idx):
    self.args = arguments


@pytest.fixture(scope="module")
def harness():
  """The module, and the harness's class of requests."""
  if INSTALLED:
    from lm_eval.api.instance import Instance

    yield importlib.import_module("csympow.evaluate.harness"), Instance
    return
  stand_ins = {
    "lm_eval": types.ModuleType("lm_eval"),
    "lm_eval.api": types.ModuleType("lm_eval.api"),
    "lm_eval.api.model": types.SimpleNamespace(LM=StandInLM),
    "lm_eval.api.instance": types.SimpleNamespace(Instance=StandInInstance),
    "lm_eval.api.registry": types.SimpleNamespace(register_model=lambda name: lambda cls: cls),
  }
  sys.modules.update(stand_ins)
  yield importlib.import_module("csympow.evaluate.harness"), StandInInstance
  for name in (*stand_ins, "csympow.evaluate.harness"):
    del sys.modules[name]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
  return make_run(tmp_path_factory.mktemp("harness") / "run")


FORWARD = quick_jit(lambda model, tokens: model(tokens))


def whole(run, text):
  """The losses of a text's bytes after a newline, and the likeliest byte after each, in one pass."""
  tokens = np.frombuffer(b"\n" + text.encode(), np.uint8).astype(np.int32)
  padded = np.pad(tokens, (0, (64 if len(tokens) <= 64 else 1024) - len(tokens)))
  logits = FORWARD(run.model, jnp.asarray(padded[None]))[0][: len(tokens)]
  return np.asarray(token_losses(logits[:-1], jnp.asarray(tokens[1:]))[0]), np.argmax(np.asarray(logits), axis=-1)


def requests(instance, kind, arguments):
  return [instance(kind, {}, one, 0) for one in arguments]


@pytest.mark.slow
def test_likelihoods_are_those_of_the_whole_text(harness, directory):
  module, instance = harness
  run, model = open_run(directory, None), module.CsympowLM(str(directory))
  pairs = [("One two", " three"), ("", "alone"), ("a space ", "moved"), ("x" * 40, "y"), ("One two", " four")]
  found = model.loglikelihood(requests(instance, "loglikelihood", pairs))
  for (context, continuation), (likelihood, greedy) in zip(pairs, found, strict=True):
    losses, likeliest = whole(run, context + continuation)
    span = slice(len(context.rstrip()), None)
    np.testing.assert_allclose(likelihood, -losses[span].sum(), rtol=1e-4)
    wanted = np.frombuffer((context + continuation).encode(), np.uint8)[span]
    assert greedy == np.array_equal(likeliest[:-1][span], wanted)


def test_a_rolling_likelihood_leaves_out_nothing(harness, directory):
  module, instance = harness
  run, model = open_run(directory, None), module.CsympowLM(directory)
  texts = ["short", "longer than a piece. " * 40]
  found = model.loglikelihood_rolling(requests(instance, "loglikelihood_rolling", [(text,) for text in texts]))
  for text, likelihood in zip(texts, found, strict=True):
    np.testing.assert_allclose(likelihood, -whole(run, text)[0].sum(), rtol=1e-4)


def test_writing_ends_at_a_stop_string_or_the_limit(harness, directory):
  module, instance = harness
  run, model = open_run(directory, None), module.CsympowLM(directory)
  free = {"until": [], "max_gen_toks": 12}
  (text,) = model.generate_until(requests(instance, "generate_until", [("Begin", free)]))
  (token,) = model.generate_until(requests(instance, "generate_until", [("Begin", free | {"max_gen_toks": 1})]))
  assert token == run.decode(whole(run, "Begin")[1][-1:])
  assert text.startswith(token)
  stop = text[3:5]
  asked = [("Begin", free | {"until": [stop]}), ("Begin", free | {"until": stop}), ("Begin", free)]
  cut = text.split(stop)[0]
  assert model.generate_until(requests(instance, "generate_until", asked)) == [cut, cut, text]
  assert model.generate_until([]) == []
  with pytest.raises(ValueError, match="likeliest"):
    model.generate_until(requests(instance, "generate_until", [("x", {"do_sample": True, "temperature": 0.7})]))


@pytest.mark.skipif(not INSTALLED, reason="the lm-evaluation-harness is an extra")
def test_the_harness_itself_evaluates_a_run(harness, directory, tmp_path):
  import lm_eval
  from lm_eval.tasks import TaskManager

  (tmp_path / "data.jsonl").write_text('{"text": "two and two is four"}\n{"text": "three and one is four"}\n')
  (tmp_path / "tiny.yaml").write_text(
    f"task: tiny\ndataset_path: json\ndataset_kwargs:\n  data_files: {{test: {tmp_path / 'data.jsonl'}}}\n"
    "test_split: test\noutput_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: '{{text}}'\n"
    "metric_list:\n  - metric: bits_per_byte\n"
  )
  model = harness[0].CsympowLM.create_from_arg_string(f"workdir={directory}", {"batch_size": 1})
  tasks = TaskManager(include_path=str(tmp_path), include_defaults=False)
  found = lm_eval.simple_evaluate(model=model, tasks=["tiny"], task_manager=tasks, bootstrap_iters=0)
  run = open_run(directory, None)
  texts = ("two and two is four", "three and one is four")
  wanted = sum(whole(run, text)[0].sum() for text in texts) / sum(map(len, texts)) / np.log(2)
  np.testing.assert_allclose(found["results"]["tiny"]["bits_per_byte,none"], wanted, rtol=1e-4)
