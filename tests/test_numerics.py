"""Numbers that are easy to get wrong, and what must not grow with the square of the length."""

import functools
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import csympow
from tests import comparing, running
from tests.comparing import FORMS, Case, forward, inputs, relative_rmse

GIB = 2**30


def gradients(x, rest, form, power=2):
  """Results of `attention` and the gradients of a weighted sum of them."""
  shape = (*x["q"].shape[:3], x["v"].shape[-1])
  weights = jnp.asarray(np.random.default_rng(1).normal(size=shape), x["v"].dtype)
  return comparing.results(x, rest, {"y": weights}, entry="attention", form=form, power=power)


@pytest.mark.parametrize("power", [2, 4])
@pytest.mark.parametrize("form", FORMS)
def test_nearly_orthogonal_queries_and_keys_in_float32(form, power):
  """Features cancel down to cosine^p of their size, so float32's 2^-24 grows by cosine^-p, and by no more."""
  cosine = {2: 1e-2, 4: 0.1}[power]
  x = comparing.nearly_orthogonal(cosine, T=63, d=8, dtype="float32")
  out = gradients(x, {}, form, power)
  exact = comparing.reference_results(x, {}, {"y": np.zeros(x["v"].shape)}, power=power)
  assert relative_rmse(out["y"], exact["y"]) < 8 * 2.0**-24 / cosine**power
  assert jnp.max(jnp.abs(out["y"])) < 1.01 * jnp.max(jnp.abs(x["v"]))


@pytest.mark.parametrize("form", FORMS)
def test_nearly_orthogonal_queries_and_keys_in_bfloat16(form):
  """Weights 1,000 times below |q|^2 |k|^2: through bfloat16 features the normaliser would be noise of either sign."""
  x = comparing.nearly_orthogonal(0.03, T=63, d=8, dtype="bfloat16")
  exact = comparing.reference_results(x, {}, {"y": np.zeros(x["v"].shape)})
  assert relative_rmse(gradients(x, {}, form)["y"], exact["y"]) < 5e-3
  ones = gradients(x | {"v": jnp.ones_like(x["v"])}, {}, form)["y"]
  np.testing.assert_allclose(np.float32(ones), 1.0, rtol=1e-2)


@pytest.mark.parametrize("cosine", [1e-3, 1e-5, 0.0])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("form", FORMS)
def test_a_normaliser_of_rounding_noise_gives_no_nan_and_no_infinity(form, dtype, cosine):
  for name, value in gradients(comparing.nearly_orthogonal(cosine, T=63, d=8, dtype=dtype), {}, form).items():
    assert np.all(np.isfinite(np.float32(value))), name


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_weights_beyond_float16_do_not_overflow(form, dtype):
  """(q . k)^2 near 1e8 and sums of features above 65,504, from numbers that float16 holds well."""
  x, _ = inputs(Case(T=63, B=1, H=1, entry="attention", gate="none", rotation="none", dtype=dtype))
  x |= {"q": 40 * x["q"], "k": 40 * x["k"]}
  out = gradients(x, {}, form)
  exact = comparing.reference_results(x, {}, {"y": np.zeros(x["v"].shape)})
  comparing.assert_close(out["y"], exact["y"], 5e-3, "y")
  for name, value in out.items():
    assert np.all(np.isfinite(np.float32(value))), name


# Where rows may be empty, at both powers: every argument there is at 2, few at 4.
ROWS = {2: comparing.FULL, 4: Case(power=4, d=4, rotation="none")}


def of_one_segment(power, **changes):
  """A case's arguments, all tokens in one segment and the state empty, with changed ones."""
  x, rest = inputs(ROWS[power])
  x |= {"S": 0 * x["S"], "Z": 0 * x["Z"]} | {name: change(x[name]) for name, change in changes.items()}
  return x, rest | {n: 0 * a for n, a in rest.items() if n == "segment_ids"}


def results_of_rows(x, rest, form, power, empty=()):
  """Results and gradients; nothing is asked of the state nor of the rows in `empty`."""
  weights = {n: a if n == "y" else 0 * a for n, a in comparing.cotangents(ROWS[power]).items()}
  weights["y"] = weights["y"].at[:, np.array(empty, int)].set(0.0)
  return comparing.results(x, rest, weights, form=form, power=power), weights


@pytest.mark.parametrize("form", [pytest.param(x, marks=pytest.mark.slow) if x == "recurrent" else x for x in FORMS])
@pytest.mark.parametrize("power", [pytest.param(p, marks=pytest.mark.slow) if p == 4 else p for p in ROWS])
def test_zero_queries_return_zero_and_pass_no_gradient(form, power):
  rows = [0, 3, 4, 16]
  others = np.setdiff1d(np.arange(17), rows)
  x, rest = of_one_segment(power, q=lambda q: q.at[:, np.array(rows)].set(0.0))
  out, _ = results_of_rows(x, rest, form, power)
  assert not np.any(out["y"][:, rows])
  assert not np.any(out["dq"][:, rows])
  assert np.all(np.any(out["y"][:, others], axis=-1))
  # What an empty row is asked to be must reach nothing: the gradients are those of asking nothing of it.
  asked_nothing, _ = results_of_rows(x, rest, form, power, empty=rows)
  comparing.assert_results_close(out, asked_nothing, 1e-6)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("power", [pytest.param(p, marks=pytest.mark.slow) if p == 4 else p for p in ROWS])
def test_keys_that_are_all_zero_give_zeros_and_zero_gradients(form, power):
  out, _ = results_of_rows(*of_one_segment(power, k=jnp.zeros_like), form, power)
  for name in out.keys() - {"phase"}:
    assert not np.any(out[name]), name


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("power", [pytest.param(p, marks=pytest.mark.slow) if p == 4 else p for p in ROWS])
def test_rows_are_zero_only_until_the_first_key_that_is_not(form, power):
  x, rest = of_one_segment(power, k=lambda k: k.at[:, :7].set(0.0))
  out, weights = results_of_rows(x, rest, form, power)
  assert not np.any(out["y"][:, :7])
  assert not np.any(out["dv"][:, :7])
  comparing.assert_results_close(out, comparing.reference_results(x, rest, weights, power=power), 1e-5)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("power", ROWS)
@pytest.mark.parametrize("name", ["q", "k"])
@pytest.mark.parametrize("factor", [1e3, 1e-3])
def test_scaling_queries_or_keys_changes_nothing(form, power, name, factor):
  plain, _ = results_of_rows(*of_one_segment(power), form, power)
  scaled, _ = results_of_rows(*of_one_segment(power, **{name: lambda a: factor * a}), form, power)
  # f(a q) = f(q), so a f'(a q) = f'(q). The state is in the units of the keys.
  scaled |= {f"d{name}": factor * scaled[f"d{name}"]}
  for result in ("y", "dq", "dk", "dv", "dlog_gate", *(["dbeta"] if "dbeta" in plain else [])):
    comparing.assert_close(scaled[result], plain[result], 1e-5, result)


@pytest.mark.parametrize(
  ("form", "scale"), [pytest.param("attention", 1e3, marks=pytest.mark.slow), ("chunked", 1e-3), ("recurrent", 1e3)]
)
def test_the_scale_changes_nothing(form, scale):
  x, rest = inputs(Case(rotation="none", gate="none"))
  exact = comparing.reference_results(x, rest, {"y": np.zeros(x["v"].shape)})
  comparing.assert_results_close(forward(x, rest, form=form, scale=scale), exact, 1e-5)


def shapes(B, T, H, d, dtype="float32"):
  x = jax.ShapeDtypeStruct((B, T, H, d), dtype)
  gate = jax.ShapeDtypeStruct((B, T, H), jnp.float32)
  return x, x, x, gate, gate, jax.ShapeDtypeStruct((d // 2,), jnp.float32)


def attend(q, k, v, log_gate, beta, rates, **options):
  return csympow.attention(q, k, v, log_gate=log_gate, beta=beta, rates=rates, **options)


def forward_and_backward(*arguments, **options):
  """A scalar's gradients to every argument but the rates."""
  return jax.grad(lambda *a: jnp.sum(attend(*a, arguments[5], **options).astype(jnp.float32) ** 2), range(5))(
    *arguments[:5]
  )


def test_the_attention_form_never_holds_a_square_array():
  """65,536 squared is 16 GiB."""
  assert comparing.temporaries(forward_and_backward, *shapes(1, 65_536, 1, 64), form="attention") < 0.4 * GIB


def test_the_chunked_form_at_65536_tokens_and_12_heads_compiles_below_3_gib():
  assert comparing.temporaries(forward_and_backward, *shapes(1, 65_536, 12, 64), form="chunked") < 3 * GIB


def test_the_recurrent_form_keeps_one_state_forward_and_few_backward():
  """All 65,536 of them would be 33 GiB."""
  assert comparing.temporaries(attend, *shapes(1, 65_536, 1, 64), form="recurrent") < 0.15 * GIB
  assert comparing.temporaries(forward_and_backward, *shapes(1, 65_536, 1, 64), form="recurrent") < GIB


@pytest.mark.slow
def test_time_grows_linearly_with_the_length():
  """In a process of its own."""
  script = pathlib.Path(__file__).parents[1] / "benchmarks" / "linearity.py"
  how = {"env": running.as_a_user(), "check": True, "capture_output": True, "text": True}
  ratios = (
    float(subprocess.run([sys.executable, script], **how).stdout)
    for _ in range(3)  # a busy moment of the machine may spoil one
  )
  assert any(ratio <= 4.6 for ratio in ratios)


LARGE = {"B": 4, "T": 131_072, "H": 32, "d": 136}  # B T H d = 1.06 * 2^31


@pytest.mark.parametrize("form", ["attention", "chunked"])
def test_more_than_two_to_the_31_numbers_compile(form):
  assert np.prod(list(LARGE.values())) > 2**31
  arguments = shapes(**LARGE, dtype="bfloat16")
  compiled = comparing.quick_jit(functools.partial(attend, form=form)).lower(*arguments).compile()
  assert compiled.out_info.shape == (4, 131_072, 32, 136)
  assert compiled.out_info.dtype == jnp.bfloat16


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["attention", "chunked"])
def test_more_than_two_to_the_31_numbers_are_right_to_the_last(form):
  """Heads are independent, so the last one of the last sequence can be computed alone and must be the same."""
  assert jax.default_backend() == "gpu"
  B, T, H, d = (LARGE[n] for n in ("B", "T", "H", "d"))
  if form == "attention":  # quadratic: the same count of numbers in shorter sequences
    B, T = B * 64, T // 64
  keys = jax.random.split(jax.random.key(0), 5)
  q, k, v = (jax.random.normal(key, (B, T, H, d), jnp.bfloat16) for key in keys[:3])
  log_gate = jax.nn.log_sigmoid(3.0 + jax.random.normal(keys[3], (B, T, H)))
  beta = 1 + jnp.tanh(jax.random.normal(keys[4], (B, T, H)))
  rates = csympow.rotary_rates(d, 65_536)
  run = jax.jit(functools.partial(attend, form=form))
  y = run(q, k, v, log_gate, beta, rates)
  assert y.size > 2**31
  for b, h in ((0, 0), (B // 2, H // 2), (B - 1, H - 1)):
    alone = run(*(a[b : b + 1, :, h : h + 1] for a in (q, k, v, log_gate, beta)), rates)
    assert relative_rmse(y[b : b + 1, :, h : h + 1], alone) < 5e-3
