"""What is read of states for gradients on Hopper, interpreted, against float64."""

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.gpu import state_read
from kernels_pallas.gpu.tiles import BLOCK
from tests.comparing import assert_close

T, H, W = BLOCK, 2, 64
INTERPRETED = plgpu.InterpretGPUParams(detect_races=True)
HAS_STATE = jnp.array([[1, 0]], jnp.int32)


def vectors(seed):
  """Of two heads."""
  return jnp.asarray(np.random.default_rng(seed).normal(size=(1, T, H, W)), jnp.bfloat16)


def state():
  """S[a, v, b], of one chunk, the same the other way round."""
  S = np.random.default_rng(0).normal(size=(1, H, 1, 1, W, W, W))
  return jnp.asarray(S + np.swapaxes(S, -3, -1), jnp.bfloat16)


def time_last(x):
  return jnp.moveaxis(x, 1, 3)


def products(x, y, formula, S):
  return np.einsum(formula, *(np.asarray(a, np.float64) for a in (x, y, S[:, :, 0, 0])))


@pytest.mark.usefixtures("no_races")
def test_gradients_of_values_are_those_of_keys_discounted_once():
  k, rows, S = vectors(1), vectors(2), state()
  discount = jnp.asarray(2.0 ** np.random.default_rng(3).integers(-9, 1, (1, H, T)), jnp.float32)  # k stays exact
  discount = discount.at[:, :, 5].set(2.0**-60)
  discounted = (k * jnp.moveaxis(discount, 1, 2)[..., None]).astype(jnp.bfloat16)
  found = state_read.read_values(
    time_last(discounted), discounted, S, rows, discount, has_state=HAS_STATE, interpret=INTERPRETED
  )
  added = products(discounted, k, "btha,bthc,bhavc->bthv", S)
  added[:, 5] = 0
  expected = np.asarray(rows, np.float64)
  np.testing.assert_array_equal(found[:, :, 1], rows[:, :, 1])
  assert_close(found[:, :, 0], expected[:, :, 0] + added[:, :, 0], 5e-3, "dv")


@pytest.mark.usefixtures("no_races")
def test_gradients_of_vectors_are_added_to_what_there_is():
  x, y, w, S = vectors(1), vectors(2), vectors(3), state()
  rows = 100 * vectors(4).astype(jnp.float32)
  Z = jnp.asarray(np.random.default_rng(5).normal(size=(1, H, 1, 2, W, W)), jnp.bfloat16)
  scale = jnp.asarray(np.random.default_rng(6).uniform(size=(1, H, T)), jnp.float32)
  found = state_read.read_transposed(
    time_last(x), y, S, w, Z, rows, scale=scale, has_state=HAS_STATE, interpret=INTERPRETED
  )
  added = products(x, y, "btha,bthv,bhavc->bthc", S)
  added += np.einsum("bthc,bhcd->bthd", np.asarray(w, np.float64), np.sum(np.asarray(Z, np.float64)[:, :, 0], axis=2))
  added *= np.moveaxis(np.asarray(scale, np.float64), 1, 2)[..., None]
  np.testing.assert_array_equal(found[:, :, 1], rows[:, :, 1])
  assert_close(found[:, :, 0], np.asarray(rows, np.float64)[:, :, 0] + added[:, :, 0], 5e-3, "dx")
