"""The paper's propositions, each as a statement about the public functions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import csympow
from tests import comparing, reference
from tests.comparing import FORMS, Case, forward, inputs


def exact(function, *arguments):
  with jax.enable_x64(True):
    return np.asarray(function(*arguments))


def random_rotation(d, seed):
  q, r = np.linalg.qr(np.random.default_rng(seed).normal(size=(d, d)))
  q *= np.sign(np.diag(r))
  q[:, 0] *= np.sign(np.linalg.det(q))
  return q


def induced(P, power, features):
  """The matrix Pbar with features(P x) = Pbar features(x) for enough x to determine it, and the misfit."""
  x = np.random.default_rng(9).normal(size=(4 * len(reference.multisets(len(P), power)), len(P)))
  before, after = features(x), features(x @ P.T)
  solution, *_ = np.linalg.lstsq(before, after)
  return solution.T, np.linalg.norm(before @ solution - after) / np.linalg.norm(after)


@pytest.mark.parametrize(("power", "d"), [(2, 2), (2, 5), (4, 3), (6, 2)])
def test_a_rotation_of_keys_is_a_rotation_of_features(power, d):
  def features(x):
    return comparing.float64(csympow.symmetric_power(jnp.asarray(x, jnp.float32), power))

  Pbar, misfit = induced(random_rotation(d, seed=d), power, features)
  assert misfit < 1e-6
  np.testing.assert_allclose(Pbar @ Pbar.T, np.eye(len(Pbar)), atol=1e-4)
  np.testing.assert_allclose(np.linalg.det(Pbar), 1.0, rtol=1e-3)


@pytest.mark.parametrize("form", FORMS)
def test_rotary_is_a_power_of_inner_products_at_relative_angles(form):
  """(q_i . R((j - i) theta) k_j)^2: only differences of positions enter."""
  x, rest = inputs(Case(T=9, d=4, gate="none", rotation="fixed", entry="attention"))
  theta = np.float64(rest["rates"])
  q, k, v = (comparing.float64(x[n]) for n in ("q", "k", "v"))
  i = np.arange(9)
  turned = exact(lambda: reference.rotate(jnp.asarray(k)[:, None], (i[None, :] - i[:, None])[..., None, None] * theta))
  B = np.tri(9) * np.einsum("bihd,bijhd->bhij", q, turned) ** 2
  want = np.einsum("bhij,bjhe->bihe", B / B.sum(-1, keepdims=True), v)
  y = forward(x, rest, entry="attention", form=form)["y"]
  assert comparing.relative_rmse(y, want) < 1e-5


@pytest.mark.parametrize("form", FORMS)
def test_gating_is_a_product_of_gammas_on_each_weight(form):
  x, _ = inputs(Case(T=9, rotation="none", entry="attention"))
  q, k, v, log_gate = (comparing.float64(x[n]) for n in ("q", "k", "v", "log_gate"))
  gamma = np.exp(log_gate)
  b = np.array([[np.prod(gamma[:, j + 1 : i + 1], axis=1) * (j <= i) for j in range(9)] for i in range(9)])  # i j B H
  B = np.einsum("ijbh,bihd,bjhd->bhij", np.sqrt(b), q, k) ** 2
  want = np.einsum("bhij,bjhe->bihe", B / B.sum(-1, keepdims=True), v)
  y = forward(x, {}, entry="attention", form=form)["y"]
  assert comparing.relative_rmse(y, want) < 1e-5


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("power", "d"), [(2, 4), (4, 2)])
def test_gate_and_rotation_are_a_conformal_map_of_the_state(form, power, d):
  """S_i = gamma_i Pbar_i S_{i-1} + phi(k_i) v_i^T with keys left alone, Pbar_i that of R(-beta_i theta)."""
  case = Case(T=7, B=1, H=1, d=d, dv=3, power=power, entry="attention")
  x, rest = inputs(case)
  q, k, v, log_gate, beta = (comparing.float64(x[n])[0, :, 0] for n in ("q", "k", "v", "log_gate", "beta"))

  def features(a):
    return exact(lambda: reference.phi(jnp.asarray(a), power))

  S, Z, want = 0.0, 0.0, []
  for i in range(case.T):
    angles = -beta[i] * np.float64(rest["rates"])
    R = exact(lambda angles=angles: reference.rotate(jnp.eye(d), angles)).T
    Pbar, _ = induced(R, power, features)
    np.testing.assert_allclose(Pbar @ Pbar.T, np.eye(len(Pbar)), atol=1e-9)
    conformal = np.exp(log_gate[i]) * Pbar
    S = (conformal @ S if i else 0) + np.outer(features(k[i]), v[i])
    Z = (conformal @ Z if i else 0) + features(k[i])
    want.append(features(q[i]) @ S / (features(q[i]) @ Z))
  y = forward(x, rest, entry="attention", power=power, form=form, chunk_size=3)["y"]
  assert comparing.relative_rmse(y[0, :, 0], np.array(want)) < 1e-5


@pytest.mark.parametrize("form", FORMS)
def test_a_constant_gate_is_alibi(form):
  """Keys e_j and queries exp(s_ij / 2) make the weights exp(s_ij), those of a softmax; the gate is then its bias."""
  T, slope = 8, 0.3
  rng = np.random.default_rng(0)
  s, v = rng.normal(size=(T, T)), rng.normal(size=(T, 3))
  distance = np.arange(T)[:, None] - np.arange(T)
  alibi = jax.nn.softmax(np.where(distance >= 0, s - slope * distance, -np.inf), axis=-1) @ v
  x = {"q": np.exp(s / 2), "k": np.eye(T), "v": v}
  x = {n: jnp.asarray(a, jnp.float32)[None, :, None] for n, a in x.items()} | {"log_gate": jnp.full((1, T, 1), -slope)}
  y = forward(x, {}, entry="attention", form=form, chunk_size=3)["y"]
  np.testing.assert_allclose(y[0, :, 0], alibi, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("power", "size", "unit"), [(2, 39, 1e6), (4, 14, 1e9)])
def test_the_state_of_gpt2_takes_the_papers_39_megabytes_and_14_gigabytes(power, size, unit):
  """12 layers of 12 heads of 64, two bytes a number, the sum of keys counted in."""
  state = jax.eval_shape(lambda: csympow.init_state(12, 12, 64, 64, power=power, dtype=jnp.bfloat16))
  assert round((2 * state.S.size + 2 * state.Z.size) / unit) == size
  assert (state.S.dtype, state.Z.dtype) == (jnp.bfloat16, jnp.bfloat16)
