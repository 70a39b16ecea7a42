"""Attention over a sequence whose time axis is sharded: every function here is called inside `jax.shard_map`.

Shard s of C along a mesh axis holds T / C tokens of every row. With the gates of its tokens multiplied to b_s, its
phase advanced by mu_s, and (S_s, Z_s) what its own tokens leave in an empty state, shards join as tokens do:

    (mu, b, S, Z)_{s then t} = (mu_s + mu_t,  b_s b_t,  b_t S_s + S_t,  b_t Z_s + Z_t)

which is associative, so the state that shard s begins with is an exclusive prefix of these (`exclusive_scan`), found in
1 + log2(C - 1) rounds between neighbours at distance 1, 1, 2, 4, ... A run of segment ids that begins in shard t is a
gate of 0 there, b_t = 0, and a phase that begins anew.

The phase comes first, on its own: keys enter a state rotated. Then
- the chunked and the recurrent form exchange states. Nothing that is exchanged grows with T. A shard writes its
  tokens twice: once for the shards after it, once on the way through them from the state that it was sent;
- the attention form gathers keys and values, each discounted to its shard's end, and adds to the sums within the shard

    sum over s < t and j in s of  b_{i, start of t} (b_{s+1} ... b_{t-1}) b_{end of s, j} (q'_i . k'_j) ** p  [v_j, 1]

  block by block, in the forward and again in the backward pass: keys and values of all T tokens, never T x T.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Bool, Float, Int, Integer, Shaped

from csympow import cost, implementations, op, validation
from csympow import softmax as baseline
from csympow.checks import came, validated
from csympow.forms import attention as within
from csympow.forms import chunked, near, recurrent
from csympow.forms.memory import Memory, Written, discounted, empty, write, write_backward
from csympow.forms.spans import (
  Inputs,
  Settings,
  Sums,
  for_each,
  heads_first,
  item,
  merge,
  normalised,
  split,
  time_first,
)
from csympow.gates import RESET
from csympow.prefix import prefix_sum
from csympow.rotation import phases, rotate
from csympow.segments import find_runs


def _check_axis(given: Mapping[str, Any]) -> None:
  axis = given["axis"]
  try:
    lax.axis_size(axis)
  except (NameError, TypeError):
    raise ValueError(f"axis must name a mesh axis of the shard_map around this call, got {came(axis)}") from None


def _check(given: Mapping[str, Any]) -> None:
  _check_axis(given)
  validation.check_sequence(given)


@validated(_check)
def attention(
  q: Float[Array, "B T Hq d"],
  k: Float[Array, "B T H d"],
  v: Float[Array, "B T H dv"],
  *,
  axis: str,
  power: int = 2,
  log_gate: Float[Array, "B T H"] | None = None,
  beta: Float[Array, "B T H"] | None = None,
  rates: Float[Array, "r"] | None = None,
  segment_ids: Integer[Array, "B T"] | None = None,
  scale: ArrayLike | None = None,
  form: op.Form = "auto",
  chunk_size: int | None = None,
  implementation: op.Implementation | None = None,
) -> Float[Array, "B T Hq dv"]:
  """This shard's part of `csympow.attention` over the sequence that all shards along `axis` hold, in order.

  Every array but `rates` is this shard's part, T tokens long; the arguments are those of `csympow.attention`, runs of
  segment ids and all, as if there were no shards. `form="auto"` takes the form that is cheapest for the whole length:
  each query looks back over all shards, so dividing the time among C of them divides the cost of every form by C and
  leaves their order as it was, whereas a choice by the shard's own length would make short shards quadratic in T.
  """
  shards = lax.axis_size(axis)
  if shards == 1:
    return op.attention(q, k, v, power, log_gate, beta, rates, segment_ids, scale, form, chunk_size, implementation)
  shape = op._shape(q, k, v, power, needs_state=False)
  plan = _plan(shape, q.dtype, shards, form, chunk_size, implementation)
  settings = op._settings(power, plan, q.dtype, cost.platform())._replace(gated=log_gate is not None)
  shard, q, k, v, log_gate, beta, rates, segment_ids = op._equally_varying(
    (lax.axis_index(axis), q, k, v, log_gate, beta, rates, segment_ids)
  )
  (batch, time, query_heads, head_dim), heads = q.shape, k.shape[2]
  prepare = functools.partial(op._prepare, q, k, v, log_gate, beta, rates, segment_ids, scale)
  continues = _continues(segment_ids, batch, axis)
  alone = prepare(None)  # of which little is ever computed
  phase, gates = alone.phase, alone.log_gate
  if rates is not None:
    phase = _phase_before(phase, segment_ids, continues, axis)
  # A first run that does not continue the shards before begins with a reset: what precedes its first token is padding.
  gates = gates.at[:, 0].set(jnp.where(continues[:, None], gates[:, 0], RESET))
  start = op.init_state(batch, heads, head_dim, v.shape[-1], power)._replace(phase=phase)
  if plan.implementation == "pallas":
    x = op._preparation_for_kernels(settings)(q, k, v, log_gate, beta, rates, segment_ids, scale, start)
    y = _by_kernels(settings, q.dtype, axis, op._padded(x._replace(log_gate=gates), settings.chunk))
    return y[:, :time].reshape(batch, time, query_heads, -1)
  x = prepare(start)
  tokens = _Tokens(*(_padded(array, settings.chunk) for array in (x.q, x.k, x.v, gates)))

  until_end = _until_end(tokens.log_gate)
  across = until_end[:, 0] + tokens.log_gate[:, 0]
  if plan.form == "attention":
    keys = _gathered(_entries(tokens.k, tokens.v, until_end), across, shard, axis, settings.block)
    y = _attend(tokens, keys, shard, settings)
  else:
    own = _Carried(across[..., None, None], _written(tokens.k, tokens.v, until_end, settings))
    memory = exclusive_scan(_join, own, axis).memory
    if plan.form == "recurrent":
      y, _ = recurrent.attend(*tokens, memory, power, settings.chunk)
    else:
      y, _ = chunked.attend(*tokens, memory, settings, False)
  return y[:, :time].reshape(batch, time, query_heads, -1).astype(q.dtype)


@validated(_check_axis)
def softmax(
  q: Float[Array, "B T Hq d"],
  k: Float[Array, "B T H d"],
  v: Float[Array, "B T H d"],
  *,
  axis: str,
  rates: Float[Array, "r"],
  segment_ids: Integer[Array, "B T"] | None = None,
  implementation: str | None = None,
) -> Float[Array, "B T Hq d"]:
  """This shard's part of `csympow.softmax.attention`: the keys and values of all shards are gathered.

  Queries go block by block, and the backward pass computes each block's scores again.
  """
  shard, q, k, v, rates, segment_ids = op._equally_varying((lax.axis_index(axis), q, k, v, rates, segment_ids))
  (batch, time, query_heads, _), shards = q.shape, lax.axis_size(axis)
  ids = jnp.zeros_like(q[..., 0, 0], jnp.int32) if segment_ids is None else segment_ids
  valid, starts = find_runs(ids)
  continues = _continues(ids, batch, axis)
  q, k, v = (jnp.where(valid[..., None, None], x, jnp.zeros_like(x)) for x in (q, k, v))
  beta = valid[..., None].astype(jnp.float32)
  initial = _phase_before(phases(beta, rates, starts=starts)[1], ids, continues, axis)
  turns, _ = phases(beta, rates, starts=starts, initial=initial)
  run = jnp.cumsum(starts, axis=1, dtype=jnp.int32) + ~continues[:, None]
  run += exclusive_scan(jnp.add, run[:, -1], axis)[:, None]
  keys, values, runs = lax.all_gather((rotate(k, turns), v, jnp.where(valid, run, -1)), axis, axis=1, tiled=True)

  @jax.checkpoint
  def attend(block: tuple[Array, Array, Array]) -> Float[Array, "B t Hq d"]:
    q, run, place = block
    past = jnp.arange(shards * time) <= place[..., None]
    return baseline._dot_product(q, keys, values, (past & (run[..., None] == runs[:, None]))[:, None], implementation)

  size = cost._part(time, None, max(64, cost._SCRATCH // (4 * batch * query_heads * shards * time)))
  place = shard * time + jnp.arange(time)[None]
  blocks = chunked._cut([_padded(x, size) for x in (rotate(q, turns), run, place)], size)
  y = chunked._join(lax.map(attend, tuple(blocks)))[:, :time]
  return jnp.where(valid[..., None, None], y, 0)


def exclusive_scan[Element](combine: Callable[[Element, Element], Element], element: Element, axis: str) -> Element:
  """What the elements of all shards before this one come to, in order; the first shard gets zeros.

  `combine` is associative, with zeros for its identity: that is what a shard receives for which nobody sends.
  """
  shards = lax.axis_size(axis)

  def received(element: Element, distance: int) -> Element:
    routes = [(s, s + distance) for s in range(shards - distance)]
    return for_each(functools.partial(lax.ppermute, axis_name=axis, perm=routes), element)

  element, reach = received(element, 1), 1
  while reach < shards - 1:
    element, reach = combine(received(element, reach), element), 2 * reach
  return element


def _plan(
  shape: cost.Shape, dtype: DTypeLike, shards: int, form: str, chunk_size: int | None, implementation: str | None
) -> cost.Plan:
  """The form and the sizes for the whole length, and the sizes then fitted to the shard's."""
  device, length = cost.platform(), dataclasses.replace(shape, time=shards * shape.time)
  allowed = implementations.allowed(length, dtype, form, chunk_size, implementation, device, split=True)
  whole = cost.choose(length, form, chunk_size, device, allowed)
  if whole.implementation == "pallas":
    return cost.choose(shape, whole.form, chunk_size, device, {"pallas": (whole.form,)})
  size = whole.block if whole.form == "attention" else whole.chunk
  return cost.choose(shape, whole.form, chunk_size or cost._part(shape.time, None, size), device)


def _continues(segment_ids: Integer[Array, "B T"] | None, batch: int, axis: str) -> Bool[Array, "B"]:
  """Whether the first run here goes on with the last run of the shards before, or nothing stands here or before."""
  if segment_ids is None:
    return jnp.ones(batch, bool)
  valid, time = segment_ids >= 0, segment_ids.shape[1]

  def at(place: Int[Array, "B"]) -> Integer[Array, "B"]:
    return jnp.take_along_axis(segment_ids, place[:, None], axis=1)[:, 0]

  def later(left: tuple[Array, Array], right: tuple[Array, Array]) -> tuple[Array, Array]:
    return left[0] | right[0], jnp.where(right[0], right[1], left[1])

  here, first, last = valid.any(1), at(jnp.argmax(valid, axis=1)), at(time - 1 - jnp.argmax(valid[:, ::-1], axis=1))
  before, previous = exclusive_scan(later, (here, last), axis)
  return ~(here & before) | (previous == first)


def _phase_before(
  turned: Float[Array, "#B #H r"], segment_ids: Integer[Array, "B T"] | None, continues: Bool[Array, "B"], axis: str
) -> Float[Array, "B H r"]:
  """The phase, in turns, from which the first run here goes on, given how far each shard turns from a phase of 0."""
  restarts = ~continues if segment_ids is None else ~continues | find_runs(segment_ids)[1].any(1)

  def join(left: tuple[Array, Array], right: tuple[Array, Array]) -> tuple[Array, Array]:
    over = left[1] - (1 - right[1])  # phases lie on a grid in [0, 1): their sum modulo 1 is exact, taken this way
    total = jnp.where(over < 0, left[1] + right[1], over)
    return left[0] | right[0], jnp.where(right[0], right[1], total)

  restarts = restarts[:, None, None]
  before = exclusive_scan(join, (restarts, jnp.broadcast_to(turned, (len(restarts), *turned.shape[1:]))), axis)[1]
  return jnp.where(continues[:, None, None], before, 0.0)


@jax.custom_vjp
def _until_end(log_gate: Float[Array, "B T H"]) -> Float[Array, "B T H"]:
  """The log discount from each token to the last: a sum over the tokens after it."""
  return prefix_sum(jnp.pad(log_gate[:, 1:], ((0, 0), (0, 1), (0, 0))), reverse=True).hi


def _until_end_backward(_: None, dsum: Float[Array, "B T H"]) -> tuple[Float[Array, "B T H"]]:
  return (prefix_sum(jnp.pad(dsum[:, :-1], ((0, 0), (1, 0), (0, 0)))).hi,)


_until_end.defvjp(lambda log_gate: (_until_end(log_gate), None), _until_end_backward)


class _Carried(NamedTuple):
  """What a shard's tokens do to a state: discount it, and add to it."""

  log_discount: Float[Array, "B H 1 1"]
  memory: Memory


def _join(left: _Carried, right: _Carried) -> _Carried:
  memory = for_each(jnp.add, discounted(left.memory, right.log_discount), right.memory)
  return _Carried(left.log_discount + right.log_discount, memory)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _by_kernels(settings: Settings, dtype: DTypeLike, axis: str, tokens: near.Tokens) -> Float[Array, "B T H g dv"]:
  """The chunked form over the tokens of one shard, whole chunks long, and all shards before it."""
  memory, _ = _before(settings, dtype, axis, tokens)
  return op._chunked_by_kernels(tokens, memory, settings, dtype, False)[0]


def _before(settings: Settings, dtype: DTypeLike, axis: str, tokens: near.Tokens) -> tuple[Memory, Callable[..., Any]]:
  """The memory of all shards before this one, and what takes its cotangent to that of what a shard leaves."""
  left = op._chunked_by_kernels(tokens, None, settings, dtype, True)[1]  # of y nothing is computed
  across = (_until_end(tokens.log_gate)[:, 0] + tokens.log_gate[:, 0])[..., None, None]
  return jax.vjp(lambda left: exclusive_scan(_join, _Carried(across, left), axis).memory, left)


def _by_kernels_forward(settings: Settings, dtype: DTypeLike, axis: str, tokens: near.Tokens) -> tuple[Array, Any]:
  memory, transposed = _before(settings, dtype, axis, tokens)

  def attend(tokens: near.Tokens, memory: Memory) -> tuple[Array, Memory | None]:
    return op._chunked_by_kernels(tokens, memory, settings, dtype, True)

  (y, after), backward = jax.vjp(attend, tokens, memory)
  return y, (backward, transposed, for_each(jnp.zeros_like, after))


@jax.jit
def _walked(backward: Callable[..., Any], cotangents: Any) -> Any:
  """Traced and lowered once for both walks: a kernel takes a second."""
  return backward(cotangents)


def _by_kernels_backward(
  settings: Settings, dtype: DTypeLike, axis: str, saved: Any, dy: Float[Array, "B T H g dv"]
) -> tuple[near.Tokens]:
  """What a shard leaves is what the next one finds, so its cotangent is that of all shards after it.

  They send it when all have walked backwards once, from nothing, for the cotangent of what they found.
  """
  del settings, dtype, axis
  backward, transposed, nothing = saved
  (dafter,) = transposed(_walked(backward, (dy, nothing))[1])  # of the rest nothing is computed
  return (_walked(backward, (dy, dafter))[0],)


_by_kernels.defvjp(_by_kernels_forward, _by_kernels_backward)


class _Tokens(NamedTuple):
  """This shard's tokens as the forms take them: rotated, padded, every break between runs a gate."""

  q: Float[Array, "B T H g d"]
  k: Float[Array, "B T H d"]
  v: Float[Array, "B T H dv"]
  log_gate: Float[Array, "B T H"]


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _written(
  k: Float[Array, "B T H d"], v: Float[Array, "B T H dv"], until_end: Float[Array, "B T H"], settings: Settings
) -> Memory:
  """The memory of these tokens alone, each discounted by its `until_end`, a logarithm."""
  return write(empty(k, v, settings.power), _entries(k, v, until_end), settings)


def _written_forward(k: Array, v: Array, until_end: Array, settings: Settings) -> tuple[Memory, tuple[Array, ...]]:
  return _written(k, v, until_end, settings), (k, v, until_end)


def _written_backward(settings: Settings, saved: tuple[Array, ...], dmemory: Memory) -> tuple[Array, ...]:
  dk, dv = map(time_first, write_backward(dmemory, _entries(*saved), settings))
  return dk, dv, jnp.sum(saved[0] * dk, axis=-1) / settings.power  # Euler, as in chunked


_written.defvjp(_written_forward, _written_backward)


def _entries(k: Float[Array, "B T H d"], v: Float[Array, "B T H dv"], until_end: Float[Array, "B T H"]) -> Written:
  return Written(*map(heads_first, (k, v, jnp.exp(until_end)[..., None])))


class _Keys(NamedTuple):
  """Blocks of keys, and their values discounted alike."""

  k: Float[Array, "n B H t d"]
  values: within.Values


def _gathered(own: Written, across: Float[Array, "B H"], shard: Int[Array, ""], axis: str, block: int) -> _Keys:
  """The blocks of all shards in order, discounted from their own shard's end until the start of this one."""
  blocks = split(_Keys(own.k, within.Values(own.v * own.discount, own.discount)), block)
  keys, across = lax.all_gather((blocks, across), axis)
  earlier = (jnp.arange(len(across)) < shard)[:, None, None]
  between = lax.cumsum(jnp.pad(jnp.where(earlier, across, 0.0)[1:], ((0, 1), (0, 0), (0, 0))), reverse=True)
  discount = jnp.exp(jnp.where(earlier, between, -jnp.inf))[:, None, :, :, None, None]
  keys = keys._replace(values=for_each(lambda x: x * discount, keys.values))
  return for_each(lambda x: x.reshape(-1, *x.shape[2:]), keys)


class _Saved(NamedTuple):
  tokens: _Tokens
  keys: _Keys
  shard: Int[Array, ""]
  y: Float[Array, "B T H g dv"]
  denominator: Float[Array, "B T H g 1"]


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _attend(tokens: _Tokens, keys: _Keys, shard: Int[Array, ""], settings: Settings) -> Float[Array, "B T H g dv"]:
  """The attention form over the tokens of one shard, whole blocks long, and the keys of all shards before it."""
  return _forward(tokens, keys, shard, settings)[0]


def _forward(
  tokens: _Tokens, keys: _Keys, shard: Int[Array, ""], settings: Settings
) -> tuple[Float[Array, "B T H g dv"], _Saved]:
  inputs, since_start = _inputs(tokens)
  near = within.forward(inputs, settings)
  queries = split(inputs.q, settings.block)

  def add_pair(far: Sums, i: Int[Array, ""], j: Int[Array, ""]) -> Sums:
    weights = within._scores(queries[i], keys.k[j]) ** settings.power
    found = within._gather(weights, item(keys.values, j), settings)
    return for_each(lambda total, new: total.at[i].add(new), far, found)

  far = merge(_each_pair(add_pair, for_each(jnp.zeros_like, split(near, settings.block)), len(queries), shard))
  sums = for_each(lambda near, far: time_first(near + since_start * far), near, far)
  y = normalised(sums)
  return y, _Saved(tokens, keys, shard, y, sums.denominator)


def _backward(settings: Settings, saved: _Saved, dy: Float[Array, "B T H g dv"]) -> tuple[_Tokens, _Keys, None]:
  inputs, since_start = _inputs(saved.tokens)
  dsums = for_each(heads_first, chunked.normalised_backward(dy, saved.y, saved.denominator))
  gradients = within.backward(inputs, dsums, settings)
  queries, dsums = split((inputs.q, for_each(lambda x: x * since_start, dsums)), settings.block)
  product = functools.partial(jnp.einsum, precision=settings.precision)

  def add_pair(totals: tuple[Array, _Keys], i: Int[Array, ""], j: Int[Array, ""]) -> tuple[Array, _Keys]:
    (dq, dkeys), q, dsum, (k, values) = totals, queries[i], item(dsums, i), item(saved.keys, j)
    scores = within._scores(q, k)
    slopes = scores ** (settings.power - 1)
    dscores = settings.power * slopes * within._dweights(dsum, values, settings)
    dvalues = within.Values(*(product("bhgij,bhgiv->bhjv", slopes * scores, x) for x in dsum))
    found = _Keys(product("bhgij,bhgid->bhjd", dscores, q), dvalues)
    dkeys = for_each(lambda total, new: total.at[j].add(new), dkeys, found)
    return dq.at[i].add(product("bhgij,bhjd->bhgid", dscores, k)), dkeys

  zeros = for_each(jnp.zeros_like, (queries, saved.keys))
  dq, dkeys = _each_pair(add_pair, zeros, len(queries), saved.shard)
  gradients = gradients._replace(q_far=gradients.q_far + merge(dq))
  return _Tokens(*chunked.finish(inputs, gradients, None, settings.power)), dkeys, None


_attend.defvjp(_forward, _backward)


def _inputs(x: _Tokens) -> tuple[Inputs, Float[Array, "B H 1 T 1"]]:
  """The tokens, heads first, and their discounts since the shard's start."""
  inputs = chunked.inputs_of(chunked.Sequence(x.q, x.k, x.v, prefix_sum(x.log_gate)))
  return inputs, jnp.exp(inputs.G.hi)[:, :, None]


def _each_pair[Totals](
  add_pair: Callable[[Totals, Array, Array], Totals], totals: Totals, blocks: int, shards: Int[Array, ""]
) -> Totals:
  """Adds up over every block i of queries and each block j of keys of the first `shards` shards, and no more."""
  return lax.fori_loop(0, shards * blocks**2, lambda n, totals: add_pair(totals, n % blocks, n // blocks), totals)


def _padded(x: Shaped[Array, "B T *rest"], size: int) -> Shaped[Array, "B t *rest"]:
  return jnp.pad(x, ((0, 0), (0, -x.shape[1] % size)) + ((0, 0),) * (x.ndim - 2))
