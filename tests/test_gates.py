"""Gates: products of gammas without overflow, clean resets, and no drift where gamma is 1."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import csympow
from tests import comparing
from tests.comparing import FORMS, FULL, inputs

RESETS = {
  "-80 once": lambda log_gate: log_gate.at[:, 7].set(-80.0),
  "-inf once": lambda log_gate: log_gate.at[:, 7].set(-jnp.inf),
  "-inf first": lambda log_gate: log_gate.at[:, 0].set(-jnp.inf),
  "-inf last": lambda log_gate: log_gate.at[:, -1].set(-jnp.inf),
  "-inf always": lambda log_gate: jnp.full_like(log_gate, -jnp.inf),
  "-80 always": lambda log_gate: jnp.full_like(log_gate, -80.0),
  "mixed": lambda log_gate: log_gate.at[:, ::3].set(-80.0).at[:, 1::5].set(-jnp.inf),
  # Sums of these overflow float32, and the difference of two infinities is no number.
  "lowest float32": lambda log_gate: log_gate.at[:, 2:9].set(jnp.finfo(jnp.float32).min),
  # No single step is a reset, but a chunk's product of them is far below the smallest float32.
  "-9 always": lambda log_gate: jnp.full_like(log_gate, -9.0),
}


def one_segment(x, rest):
  return x, rest | {"segment_ids": jnp.zeros_like(rest["segment_ids"])}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("pattern", RESETS)
def test_closed_gates_are_clean_resets_forward_and_backward(pattern, form):
  x, rest = one_segment(*inputs(FULL))
  gated = x | {"log_gate": RESETS[pattern](x["log_gate"])}
  exact, unfaded = (comparing.reference_results(x, rest, comparing.cotangents(FULL)) for x in (gated, x))
  # Where all but the newest token has faded, so have the gradients to q and log_gate: they are differences of numbers
  # of the size that the same gradients have with open gates, and can only be as exact as those.
  size = unfaded if pattern == "-9 always" else None
  comparing.assert_results_close(comparing.full_results(gated, rest, form), exact, 1e-5, size)


@pytest.mark.parametrize("value", [-jnp.inf, -128.0, -1e30])
@pytest.mark.parametrize("form", FORMS)
def test_a_closed_gate_forgets_exactly_what_came_before_but_not_the_phase(form, value):
  x, rest = one_segment(*inputs(FULL))
  x |= {"log_gate": x["log_gate"].at[:, 6].set(value)}
  before = {name: x[name].at[:, :6].multiply(7.0) for name in ("q", "k", "v")} | {"S": 3 * x["S"], "Z": 2 * x["Z"]}
  a, b = (comparing.full_results(x, rest, form) for x in (x, x | before))
  np.testing.assert_array_equal(a["y"][:, 6:], b["y"][:, 6:])
  np.testing.assert_array_equal(a["S"], b["S"])
  np.testing.assert_array_equal(a["Z"], b["Z"])
  open_gate = comparing.full_results(x | {"log_gate": x["log_gate"].at[:, 6].set(-0.1)}, rest, form)
  np.testing.assert_array_equal(a["phase"], open_gate["phase"])


@jax.jit
def decode(q, k, v, log_gate):
  """`prefill`, token by token."""

  def token(state, x):
    return csympow.step(**x, state=state)[::-1]

  x = {n: jnp.moveaxis(a, 1, 0) for n, a in {"q": q, "k": k, "v": v, "log_gate": log_gate}.items()}
  state, y = jax.lax.scan(token, csympow.init_state(q.shape[0], *k.shape[2:], v.shape[-1]), x)
  return jnp.moveaxis(y, 0, 1), state


PREFILL = {form: jax.jit(functools.partial(csympow.prefill, form=form)) for form in FORMS}


@pytest.mark.parametrize(
  ("form", "T"), [("chunked", 65_536), ("recurrent", 65_536), ("step", 65_536), ("attention", 8_192)]
)
@pytest.mark.parametrize("log_gate", [0.0, -1e-4, -0.1])
def test_a_constant_gate_does_not_drift_over_a_long_sequence(form, T, log_gate):
  """Nothing may fade at 0; at -1e-4, gamma in float32 would be another gate, by 3e-4 of what it forgets in a step; at
  -0.1, a float32 running sum of logs would be off by 1e-4 at the end.
  """
  q, k, v = np.random.default_rng(T).normal(size=(3, 1, T, 1, 4))
  q, k, v = (jnp.asarray(a, jnp.float32) for a in (q, k, v + 1))  # a mean of 1: what is averaged must not cancel to 0
  gates = jnp.full((1, T, 1), log_gate)
  exact, state = comparing.reference_prefill(q, k, v, log_gate=gates)
  y, got = decode(q, k, v, gates) if form == "step" else PREFILL[form](q, k, v, log_gate=gates)
  tail = slice(-T // 8, None)
  assert comparing.relative_rmse(y[:, tail], exact[:, tail]) < 1e-5
  assert comparing.relative_rmse(got.S, state.S) < 1e-5
  assert comparing.relative_rmse(got.Z, state.Z) < 1e-5
