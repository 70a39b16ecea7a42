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
from tests.comparing import Case, assert_close, assert_results_close, cotangents, inputs, quick_jit
from tests.test_kernels import attend, inputs_about, reference_of

B, T, H, GROUPS, D, WIDTH = 1, 256, 2, 2, 24, 64  # of which kernels have whole 64s
SETTINGS = Settings(2, 128, 64, 128, "highest")
TOLERANCE = 1e-4
ANEW = jnp.array([[False, True]])


def normal(random, *shape):
  return jnp.asarray(random.normal(size=shape), jnp.float32)


def operands(q, k, v, rotation, random):
  """What kernels would be given, but for rounding, with a scale for each vector."""
  exponents = (jnp.asarray(random.integers(-3, 4, x.shape[:-1]), jnp.int32) for x in (q, k))
  return _operands(q, k, v, rotation, *exponents)


@quick_jit
def _operands(q, k, v, rotation, q_exponent, exponent):
  q, k = rotating.rotated(q, k, rotation)
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


@pytest.mark.parametrize(("rotated", "continued"), [(True, True), pytest.param(False, False, marks=pytest.mark.slow)])
def test_some_heads_are_done_anew_from_operands_and_back(rotated, continued, monkeypatch):
  monkeypatch.setattr(finely, "_AT_ONCE", GROUPS * 64**2)  # in parts of chunks
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

  def exact_backward(*arrays):
    out, transpose = jax.vjp(exact, *arrays)
    return out, transpose((dy, dfinal))

  (y, final), (*expected, dmemory, dturns) = quick_jit(exact_backward)(q, k, v, log_gate, memory, turns)

  x, rotation = operands(q, k, v, given, random), rotating.padded(given, 0, WIDTH)
  unit = jnp.exp2(2.0 * x.top)[..., None, None]  # of states

  @jax.jit
  def scaled_in(memory):
    return full.scaled(full.of_memory(memory, D), 1 / unit)

  @jax.jit
  def scaled_out(state):
    return full.to_memory(full.scaled(state, unit), D, WIDTH)

  def by_kernels(x):
    return for_each(lambda x: normal(random, *x.shape), x)

  if continued:
    initial, transpose_in = jax.vjp(scaled_in, memory)
  else:
    initial = None
  kernels = by_kernels((y, scaled_in(final)))
  forward = functools.partial(finely.forward, settings=SETTINGS, head_dim=D)
  found_y, state = quick_jit(forward)(ANEW, kernels, x, log_gate, initial)
  assert_anew(found_y, y, kernels[0], "y", 2)
  for name, a, b, c in zip("SZ", scaled_out(state), final, scaled_out(kernels[1]), strict=True):
    assert_anew(a, b, c, name, 1)

  _, transpose_out = jax.vjp(scaled_out, state)
  tokens = near.Tokens(*map(full.widened, (q, k)), v, log_gate, rotation and for_each(jnp.zeros_like, rotation))
  kernels = by_kernels((tokens, initial))
  cotangents = dy, *transpose_out(dfinal)
  backward = functools.partial(finely.backward, settings=SETTINGS, head_dim=D)
  dtokens, dinitial = quick_jit(backward)(ANEW, kernels, x, log_gate, rotation, initial, cotangents)
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


def test_of_many_calls_at_once_a_head_is_done_anew_if_it_is_of_any():
  heads = jnp.array([[[True, False, False]], [[False, False, True]]])

  def call(heads):
    found = finely._Parts(jnp.zeros((1, 4, 3)), (jnp.zeros((1, 3, 2)), None))
    redone = finely._Parts(jnp.ones((1, 4, 1)), (jnp.ones((1, 1, 2)), None))
    return finely._instead(heads, found, lambda place: redone)

  y, (state, _) = jax.vmap(call)(heads)
  np.testing.assert_array_equal(y, np.broadcast_to([1, 0, 1], y.shape))
  np.testing.assert_array_equal(state[..., 0], np.broadcast_to([1, 0, 1], state.shape[:-1]))


@pytest.mark.parametrize("entry", [pytest.param("prefill", marks=pytest.mark.slow), "continued"])
def test_a_few_tokens_beside_a_state_have_a_state_in_float32(entry):
  def kernels_of(time):
    case = Case(T=time, B=1, H=1, d=64, dv=64, dtype="bfloat16", entry=entry)
    run, (x, rest) = attend(case, chunk=256), inputs(case)
    text = str(jax.make_jaxpr(lambda x, w: comparing.with_gradients(lambda x: run(x, rest), x, w))(x, cotangents(case)))
    return {name for name in ("attention_forward", "state_write", "state_read") if f"kernel_name='{name}'" in text}

  assert kernels_of(16) == {"attention_forward"}
  assert kernels_of(17) == {"attention_forward", "state_write", "state_read"}


def test_calls_beside_a_state_trace_where_integers_have_64_bits():
  case = Case(T=300, B=1, H=2, d=64, dv=64, dtype="bfloat16", entry="continued")
  run, (x, rest) = attend(case, chunk=256), inputs(case)
  with jax.enable_x64(True):
    out = jax.eval_shape(lambda x, w: comparing.with_gradients(lambda x: run(x, rest), x, w), x, cotangents(case))
  assert all(out[f"d{name}"].dtype == a.dtype for name, a in x.items())


def told(monkeypatch):
  """Which heads are done anew, of all calls from now on."""
  jax.clear_caches()  # programs traced before would not tell
  found, forward = [], finely.forward

  def and_tell(heads, *rest):
    jax.debug.callback(lambda x: found.append(np.asarray(x)), heads)
    return forward(heads, *rest)

  monkeypatch.setattr(finely, "forward", and_tell)
  return found


def ordinary_and_nearly_orthogonal(cosine, mean, time):
  """A head like others, and one whose queries are nearly orthogonal to all keys."""
  random, d = np.random.default_rng(2), 64
  faint = comparing.nearly_orthogonal(cosine, T=time, d=d, dtype="bfloat16")
  x = {name: np.concatenate([random.normal(size=a.shape), a], axis=2) for name, a in faint.items()}
  x["v"] += mean
  log_gate = comparing.random_log_gate(random, (1, time, 2), offset=6.0)
  return {name: jnp.asarray(a, jnp.bfloat16) for name, a in x.items()} | {"log_gate": jnp.asarray(log_gate)}


def in_two_calls(run, x):
  """`run`, which goes on from a state if there is one, on both halves of the tokens."""
  time = x["q"].shape[1] // 2
  first = run({name: array[:, :time] for name, array in x.items()})
  state = {name: first[name] for name in comparing.STATE}
  second = run({name: array[:, time:] for name, array in x.items()} | state)
  return {"y": jnp.concatenate([first["y"], second["y"]], axis=1)}


def weights_of(x):
  return {"y": jnp.asarray(np.random.default_rng(1).normal(size=x["v"].shape), jnp.bfloat16)}


@pytest.mark.gpu
@pytest.mark.parametrize(("cosine", "mean"), [(0.3, 0.0), (0.1, 1.0), (0.05, 0.0), (0.05, 1.0), (0.01, 0.0)])
@pytest.mark.parametrize("time", [256, 600])  # of a call: a chunk, and several
def test_queries_nearly_orthogonal_to_all_keys_are_right_from_call_to_call_on_the_chip(time, cosine, mean, monkeypatch):
  heads, x = told(monkeypatch), ordinary_and_nearly_orthogonal(cosine, mean, 2 * time)
  options = {"entry": "continued", "power": 2, "form": "chunked", "chunk_size": 256, "implementation": "pallas"}
  call = functools.partial(in_two_calls, functools.partial(comparing.call, rest={}, **options))
  results = jax.jit(lambda x, w: comparing.with_gradients(call, x, w))(x, weights_of(x))
  jax.effects_barrier()
  ordinary, faint = np.any(heads, axis=(0, 1))
  assert not ordinary
  assert faint or cosine >= 0.1
  assert not faint or cosine <= 0.1
  expected = comparing.quadratic_results(x, {}, weights_of(x))
  of_gates = {"dlog_gate": results.pop("dlog_gate")}  # the rest of sums that cancel, where heads have a state
  assert_results_close(results, expected, 5e-3)
  assert_results_close(of_gates, expected, 8e-3)
  assert_close(jax.jit(call)(x)["y"], expected["y"], 5e-3, "y")  # without gradients


@pytest.mark.slow
@pytest.mark.usefixtures("no_races")
def test_queries_nearly_orthogonal_to_all_keys_are_right_from_call_to_call(monkeypatch):
  heads, x = told(monkeypatch), ordinary_and_nearly_orthogonal(0.03, 1.0, 512)
  case = Case(T=256, B=1, H=2, d=64, dv=64, dtype="bfloat16", entry="prefill")
  run = functools.partial(attend(case, plgpu.InterpretGPUParams(), 256), rest={})
  results = comparing.with_gradients(functools.partial(in_two_calls, run), x, weights_of(x))
  jax.effects_barrier()
  alone = in_two_calls(run, x)["y"]  # whose states are written otherwise
  jax.effects_barrier()
  np.testing.assert_array_equal(heads, [[[False, True]]] * 4)
  expected = comparing.quadratic_results(x, {}, weights_of(x))
  assert_results_close(jax.tree.map(np.asarray, results), expected, 5e-3)
  assert_close(alone, expected["y"], 5e-3, "y")


@pytest.mark.slow
@pytest.mark.parametrize("entry", ["prefill", "continued"])
@pytest.mark.usefixtures("no_races")
def test_a_call_beside_a_state_is_right_if_it_is_done_finely(entry, monkeypatch):
  monkeypatch.setattr(fused_chunked, "faint", lambda read, interpret: jnp.ones(read.centre_size.shape, bool))
  case = Case(T=300, B=1, H=1, groups=2, d=64, dv=32, segments="padded", dtype="bfloat16", entry=entry)
  x, rest = inputs_about(2, case)
  run, weights = functools.partial(attend(case, plgpu.InterpretGPUParams(), 256), rest=rest), cotangents(case)
  results = jax.tree.map(np.asarray, comparing.with_gradients(run, x, weights))
  expected = reference_of(case, x, rest)
  assert_results_close(results, expected, 3e-3)  # of which y and vectors are rounded to 16 bits
  assert_close(results["S"], expected["S"], 1e-3, "S")
