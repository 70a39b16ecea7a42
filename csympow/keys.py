"""The state not yet multiplied out: keys and values, for as long as they are fewer than what they would add up to.

    y_i = sum_j B_ij v_j / sum_j B_ij,    B_ij = exp(G_i - G_j) (q'_i . k'_j) ** p

over all tokens so far is what `csympow.step` reads from S and Z. A token takes d + dv numbers, a state D (dv + 1): at
p=4 and d=64 a state has the size of 755,000 tokens in bfloat16, at p=2 of 2,000. `fold` adds the tokens up to the state
that `csympow.step` and `prefill` would have reached with them.

A new segment is a gate of 0, as everywhere: tokens before it stay in their slots and weigh nothing.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Integer

from csympow import cost, op
from csympow.forms.memory import Written, empty, write
from csympow.forms.spans import Settings, Sums, exact_product, heads_first, normalised
from csympow.prefix import Total, add, prefix_sum
from csympow.softmax import place_tokens, poisoned
from csympow.state import State

_SCORES_AT_ONCE = 2**20  # of a row and head: slots are read in parts


class KeyCache(NamedTuple):
  """Keys and values of all tokens so far, in buffers of a fixed size.

  Attributes:
    k: the keys, rotated.
    v: the values.
    G_hi: the running total of the log gates at each token.
    G_lo: what is beyond float32 of it.
    phase: the rotation reached, in turns, in [0, 1).
    length: how many of the slots of each row are taken; rows may differ, since padding takes none.
  """

  k: Float[Array, "B S H d"]
  v: Float[Array, "B S H dv"]
  G_hi: Float[Array, "B S H"]
  G_lo: Float[Array, "B S H"]
  phase: Float[Array, "B H r"]
  length: Integer[Array, "B"]


def init_keys(batch: int, slots: int, heads: int, head_dim: int, value_dim: int, dtype: DTypeLike) -> KeyCache:
  """The empty cache. `dtype` is that of keys and values: errors in them do not add up, as they would in a state."""
  gates = jnp.zeros((batch, slots, heads), jnp.float32)
  return KeyCache(
    k=jnp.zeros((batch, slots, heads, head_dim), dtype),
    v=jnp.zeros((batch, slots, heads, value_dim), dtype),
    G_hi=gates,
    G_lo=gates,
    phase=jnp.zeros((batch, heads, head_dim // 2), jnp.float32),
    length=jnp.zeros((batch,), jnp.int32),
  )


def prefill(
  q: Float[Array, "B T Hq d"],
  k: Float[Array, "B T H d"],
  v: Float[Array, "B T H dv"],
  cache: KeyCache,
  power: int,
  log_gate: Float[Array, "B T H"] | None,
  beta: Float[Array, "B T H"] | None,
  rates: Float[Array, "r"] | None,
  segment_ids: Integer[Array, "B T"] | None,
) -> tuple[Float[Array, "B T Hq dv"], KeyCache]:
  """The next tokens, as `csympow.prefill` gives them; a row that overflows its slots is NaN from then on."""
  x = op._prepare(q, k, v, log_gate, beta, rates, segment_ids, None, None, phase=cache.phase)
  G = add(_reached(cache), prefix_sum(x.log_gate))
  valid = jnp.ones(q.shape[:2], bool) if segment_ids is None else segment_ids >= 0
  place = cache.length[:, None] + jnp.cumsum(valid, axis=1) - 1
  slot = jnp.where(valid, place, cache.k.shape[1])
  cache = KeyCache(
    k=place_tokens(cache.k, slot, x.k),
    v=place_tokens(cache.v, slot, x.v),
    G_hi=place_tokens(cache.G_hi, slot, G.hi),
    G_lo=place_tokens(cache.G_lo, slot, G.lo),
    phase=x.phase,
    length=cache.length + valid.sum(axis=1, dtype=jnp.int32),
  )
  y = normalised(_sums(x.q, G, place, cache, power))
  y = jnp.moveaxis(y, 3, 1).reshape(*q.shape[:-1], v.shape[-1])
  y = poisoned(jnp.where(valid[..., None, None], y, 0.0), cache.length, cache.k.shape[1])
  return y.astype(q.dtype), cache


def step(
  q: Float[Array, "B Hq d"],
  k: Float[Array, "B H d"],
  v: Float[Array, "B H dv"],
  cache: KeyCache,
  power: int,
  log_gate: Float[Array, "B H"] | None,
  beta: Float[Array, "B H"] | None,
  rates: Float[Array, "r"] | None,
) -> tuple[Float[Array, "B Hq dv"], KeyCache]:
  """The next token, as `csympow.step` gives it."""
  log_gate, beta = (None if x is None else x[:, None] for x in (log_gate, beta))
  y, cache = prefill(q[:, None], k[:, None], v[:, None], cache, power, log_gate, beta, rates, None)
  return y[:, 0], cache


def fold(cache: KeyCache, power: int) -> State:
  """The state that the cache's tokens add up to."""
  (batch, slots, heads, head_dim), value_dim = cache.k.shape, cache.v.shape[-1]
  shape = cost.Shape(batch, slots, heads, heads, head_dim, value_dim, power, needs_state=True)
  plan = cost.choose(shape, "attention", None, cost.platform())
  taken = jnp.arange(slots) < cache.length[:, None]
  now = _reached(cache)
  until_now = jnp.where(taken[..., None], now - Total(cache.G_hi, cache.G_lo), -jnp.inf)
  k, v, discount = (
    heads_first(jnp.pad(x.astype(jnp.float32), ((0, 0), (0, plan.chunk - slots), (0, 0), (0, 0))))
    for x in (cache.k, cache.v, jnp.exp(until_now)[..., None])
  )
  settings = Settings(power, plan.chunk, plan.block, plan.tile, "highest")
  memory = write(empty(k[:, None, :, 0], v[:, None, :, 0], power), Written(k, v, discount), settings)
  return State(memory.S, memory.Z[..., 0], cache.phase)


def tokens_of_a_state(heads: int, head_dim: int, value_dim: int, power: int, key_dtype: DTypeLike) -> int:
  """How many tokens in a KeyCache take as many bytes as the state: until then they are the cheaper to read as well."""
  state = cost.Shape(1, 1, heads, heads, head_dim, value_dim, power, needs_state=True).state_bytes
  return int(state // (heads * ((head_dim + value_dim) * jnp.dtype(key_dtype).itemsize + 8)))


def _reached(cache: KeyCache) -> Total:
  """The running total of the log gates at each row's last token, B 1 H."""
  last = jnp.maximum(cache.length - 1, 0)[:, None, None]
  begun = (cache.length > 0)[:, None, None]
  return Total(*(jnp.where(begun, jnp.take_along_axis(G, last, axis=1), 0.0) for G in (cache.G_hi, cache.G_lo)))


def _sums(q: Float[Array, "B T H g d"], G: Total, place: Integer[Array, "B T"], cache: KeyCache, power: int) -> Sums:
  """What each query gathers from the slots up to its own."""
  time, slots = q.shape[1], cache.k.shape[1]
  part = min(slots, max(1, _SCORES_AT_ONCE // time))
  count = -(-slots // part)
  queries = Total(*(jnp.moveaxis(x, 1, -1)[:, :, None, :, None] for x in G))  # B H 1 T 1

  def cut(x: Array) -> Array:
    padded = jnp.pad(x, ((0, 0), (0, count * part - slots)) + ((0, 0),) * (x.ndim - 2))
    return jnp.moveaxis(padded.reshape(x.shape[0], count, part, *x.shape[2:]), 1, 0)

  def gather(sums: Sums, x: tuple[Array, ...]) -> tuple[Sums, None]:
    k, v, G_hi, G_lo, slot = x
    keys = Total(*(jnp.moveaxis(total, 1, -1)[:, :, None, None, :] for total in (G_hi, G_lo)))  # B H 1 1 s
    seen = (slot[None, None, :] <= place[:, :, None])[:, None, None]
    discount = jnp.where(seen, jnp.exp(jnp.where(seen, queries - keys, 0.0)), 0.0)
    weights = exact_product("bthgd,bshd->bhgts", q, k.astype(jnp.float32)) ** power * discount
    numerator = exact_product("bhgts,bshv->bhgtv", weights, v.astype(jnp.float32))
    return Sums(sums.numerator + numerator, sums.denominator + weights.sum(-1, keepdims=True)), None

  lead = tuple(q.shape[axis] for axis in (0, 2, 3, 1))
  zero = Sums(jnp.zeros((*lead, cache.v.shape[-1])), jnp.zeros((*lead, 1)))
  parts = (*(cut(x) for x in (cache.k, cache.v, cache.G_hi, cache.G_lo)), jnp.arange(count * part).reshape(count, part))
  if count == 1:
    return gather(zero, tuple(x[0] for x in parts))[0]
  return lax.scan(gather, zero, parts)[0]
