"""Rotation: rates, betas, and the phase that the state carries in turns."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import csympow
from tests import comparing, reference
from tests.comparing import FULL, forward, inputs, relative_rmse, turns_apart


@pytest.mark.parametrize(("d", "N"), [(64, 65_536), (8, 1_000), (2, 10)])
def test_rates_fall_from_one_turn_by_powers_of_the_longest_length(d, N):
  rates = csympow.rotary_rates(d, N)
  assert rates.shape == (d // 2,)
  assert rates.dtype == jnp.float32
  j = np.arange(1, d // 2 + 1)
  np.testing.assert_allclose(rates, 2 * np.pi / N ** (2 * (j - 1) / d), rtol=3e-7)


def one_token(beta, rates, power=2):
  """Z and the phase after one key: Z is phi of that key as the op turned it."""
  k = jnp.asarray([1.0, 2.0, -0.5, 3.0]).reshape(1, 1, 1, 4)
  _, state = csympow.prefill(k, k, k, power=power, beta=jnp.full((1, 1, 1), beta), rates=jnp.asarray(rates))
  return np.asarray(k).ravel(), np.asarray(state.Z).ravel(), np.asarray(state.phase).ravel()


def test_adjacent_pairs_turn_counterclockwise_each_by_its_own_angle():
  # A quarter turn of the first pair and an eighth of the second.
  (a, b, c, d), Z, phase = one_token(0.5, [np.pi, np.pi / 2])
  r = np.sqrt(0.5)
  turned = np.array([-b, a, r * (c - d), r * (c + d)])
  with jax.enable_x64(True):
    features = np.asarray(reference.phi(jnp.asarray(turned), 2))
  np.testing.assert_allclose(Z, features, rtol=1e-5, atol=1e-6)
  assert turns_apart(phase, [0.25, 0.125]) < 1e-7


@pytest.mark.parametrize("form", comparing.FORMS)
def test_the_phase_is_in_turns_in_float32_and_below_one(form):
  x, rest = inputs(FULL)
  phase = comparing.full_results(x, rest | {"segment_ids": 0 * rest["segment_ids"]}, form)["phase"]
  assert phase.dtype == jnp.float32
  assert jnp.all((phase >= 0) & (phase < 1))
  turns = np.asarray(x["phase"]) + comparing.float64(x["beta"]).sum(1)[..., None] * rest["rates"] / (2 * np.pi)
  assert turns_apart(phase, turns) < 1e-6


@pytest.mark.parametrize("form", comparing.FORMS)
def test_a_beta_of_zero_is_no_rotation(form):
  x, rest = inputs(FULL)
  x |= {"phase": 0 * x["phase"], "beta": 0 * x["beta"]}
  weights = comparing.cotangents(FULL)
  still = comparing.reference_results(x, {"segment_ids": rest["segment_ids"]}, weights)
  got = comparing.full_results(x, rest, form)
  for name in ("y", "S", "Z", "dq", "dk", "dv", "dlog_gate"):
    comparing.assert_close(got[name], still[name], 1e-5, name)


@pytest.mark.parametrize("form", comparing.FORMS)
def test_without_rates_the_phase_is_carried_through_untouched(form):
  x, rest = inputs(FULL)
  x.pop("beta")
  ids = {"segment_ids": rest["segment_ids"]}
  out = forward(x, ids, form=form)
  np.testing.assert_array_equal(out["phase"], x["phase"])
  np.testing.assert_array_equal(out["y"], forward(x | {"phase": 0 * x["phase"]}, ids, form=form)["y"])


@pytest.mark.parametrize("form", comparing.FORMS)
def test_only_the_angle_between_positions_is_seen(form):
  """A phase that has come far before the first key turns queries and keys alike."""
  x, rest = inputs(FULL)
  x |= {"S": 0 * x["S"], "Z": 0 * x["Z"]}
  a, b = (comparing.full_results(x | {"phase": phase}, rest, form)["y"] for phase in (x["phase"], 0 * x["phase"]))
  assert relative_rmse(a, b) < 1e-5


D, N = 8, 65_536


def betas(kind, T, H=2):
  """(the argument, the float64 betas it stands for)."""
  rng = np.random.default_rng(0)
  beta = {
    "random": rng.uniform(0, 2, (1, T, H)).astype(np.float32),
    "constant": np.full((1, T, H), 1.3, np.float32),
    # By which few pairs, or one, turn by more than a phase's last bit.
    "slow": np.broadcast_to(np.float32([3e-5, 1e-5, 3e-6, 1e-6, 1e-7])[:H], (1, T, H)),
    "fixed": np.ones((1, T, H), np.float32),
  }[kind]
  return None if kind == "fixed" else jnp.asarray(beta), beta.astype(np.float64)


@pytest.mark.parametrize("rates", ["rotary", "arbitrary"])
@pytest.mark.parametrize("kind", ["random", "constant", "fixed"])
@pytest.mark.parametrize("T", [pytest.param(65_536, marks=pytest.mark.slow), 1_048_576])
def test_the_phase_of_a_long_sequence_is_right_to_a_thousandth_of_a_radian(T, kind, rates):
  """The exact phase is that of the float32 rates: they are what the caller gave."""
  theta = csympow.rotary_rates(D, N) if rates == "rotary" else jnp.asarray([3.0, 1.7, 0.1, 1e-4], jnp.float32)
  beta, exact = betas(kind, T)
  turns = exact.sum(1)[..., None] * (np.asarray(theta, np.float64) / (2 * np.pi))
  assert 2 * np.pi * turns_apart(final_phase(beta, theta, T), turns) < 1e-3


@jax.jit
def _final_phase(x, beta, rates):
  return csympow.prefill(x, x, x[..., :1], beta=beta, rates=rates, form="chunked")[1].phase


def final_phase(beta, rates, T, H=2):
  return _final_phase(jnp.ones((1, T, H, D)), beta, rates)


@pytest.mark.parametrize("form", ["chunked", "recurrent"])
def test_angles_are_right_at_every_position_of_a_long_sequence(form):
  """The last phase says nothing of the others, and y depends on each."""
  T, d = 65_536, 4
  rng = np.random.default_rng(3)
  q, k, v = (jnp.asarray(a, jnp.float32) for a in rng.normal(size=(3, 1, T, 1, d)))
  options = {
    "log_gate": jnp.asarray(comparing.random_log_gate(rng, (1, T, 1))),
    "beta": jnp.asarray(comparing.random_beta(rng, (1, T, 1))),
    "rates": jnp.asarray(comparing.rotary(d)),
  }
  exact, _ = comparing.reference_prefill(q, k, v, **options)
  y = jax.jit(lambda *a, **o: csympow.attention(*a, **o, form=form))(q, k, v, **options)
  for quarter in range(4):
    rows = slice(quarter * T // 4, (quarter + 1) * T // 4)
    assert relative_rmse(y[:, rows], exact[:, rows]) < 1e-4


@pytest.mark.parametrize("kind", ["random", "constant", "slow", "fixed"])
def test_decoding_65536_tokens_keeps_the_phase(kind):
  T, H = 65_536, 5
  theta = csympow.rotary_rates(D, N)
  beta, exact = betas(kind, T, H)

  @jax.jit
  def decode(beta, theta):
    x = jnp.ones((1, H, D))

    def token(state, beta):
      return csympow.step(x, x, x[..., :1], state, beta=beta, rates=theta)[1], None

    start = csympow.init_state(1, H, D, 1)
    return jax.lax.scan(token, start, None if beta is None else jnp.moveaxis(beta, 1, 0), length=T)[0].phase

  turns = exact.sum(1)[..., None] * (np.asarray(theta, np.float64) / (2 * np.pi))
  assert 2 * np.pi * turns_apart(decode(beta, theta), turns) < 1e-3


@pytest.mark.parametrize("order", [("rates", "beta"), pytest.param(("beta", "rates"), marks=pytest.mark.slow)])
def test_a_second_derivative_by_rates_and_betas_does_not_depend_on_their_order(order):
  """And is what first ones say of rates a little apart."""
  x, rest = comparing.inputs(comparing.Case(T=5, B=1, H=1, d=4, dv=3, entry="attention"))
  random = np.random.default_rng(0)
  along = {n: jnp.asarray(random.normal(size=a.shape), jnp.float32) for n, a in (x | rest).items() if n in order}

  def loss(changed):
    y = csympow.attention(**(x | {"rates": rest["rates"]} | changed), implementation="xla", form="attention")
    return jnp.sum(y * jnp.arange(y.size).reshape(y.shape))

  given = {"beta": x["beta"], "rates": rest["rates"]}

  def slope(name, changed):
    return jnp.sum(jax.grad(loss)(changed)[name] * along[name])

  inner, outer = order
  found = jax.grad(functools.partial(slope, inner))(given)[outer]
  apart = [slope(inner, given | {outer: given[outer] + step * along[outer]}) for step in (-1e-2, 1e-2)]
  np.testing.assert_allclose(jnp.sum(found * along[outer]), (apart[1] - apart[0]) / 2e-2, rtol=5e-3)
