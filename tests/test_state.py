"""The state: one call, two calls joined by it at any split, and token by token are one function."""

import dataclasses
import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import csympow
from tests import comparing, reference
from tests.comparing import (
  FORMS,
  FULL,
  STATE,
  TIMED,
  Case,
  assert_results_close,
  forward,
  inputs,
  relative_rmse,
  results,
  with_gradients,
)


def steps(x, rest, power):
  """Token by token; the results of `comparing.call`."""

  def token(state, x):
    y, state = csympow.step(**x, state=state, **rest, power=power)
    return state, y

  timed = {n: jnp.moveaxis(a, 1, 0) for n, a in x.items() if n in TIMED}
  state, y = jax.lax.scan(token, csympow.State(*(x[n] for n in STATE)), timed)
  return {"y": jnp.moveaxis(y, 0, 1), "S": state.S, "Z": state.Z, "phase": state.phase}


token_by_token = functools.partial(comparing.quick_jit, static_argnames="power")(steps)


def between(x, start, stop, state=None):
  state = x if state is None else state
  return {n: a[:, start:stop] for n, a in x.items() if n in TIMED} | {n: state[n] for n in STATE}


SHAPES = [
  {"power": 2, "d": 4, "dv": 3, "H": 2, "groups": 2},
  {"power": 4, "d": 3, "dv": 1, "H": 1, "groups": 1, "rotation": "none"},
]


@hypothesis.settings(max_examples=2)
@hypothesis.given(
  shape=st.sampled_from(SHAPES),
  gate=st.sampled_from(["learned", "resets"]),
  forms=st.tuples(*[st.sampled_from(FORMS)] * 2),
  split=st.integers(1, 2),
  seed=st.integers(0, 1000),
)
def test_one_call_is_two_calls_at_any_split_is_token_by_token(shape, gate, forms, split, seed):
  """With chunks of two, on and off their boundaries, and from one form into another: a state is a state."""
  case = Case(T=3, **shape, gate=gate, seed=seed)
  x, rest = inputs(case)
  run = functools.partial(forward, rest=rest, power=case.power, chunk_size=2)
  one = run(x, form=forms[0])
  first = run(between(x, 0, split), form=forms[0])
  second = run(between(x, split, None, first), form=forms[1])
  two = second | {"y": np.concatenate([first["y"], second["y"]], axis=1)}
  assert_results_close(two, one, 1e-5)
  assert_results_close(token_by_token(x, rest, power=case.power), one, 1e-5)


@hypothesis.settings(max_examples=2)
@hypothesis.given(
  forms=st.tuples(*[st.sampled_from(FORMS)] * 2),
  gate=st.sampled_from(["learned", "resets"]),
  split=st.integers(0, FULL.T),
  seed=st.integers(0, 1000),
)
def test_gradients_pass_through_the_state_at_any_split(forms, gate, split, seed):
  """The gradient to the second call's state is what the first call is asked for.

  Both calls are given all tokens and told by padding which of them are theirs: one program serves every split.
  """
  x, rest = inputs(dataclasses.replace(FULL, gate=gate, seed=seed))
  weights = comparing.cotangents(FULL)
  here = np.tile(np.arange(FULL.T) < split, (FULL.B, 1))
  before, after = (rest | {"segment_ids": jnp.where(mine, 0, -1)} for mine in (here, ~here))
  first = results(x, before, weights, form=forms[0])
  second = results(x | {n: first[n] for n in STATE}, after, weights, form=forms[1])
  first = results(x, before, weights | {n: second[f"d{n}"] for n in STATE}, form=forms[0])
  joined = {n: first[n] + second[n] for n in ("y", *(f"d{n}" for n in x if n in TIMED))}
  joined |= {n: second[n] for n in STATE} | {f"d{n}": first[f"d{n}"] for n in STATE}
  whole = comparing.reference_results(x, {"rates": rest["rates"]}, weights)
  assert_results_close(joined, whole, 1e-5)


def test_gradients_pass_through_the_state_token_by_token():
  case = Case(T=6, d=4, dv=3, gate="resets")
  run = comparing.quick_jit(lambda x, rest, weights: with_gradients(lambda x: steps(x, rest, 2), x, weights))
  assert_results_close(run(*inputs(case), comparing.cotangents(case)), comparing.expected(case), 1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_is_a_prefill_of_one_token(dtype):
  case = Case(T=1, groups=2, dtype=dtype)
  x, rest = inputs(case)
  state = csympow.State(*(x[n] for n in STATE))
  now = {n: a[:, 0] for n, a in x.items() if n in TIMED}
  y, after = comparing.quick_jit(csympow.step)(**now, state=state, **rest)
  assert y.dtype == dtype
  want = comparing.expected(case)
  assert_results_close(
    {"y": y[:, None], "S": after.S, "Z": after.Z, "phase": after.phase}, want, comparing.TOLERANCE[dtype]
  )


def test_a_new_state_is_no_state():
  start = csympow.init_state(2, 2, 8, 5)
  assert all(not np.any(a) for a in jax.tree.leaves(start))
  x, rest = inputs(Case(dv=5, rotation="none", gate="none", entry="prefill"))
  none = forward(x, rest, entry="prefill", form="chunked")
  assert_results_close(forward(x | {n: getattr(start, n) for n in STATE}, rest, form="chunked"), none, 1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_the_state_is_the_sum_of_key_features_times_values(form):
  x, _ = inputs(Case(gate="none", rotation="none", entry="prefill", dv=5))
  out = forward(x, {}, entry="prefill", form=form)
  phi = csympow.symmetric_power(x["k"], 2)
  assert relative_rmse(out["S"], jnp.einsum("bthD,bthe->bhDe", phi, x["v"])) < 1e-6
  assert relative_rmse(out["Z"], jnp.sum(phi, 1)) < 1e-6


def test_a_state_is_a_pytree_of_three_named_arrays():
  state = csympow.init_state(3, 2, 8, 5, power=4)
  D = len(reference.multisets(8, 4))
  shapes = {"S": (3, 2, D, 5), "Z": (3, 2, D), "phase": (3, 2, 4)}
  assert {n: getattr(state, n).shape for n in shapes} == shapes
  assert [a.shape for a in jax.tree.leaves(state)] == list(shapes.values())
  assert {a.dtype for a in jax.tree.leaves(state)} == {jnp.dtype(jnp.float32)}
  assert isinstance(jax.tree.map(lambda a: a + 1, state), csympow.State)


def test_a_bfloat16_state_stays_one_and_follows_the_float32_one():
  x, rest = inputs(Case(T=30, d=4, dv=3, rotation="none", entry="prefill"))
  x = {n: a for n, a in x.items() if n in TIMED}
  starts = {t: csympow.init_state(2, 2, 4, 3, dtype=t) for t in (jnp.float32, jnp.bfloat16)}
  exact, rough = (token_by_token(x | {n: getattr(s, n) for n in STATE}, rest, power=2) for s in starts.values())
  assert [rough[n].dtype for n in STATE] == [jnp.bfloat16, jnp.bfloat16, jnp.float32]
  # gamma near 0.95 remembers some 20 tokens, each with a rounding of 2^-9.
  assert relative_rmse(rough["y"], exact["y"]) < 2e-2
  for form in FORMS:
    out = forward(x | {n: getattr(starts[jnp.bfloat16], n) for n in STATE}, rest, form=form)
    assert [out[n].dtype for n in STATE] == [jnp.bfloat16, jnp.bfloat16, jnp.float32]
    assert relative_rmse(out["y"], exact["y"]) < 1e-5
    assert relative_rmse(out["S"], exact["S"]) < 2.0**-8
