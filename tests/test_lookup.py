"""Rows of a table, and the sum of their gradients in a fixed order."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from csympow.lookup import _places, look_up, sum_in_order
from tests.comparing import quick_jit


@pytest.mark.parametrize(
  ("count", "size", "width"), [(1, 5, 3), (7, 5, 3), (1000, 50, 8), (1023, 3, 1), (64, 1, 2), (5, 100_000, 2)]
)
def test_rows_are_added_up(count, size, width):
  rng = np.random.default_rng(0)
  ids = np.minimum(rng.geometric(0.05, size=count), size) - 1  # some often, some never
  values = rng.normal(size=(count, width)).astype(np.float32)
  wanted = np.zeros((size, width))
  np.add.at(wanted, ids, values.astype(np.float64))
  found = quick_jit(functools.partial(sum_in_order, size))(jnp.asarray(ids, jnp.int32), values)
  np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
  ("dtype", "size", "count"), [("uint8", 256, 1000), ("uint16", 50_304, 16_000), ("int16", 20_000, 14_000)]
)
def test_ids_of_few_bits_are_right_too(dtype, size, count):
  ids = np.resize(np.arange(0, size, 3), count).astype(dtype)
  found = quick_jit(functools.partial(sum_in_order, size))(jnp.asarray(ids), jnp.ones((count, 1)))
  np.testing.assert_array_equal(found[:, 0], np.bincount(ids, minlength=size))


def test_without_ids_there_is_nothing_to_add():
  found = jax.jit(jax.grad(lambda table: look_up(table, jnp.zeros(0, jnp.int32)).sum()))(jnp.ones((3, 2)))
  np.testing.assert_array_equal(found, np.zeros((3, 2)))


def test_each_sum_has_a_place_of_its_own_and_equal_ids_keep_their_order():
  places = np.asarray(_places(jnp.asarray([0, 0, 3, 3, 3, 4]), 5)).tolist()
  assert [places[n] for n in (1, 4, 5)] == [0, 3, 4]
  assert len(set(places)) == 6
  assert min(places[n] for n in (0, 2, 3)) >= 5
  summing = jax.make_jaxpr(functools.partial(sum_in_order, 5))(jnp.zeros(7, jnp.int32), jnp.zeros((7, 2)))
  assert "is_stable=True" in str(summing)


def test_a_row_that_is_no_number_spoils_no_other():
  values = jnp.asarray([[1.0], [jnp.nan], [2.0], [3.0]])
  found = sum_in_order(3, jnp.asarray([0, 1, 0, 2]), values)
  np.testing.assert_array_equal(found, [[3.0], [jnp.nan], [3.0]])


@pytest.mark.parametrize("shape", [(), (4,), (3, 5)], ids=str)
def test_a_lookup_and_its_gradient_are_those_of_take(shape):
  rng = np.random.default_rng(1)
  table = jnp.asarray(rng.normal(size=(6, 4)), jnp.float32)
  ids = jnp.asarray(rng.integers(0, 6, size=shape), jnp.int32)
  weight = jnp.asarray(rng.normal(size=(*shape, 4)), jnp.float32)

  def gradient(find):
    return jax.value_and_grad(lambda table: jnp.sum(weight * find(table, ids) ** 2))(table)

  jax.tree.map(
    functools.partial(np.testing.assert_allclose, rtol=1e-6),
    gradient(look_up),
    gradient(functools.partial(jnp.take, axis=0)),
  )


def test_on_a_gpu_nothing_is_added_to_memory_in_no_order():
  table, ids = jax.ShapeDtypeStruct((50, 8), jnp.float32), jax.ShapeDtypeStruct((4, 9), jnp.int32)
  gradient = jax.jit(jax.grad(lambda table, ids: jnp.sum(look_up(table, ids) ** 2))).trace(table, ids)
  unique = {}
  for platform in ("cuda", "cpu", "tpu"):
    text = gradient.lower(lowering_platforms=(platform,)).as_text()
    unique[platform] = re.findall(r'"stablehlo.scatter".*unique_indices = (\w+)', text)
  assert unique == {"cuda": ["true"], "cpu": ["false"], "tpu": ["false"]}
