"""The attention form: weights B_ij = exp(G_i - G_j) (q_i . k_j) ** p, block by block, never a T x T array.

Gates cost exponentials only on the diagonal blocks. Between block i and an earlier block j the discount factors into
`until_end` of each key, one scalar from the end of j to the start of i, and `since_start` of each query; the first is
applied to the values, the last to the finished sums.

Sums are left unnormalised, `numerator` and `denominator`, so that the chunked form can add what its state holds.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from csympow import gates
from csympow.forms.spans import Inputs, Settings, Sums, exact_product, for_each, item, merge, split
from csympow.prefix import Total


class Values(NamedTuple):
  """What each key holds out: its value, and the weight that enters the normaliser, both discounted alike."""

  v: Float[Array, "*n B H T dv"]
  weight: Float[Array, "*n B H T 1"]


class Gradients(NamedTuple):
  """Cotangents of a span's inputs. Those of q and k come in two parts.

  `far` holds the pairs of tokens in different blocks and `near` those in one block. For the far part the gate's
  cotangent needs no pass of its own: it is (q . q_far - k . k_far) / p, because the weights are homogeneous of degree p
  in both. The near part of it is `G_near`, summed without the diagonal, where gates cancel: where gates are strong,
  everything else is tiny beside the diagonal.
  """

  q_far: Float[Array, "*n B H g T d"]
  q_near: Float[Array, "*n B H g T d"]
  k_far: Float[Array, "*n B H T d"]
  k_near: Float[Array, "*n B H T d"]
  v: Float[Array, "*n B H T dv"]
  G_near: Float[Array, "*n B H T 1"]


def forward(inputs: Inputs, settings: Settings) -> Sums:
  """The sums over j <= i within one span of tokens, whole blocks long."""
  blocks: Inputs = split(inputs, settings.block)
  near: Sums = _each_block(lambda x: _diagonal(x, settings), blocks)
  if len(blocks.q) == 1:
    return Sums(*merge(near))
  decay, between = _between_blocks(blocks.G)
  values = Values(blocks.v * decay.until_end, decay.until_end)

  def add_pair(far: Sums, i: Int[Array, ""], j: Int[Array, ""]) -> Sums:
    found = _gather(_scores(blocks.q[i], blocks.k[j]) ** settings.power, item(values, j), settings)
    return for_each(lambda total, new: total.at[i].add(between(i, j) * new), far, found)

  far = _scan_pairs(add_pair, for_each(jnp.zeros_like, near), len(blocks.q))
  return Sums(*merge(for_each(lambda near, far: near + decay.since_start[:, :, :, None] * far, near, far)))


def backward(inputs: Inputs, dsums: Sums, settings: Settings) -> Gradients:
  """The cotangents of `forward`; the scores are computed again."""
  blocks: Inputs = split(inputs, settings.block)
  dsums = split(dsums, settings.block)
  near: Gradients = _each_block(lambda x: _diagonal_backward(x[0], x[1], settings), (blocks, dsums))
  if len(blocks.q) == 1:
    return Gradients(*merge(near))
  decay, between = _between_blocks(blocks.G)
  values = Values(blocks.v * decay.until_end, decay.until_end)
  dsums = for_each(lambda x: x * decay.since_start[:, :, :, None], dsums)

  def add_pair(totals: tuple[Array, Array, Array], i: Int[Array, ""], j: Int[Array, ""]) -> tuple[Array, Array, Array]:
    q, k, dsum = blocks.q[i], blocks.k[j], item(dsums, i)
    scores = _scores(q, k)
    slopes = scores ** (settings.power - 1) * between(i, j)
    dscores = settings.power * slopes * _dweights(dsum, item(values, j), settings)
    dq, dk, dv = totals
    return (
      dq.at[i].add(jnp.einsum("bhgij,bhjd->bhgid", dscores, k, precision=settings.precision)),
      dk.at[j].add(jnp.einsum("bhgij,bhgid->bhjd", dscores, q, precision=settings.precision)),
      dv.at[j].add(jnp.einsum("bhgij,bhgiv->bhjv", slopes * scores, dsum.numerator, precision=settings.precision)),
    )

  zeros = (near.q_far, near.k_far, jnp.zeros_like(near.v))
  dq, dk, dv = _scan_pairs(add_pair, zeros, len(blocks.q))
  return Gradients(*merge(near._replace(q_far=dq, k_far=dk, v=near.v + dv * decay.until_end)))


def _diagonal(x: Inputs, settings: Settings) -> Sums:
  """The sums within one block, gates pair by pair."""
  return _gather(_scores(x.q, x.k) ** settings.power * _discounts(x.G), _undiscounted(x.v), settings)


def _diagonal_backward(x: Inputs, dsums: Sums, settings: Settings) -> Gradients:
  scores = _scores(x.q, x.k)
  slopes = scores ** (settings.power - 1) * _discounts(x.G)
  weights = slopes * scores
  dweights = _dweights(dsums, _undiscounted(x.v), settings)
  dscores = settings.power * slopes * dweights
  pull = jnp.where(_below_diagonal(x.q.shape[-2]), weights * dweights, 0.0).sum(2)
  return Gradients(
    q_far=jnp.zeros_like(x.q),
    q_near=jnp.einsum("bhgij,bhjd->bhgid", dscores, x.k, precision=settings.precision),
    k_far=jnp.zeros_like(x.k),
    k_near=jnp.einsum("bhgij,bhgid->bhjd", dscores, x.q, precision=settings.precision),
    v=jnp.einsum("bhgij,bhgiv->bhjv", weights, dsums.numerator, precision=settings.precision),
    G_near=(pull.sum(-1) - pull.sum(-2))[..., None],
  )


def _scores(q: Float[Array, "B H g i d"], k: Float[Array, "B H j d"]) -> Float[Array, "B H g i j"]:
  """Exact, because the power multiplies a score's relative error."""
  return exact_product("bhgid,bhjd->bhgij", q, k)


def _gather(weights: Float[Array, "B H g i j"], values: Values, settings: Settings) -> Sums:
  return Sums(
    jnp.einsum("bhgij,bhjv->bhgiv", weights, values.v, precision=settings.precision),
    exact_product("bhgij,bhju->bhgiu", weights, values.weight),
  )


def _dweights(dsums: Sums, values: Values, settings: Settings) -> Float[Array, "B H g i j"]:
  """The cotangent of the weights, the transpose of `_gather`."""
  towards_values = jnp.einsum("bhgiv,bhjv->bhgij", dsums.numerator, values.v, precision=settings.precision)
  return towards_values + dsums.denominator * jnp.swapaxes(values.weight, -1, -2)[:, :, None]


def _undiscounted(v: Float[Array, "B H T dv"]) -> Values:
  return Values(v, jnp.ones_like(v[..., :1]))


def _discounts(G: Total) -> Float[Array, "B H 1 T T"]:
  """b_ij for j <= i, and 0 above the diagonal, cut off before the exponential could overflow."""
  exponent = (G - Total(*(jnp.swapaxes(x, -1, -2) for x in G)))[:, :, None]
  return jnp.exp(jnp.where(_below_diagonal(exponent.shape[-1], or_on=True), exponent, -jnp.inf))


def _below_diagonal(size: int, or_on: bool = False) -> Bool[Array, "T T"]:
  return jnp.tri(size, k=0 if or_on else -1, dtype=bool)


def _scan_pairs[Totals](add_pair: Callable[[Totals, Array, Array], Totals], totals: Totals, blocks: int) -> Totals:
  """Adds up over all (query block i, key block j) with j < i, row by row."""

  def advance(carry: tuple[Totals, Array, Array], _: None) -> tuple[tuple[Totals, Array, Array], None]:
    totals, i, j = carry
    row_done = j + 1 == i
    return (add_pair(totals, i, j), jnp.where(row_done, i + 1, i), jnp.where(row_done, 0, j + 1)), None

  start = (totals, jnp.int32(1), jnp.int32(0))
  return lax.scan(advance, start, None, length=blocks * (blocks - 1) // 2)[0][0]


def _between_blocks(G: Total) -> tuple[gates.Decay, Callable[[Array, Array], Float[Array, "B H 1 1 1"]]]:
  """The discounts inside each block, and a function (i, j) of the discount from the end of block j to the start of i.

  Nothing looks back from the first block, so its own first token serves as the total before it.
  """
  end = gates.last(G)
  before = Total(*(jnp.concatenate([x[:1, :, :, :1], y[:-1]]) for x, y in zip(G, end, strict=True)))
  return gates.decay(G, before), lambda i, j: jnp.exp(item(before, i) - item(end, j))[:, :, None]


def _each_block(function: Callable[[Any], Any], blocks: Any) -> Any:
  if len(jax.tree.leaves(blocks)[0]) == 1:
    return for_each(lambda x: x[None], function(item(blocks, 0)))
  return lax.map(function, blocks)
