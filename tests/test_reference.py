"""The reference against the other formula for the same function, so that its mistakes would have to be made twice."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import comparing, reference


@pytest.mark.parametrize(("power", "d"), [(2, 6), (4, 4)])
def test_the_recurrence_is_the_gated_sum_over_earlier_tokens(power, d):
  rng = np.random.default_rng(power)
  heads = (2, 9, 2)
  x = {
    "q": rng.normal(size=(*heads, d)),
    "k": rng.normal(size=(*heads, d)),
    "v": rng.normal(size=(*heads, 3)),
    "log_gate": comparing.random_log_gate(rng, heads),
    "beta": comparing.random_beta(rng, heads),
  }
  weights = rng.normal(size=(*heads, 3))

  def value_and_gradient(function):
    y, vjp = jax.vjp(lambda x: function(**x, rates=jnp.asarray(comparing.rotary(d)), power=power), x)
    return {"y": y} | vjp(weights)[0]

  with jax.enable_x64(True):
    x = comparing.float64(x)
    recurrence, quadratic = (
      jax.jit(value_and_gradient, static_argnums=0)(f) for f in (reference.attention, reference.quadratic)
    )
    for name in quadratic:
      assert comparing.relative_rmse(recurrence[name], quadratic[name]) < 1e-12, name


def test_padding_is_stepped_over_and_runs_start_afresh():
  rng = np.random.default_rng(0)
  q, k, v = rng.normal(size=(3, 1, 8, 1, 4))
  ids = np.array([[-1, 5, 5, -1, 5, 2, -1, 2]])
  rates = comparing.rotary(4)
  y, state = comparing.reference_prefill(q, k, v, segment_ids=ids, rates=rates)
  kept = {5: [1, 2, 4], 2: [5, 7]}
  for run in kept.values():
    alone, last = comparing.reference_prefill(*(a[:, run] for a in (q, k, v)), rates=rates)
    np.testing.assert_allclose(y[:, run], alone, rtol=1e-12)
  np.testing.assert_allclose(state.S, last.S, rtol=1e-12)
  np.testing.assert_allclose(state.phase, last.phase, rtol=1e-12)
  assert not y[:, [0, 3, 6]].any()


def test_the_two_formulas_agree_on_segments_resets_and_groups():
  case = comparing.Case(T=23, groups=2, gate="resets", segments="padded", entry="attention")
  x, rest = comparing.inputs(case)
  weights = comparing.cotangents(case)
  recurrence = comparing.reference_results(x, rest, weights)
  quadratic = comparing.quadratic_results(x, rest, weights)
  for name in quadratic:
    assert comparing.relative_rmse(quadratic[name], recurrence[name]) < 1e-10, name
