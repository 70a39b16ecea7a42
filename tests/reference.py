"""The definition in float64: the recurrence of conformal symmetric-power attention, written to be read.

Nothing here is shared with csympow. Call it under `jax.enable_x64(True)` (tests.comparing does), where every value is
float64 and the phase is an angle that is never reduced.

  phase_i = phase_{i-1} + beta_i theta
  S_i     = gamma_i S_{i-1} + phi(R(phase_i) k_i) v_i^T
  Z_i     = gamma_i Z_{i-1} + phi(R(phase_i) k_i)
  y_i     = S_i^T phi(R(phase_i) q_i) / (Z_i . phi(R(phase_i) q_i))
"""

import collections
import itertools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

RESET = -128.0  # a log gate at or below this is gamma = 0: a float32 state scaled by exp(-128) is nothing


class State(NamedTuple):
  """S: B H D dv, Z: B H D, phase: B H d/2 in turns (here not reduced modulo 1)."""

  S: jax.Array
  Z: jax.Array
  phase: jax.Array


def multisets(d, power):
  return list(itertools.combinations_with_replacement(range(d), power))


def multinomial(multiset):
  """The number of distinct orders of a multiset."""
  repeats = collections.Counter(multiset).values()
  return math.factorial(len(multiset)) // math.prod(math.factorial(n) for n in repeats)


def phi(x, power):
  sets = multisets(x.shape[-1], power)
  weights = np.sqrt([float(multinomial(s)) for s in sets])
  return weights * math.prod(x[..., indices] for indices in np.array(sets).T)


def rotate(x, angles):
  """R(angles) x: the pair (x_1, x_2) turns by the first angle, (x_3, x_4) by the second, and so on."""
  a, b = x[..., 0::2], x[..., 1::2]
  cos, sin = jnp.cos(angles), jnp.sin(angles)
  pairs = jnp.stack([a * cos - b * sin, a * sin + b * cos], axis=-1)
  return pairs.reshape(*pairs.shape[:-2], -1)


def divide(numerator, normaliser):
  """A row whose weights sum to zero is zero, and so are its gradients."""
  empty = normaliser == 0
  return jnp.where(empty[..., None], 0.0, numerator / jnp.where(empty, 1.0, normaliser)[..., None])


def zero_state(batch, heads, d, dv, power):
  D = math.comb(d + power - 1, power)
  return State(jnp.zeros((batch, heads, D, dv)), jnp.zeros((batch, heads, D)), jnp.zeros((batch, heads, d // 2)))


def prefill(q, k, v, *, power=2, log_gate=None, beta=None, rates=None, segment_ids=None, scale=None, state=None):
  """q: B T Hq d, k: B T H d, v: B T H dv, log_gate and beta: B T H, segment_ids: B T -> y: B T Hq dv, State."""
  B, T, Hq, d = q.shape
  H, dv = v.shape[2:]
  log_gate = jnp.zeros((B, T, H)) if log_gate is None else log_gate
  beta = jnp.ones((B, T, H)) if beta is None else beta
  theta = jnp.zeros(d // 2) if rates is None else rates
  segment_ids = jnp.zeros((B, T), int) if segment_ids is None else segment_ids
  state = zero_state(B, H, d, dv, power) if state is None else state
  scale = d**-0.5 if scale is None else scale

  def token(carry, x):
    S, Z, phase, run = carry
    q, k, v, log_gate, beta, segment_id = x
    padding = segment_id < 0
    restarts = ~padding & (run >= 0) & (run != segment_id)  # run < 0: nothing yet, so the state given continues
    S, Z, phase = (jnp.where(restarts, 0.0, a) for a in (S, Z, phase))

    gamma = jnp.exp(jnp.where(log_gate <= RESET, -jnp.inf, log_gate))
    turned = phase + beta * theta
    key = phi(k if rates is None else rotate(k, turned), power)
    query = phi(q if rates is None else rotate(q, turned), power)
    after = (gamma * S + jnp.outer(key, v), gamma * Z + key, turned, segment_id)

    carry = tuple(jnp.where(padding, a, b) for a, b in zip((S, Z, phase, run), after, strict=True))
    y = jnp.where(padding, 0.0, divide(query @ carry[0], query @ carry[1]))
    return carry, y

  def head(q, k, v, log_gate, beta, segment_ids, S, Z, phase):
    """q: T G d (the queries that share this key head), k: T d, v: T dv, the rest: T."""
    start = (S, Z, phase * (2 * np.pi), jnp.array(-1, segment_ids.dtype))
    token_anew = jax.checkpoint(token, prevent_cse=False)  # gradients keep one state of each token, and nothing else
    (S, Z, phase, _), y = jax.lax.scan(token_anew, start, (q, k, v, log_gate, beta, segment_ids))
    return y, State(S, Z, phase / (2 * np.pi))

  heads = jax.vmap(head, in_axes=(1, 1, 1, 1, 1, None, 0, 0, 0), out_axes=(1, 0))
  grouped = (q * scale).reshape(B, T, H, Hq // H, d)
  y, after = jax.vmap(heads)(grouped, k, v, log_gate, beta, segment_ids, *state)
  if rates is None:  # nothing turns, and a phase that is given passes by
    after = after._replace(phase=state.phase)
  return y.reshape(B, T, Hq, dv), after


def attention(q, k, v, **options):
  return prefill(q, k, v, **options)[0]


def runs_of(segment_ids, log_gate):
  """(the token at which each token's run begins: B T, the number of resets up to each token: B T H) of concrete arrays.

  A run of equal ids goes on over padding; padding neither turns nor resets.
  """
  B, T = segment_ids.shape
  begins, resets = np.zeros((B, T), int), np.zeros(log_gate.shape, int)
  for b in range(B):
    run, begin, count = -1, 0, np.zeros(log_gate.shape[2], int)
    for t in range(T):
      if segment_ids[b, t] >= 0:
        if run >= 0 and run != segment_ids[b, t]:
          begin, count = t, count + 1
        else:
          count = count + (log_gate[b, t] <= RESET)
        run = segment_ids[b, t]
      begins[b, t], resets[b, t] = begin, count
  return begins, resets


def weights(q, k, *, power=2, log_gate=None, beta=None, rates=None, segment_ids=None, runs=None):
  """The same function the other way round: B_ij = b_ij (q'_i . k'_j)^p for j <= i, B H T T (Hq = H).

  `runs` is `runs_of` the arguments; None where there are neither segments nor resets.
  """
  B, T, H, _ = q.shape
  log_gate = jnp.zeros((B, T, H)) if log_gate is None else log_gate
  segment_ids = np.zeros((B, T), int) if segment_ids is None else segment_ids
  begins, resets = (np.zeros((B, T), int), np.zeros((B, T, H), int)) if runs is None else runs
  valid = np.asarray(segment_ids) >= 0
  if rates is not None:
    total = jnp.cumsum(jnp.where(valid[..., None], jnp.ones((B, T, H)) if beta is None else beta, 0.0), axis=1)
    before = jnp.concatenate([jnp.zeros((B, 1, H)), total[:, :-1]], axis=1)
    angles = (total - jnp.take_along_axis(before, begins[..., None], axis=1))[..., None] * rates
    q, k = rotate(q, angles), rotate(k, angles)
  kept = valid[..., None] & (jnp.diff(resets, axis=1, prepend=0) == 0)
  G = jnp.moveaxis(jnp.cumsum(jnp.where(kept, log_gate, 0.0), axis=1), 1, 2)
  resets = jnp.moveaxis(resets, 1, 2)
  seen = np.tri(T, dtype=bool) & valid[:, None, :, None] & valid[:, None, None, :]
  seen = seen & (resets[..., :, None] == resets[..., None, :])
  b = jnp.exp(jnp.where(seen, G[..., :, None] - G[..., None, :], -jnp.inf))
  return b * jnp.einsum("bihd,bjhd->bhij", q, k) ** power


def quadratic(q, k, v, *, log_gate=None, beta=None, runs=None, **options):
  """One head after another, whose gradients keep no weights, of which a long sequence has many."""
  group = q.shape[2] // k.shape[2]
  begins, resets = (None, None) if runs is None else runs
  k, v, log_gate, beta, resets = (
    a if a is None else jnp.repeat(a, group, axis=2) for a in (k, v, log_gate, beta, resets)
  )

  def head(x):
    q, k, v, log_gate, beta, resets = jax.tree.map(lambda a: jnp.expand_dims(a, 2), x)
    runs = None if resets is None else (begins, resets)
    B = weights(q, k, log_gate=log_gate, beta=beta, runs=runs, **options)
    return divide(jnp.einsum("bhij,bjhe->bihe", B, v), jnp.moveaxis(B.sum(-1), 1, 2))[:, :, 0]

  heads = jax.tree.map(lambda a: jnp.moveaxis(a, 2, 0), (q, k, v, log_gate, beta, resets))
  return jnp.moveaxis(jax.lax.map(jax.checkpoint(head), heads), 0, 2)
