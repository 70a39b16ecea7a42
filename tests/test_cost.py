"""explain and auto: what will run, at what cost, without running it."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest

import csympow
from tests import comparing
from tests.comparing import FORMS, Case, inputs


def explain(T, d=64, dv=None, H=12, B=1, power=2, dtype="bfloat16", **options):
  q = jax.ShapeDtypeStruct((B, T, H, d), dtype)
  v = jax.ShapeDtypeStruct((B, T, H, dv or d), dtype)
  return csympow.explain(q, q, v, power=power, **options)


def test_an_explanation_is_frozen_and_complete():
  explanation = explain(1024)
  assert {f.name for f in dataclasses.fields(explanation)} >= {
    "form",
    "implementation",
    "chunk_size",
    "state_bytes",
    "flops",
    "reason",
  }
  assert explanation.form in FORMS
  assert explanation.implementation == "xla"
  assert explanation.chunk_size >= 1
  assert explanation.flops > 0
  assert explanation.form in explanation.reason
  with pytest.raises(dataclasses.FrozenInstanceError):
    explanation.form = "attention"


@pytest.mark.parametrize("form", FORMS)
def test_what_is_asked_for_is_what_is_explained(form):
  explanation = explain(1000, form=form, chunk_size=48, implementation="xla")
  assert (explanation.form, explanation.chunk_size, explanation.implementation) == (form, 48, "xla")


def test_arrays_and_their_shapes_are_explained_alike():
  x, rest = inputs(Case(entry="attention", segments="packed"))
  as_shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), (x, rest))
  assert csympow.explain(**x, **rest) == csympow.explain(**as_shapes[0], **as_shapes[1])


def test_explaining_works_on_traced_arrays():
  explained = []
  jax.jit(lambda q: explained.append(csympow.explain(q, q, q))).trace(jnp.ones((1, 64, 2, 8)))
  assert explained[0].form in FORMS


@pytest.mark.parametrize("form", FORMS)
def test_the_state_bytes_are_those_of_the_state(form):
  state = jax.eval_shape(lambda: csympow.init_state(3, 12, 64, 32, power=2))
  size = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(state))
  assert explain(1024, dv=32, B=3, form=form).state_bytes == size


def test_estimated_flops_grow_as_each_form_does():
  # Lengths that every chunk size divides, so that no partial chunk blurs the ratio.
  ratio = {form: explain(2**17, form=form).flops / explain(2**16, form=form).flops for form in FORMS}
  assert 3.9 < ratio["attention"] < 4.1
  assert 1.95 < ratio["chunked"] < 2.05
  assert 1.95 < ratio["recurrent"] < 2.05


@pytest.mark.parametrize(("T", "d", "power"), [(65_536, 64, 2), (4_096, 64, 4), (16_384, 32, 2)])
def test_estimated_flops_are_those_of_the_design(T, d, power):
  """2 T d multiply-adds per token and head in the attention form (T d causal, for scores and for values), 2 D (d+1) in
  the state: within a factor of 2 of it, for what a block or a chunk adds.
  """
  D = len(comparing.reference.multisets(d, power)) if power == 2 else 766_480
  tokens = T * 12
  assert 0.5 < explain(T, d=d, power=power, form="attention").flops / (2 * T * d * tokens) < 2.1
  assert 0.5 < explain(T, d=d, power=power, form="recurrent").flops / (4 * D * (d + 1) * tokens) < 2.1


@pytest.mark.parametrize("device", ["cpu", "gpu", "tpu"])
def test_auto_is_attention_when_short_and_a_state_when_long(device):
  picks = [explain(2**n, device=device).form for n in range(4, 21)]
  assert picks[0] == "attention"
  assert picks[-1] == "chunked"
  assert picks == sorted(picks), "there is one crossover"


@pytest.mark.parametrize("device", ["cpu", "gpu", "tpu"])
@pytest.mark.parametrize("d", [32, 64, 128])
def test_crossovers_come_later_with_more_features(device, d):
  def crossover(power, d):
    picks = (explain(2**n, d=d, power=power, device=device, implementation="xla").form for n in range(4, 30))
    return next((n for n, form in enumerate(picks) if form != "attention"), 30)

  assert crossover(2, d) < crossover(4, d)
  assert crossover(2, 32) <= crossover(2, d) <= crossover(2, 128)


@pytest.mark.parametrize(("d", "dv"), [(32, 128), (128, 64)])
def test_attention_by_kernels_pays_for_what_it_fills_up(d, dv):
  options = {"device": "gpu", "form": "attention", "implementation": "pallas"}
  assert explain(4096, d=d, dv=dv, **options).flops == explain(4096, d=128, **options).flops
  assert explain(4096, d=32, dv=64, **options).flops < explain(4096, d=64, **options).flops


@pytest.mark.parametrize(("T", "d"), [(1, 64), (1100, 64), (4096, 64), (4100, 128), (8192, 128), (9000, 128)])
def test_chunks_of_the_kernels_leave_little_to_fill_up(T, d):
  chunk = explain(T, d=d, device="gpu", form="chunked", implementation="pallas").chunk_size
  chunks = -(-T // chunk)
  assert chunk % 256 == 0
  assert chunks * chunk < T + chunks * 256


def test_power_4_with_heads_of_64_stays_with_attention_below_a_million_tokens():
  for device in ("cpu", "gpu", "tpu"):
    assert explain(2**20, power=4, device=device).form == "attention"


@pytest.mark.parametrize(("T", "power", "d"), [(300, 2, 4), (12, 2, 16), (40, 4, 4), (1, 2, 8)])
def test_auto_runs_the_form_that_it_explains(T, power, d):
  """Programs are compared, not numbers: the forms agree too well to be told apart by results."""
  x, rest = inputs(Case(T=T, d=d, dv=d, power=power, entry="attention"))
  picked = csympow.explain(**x, **rest, power=power)

  def program(**options):
    text = str(jax.make_jaxpr(lambda x, rest: csympow.attention(**x, **rest, power=power, **options))(x, rest))
    return re.sub(r"0x[0-9a-f]+", "", text)  # addresses of functions differ between two equal traces

  assert program() == program(form=picked.form, chunk_size=picked.chunk_size, implementation=picked.implementation)


def test_explaining_runs_nothing_however_large():
  explanation = explain(2**30, B=64, H=128, d=128)
  assert explanation.state_bytes < 2**50
  assert jnp.isfinite(jnp.float32(explanation.flops))


@pytest.mark.parametrize("by_name", [False, True])
def test_a_program_for_the_default_device_is_planned_for_it(by_name, monkeypatch):
  monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
  assert explain(1024).implementation == "pallas"
  with jax.default_device("cpu" if by_name else jax.devices("cpu")[0]):
    assert explain(1024).implementation == "xla"
