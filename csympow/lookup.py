"""Rows of a table, whose gradients are added up in the same order every time.

The gradient of a row is a sum over all places where the row was looked up. A GPU adds in whatever order they come, and
told not to, XLA sorts every single number of them, which took a fifth of a 124M model's step on an H200. Here it is the
rows that are sorted, and a scan adds up each run of equal ones.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Integer


def look_up(table: Float[Array, "V d"], ids: Integer[Array, "*lead"]) -> Float[Array, "*lead d"]:
  """The rows with these numbers; no id is out of range."""
  return _look_up(len(table), table, ids)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _look_up(size: int, table: Float[Array, "V d"], ids: Integer[Array, "*lead"]) -> Float[Array, "*lead d"]:
  del size
  return jnp.take(table, ids, axis=0)


def _forward(
  size: int, table: Float[Array, "V d"], ids: Integer[Array, "*lead"]
) -> tuple[Float[Array, "*lead d"], Integer[Array, "*lead"]]:
  return _look_up(size, table, ids), ids


def _backward(
  size: int, ids: Integer[Array, "*lead"], dfound: Float[Array, "*lead d"]
) -> tuple[Float[Array, "V d"], None]:
  # On CPUs and TPUs the order is fixed anyway.
  total = lax.platform_dependent(
    ids.reshape(-1),
    dfound.reshape(-1, dfound.shape[-1]),
    cuda=functools.partial(sum_in_order, size),
    default=functools.partial(_sum, size),
  )
  return total, None


_look_up.defvjp(_forward, _backward)


def _sum(size: int, ids: Integer[Array, "n"], values: Float[Array, "n d"]) -> Float[Array, "V d"]:
  return jnp.zeros((size, values.shape[1]), values.dtype).at[ids].add(values)


def sum_in_order(size: int, ids: Integer[Array, "n"], values: Float[Array, "n d"]) -> Float[Array, "V d"]:
  """For each of the first `size` numbers the sum of the values that have it for an id."""
  if not ids.size:
    return jnp.zeros((size, values.shape[1]), values.dtype)
  ids = ids.astype(jnp.int32)  # numbers beyond `size` must fit
  order = jnp.argsort(ids)
  ids, values = ids[order], values[order]
  begins = jnp.pad(ids[1:] != ids[:-1], (1, 0), constant_values=True)

  def join(
    left: tuple[Bool[Array, "n 1"], Float[Array, "n d"]], right: tuple[Bool[Array, "n 1"], Float[Array, "n d"]]
  ) -> tuple[Bool[Array, "n 1"], Float[Array, "n d"]]:
    return left[0] | right[0], right[1] + jnp.where(right[0], 0, left[1])

  _, totals = lax.associative_scan(join, (begins[:, None], values))
  places = _places(ids, size)
  return jnp.zeros((size, values.shape[1]), values.dtype).at[places].set(totals, mode="drop", unique_indices=True)


def _places(ids: Integer[Array, "n"], size: int) -> Integer[Array, "n"]:
  """The id, from the last of a run of equal ones; from all others something out of range, and no two the same."""
  ends = jnp.pad(ids[1:] != ids[:-1], (0, 1), constant_values=True)
  return jnp.where(ends, ids, size + jnp.arange(len(ids), dtype=ids.dtype))
