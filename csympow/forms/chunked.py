"""The chunked form: the attention form inside each chunk of tokens, and a state that carries all chunks before it.

    y_i = (inside chunk + b_i S^T phi(q_i)) / (inside chunk + b_i Z . phi(q_i))    b_i: discount since the chunk's start
    S  <- b S + sum_j b_j phi(k_j) v_j^T                                           b_j: discount until the chunk's end

With one chunk over the whole sequence this is the attention form, which then needs the state only where one is given or
asked for. The backward pass walks the chunks in reverse with the cotangent of the state; it computes features again and
keeps one state per chunk.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from csympow import gates
from csympow.forms import attention
from csympow.forms.memory import Memory, Written, discounted, empty, inner, read, read_backward, write, write_backward
from csympow.forms.spans import (
  Inputs,
  Settings,
  Sums,
  for_each,
  heads_first,
  item,
  normalised,
  over_normaliser,
  time_first,
)
from csympow.prefix import Total, prefix_sum


class Sequence(NamedTuple):
  """All tokens, time first, as they come; chunks are turned to `Inputs` one at a time."""

  q: Float[Array, "B T H g d"]
  k: Float[Array, "B T H d"]
  v: Float[Array, "B T H dv"]
  G: Total


class _Saved(NamedTuple):
  """What the backward pass needs."""

  sequence: Sequence
  initial: Memory | None
  y: Float[Array, "B T H g dv"]
  denominator: Float[Array, "B T H g 1"]
  before: Memory | None  # the state that each chunk begins with
  final: Memory | None


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def attend(
  q: Float[Array, "B T H g d"],
  k: Float[Array, "B T H d"],
  v: Float[Array, "B T H dv"],
  log_gate: Float[Array, "B T H"],
  memory: Memory | None,
  settings: Settings,
  return_memory: bool,
) -> tuple[Float[Array, "B T H g dv"], Memory | None]:
  """Attends to `memory` and to the tokens up to each token; returns y in float32 and the memory after the last token.

  All inputs are float32; T is a multiple of settings.chunk.
  """
  return _forward(q, k, v, log_gate, memory, settings, return_memory, save=False)[0]


def _forward(
  q: Float[Array, "B T H g d"],
  k: Float[Array, "B T H d"],
  v: Float[Array, "B T H dv"],
  log_gate: Float[Array, "B T H"],
  memory: Memory | None,
  settings: Settings,
  return_memory: bool,
  save: bool = True,
) -> tuple[tuple[Float[Array, "B T H g dv"], Memory | None], _Saved | None]:
  # Without the barrier XLA computes the sums anew for every score that they discount.
  sequence = Sequence(q, k, v, lax.optimization_barrier(prefix_sum(log_gate)))
  if q.shape[1] == settings.chunk and memory is None and not return_memory:
    sums = for_each(time_first, attention.forward(inputs_of(sequence), settings))
    y = normalised(sums)
    return (y, None), _Saved(sequence, None, y, sums.denominator, None, None)

  def advance(memory: Memory, x: tuple[Sequence, Total]) -> tuple[Memory, tuple[Array, Array, Memory | None]]:
    chunk, decay = _chunk(*x)
    inside = attention.forward(chunk, settings)
    carried = read(memory, chunk.q, settings)
    sums = for_each(lambda near, far: near + decay.since_start[:, :, None] * far, inside, carried)
    after = write(discounted(memory, decay.log_across), Written(chunk.k, chunk.v, decay.until_end), settings)
    return after, (time_first(normalised(sums)), time_first(sums.denominator), memory if save else None)

  chunks = _cut(sequence, settings.chunk)
  initial = empty(k, v, settings.power) if memory is None else memory
  final, (y, denominator, before) = lax.scan(advance, initial, (chunks, _total_before(chunks.G)))
  y, denominator = _join((y, denominator))
  last = final if return_memory else None
  return (y, last), _Saved(sequence, memory, y, denominator, before, last)


def _backward(
  settings: Settings, return_memory: bool, saved: _Saved, cotangents: tuple[Array, Memory | None]
) -> tuple[Array, Array, Array, Array, Memory | None]:
  dy, dfinal = cotangents
  dsums = normalised_backward(dy, saved.y, saved.denominator)
  if saved.before is None:
    inputs = inputs_of(saved.sequence)
    gradients = attention.backward(inputs, for_each(heads_first, dsums), settings)
    return *finish(inputs, gradients, None, settings.power), None

  if dfinal is None or saved.final is None:
    dfinal, pull = for_each(jnp.zeros_like, item(saved.before, 0)), jnp.zeros_like(saved.sequence.G.hi[:, 0])
  else:
    pull = inner(dfinal, saved.final)

  def retreat(
    carry: tuple[Memory, Array], x: tuple[tuple[Sequence, Total], Sums, Memory]
  ) -> tuple[tuple[Memory, Array], tuple[Array, Array, Array, Array]]:
    dafter, pull = carry
    (chunk, decay), dsum, before = _chunk(*x[0]), for_each(heads_first, x[1]), x[2]
    gradients = attention.backward(chunk, dsum, settings)
    dk, dv = write_backward(dafter, Written(chunk.k, chunk.v, decay.until_end), settings)
    dsum = for_each(lambda x: x * decay.since_start[:, :, None], dsum)
    dbefore = discounted(dafter, decay.log_across)
    dbefore, dq = read_backward(before, chunk.q, dsum, dbefore, settings)
    gradients = gradients._replace(q_far=gradients.q_far + dq, k_far=gradients.k_far + dk, v=gradients.v + dv)
    return (dbefore, inner(dbefore, before)), finish(chunk, gradients, pull, settings.power)

  chunks, dsums = _cut((saved.sequence, dsums), settings.chunk)
  spans = ((chunks, _total_before(chunks.G)), dsums, saved.before)
  (dinitial, _), parts = lax.scan(retreat, (dfinal, pull), spans, reverse=True)
  return *_join(parts), None if saved.initial is None else dinitial


attend.defvjp(_forward, _backward)


def finish(
  x: Inputs, gradients: attention.Gradients, pull: Float[Array, "B H"] | None, power: int
) -> tuple[Float[Array, "B T H g d"], Float[Array, "B T H d"], Float[Array, "B T H dv"], Float[Array, "B T H"]]:
  """Puts the parts of the gradients together, time first, and finds the gates'.

  The gate at t discounts all pairs j < t <= i. Its cotangent is the sum of their pulls B_ij dB_ij: those of all
  queries from t on, less those of all keys from t on, plus those between this span and what comes after, which is
  `pull`, the inner product of the state and its cotangent. So no error adds up over more than one span.
  """
  by_query = jnp.sum(x.q * gradients.q_far, axis=(2, -1))  # Euler: q . dq = p * (the sum of its pulls)
  by_key = jnp.sum(x.k * gradients.k_far, axis=-1)
  dG = gradients.G_near[..., 0] + (by_query - by_key) / power
  dlog_gate = prefix_sum(jnp.swapaxes(dG, 1, 2), reverse=True).hi
  return (
    time_first(gradients.q_near + gradients.q_far),
    time_first(gradients.k_near + gradients.k_far),
    time_first(gradients.v),
    dlog_gate if pull is None else dlog_gate + pull[:, None],
  )


def normalised_backward(
  dy: Float[Array, "B T H g dv"], y: Float[Array, "B T H g dv"], denominator: Float[Array, "B T H g 1"]
) -> Sums:
  """The cotangents of a row's sums, from that of their quotient y."""
  dnumerator = over_normaliser(dy, denominator)
  return Sums(dnumerator, -jnp.sum(dnumerator * y, axis=-1, keepdims=True))


def inputs_of(x: Sequence) -> Inputs:
  """The whole sequence as one span."""
  G = Total(*(heads_first(total[..., None]) for total in x.G))
  return Inputs(heads_first(x.q), heads_first(x.k), heads_first(x.v), G)


def _chunk(x: Sequence, before: Total) -> tuple[Inputs, gates.Decay]:
  chunk = inputs_of(x)
  return chunk, gates.decay(chunk.G, before)


def _total_before(G: Total) -> Total:
  """The running total of the log gates before each chunk, n B H 1 1."""
  before = (jnp.concatenate([jnp.zeros_like(x[:1, :, -1]), x[:-1, :, -1]]) for x in G)
  return Total(*(x[..., None, None] for x in before))


def _cut(tree: Any, size: int) -> Any:
  """Cuts axis 1, time, into chunks along a new leading axis."""
  return for_each(lambda x: jnp.moveaxis(x.reshape(x.shape[0], -1, size, *x.shape[2:]), 1, 0), tree)


def _join(tree: Any) -> Any:
  return for_each(lambda x: jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, *x.shape[3:]), tree)
