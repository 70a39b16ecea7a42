"""Calls whose states are too coarse in 16 bits, and that have no keys to read instead."""

import functools

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

from csympow.features import feature_dim
from csympow.forms import chunked, finely, full, fused_chunked, near, rotating
from csympow.forms.memory import Memory
from csympow.forms.spans import Settings, for_each
from csympow.rotation import factors
from kernels_pallas.gpu import arrays
from tests import comparing
from tests.comparing import Case, assert_close, assert_results_close, cotangents
from tests.test_kernels import attend, reference

B, T, H, GROUPS, D, WIDTH = 1, 512, 2, 2, 48, 64  # of which kernels have whole 64s
SETTINGS = Settings(2, 256, 128, 256, "highest")
TOLERANCE = 1e-4
ANEW = jnp.array([[False, True]])


def normal(random, *shape):
  return jnp.asarray(random.normal(size=shape), jnp.float32)


def operands(q, k, v, rotation, random):
  """What kernels would be given, but for rounding, with a scale for each vector."""
  q, k = rotating.rotated(q, k, rotation)
  q_exponent, exponent = (jnp.asarray(random.integers(-3, 4, x.shape[:-1]), jnp.int32) for x in (q, k))
  q, k = (full.widened(x * jnp.exp2(-e.astype(jnp.float32))[..., None]) for x, e in ((q, q_exponent), (k, exponent)))
  by_token, by_tile = jnp.zeros((B, H, T)), jnp.zeros((B, H, T // 128), jnp.int32)  # which nobody looks at
  keys = arrays.Keys(None, k, by_token, by_token, by_token, by_tile, by_tile, jnp.stack([by_tile] * 4))
  q, v, top = q.reshape(B, T, -1, WIDTH), v.astype(jnp.bfloat16), jnp.array([[2, -1]], jnp.int32)
  return near.Operands(q, keys, by_tile, v, q_exponent, exponent, top)


def assert_anew(found, expected, kernels, name, axis):
  """Heads that are to be done anew are as expected, and the others as the kernels found them."""
  found, expected, kernels = (np.moveaxis(x, axis, 0) for x in (found, expected, kernels))
  assert_close(found[1][..., : expected.shape[-1]], expected[1], TOLERANCE, name)
  np.testing.assert_array_equal(found[0], kernels[0], err_msg=name)


@pytest.mark.parametrize(("rotated", "continued"), [(True, True), (False, False)])
def test_some_heads_are_done_anew_from_operands_and_back(rotated, continued, monkeypatch):
  monkeypatch.setattr(finely, "_AT_ONCE", GROUPS * 128**2)  # in parts of chunks
  random = np.random.default_rng(0)
  q, k = normal(random, B, T, H, GROUPS, D), normal(random, B, T, H, D)
  v = jnp.asarray(random.normal(size=(B, T, H, WIDTH)), jnp.bfloat16).astype(jnp.float32)
  log_gate, beta = -0.1 * jnp.abs(normal(random, B, T, H)), normal(random, B, T, H)
  rates, start = jnp.asarray(comparing.rotary(D)), jnp.asarray(random.random((B, H, D // 2)), jnp.float32)
  total = jnp.cumsum(beta, axis=1)
  turns = (total[..., None] * rates / (2 * jnp.pi) + start[:, None]) % 1
  given = rotating.Rotation(turns, total, rates, factors(beta, rates, (B, T, H), initial=start)) if rotated else None
  memory = Memory(normal(random, B, H, feature_dim(D, 2), WIDTH), 9 + normal(random, B, H, feature_dim(D, 2), 1))
  dy, dfinal = normal(random, *v.shape[:3], GROUPS, WIDTH), for_each(lambda x: normal(random, *x.shape), memory)
  memory = memory if continued else None

  def exact(q, k, v, log_gate, memory, turns):
    turned = rotating.rotated(q, k, given and given._replace(turns=turns))
    return chunked.attend(*turned, v, log_gate, memory, SETTINGS, True)

  (y, final), transpose = jax.vjp(exact, q, k, v, log_gate, memory, turns)
  *expected, dmemory, dturns = transpose((dy, dfinal))

  x, rotation = operands(q, k, v, given, random), rotating.padded(given, 0, WIDTH)
  unit = jnp.exp2(2.0 * x.top)[..., None, None]  # of states

  def scaled_in(memory):
    return full.scaled(full.of_memory(memory, D), 1 / unit)

  def scaled_out(state):
    return full.to_memory(full.scaled(state, unit), D, WIDTH)

  def by_kernels(x):
    return for_each(lambda x: normal(random, *x.shape), x)

  if continued:
    initial, transpose_in = jax.vjp(scaled_in, memory)
  else:
    initial = None
  kernels = by_kernels((y, scaled_in(final)))
  found_y, state = finely.forward(ANEW, kernels, x, log_gate, initial, SETTINGS, D)
  assert_anew(found_y, y, kernels[0], "y", 2)
  for name, a, b, c in zip("SZ", scaled_out(state), final, scaled_out(kernels[1]), strict=True):
    assert_anew(a, b, c, name, 1)

  _, transpose_out = jax.vjp(scaled_out, state)
  tokens = near.Tokens(*map(full.widened, (q, k)), v, log_gate, rotation and for_each(jnp.zeros_like, rotation))
  kernels = by_kernels((tokens, initial))
  cotangents = dy, *transpose_out(dfinal)
  dtokens, dinitial = finely.backward(ANEW, kernels, x, log_gate, rotation, initial, cotangents, SETTINGS, D)
  for name, a, b, c in zip(("dq", "dk", "dv", "dlog_gate"), dtokens[:4], expected, kernels[0][:4], strict=True):
    assert_anew(a, b, c, name, 2)
  if continued:
    (found,), (theirs,) = transpose_in(dinitial), transpose_in(kernels[1])
    for name, a, b, c in zip(("dS", "dZ"), found, dmemory, theirs, strict=True):
      assert_anew(a, b, c, name, 1)
  if rotated:
    assert_anew(dtokens.rotation.turns, dturns, kernels[0].rotation.turns, "turns", 2)
    dtotal = jnp.sum(dturns * rates, axis=-1, keepdims=True) / (2 * jnp.pi)
    assert_anew(dtokens.rotation.total[..., None], dtotal, kernels[0].rotation.total[..., None], "total", 2)


def told(monkeypatch, force=None):
  """Which heads are found to have states that are too coarse, of all calls from now on; or are said to."""
  found, judge = [], fused_chunked.faint

  def and_tell(*arguments):
    heads = judge(*arguments)
    heads = heads if force is None else jnp.full_like(heads, force)
    jax.debug.callback(lambda x: found.append(np.asarray(x)), heads)
    return heads

  monkeypatch.setattr(fused_chunked, "faint", and_tell)
  return found


def beside_a_state(entry, cosine, mean):
  """Queries nearly orthogonal to all keys, those of a given state among them."""
  time = 600
  x = comparing.nearly_orthogonal(cosine, T=2 * time, d=64, dtype="bfloat16")
  log_gate = comparing.random_log_gate(np.random.default_rng(2), (1, 2 * time, 1), offset=6.0)
  x |= {"v": x["v"] + jnp.bfloat16(mean), "log_gate": jnp.asarray(log_gate)}
  before, x = ({name: array[:, some] for name, array in x.items()} for some in (slice(time), slice(time, None)))
  if entry == "continued":
    _, state = comparing.reference_prefill(**before)
    x |= {"S": jnp.float32(state.S), "Z": jnp.float32(state.Z), "phase": jnp.zeros((1, 1, 32))}
  return x, cotangents(Case(T=time, B=1, H=1, d=64, dv=64, dtype="bfloat16", entry=entry))


@pytest.mark.gpu
@pytest.mark.parametrize(("cosine", "mean"), [(0.3, 0.0), (0.1, 1.0), (0.05, 0.0), (0.05, 1.0), (0.01, 0.0)])
@pytest.mark.parametrize("entry", ["prefill", "continued"])
def test_queries_nearly_orthogonal_to_all_keys_are_right_beside_a_state_on_the_chip(entry, cosine, mean, monkeypatch):
  drowned = told(monkeypatch)
  x, weights = beside_a_state(entry, cosine, mean)
  options = {"entry": entry, "power": 2, "form": "chunked", "chunk_size": 256, "implementation": "pallas"}
  call = functools.partial(comparing.call, rest={}, **options)
  results = jax.jit(lambda x, w: comparing.with_gradients(call, x, w))(x, weights)
  jax.effects_barrier()
  if cosine != 0.1:
    assert bool(drowned[0]) == (cosine < 0.1)
  expected = comparing.reference_results(x, {}, weights)
  assert_results_close(results, expected, 5e-3)
  alone = jax.jit(call)(x)
  assert_close(alone["y"], expected["y"], 5e-3, "y")


@pytest.mark.slow
@pytest.mark.parametrize("entry", ["prefill", "continued"])
@pytest.mark.usefixtures("no_races")
def test_a_call_beside_a_state_is_right_if_it_is_done_finely(entry, monkeypatch):
  drowned = told(monkeypatch, force=True)
  case = Case(T=300, B=1, H=1, groups=2, d=64, dv=32, segments="padded", dtype="bfloat16", entry=entry)
  x, rest = comparing.inputs(case)
  run, weights = functools.partial(attend(case, plgpu.InterpretGPUParams(), 256), rest=rest), cotangents(case)
  results = jax.tree.map(np.asarray, comparing.with_gradients(run, x, weights))
  jax.effects_barrier()
  assert len(drowned) == 1
  assert_results_close(results, reference(case), 3e-3)  # of which y and vectors are rounded to 16 bits
