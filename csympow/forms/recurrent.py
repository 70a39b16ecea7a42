"""The recurrent form: the definition itself, one token after another, with a state of constant size."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from csympow.features import symmetric_power
from csympow.forms.memory import Memory, discounted, empty, without_noise
from csympow.forms.spans import Sums, exact_product, for_each, normalised


def step(
  memory: Memory,
  q: Float[Array, "B H g d"],
  k: Float[Array, "B H d"],
  v: Float[Array, "B H dv"],
  log_gate: Float[Array, "B H"],
  power: int,
) -> tuple[Memory, Float[Array, "B H g dv"]]:
  """One token: S <- gamma S + phi(k) v^T, Z <- gamma Z + phi(k), y = S^T phi(q) / (Z . phi(q)).

  The query meets its own key directly, (q . k) ** p, and the older ones through the state: where there are few of
  those, features lose digits to cancellation that the product does not.
  """
  older, v = discounted(memory, log_gate[..., None, None]), v[..., None, :]
  phi_k, phi_q = symmetric_power(k, power)[..., None], symmetric_power(q, power)
  own_weight = exact_product("bhgd,bhd->bhg", q, k)[..., None] ** power
  carried = without_noise(
    Sums(exact_product("bhgf,bhfv->bhgv", phi_q, older.S), exact_product("bhgf,bhfu->bhgu", phi_q, older.Z))
  )
  sums = Sums(carried.numerator + own_weight * v, carried.denominator + own_weight)
  return Memory(older.S + phi_k * v, older.Z + phi_k), normalised(sums)


def attend(
  q: Float[Array, "B T H g d"],
  k: Float[Array, "B T H d"],
  v: Float[Array, "B T H dv"],
  log_gate: Float[Array, "B T H"],
  memory: Memory | None,
  power: int,
  interval: int,
) -> tuple[Float[Array, "B T H g dv"], Memory]:
  """All tokens in turn. The backward pass keeps a state every `interval` tokens and recomputes those between."""

  def advance(memory: Memory, token: tuple[Array, Array, Array, Array]) -> tuple[Memory, Float[Array, "B H g dv"]]:
    q, k, v, log_gate = token
    return step(memory, q, k, v, log_gate, power)

  def advance_interval(
    memory: Memory, tokens: tuple[Array, Array, Array, Array]
  ) -> tuple[Memory, Float[Array, "t B H g dv"]]:
    return lax.scan(advance, memory, tokens)

  by_interval = for_each(
    lambda x: jnp.moveaxis(x, 1, 0).reshape(-1, interval, x.shape[0], *x.shape[2:]), (q, k, v, log_gate)
  )
  start = empty(k, v, power) if memory is None else memory
  final, y = lax.scan(jax.checkpoint(advance_interval, prevent_cse=False), start, by_interval)
  return jnp.moveaxis(y.reshape(-1, *y.shape[2:]), 0, 1), final
