"""The feature map: phi(x) . phi(y) = (x . y)^p with one feature per multiset."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import csympow
from tests import comparing, reference


@pytest.mark.parametrize(("power", "d"), [(2, 1), (2, 3), (2, 64), (4, 2), (4, 8), (6, 5)])
def test_the_inner_product_of_features_is_the_power_of_the_inner_product(power, d):
  # Small whole numbers: every product is exact, and only the square roots of the weights are rounded.
  x, y = np.random.default_rng(d).integers(-3, 4, (2, 50, d)).astype(np.float32)
  features = csympow.symmetric_power(jnp.asarray(np.stack([x, y])), power)
  a, b = comparing.float64(features)
  exact = np.sum(x.astype(np.int64) * y.astype(np.int64), axis=-1) ** power
  # |phi(x)| |phi(y)| bounds every partial sum, so this is what rounding the features to float32 can do.
  bound = 2 * power * 2.0**-24 * np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1)
  assert np.all(np.abs(np.sum(a * b, axis=-1) - exact) <= bound)


@pytest.mark.parametrize(
  ("power", "d", "D"), [(2, 64, 2_080), (4, 64, 766_480), (4, 32, 52_360), (4, 16, 3_876), (2, 1, 1), (6, 4, 84)]
)
def test_the_number_of_features_is_the_number_of_multisets(power, d, D):
  shape = jax.eval_shape(lambda x: csympow.symmetric_power(x, power), jax.ShapeDtypeStruct((3, d), jnp.float32))
  assert shape.shape == (3, D)


@pytest.mark.parametrize(("power", "d"), [(2, 5), (4, 4), (6, 3)])
def test_features_are_weighted_monomials_in_lexicographic_order(power, d):
  x = np.random.default_rng(0).normal(size=(2, 3, d)).astype(np.float32)
  with jax.enable_x64(True):
    exact = np.asarray(reference.phi(jnp.asarray(x, jnp.float64), power))
  features = csympow.symmetric_power(jnp.asarray(x), power)
  assert features.dtype == jnp.float32
  np.testing.assert_allclose(features, exact, rtol=1e-6, atol=0)


def test_scaling_by_a_scales_the_features_by_a_to_the_power():
  x = jax.random.normal(jax.random.key(0), (7, 6))
  np.testing.assert_array_equal(csympow.symmetric_power(0.5 * x, 4), csympow.symmetric_power(x, 4) / 16)


@pytest.mark.parametrize("power", [2, 4])
def test_the_gradient_of_the_features_is_that_of_the_monomials(power):
  x = np.random.default_rng(1).normal(size=(5, 4))
  x[0, 0] = 0  # a monomial's gradient where one of its factors is zero
  weights = np.random.default_rng(2).normal(size=(5, len(reference.multisets(4, power))))
  with jax.enable_x64(True):
    exact = jax.grad(lambda x: jnp.sum(weights * reference.phi(x, power)))(jnp.asarray(np.float32(x), jnp.float64))
  got = jax.grad(lambda x: jnp.sum(np.float32(weights) * csympow.symmetric_power(x, power)))(jnp.asarray(np.float32(x)))
  assert comparing.relative_rmse(got, exact) < 1e-6


def test_more_features_than_an_index_counts_are_refused():
  for call in (lambda: csympow.symmetric_power(jnp.ones(64), 20), lambda: csympow.init_state(1, 1, 64, 64, power=8)):
    with pytest.raises(ValueError, match=r"^power must leave fewer than 2\^31 features of d=64, got (20|8)$"):
      call()
