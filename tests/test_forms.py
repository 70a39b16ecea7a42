"""Three forms, one function: each against the float64 recurrence, and each against the others."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import comparing, reference
from tests.comparing import FORMS, TOLERANCE, Case, actual, assert_results_close, expected, forward, relative_rmse

# Every pair of levels of any two of these occurs.
COVERING = comparing.covering(
  shape=[
    {"power": 2, "d": 6, "dv": 9, "H": 3, "groups": 2},
    {"power": 4, "d": 4, "dv": 5, "H": 1, "groups": 3},
  ],
  gate=[{"gate": "none"}, {"gate": "resets"}],
  rotation=[{"rotation": "learned"}, {"rotation": "none"}],
  segments=[{"segments": "none"}, {"segments": "padded"}],
  entry=[{"entry": "attention"}, {"entry": "prefill"}, {"entry": "continued"}],
)
# (T, chunk_size), one for each. A last chunk that is whole, lacks one or holds one is where gradients get lost.
LENGTHS = [(500, 16), (1, 16), (17, 16), (16, 16), (15, 16), (2, 100)]
COVERING = [dataclasses.replace(case, T=T, chunk_size=c) for case, (T, c) in zip(COVERING, LENGTHS, strict=True)]
CASES = [
  *COVERING,
  # The same programs on other numbers: gates that only fade, runs without holes.
  *(
    dataclasses.replace(case, gate="learned", segments=case.segments.replace("padded", "packed"))
    for case in COVERING
    if case.gate == "resets"
  ),
  Case(T=9, d=4, dv=1, power=6, chunk_size=1),
  Case(T=63, B=1, H=1, groups=2, d=32, dv=32, chunk_size=16, rotation="fixed", entry="prefill"),
  Case(T=65, B=1, H=1, d=32, dv=32, chunk_size=None, dtype="bfloat16", segments="packed"),
  Case(T=63, d=4, dv=8, power=4, dtype="float16", chunk_size=16, rotation="none"),
]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_results_and_gradients_are_those_of_the_recurrence(case, form):
  assert_results_close(actual(case, form), expected(case), TOLERANCE[case.dtype])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_results_and_gradients_agree_between_forms(case):
  for a, b in itertools.combinations(FORMS, 2):
    assert_results_close(actual(case, a), actual(case, b), TOLERANCE[case.dtype], expected(case))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", [case for case in CASES if case.dtype != "float32"], ids=str)
def test_results_have_the_dtype_of_the_inputs_and_the_state_is_float32(case, form):
  out = actual(case, form)
  for name, value in out.items():
    assert value.dtype == (case.dtype if name in ("y", "dq", "dk", "dv") else "float32"), name


@pytest.mark.parametrize(
  ("form", "case"),
  [
    ("attention", Case(T=100, B=1, H=2, d=64, dv=64, power=4, entry="attention", chunk_size=32)),
    pytest.param(
      "chunked",
      Case(T=9, B=1, H=1, d=64, dv=4, power=4, entry="attention", chunk_size=3),
      marks=pytest.mark.slow,
    ),
    pytest.param(
      "attention",
      Case(T=100, B=1, H=2, d=64, dv=64, power=4, entry="attention", chunk_size=32, dtype="bfloat16"),
      marks=pytest.mark.slow,
    ),
  ],
  ids=str,
)
def test_heads_of_64_at_power_4_are_the_gated_sum(form, case):
  """766,480 features: only the attention form is practical, and the reference is the sum over earlier tokens."""
  x, rest = comparing.inputs(case)
  weights = comparing.cotangents(case)["y"]

  @comparing.quick_jit
  def exact(x, rates, weights):
    return comparing.with_gradients(lambda x: {"y": reference.quadratic(**x, rates=rates, power=4)}, x, {"y": weights})

  with jax.enable_x64(True):
    want = jax.tree.map(np.asarray, exact(*comparing.float64((x, rest["rates"], weights))))
  assert_results_close(actual(case, form), want, TOLERANCE[case.dtype])


def test_query_heads_in_a_row_share_a_key_head():
  x, rest = comparing.inputs(Case(H=2, groups=3, entry="attention", gate="none", rotation="none"))
  y = forward(x, rest, entry="attention", form="attention")["y"]
  for h in range(6):
    alone = {"q": x["q"][:, :, h : h + 1], "k": x["k"][:, :, h // 3][:, :, None], "v": x["v"][:, :, h // 3][:, :, None]}
    assert relative_rmse(y[:, :, h : h + 1], forward(alone, rest, entry="attention", form="attention")["y"]) < 1e-6


@pytest.mark.parametrize("form", FORMS)
def test_no_token_sees_a_later_one(form):
  x, rest = comparing.inputs(comparing.FULL)
  later = {n: x[n].at[:, 9:].add(1.0) for n in ("q", "k", "v", "beta")}
  later["log_gate"] = x["log_gate"].at[:, 9:].add(-1.0)
  a, b = (comparing.full_results(x, rest, form)["y"] for x in (x, x | later))
  np.testing.assert_array_equal(a[:, :9], b[:, :9])


@pytest.mark.parametrize("form", FORMS)
def test_constant_values_come_back_unchanged(form):
  """The weights of a row sum to 1 after normalising."""
  x, rest = comparing.inputs(comparing.FULL)
  constant = {"v": jnp.full_like(x["v"], 2.5), "S": 2.5 * jnp.repeat(x["Z"][..., None], x["S"].shape[-1], axis=-1)}
  y = comparing.full_results(x | constant, rest, form)["y"]
  np.testing.assert_allclose(y[rest["segment_ids"] >= 0], 2.5, rtol=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_enabling_float64_elsewhere_changes_no_dtype(form):
  x, rest = comparing.inputs(comparing.FULL)
  with jax.enable_x64(True):
    out = jax.eval_shape(
      lambda x, rest, weights: comparing.with_gradients(
        lambda x: comparing.call(x, rest, entry="continued", form=form, chunk_size=5), x, weights
      ),
      *(x, rest, comparing.cotangents(comparing.FULL)),
    )
  for name, value in out.items():
    assert value.dtype == jnp.float32, name


def test_enabling_float64_elsewhere_changes_no_number():
  x, rest = comparing.inputs(comparing.FULL)
  with jax.enable_x64(True):
    out = forward(x, rest, form="chunked")
  assert_results_close(out, expected(comparing.FULL), 1e-5)
