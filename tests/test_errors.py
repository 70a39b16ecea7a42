"""Bad input is a ValueError of one line that names the argument, what came and what fits."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import csympow

B, T, H, d, dv = 2, 5, 2, 4, 3


def ones(*shape, dtype=jnp.float32):
  return jnp.ones(shape, dtype)


def good():
  return {"q": ones(B, T, 2 * H, d), "k": ones(B, T, H, d), "v": ones(B, T, H, dv)}


RATES = ones(d // 2)
EMPTY = r"\b(1|one)\b|positive|non-empty"

# name: (arguments that replace good ones, the argument at fault, what came, what fits), the last two as patterns.
# A pattern of a shape accepts it as a tuple or in words with the numbers in that order.
BAD = {
  "power 3": ({"power": 3}, "power", "3", "even"),
  "power 1": ({"power": 1}, "power", "1", "even"),
  "power 0": ({"power": 0}, "power", "0", "positive|even"),
  "power -2": ({"power": -2}, "power", "-2", "positive|even"),
  "power 2.0": ({"power": 2.0}, "power", r"2\.0", "even|int"),
  "power True": ({"power": True}, "power", "True", "even|int"),
  "power as text": ({"power": "2"}, "power", "'2'", "even|int"),
  "power as an array": ({"power": jnp.asarray(2)}, "power", "2|Array", "even|int"),
  "q a list": ({"q": [[1.0]]}, "q", "list", "array"),
  "k None": ({"k": None}, "k", "None", "array"),
  "v a float": ({"v": 1.0}, "v", "float|1.0", "array"),
  "q complex": ({"q": ones(B, T, H, d, dtype=jnp.complex64)}, "q", "complex64", "float32.*bfloat16.*float16"),
  "q integer": ({"q": ones(B, T, H, d, dtype=jnp.int32)}, "q", "int32", "float32.*bfloat16.*float16"),
  "all float8": (
    {n: ones(B, T, H, d, dtype=jnp.float8_e4m3fn) for n in "qkv"},
    "q",
    "float8_e4m3fn",
    "float32.*bfloat16.*float16",
  ),
  "k of another dtype": ({"k": ones(B, T, H, d, dtype=jnp.bfloat16)}, "k", "bfloat16", "float32"),
  "v of another dtype": ({"v": ones(B, T, H, d, dtype=jnp.float16)}, "v", "float16", "float32"),
  "q of rank 3": ({"q": ones(B, T, d)}, "q", r"\(2, 5, 4\)", "heads|H"),
  "k of rank 5": ({"k": ones(1, B, T, H, d)}, "k", r"\(1, 2, 5, 2, 4\)", "heads|H"),
  "v of rank 0": ({"v": ones()}, "v", r"\(\)", "heads|H"),
  "heads before time": ({"k": ones(B, H, T, d)}, "k", r"\(2, 2, 5, 4\)", "5"),
  "k of another length": ({"k": ones(B, T + 1, H, d)}, "k", "6", "5"),
  "v of another length": ({"v": ones(B, T - 1, H, dv)}, "v", "4", "5"),
  "k of another batch": ({"k": ones(B + 1, T, H, d)}, "k", "3", "2"),
  "v of another batch": ({"v": ones(1, T, H, dv)}, "v", "1", "2"),
  "k of another head dim": ({"k": ones(B, T, H, d + 2)}, "k", "6", "4"),
  "v of other heads": ({"v": ones(B, T, 2 * H, dv)}, "v", "4", "2"),
  "query heads not a multiple": ({"q": ones(B, T, 3, d)}, "q", "3", "2"),
  "fewer query heads than key heads": ({"q": ones(B, T, 1, d)}, "q", "1", "2"),
  "no batch": ({n: ones(0, T, H, d) for n in "qkv"}, "q", "0", EMPTY),
  "no time": ({n: ones(B, 0, H, d) for n in "qkv"}, "q", "0", EMPTY),
  "no heads": ({n: ones(B, T, 0, d) for n in "qkv"}, "q|k", "0", EMPTY),
  "no query heads": ({"q": ones(B, T, 0, d)}, "q", "0", EMPTY),
  "no head dim": ({n: ones(B, T, H, 0) for n in "qk"}, "q", "0", EMPTY),
  "no value dim": ({"v": ones(B, T, H, 0)}, "v", "0", EMPTY),
  "log_gate bfloat16": ({"log_gate": ones(B, T, H, dtype=jnp.bfloat16)}, "log_gate", "bfloat16", "float32"),
  "log_gate a float": ({"log_gate": -0.1}, "log_gate", "float|-0.1", "array"),
  "log_gate per query head": ({"log_gate": ones(B, T, 2 * H)}, "log_gate", r"\(2, 5, 4\)", r"2\D+5\D+2"),
  "log_gate with a last axis": ({"log_gate": ones(B, T, H, 1)}, "log_gate", r"\(2, 5, 2, 1\)", r"2\D+5\D+2"),
  "log_gate to be broadcast": ({"log_gate": ones(B, T, 1)}, "log_gate", r"\(2, 5, 1\)", r"2\D+5\D+2"),
  "beta float16": ({"rates": RATES, "beta": ones(B, T, H, dtype=jnp.float16)}, "beta", "float16", "float32"),
  "beta of another shape": ({"rates": RATES, "beta": ones(B, H, T)}, "beta", r"\(2, 2, 5\)", r"2\D+5\D+2"),
  "beta without rates": ({"beta": ones(B, T, H)}, "beta", "rates", "rates"),
  "rates of another length": ({"rates": ones(d)}, "rates", r"\(4,\)", "2"),
  "rates of rank 2": ({"rates": ones(1, d // 2)}, "rates", r"\(1, 2\)", r"d/2|\(2,\)"),
  "rates a list": ({"rates": [1.0, 0.1]}, "rates", "list", "array"),
  "rates integer": ({"rates": ones(d // 2, dtype=jnp.int32)}, "rates", "int32", "float"),
  "odd head dim with rates": (
    {"q": ones(B, T, H, 3), "k": ones(B, T, H, 3), "rates": ones(1)},
    "rates|head|d|q",
    "3",
    "even",
  ),
  "segment_ids float": ({"segment_ids": ones(B, T)}, "segment_ids", "float32", "int"),
  "segment_ids bool": ({"segment_ids": ones(B, T, dtype=bool)}, "segment_ids", "bool", "int"),
  "segment_ids of another shape": (
    {"segment_ids": ones(T, dtype=jnp.int32)},
    "segment_ids",
    r"\(5,\)",
    r"B\W+T\b|2\D+5",
  ),
  "segment_ids per head": (
    {"segment_ids": ones(B, T, H, dtype=jnp.int32)},
    "segment_ids",
    r"\(2, 5, 2\)",
    r"B\W+T\b|2\D+5",
  ),
  "segment_ids a list": ({"segment_ids": [[0] * T] * B}, "segment_ids", "list", "array"),
  "form unknown": ({"form": "quadratic"}, "form", "'quadratic'", "'?auto.*attention.*chunked.*recurrent"),
  "form None": ({"form": None}, "form", "None", "auto.*attention.*chunked.*recurrent"),
  "implementation unknown": ({"implementation": "triton"}, "implementation", "'triton'", "xla.*pallas"),
  "chunk_size 0": ({"chunk_size": 0}, "chunk_size", "0", "positive|1"),
  "chunk_size -1": ({"chunk_size": -1}, "chunk_size", "-1", "positive|1"),
  "chunk_size 2.5": ({"chunk_size": 2.5}, "chunk_size", r"2\.5", "int|whole"),
  "chunk_size True": ({"chunk_size": True}, "chunk_size", "True", "int|whole"),
  "chunk_size as text": ({"chunk_size": "64"}, "chunk_size", "'64'", "int|whole"),
  "scale as text": ({"scale": "0.1"}, "scale", "'0.1'", "float|number|real"),
  "scale of many numbers": ({"scale": ones(H)}, "scale", r"\(2,\)|Array|array", "float|number|real|scalar"),
}


def assert_refused(function, arguments, argument, came, fits):
  with pytest.raises(ValueError, match=r"\A[^\n]+\Z") as raised:
    function(**arguments)
  message = str(raised.value)
  assert re.search(rf"\b({argument})\b", message), f"{argument} is not named in: {message}"
  assert re.search(came, message), f"what came ({came}) is not in: {message}"
  assert re.search(fits, message), f"what fits ({fits}) is not in: {message}"


@pytest.mark.parametrize("function", [csympow.attention, csympow.prefill, csympow.explain])
@pytest.mark.parametrize("mistake", BAD)
def test_a_bad_argument_is_named_with_what_came_and_what_fits(mistake, function):
  changes, argument, came, fits = BAD[mistake]
  assert_refused(function, good() | changes, argument, came, fits)


def state(**changes):
  return csympow.init_state(**({"batch": B, "heads": H, "head_dim": d, "value_dim": dv} | changes))


def good_step():
  return {n: a[:, 0] for n, a in good().items()} | {"state": state()}


def with_leaf(name, change):
  leaves = dict(zip(("S", "Z", "phase"), jax.tree.leaves(state()), strict=True))
  return csympow.State(**(leaves | {name: change(leaves[name])}))


BAD_STATES = {
  "another power": (lambda: state(power=4), "35", "10"),
  "another batch": (lambda: state(batch=3), "3", "2"),
  "other heads": (lambda: state(heads=4), "4", "2"),
  "another head dim": (lambda: state(head_dim=6), "21", "10"),
  "another value dim": (lambda: state(value_dim=4), "4", "3"),
  "S float16": (lambda: with_leaf("S", lambda a: a.astype(jnp.float16)), "float16", "float32"),
  "S integer": (lambda: with_leaf("S", lambda a: a.astype(jnp.int32)), "int32", "float32"),
  "S bfloat16 but Z float32": (lambda: with_leaf("S", lambda a: a.astype(jnp.bfloat16)), "bfloat16", "float32"),
  "phase bfloat16": (lambda: with_leaf("phase", lambda a: a.astype(jnp.bfloat16)), "bfloat16", "float32"),
  "Z without its last axis": (lambda: with_leaf("Z", lambda a: a[..., 0]), r"\(2, 2\)", r"B\W+H\W+D\b|10"),
  "phase per dimension": (lambda: with_leaf("phase", lambda a: jnp.ones((B, H, d))), r"\(2, 2, 4\)", r"2\D+2\D+2"),
  "a tuple": (lambda: tuple(state()), "tuple", "State"),
  "an array": (lambda: ones(B, H, 10, dv), "Array", "State"),
}


@pytest.mark.parametrize("mistake", BAD_STATES)
def test_a_state_that_does_not_fit_is_refused(mistake):
  make, came, fits = BAD_STATES[mistake]
  assert_refused(csympow.prefill, good() | {"state": make()}, "state", came, fits)
  assert_refused(csympow.step, good_step() | {"state": make()}, "state", came, fits)


def test_a_step_needs_a_state():
  assert_refused(csympow.step, good_step() | {"state": None}, "state", "None", "State")


BAD_STEPS = {
  "a time axis": ({"q": ones(B, 1, 2 * H, d)}, "q", r"\(2, 1, 4, 4\)", "heads|H"),
  "log_gate with a time axis": ({"log_gate": ones(B, 1, H)}, "log_gate", r"\(2, 1, 2\)", r"B\W+H\b"),
  "log_gate bfloat16": ({"log_gate": ones(B, H, dtype=jnp.bfloat16)}, "log_gate", "bfloat16", "float32"),
  "beta without rates": ({"beta": ones(B, H)}, "beta", "rates", "rates"),
  "beta per query head": ({"rates": RATES, "beta": ones(B, 2 * H)}, "beta", r"\(2, 4\)", r"2\D+2"),
  "power 3": ({"power": 3}, "power", "3", "even"),
  "query heads not a multiple": ({"q": ones(B, 3, d)}, "q", "3", "2"),
  "k of another dtype": ({"k": ones(B, H, d, dtype=jnp.bfloat16)}, "k", "bfloat16", "float32"),
  "rates of another length": ({"rates": ones(3)}, "rates", r"\(3,\)", "2"),
  "scale as text": ({"scale": "1"}, "scale", "'1'", "float|number|real"),
}


@pytest.mark.parametrize("mistake", BAD_STEPS)
def test_a_bad_argument_of_step_is_named_with_what_came_and_what_fits(mistake):
  changes, argument, came, fits = BAD_STEPS[mistake]
  assert_refused(csympow.step, good_step() | changes, argument, came, fits)


@pytest.mark.parametrize(
  ("function", "arguments", "argument", "came"),
  [
    (csympow.init_state, {"power": 3}, "power", "3"),
    (csympow.init_state, {"power": 2.0}, "power", r"2\.0"),
    (csympow.init_state, {"batch": 0}, "batch", "0"),
    (csympow.init_state, {"heads": -1}, "heads", "-1"),
    (csympow.init_state, {"head_dim": 0}, "head_dim", "0"),
    (csympow.init_state, {"value_dim": 2.5}, "value_dim", r"2\.5"),
    (csympow.init_state, {"dtype": jnp.float16}, "dtype", "float16"),
    (csympow.init_state, {"dtype": jnp.int32}, "dtype", "int32"),
    (csympow.init_state, {"dtype": "nonsense"}, "dtype", "nonsense"),
    (csympow.symmetric_power, {"x": ones(3), "power": 0}, "power", "0"),
    (csympow.symmetric_power, {"x": ones(3), "power": -2}, "power", "-2"),
    (csympow.symmetric_power, {"x": ones(3), "power": 2.0}, "power", r"2\.0"),
    (csympow.symmetric_power, {"x": ones(3), "power": True}, "power", "True"),
    (csympow.symmetric_power, {"x": [1.0], "power": 2}, "x", "list"),
    (csympow.symmetric_power, {"x": ones(), "power": 2}, "x", r"\(\)"),
    (csympow.symmetric_power, {"x": ones(3, dtype=jnp.complex64), "power": 2}, "x", "complex64"),
    (csympow.rotary_rates, {"head_dim": 5, "max_length": 10}, "head_dim", "5"),
    (csympow.rotary_rates, {"head_dim": 0, "max_length": 10}, "head_dim", "0"),
    (csympow.rotary_rates, {"head_dim": 4, "max_length": 0}, "max_length", "0"),
    (csympow.rotary_rates, {"head_dim": 4.0, "max_length": 10}, "head_dim", r"4\.0"),
    (csympow.rotary_rates, {"head_dim": 4, "max_length": "long"}, "max_length", "'long'"),
    (csympow.explain, good() | {"device": "quantum"}, "device", "'quantum'"),
  ],
)
def test_the_other_functions_refuse_bad_arguments_too(function, arguments, argument, came):
  if function is csympow.init_state:
    arguments = {"batch": B, "heads": H, "head_dim": d, "value_dim": dv} | arguments
  assert_refused(function, arguments, argument, came, "must|expected|needs|takes|one of")


@pytest.mark.parametrize("call", [csympow.attention, csympow.prefill, csympow.explain])
def test_kernels_that_do_not_exist_yet_are_not_pretended(call):
  with pytest.raises(NotImplementedError, match="pallas") as raised:
    call(**good(), implementation="pallas")
  assert "\n" not in str(raised.value)


def test_the_xla_implementation_is_obeyed():
  x = good() | {"v": jnp.asarray(np.random.default_rng(0).normal(size=(B, T, H, dv)), jnp.float32)}
  np.testing.assert_array_equal(csympow.attention(**x, implementation="xla"), csympow.attention(**x))


def test_errors_come_under_jit_and_grad_as_they_do_without():
  x = good()
  for transform in (jax.jit, jax.checkpoint):
    with pytest.raises(ValueError, match=r"\bpower\b.*\b3\b"):
      transform(lambda q: csympow.attention(q, x["k"], x["v"], power=3))(x["q"])
  with pytest.raises(ValueError, match=r"\blog_gate\b"):
    jax.grad(lambda q: csympow.attention(q, x["k"], x["v"], log_gate=ones(1)).sum())(x["q"])


def test_shapes_alone_are_refused_as_the_arrays_would_be():
  bad = {n: jax.ShapeDtypeStruct(a.shape, a.dtype) for n, a in good().items()} | {
    "q": jax.ShapeDtypeStruct((B, T, 3, d), jnp.float32)
  }
  with pytest.raises(ValueError, match=r"\bq\b"):
    csympow.explain(**bad)


def test_a_float64_input_is_refused_rather_than_rounded():
  with jax.enable_x64(True), pytest.raises(ValueError, match=r"\bq\b.*float64"):
    csympow.attention(*(jnp.ones((B, T, H, d), jnp.float64) for _ in range(3)))
