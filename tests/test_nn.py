"""The layer: what it computes, that its cache tells the same story in any pieces, and what it refuses."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import csympow
from csympow.nn import VARIANTS, ConformalAttention, KVCache

D_MODEL, HEADS, KV_HEADS, HEAD_DIM, MAX_LENGTH = 24, 4, 2, 8, 64
SLOTS = 16

every_variant = pytest.mark.parametrize("variant", VARIANTS)

# Each program here runs a few times at most, on a few tokens: compiling it is all it costs.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def make(variant, **options):
  options = {"num_kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "max_length": MAX_LENGTH} | options
  layer = nnx.eval_shape(lambda: ConformalAttention(D_MODEL, HEADS, variant=variant, rngs=nnx.Rngs(0), **options))
  draw = functools.partial(np.random.default_rng(0).normal, 0, D_MODEL**-0.5)
  return nnx.merge(nnx.graphdef(layer), jax.tree.map(lambda p: jnp.asarray(draw(p.shape), p.dtype), nnx.state(layer)))


def inputs(batch, time, seed=1):
  return jax.random.normal(jax.random.key(seed), (batch, time, D_MODEL))


@jit
def call(layer, x, segment_ids=None):
  return layer(x, segment_ids)


@jit
def prefill(layer, x, cache, segment_ids=None):
  return layer.prefill(x, cache, segment_ids)


@jit
def steps(layer, x, cache):
  """Token by token."""

  def one(cache, x_t):
    y, cache = layer.step(x_t, cache)
    return cache, y

  cache, y = jax.lax.scan(one, cache, x.swapaxes(0, 1))
  return y.swapaxes(0, 1), cache


def close(a, b, tolerance=2e-5):
  np.testing.assert_allclose(np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=tolerance, atol=tolerance)


def by_hand(layer, x):
  """Every variant from the equations, in float64: a loop over rows, heads and pairs of tokens."""
  x = np.asarray(x, np.float64)
  weights = {name: np.asarray(p[...], np.float64) for name, p in _kernels(layer).items()}
  q, k, v = (np.einsum("btm,mhd->bthd", x, weights[name]) for name in ("query", "key", "value"))
  ones = np.ones((*x.shape[:2], KV_HEADS))
  gamma = 1 / (1 + np.exp(-(x @ weights["gamma"] + layer.gate_offset))) if "gamma" in weights else ones
  beta = 1 + np.tanh(x @ weights["beta"]) if "beta" in weights else ones
  theta = 2 * np.pi / MAX_LENGTH ** (2 * np.arange(HEAD_DIM // 2) / HEAD_DIM)
  phase = np.cumsum(beta, axis=1)[..., None] * theta
  y = np.zeros_like(q)
  for b, h in np.ndindex(x.shape[0], HEADS):
    group = h // (HEADS // KV_HEADS)
    turn = np.exp(1j * phase[b, :, group])
    queries = (q[b, :, h, 0::2] + 1j * q[b, :, h, 1::2]) * turn
    keys = (k[b, :, group, 0::2] + 1j * k[b, :, group, 1::2]) * turn
    score = np.real(queries @ keys.conj().T) / np.sqrt(HEAD_DIM)
    G = np.cumsum(np.log(gamma[b, :, group]))
    weight = np.exp(score) if layer.variant == "softmax" else score**layer.power
    weight = np.tril(weight * np.exp(np.minimum(G[:, None] - G[None, :], 0)))
    y[b, :, h] = weight @ v[b, :, group] / weight.sum(axis=1, keepdims=True)
  return np.einsum("bthd,hdm->btm", y, weights["out"])


def _kernels(layer):
  names = ("query", "key", "value", "out", "gamma", "beta")
  return {name: getattr(layer, name).kernel for name in names if getattr(layer, name) is not None}


@every_variant
def test_every_variant_is_its_equation(variant):
  layer, x = make(variant), inputs(2, 12)
  close(call(layer, x), by_hand(layer, x), 1e-4)


@every_variant
def test_one_call_is_pieces_is_steps(variant):
  layer = make(variant)
  x = inputs(2, 12)
  whole = call(layer, x)
  for ways in ((prefill, prefill, steps), (steps, steps, prefill)):
    cache = layer.init_cache(2, SLOTS)
    for way, start in zip(ways, (0, 4, 8), strict=True):
      y, cache = way(layer, x[:, start : start + 4], cache)
      close(y, whole[:, start : start + 4])


@every_variant
def test_segments_are_separate_calls_and_padding_is_absent(variant):
  layer = make(variant)
  x = inputs(2, 12)
  segment_ids = jnp.array([[4, 4, -1, 4, 4, 9, 9, 9, 9, -1, -1, -1], [0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0]])
  runs = [(0, [0, 1, 3, 4]), (1, [0, 1, 2, 3]), (1, [4, 5, 6, 7]), (0, [5, 6, 7, 8]), (1, [8, 9, 10, 11])]
  alone = jnp.stack([x[row, jnp.array(places)] for row, places in runs])
  expected = np.zeros(x.shape)
  for (row, places), y in zip(runs, call(layer, alone), strict=True):
    expected[row, places] = y
  y = call(layer, x, segment_ids)
  close(y, expected)
  assert not np.any(y[segment_ids < 0])

  # A cache continues into the first run, and what comes out of it is the last run's.
  first, cache = prefill(layer, x[:, :6], layer.init_cache(2, SLOTS), segment_ids[:, :6])
  second, cache = prefill(layer, x[:, 6:], cache, segment_ids[:, 6:])
  close(jnp.concatenate([first, second], axis=1), expected)
  _, last_runs = prefill(layer, alone[3:], layer.init_cache(2, SLOTS))
  close(steps(layer, x[:, :4], cache)[0], steps(layer, x[:, :4], last_runs)[0])


@every_variant
def test_prompts_of_different_lengths_decode_in_one_batch(variant):
  layer = make(variant)
  prompts, answers = inputs(2, 6), inputs(2, 4, seed=2)
  lengths = jnp.array([[4], [6]])
  _, cache = prefill(layer, prompts, layer.init_cache(2, SLOTS), jnp.where(jnp.arange(6) < lengths, 0, -1))
  together, _ = steps(layer, answers, cache)
  _, cache = prefill(layer, prompts[:, :4], layer.init_cache(2, SLOTS))
  close(together[0], steps(layer, answers, cache)[0][0])
  _, cache = prefill(layer, prompts, layer.init_cache(2, SLOTS), jnp.zeros((2, 6), int))
  close(together[1], steps(layer, answers, cache)[0][1])


@every_variant
def test_bfloat16_compute_keeps_float32_parameters_gates_and_state(variant):
  layer = make(variant, dtype=jnp.bfloat16)
  x = inputs(2, 12)
  assert jax.eval_shape(call, layer, x).dtype == jnp.bfloat16
  if variant in ("softmax", "conformal"):
    close(call(layer, x), call(make(variant), x), 0.05)

  float32 = jnp.dtype("float32")
  _, cache = jax.eval_shape(prefill, layer, x, layer.init_cache(2, SLOTS))
  assert cache[0].dtype == (jnp.bfloat16 if variant == "softmax" else float32)
  for gate in jax.eval_shape(lambda x: layer.gates(x), x.astype(jnp.bfloat16)):
    assert gate is None or gate.dtype == float32
  graphdef, parameters = nnx.split(layer)
  gradient = jax.eval_shape(jax.grad(lambda p: nnx.merge(graphdef, p)(x).astype(float32).sum()), parameters)
  assert {leaf.dtype for leaf in jax.tree.leaves((parameters, gradient))} == {float32}


def test_by_default_the_dtype_is_promoted_as_in_flax():
  x = inputs(1, 3)
  for parameters, given, result in (
    ("float32", "float32", "float32"),
    ("float32", "bfloat16", "float32"),
    ("bfloat16", "bfloat16", "bfloat16"),
  ):
    layer = nnx.eval_shape(functools.partial(make, "conformal", param_dtype=jnp.dtype(parameters)))
    assert jax.eval_shape(call, layer, x.astype(given)).dtype == result


def test_gates_are_what_the_variant_has():
  x = inputs(2, 5) * 3
  present = {variant: tuple(gate is not None for gate in make(variant).gates(x)) for variant in VARIANTS}
  assert present == {
    "softmax": (False, False),
    "sympow": (False, False),
    "sympow+gating": (True, False),
    "conformal": (True, True),
  }
  log_gate, beta = make("conformal").gates(x)
  assert log_gate.shape == beta.shape == (2, 5, KV_HEADS)
  assert np.all(log_gate < 0)
  assert np.all((beta > 0) & (beta < 2))


def test_the_authors_offset_starts_the_gates_at_0_999():
  nowhere = jnp.zeros((1, 3, D_MODEL))
  close(jnp.exp(make("conformal").gates(nowhere)[0]), 0.5)
  log_gate, _ = make("conformal", gate_offset=6.906768).gates(nowhere)
  close(jnp.exp(log_gate), 0.999, 1e-6)


def test_a_state_does_not_grow_and_a_key_value_cache_has_its_slots():
  state = make("conformal").init_cache(3)
  assert isinstance(state, csympow.State)
  assert state.S.shape == (3, KV_HEADS, 36, HEAD_DIM)
  assert make("conformal").init_cache(3, dtype=jnp.bfloat16).S.dtype == jnp.bfloat16
  cache = make("softmax").init_cache(3, 10)
  assert isinstance(cache, KVCache)
  assert cache.k.shape == cache.v.shape == (3, 10, KV_HEADS, HEAD_DIM)
  # Keys and values are buffers of their own, for no buffer can be donated twice.
  assert cache.k.unsafe_buffer_pointer() != cache.v.unsafe_buffer_pointer()


def test_an_overflowing_cache_cannot_be_overlooked():
  layer = make("softmax")
  x = inputs(2, 6)
  one_row_is_short = jnp.array([[0, 0, 0, 0, 0, 0], [0, 0, 0, -1, -1, -1]])
  cache = layer.init_cache(2, SLOTS)
  for way, taken, overflows in (
    (functools.partial(prefill, segment_ids=one_row_is_short), (6, 3), (False, False)),
    (functools.partial(prefill, segment_ids=one_row_is_short), (12, 6), (False, False)),
    (steps, (16, 10), (False, False)),
    (steps, (20, 14), (True, False)),
    (prefill, (24, 18), (True, True)),
  ):
    tokens = 4 if way in (steps, prefill) else 6
    y, cache = way(layer, x[:, :tokens], cache)
    assert tuple(cache.length) == taken
    assert tuple(bool(np.all(np.isnan(row))) for row in y) == overflows
    assert tuple(bool(np.any(np.isnan(row))) for row in y) == overflows


def test_form_and_chunk_size_reach_the_op():
  x = inputs(2, 12)
  whole = call(make("conformal", form="attention"), x)
  close(call(make("conformal", form="chunked", chunk_size=5), x), whole)
  close(call(make("conformal", form="recurrent"), x), whole)
  with pytest.raises(NotImplementedError, match="pallas"):
    make("conformal", implementation="pallas")(x)


def test_it_works_in_nnx_and_under_vmap():
  layer = make("conformal")
  x = inputs(2, 12)
  whole = call(layer, x)
  close(nnx.jit(lambda layer, x: layer(x))(layer, x), whole)
  close(jit(jax.vmap(lambda row: layer(row[None])[0]))(x), whole)


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"variant": "linear"}, "variant must be one of softmax, sympow, sympow.gating, conformal, got 'linear'"),
    ({"power": 3}, "power must be a positive even integer, got 3"),
    ({"power": 2.0}, "power must be a positive even integer, got 2.0"),
    ({"num_kv_heads": 3}, "num_kv_heads must divide num_heads=4, got 3"),
    ({"num_kv_heads": 0}, "num_kv_heads must be a positive integer, got 0"),
    ({"head_dim": 7}, "head_dim must be even"),
    ({"d_model": 22, "head_dim": None}, "num_heads must divide d_model=22 unless head_dim is given, got 4"),
    ({"d_model": "wide"}, "d_model must be a positive integer, got 'wide'"),
    ({"max_length": 0}, "max_length must be a positive integer, got 0"),
    ({"gate_offset": float("nan")}, "gate_offset must be a finite number, got nan"),
    ({"chunk_size": 0}, "chunk_size must be a positive integer"),
    ({"form": "quadratic"}, "form must be one of auto, attention, chunked, recurrent .* got 'quadratic'"),
    ({"form": "chunked", "variant": "softmax"}, "form must be one of auto, attention for variant 'softmax'"),
    ({"implementation": "triton"}, "implementation must be one of None, xla, pallas .* got 'triton'"),
    ({"implementation": "pallas", "variant": "softmax"}, "implementation must be one of None, xla, cudnn"),
  ],
)
def test_options_that_mean_nothing_are_refused(options, message):
  options = {"d_model": D_MODEL, "num_heads": HEADS, "head_dim": HEAD_DIM} | options
  with pytest.raises(ValueError, match=message):
    ConformalAttention(rngs=nnx.Rngs(0), **options)


def test_layouts_that_do_not_fit_are_refused():
  layer, softmax = make("conformal"), make("softmax")
  x, state = inputs(2, 5), layer.init_cache(2)

  def refuse(message, method, *args):
    with pytest.raises(ValueError, match=message) as caught:
      method(*args)
    assert "\n" not in str(caught.value)

  refuse(r"x must be floating \[B, T, 24\], got float32\[2, 24\]", layer, x[:, 0])
  refuse(r"x must be floating \[B, T, 24\], got float32\[2, 5, 23\]", layer, x[..., :23])
  refuse(r"x must be floating \[B, T, 24\], got int32", layer, x.astype(int))
  refuse(r"x must be floating \[B, T, 24\], got None", layer, None)
  refuse(r"segment_ids must be signedinteger \[2, 5\], got int32\[5\]", layer, x, jnp.zeros(5, int))
  refuse(r"segment_ids must be signedinteger \[2, 5\], got float32\[2, 5\]", layer, x, jnp.zeros((2, 5)))
  refuse(r"x must be floating \[B, 24\], got float32\[2, 5, 24\]", layer.step, x, state)
  refuse("cache must be the State or KeyCache that init_cache .* 'conformal', got NoneType", layer.prefill, x, None)
  refuse("cache must be the KVCache .* variant 'softmax', got State", softmax.prefill, x, state)
  refuse(r"cache.S must have shape \[2, 2, 36, 8\] .* got \[3, 2, 36, 8\]", layer.prefill, x, layer.init_cache(3))
  refuse("x must have no more tokens than the cache has slots, 4, got 5", softmax.prefill, x, softmax.init_cache(2, 4))
  refuse("max_length must be given for the cache of variant 'softmax'", softmax.init_cache, 2)
  refuse("batch must be a positive integer, got 0", layer.init_cache, 0)


@pytest.mark.gpu
def test_on_a_gpu_softmax_is_cudnns_and_needs_no_square_array():
  layer = ConformalAttention(256, 4, head_dim=64, variant="softmax", dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
  plain = nnx.clone(layer)
  plain.implementation = "xla"
  time = 1024
  x = jax.random.normal(jax.random.key(0), (1, time, 256), jnp.bfloat16)
  documents = jnp.arange(time)[None] // 300

  def loss(layer, x, segment_ids):
    return (layer(x, segment_ids).astype(jnp.float32) ** 2).sum()

  compiled = jax.jit(jax.grad(loss)).lower(layer, x, None).compile()
  assert "cudnn$fmha" in compiled.as_text()
  assert compiled.memory_analysis().temp_size_in_bytes < 4 * time * time * 4
  for segment_ids in (None, documents):
    assert "cudnn$fmha" in call.lower(layer, x, segment_ids).compile().as_text()
    close(call(layer, x, segment_ids), call(plain, x, segment_ids), 0.03)
    ours, theirs = (jax.jit(jax.grad(loss))(each, x, segment_ids) for each in (layer, plain))
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
      assert jnp.linalg.norm(a - b) < 0.03 * jnp.linalg.norm(b)
  y, _ = prefill(layer, x, layer.init_cache(1, 2 * time))
  close(y, call(plain, x), 0.03)
  for short in (1, 63, 127, 129):
    close(call(layer, x[:, :short]), call(plain, x[:, :short]), 0.03)
