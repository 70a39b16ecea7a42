"""The model: its size, what it may see, that it compiles flat, streams, learns, and what it refuses."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from csympow.model import PADDED_LOGIT, REMAT, ModelConfig, Transformer, _readout
from csympow.nn import VARIANTS

every_variant = pytest.mark.parametrize("variant", VARIANTS)

# Each program here runs a few times at most, on a few tokens: compiling it is all it costs.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def small(variant="conformal", **options):
  shape = {"vocab_size": 60, "d_model": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
  return ModelConfig(variant=variant, **(shape | {"max_length": 64, "dtype": "float32"} | options))


def abstract(config):
  """The model with shapes for parameters: no memory, no initialisation."""
  return nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))


def model_of(config):
  """A model in which attention matters: GPT-2's initialisation times 5, for the width is a twentieth of GPT-2's."""
  graphdef, state = nnx.split(abstract(config))
  draw = np.random.default_rng(0).normal

  def value(path, p):
    return jnp.asarray(np.ones(p.shape) if "scale" in str(path) else draw(0, 0.1, p.shape), p.dtype)

  return nnx.merge(graphdef, jax.tree.map_with_path(value, state))


def tokens_of(batch=2, time=12, seed=3):
  return jax.random.randint(jax.random.key(seed), (batch, time), 0, 60)


@jit
def call(model, tokens, segment_ids=None):
  return model(tokens, segment_ids)


@jit
def prefill(model, tokens, cache, segment_ids=None):
  return model.prefill(tokens, cache, segment_ids)


@jit
def steps(model, tokens, cache):
  """Token by token."""

  def one(cache, token):
    logits, cache = model.step(token, cache)
    return cache, logits

  cache, logits = jax.lax.scan(one, cache, tokens.T)
  return logits.swapaxes(0, 1), cache


def close(a, b, tolerance=5e-5):
  np.testing.assert_allclose(np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=tolerance, atol=tolerance)


def loss_of(model, tokens):
  logits = model(tokens)[:, :-1]
  return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def parameter_count(config):
  return sum(p.size for p in jax.tree.leaves(nnx.state(abstract(config), nnx.Param)))


def test_gates_and_rotations_cost_what_the_paper_says():
  counts = {variant: parameter_count(ModelConfig(variant=variant)) for variant in VARIANTS}
  sympow = counts["sympow"]
  assert sympow == counts["softmax"] == 123_588_096
  assert counts["sympow+gating"] - sympow == 110_592
  assert counts["conformal"] - counts["sympow+gating"] == 110_592
  assert f"{(counts['sympow+gating'] - sympow) / sympow:.2%}" == "0.09%"
  assert f"{(counts['conformal'] - sympow) / sympow:.2%}" == "0.18%"


@pytest.mark.parametrize("config", [ModelConfig(), small(), small(num_layers=3, mlp_ratio=2, head_dim=6)])
def test_the_parameters_are_those_of_the_equations(config):
  d, heads, kv_heads = config.d_model, config.num_heads, config.num_kv_heads or config.num_heads
  attention = 2 * d * heads * config.head_dim + 2 * d * kv_heads * config.head_dim + 2 * d * kv_heads
  layer = attention + 2 * config.mlp_ratio * d**2 + 2 * d
  assert parameter_count(config) == config.padded_vocab_size * d + config.num_layers * layer + 2 * d


def test_the_states_of_the_paper():
  def megabytes(power):
    cache = jax.eval_shape(lambda: abstract(ModelConfig(power=power)).init_cache(1, dtype=jnp.bfloat16))
    return (cache.S.size + cache.Z.size) * cache.S.dtype.itemsize / 1e6

  assert round(megabytes(2)) == 39
  assert round(megabytes(4) / 1e3) == 14


def test_layers_carry_a_leading_axis_and_start_as_gpt2():
  config = small(num_layers=3, d_model=64)
  layers = nnx.state(jit(lambda: Transformer(config, rngs=nnx.Rngs(0)))().layers)
  assert {leaf.shape[0] for leaf in jax.tree.leaves(layers)} == {3}
  attention = layers["attention"]
  for module, deviation in (
    (layers["up"], 0.02),
    (attention["query"], 0.02),
    (attention["gamma"], 0.02),
    (layers["down"], 0.02 / np.sqrt(6)),
    (attention["out"], 0.02 / np.sqrt(6)),
  ):
    kernel = np.asarray(module["kernel"][...])
    assert np.std(kernel) == pytest.approx(deviation, rel=0.1)
    assert not np.allclose(kernel[0], kernel[1])


@pytest.mark.parametrize("variant", ["softmax", "conformal"])
def test_compile_time_does_not_grow_with_depth(variant):
  def program_size(layers):
    model = abstract(small(variant, num_layers=layers))
    lowered = jax.jit(jax.grad(lambda p, t: loss_of(nnx.merge(nnx.graphdef(model), p), t))).lower(
      nnx.state(model), jax.ShapeDtypeStruct((2, 16), jnp.int32)
    )
    return len(lowered.as_text())

  assert program_size(12) == pytest.approx(program_size(2), rel=0.01)


@every_variant
def test_no_token_is_seen_before_its_time_and_every_one_after(variant):
  model, tokens = model_of(small(variant)), tokens_of()
  changed = tokens.at[:, 5].set((tokens[:, 5] + 1) % 60)
  difference = jnp.abs(call(model, changed) - call(model, tokens)).max(axis=(0, 2))
  assert np.all(difference[:5] == 0)
  assert np.all(difference[5:] > 1e-4)


@every_variant
def test_one_pass_is_pieces_is_steps(variant):
  model, tokens = model_of(small(variant)), tokens_of()
  whole = call(model, tokens)
  cache = model.init_cache(2, 16)
  for way, start in ((prefill, 0), (steps, 4), (prefill, 8)):
    logits, cache = way(model, tokens[:, start : start + 4], cache)
    close(logits, whole[:, start : start + 4])


def test_segments_are_separate_passes():
  model, tokens = model_of(small()), tokens_of()
  segment_ids = jnp.repeat(jnp.array([[0, 1, 2], [7, -1, 7]]), 4, axis=1)
  whole = call(model, tokens, segment_ids)
  first, cache = prefill(model, tokens, model.init_cache(2), segment_ids)
  alone = call(model, jnp.concatenate([tokens[:1, :4], tokens[:1, 4:8], tokens[:1, 8:], tokens[1:, :4]]))
  expected = ((0, slice(0, 4)), (0, slice(4, 8)), (0, slice(8, 12)), (1, slice(0, 4)))
  for (row, part), logits in zip(expected, alone, strict=True):
    close(whole[row, part], logits)
    close(first[row, part], logits)
  joined = call(model, jnp.concatenate([tokens[1:, :4], tokens[1:, 8:]], axis=1))
  close(whole[1, 8:], joined[0, 4:])
  assert cache.S.shape[0] == 2


def test_padded_logits_get_no_probability_and_stay_finite():
  model = model_of(small())
  logits = call(model, tokens_of())
  assert logits.dtype == jnp.float32
  assert logits.shape == (2, 12, 128)
  assert np.all(logits[..., 60:] == PADDED_LOGIT)
  probability = jax.nn.softmax(logits)
  assert np.all(probability[..., 60:] == 0)
  assert np.all(np.isfinite(probability * jax.nn.log_softmax(logits / 0.01)))


def test_hidden_and_logits_are_the_whole_in_two_parts():
  model, tokens = model_of(small()), tokens_of()
  in_chunks = jit(lambda model, t: jax.lax.map(model.logits, jnp.split(model.hidden(t), 1, axis=1)[0]))
  close(in_chunks(model, tokens), call(model, tokens))


def test_readout_rounds_nothing_but_its_operands():
  hidden = jax.random.normal(jax.random.key(0), (3, 5, 16))
  embedding = jax.random.normal(jax.random.key(1), (24, 16))
  weight = jax.random.normal(jax.random.key(2), (3, 5, 24))

  def plain(hidden, embedding):
    return jnp.einsum("btd,vd->btv", hidden, embedding)

  def gradients(readout, *args):
    return jax.grad(lambda *args: (readout(*args) * weight).sum(), argnums=(0, 1))(*args)

  jax.tree.map(close, *(jit(functools.partial(gradients, f))(hidden, embedding) for f in (_readout, plain)))
  hidden, embedding = (a.astype(jnp.bfloat16) for a in (hidden, embedding))
  exact = np.einsum("btd,vd->btv", np.asarray(hidden, np.float64), np.asarray(embedding, np.float64))
  close(jit(_readout)(hidden, embedding.astype(jnp.float32)), exact)
  dhidden, dembedding = jax.eval_shape(functools.partial(gradients, _readout), hidden, embedding.astype(jnp.float32))
  assert (dhidden.dtype, dembedding.dtype) == (jnp.bfloat16, jnp.float32)


def check_gradient(gradient):
  for path, leaf in jax.tree.leaves_with_path(gradient):
    assert np.all(np.isfinite(leaf)), path
    assert np.any(leaf), path
  # What pads the vocabulary is in no token and gets no probability.
  assert not np.any(gradient["embedding"]["embedding"][...][60:])


@pytest.mark.parametrize(
  ("variant", "how"),
  [
    pytest.param("sympow", {"remat": "dots"}, marks=pytest.mark.slow),
    pytest.param("sympow+gating", {"unroll": True}, marks=pytest.mark.slow),
    ("conformal", {"remat": "full"}),
  ],
  ids=str,
)
def test_a_donated_training_step_moves_every_parameter_and_lowers_the_loss(variant, how):
  tokens = jnp.tile(tokens_of(2, 4), (1, 3))
  graphdef, parameters = nnx.split(model_of(small(variant, **how)))
  optimizer = optax.adam(3e-3)

  @functools.partial(jit, donate_argnums=(0, 1))
  def train_step(parameters, moments, tokens):
    loss, gradient = jax.value_and_grad(lambda p: loss_of(nnx.merge(graphdef, p), tokens))(parameters)
    updates, moments = optimizer.update(gradient, moments, parameters)
    return optax.apply_updates(parameters, updates), moments, loss, gradient

  parameters, moments, loss, gradient = train_step(parameters, optimizer.init(parameters), tokens)
  assert train_step(parameters, moments, tokens)[2] < loss
  check_gradient(gradient)


def test_unrolled_there_is_no_loop_over_layers():
  def loops(**how):
    graphdef, parameters = nnx.split(abstract(small("softmax", **how)))
    return (
      jax.jit(lambda p, t: nnx.merge(graphdef, p)(t)).lower(parameters, tokens_of()).as_text().count("stablehlo.while")
    )

  assert loops(unroll=True) == loops() - 1


def test_nnx_optimizer_trains_it():
  model = model_of(small("softmax"))
  optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
  tokens = jnp.tile(tokens_of(2, 4), (1, 3))

  @nnx.jit
  def train_step(model, optimizer):
    loss, gradient = nnx.value_and_grad(loss_of)(model, tokens)
    optimizer.update(model, gradient)
    return loss, gradient

  loss, gradient = train_step(model, optimizer)
  assert train_step(model, optimizer)[0] < loss
  check_gradient(gradient)


def test_bfloat16_is_the_compute_and_float32_the_rest():
  config = small(dtype="bfloat16")
  assert ModelConfig().dtype == "bfloat16"
  model, exact = model_of(config), model_of(small())
  tokens = tokens_of()
  logits = call(model, tokens)
  assert logits.dtype == jnp.float32
  assert jax.eval_shape(lambda m, t: m.hidden(t), model, tokens).dtype == jnp.bfloat16
  error = logits[..., :60] - call(exact, tokens)[..., :60]
  assert float(jnp.std(error)) < 0.03 * float(jnp.std(logits[..., :60]))
  graphdef, parameters = nnx.split(model)
  gradient = jax.eval_shape(jax.grad(lambda p: loss_of(nnx.merge(graphdef, p), tokens)), parameters)
  assert {leaf.dtype for leaf in jax.tree.leaves((parameters, gradient))} == {jnp.dtype("float32")}


def test_a_frequent_tokens_gradient_is_added_up_in_float32():
  graphdef, parameters = nnx.split(abstract(small(dtype="bfloat16")))
  gradient = jax.jit(jax.grad(lambda p, t: loss_of(nnx.merge(graphdef, p), t))).lower(parameters, tokens_of())
  scatter = r"\(tensor<128x32x(\w+)>, tensor<24x1xi32>, tensor<24x32x(\w+)>\) -> tensor<128x32x(\w+)>"
  assert re.findall(scatter, gradient.as_text()) == [("f32", "f32", "f32")]


@pytest.mark.slow
def test_remat_policies_trade_memory_for_work_and_change_nothing_else():
  tokens = tokens_of(16, 12)
  memory, gradients = {}, {}
  ways = {name: {"remat": name} for name in REMAT}
  ways |= {f"unrolled {name}": {"remat": name, "unroll": True} for name in REMAT}
  for name, how in ways.items():
    graphdef, parameters = nnx.split(model_of(small("softmax", num_layers=6, **how)))
    compiled = jit(jax.grad(lambda p, t, g=graphdef: loss_of(nnx.merge(g, p), t))).lower(parameters, tokens).compile()
    memory[name] = compiled.memory_analysis().temp_size_in_bytes
    gradients[name] = compiled(parameters, tokens)
  assert memory["full"] < 0.9 * memory["dots"] < 0.8 * memory["none"], memory
  assert memory["unrolled full"] < 0.9 * memory["unrolled dots"] < 0.8 * memory["unrolled none"], memory
  assert memory["none"] < 0.9 * memory["unrolled none"], memory  # norms and activations are made again in the loop
  for name in ways:
    jax.tree.map(close, gradients[name], gradients["none"])


@pytest.mark.parametrize("variant", ["softmax", "conformal"])
def test_decoding_with_a_donated_cache_keeps_one_copy_of_it(variant):
  model = abstract(small(variant, num_layers=6, head_dim=32))
  cache = jax.eval_shape(lambda: model.init_cache(4, 256))
  step = jit(lambda m, token, cache: m.step(token, cache), donate_argnums=2)
  memory = step.lower(model, jax.ShapeDtypeStruct((4,), jnp.int32), cache).compile().memory_analysis()
  size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))
  assert memory.alias_size_in_bytes >= size
  assert memory.temp_size_in_bytes < 0.5 * size, (memory.temp_size_in_bytes, size)


def test_gates_of_every_layer_for_statistics():
  model, tokens = model_of(small()), tokens_of()
  log_gate, beta = jit(lambda m, t: m.gates(t))(model, tokens)
  assert log_gate.shape == beta.shape == (2, 2, 12, 2)
  assert np.all(log_gate < 0)
  assert np.all((beta > 0) & (beta < 2))
  x = model.embedding_norm(model.embedding(tokens))
  first = nnx.merge(*jax.tree.map(lambda p: p[0], nnx.split(model.layers)))
  jax.tree.map(close, first.gates(x), (log_gate[0], beta[0]))
  assert jax.eval_shape(lambda m, t: m.gates(t), model_of(small("sympow")), tokens) == (None, None)


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"vocab_size": 0}, "vocab_size must be a positive integer, got 0"),
    ({"num_layers": -1}, "num_layers must be a positive integer, got -1"),
    ({"head_dim": 63}, "head_dim must be even"),
    ({"mlp_ratio": -4}, "mlp_ratio must be a positive integer, got -4"),
    ({"num_kv_heads": 5}, "num_kv_heads must divide num_heads=12, got 5"),
    ({"power": 3}, "power must be a positive even integer, got 3"),
    ({"variant": "gated"}, "variant must be one of .* got 'gated'"),
    ({"remat": "some"}, "remat must be one of none, dots, full, got 'some'"),
    ({"dtype": "int8"}, "dtype must be one of float32, bfloat16, float16, got 'int8'"),
    ({"param_dtype": "double"}, "param_dtype must be one of float32, bfloat16, float16, got 'double'"),
  ],
)
def test_configs_that_mean_nothing_are_refused(options, message):
  with pytest.raises(ValueError, match=message) as caught:
    ModelConfig(**options)
  assert "\n" not in str(caught.value)


def test_a_config_is_frozen_and_pads_its_vocabulary():
  config = ModelConfig()
  assert config.padded_vocab_size == 50_304
  assert dataclasses.replace(config, vocab_size=256).padded_vocab_size == 256
  with pytest.raises(dataclasses.FrozenInstanceError):
    config.power = 4


def test_layouts_that_do_not_fit_are_refused():
  model, softmax = abstract(small()), abstract(small("softmax"))
  tokens, cache = tokens_of(), jax.eval_shape(lambda: model.init_cache(2))

  def refuse(message, method, *args):
    with pytest.raises(ValueError, match=message) as caught:
      method(*args)
    assert "\n" not in str(caught.value)

  refuse(r"tokens must be integer \[B, T\], got int32\[2\]", model, tokens[:, 0])
  refuse(r"tokens must be integer \[B, T\], got float32\[2, 12\]", model.hidden, tokens.astype(float))
  refuse(r"tokens must be integer \[B, T\], got \[1, 2\]", model, [1, 2])
  refuse(r"segment_ids must be signedinteger \[2, 12\], got int32\[2, 11\]", model, tokens, tokens[:, 1:])
  refuse(r"token must be integer \[B\], got int32\[2, 12\]", model.step, tokens, cache)
  refuse("cache must be the State .* got NoneType", model.prefill, tokens, None)
  one_layer = jax.tree.map(lambda a: a.update(shape=a.shape[1:]), jax.eval_shape(lambda: model.init_cache(3)))
  refuse(r"cache must be stacked over 2 layers, as init_cache gives it, got \[3, 2", model.prefill, tokens, one_layer)
  refuse(r"cache.S must have shape \[1, 2, 36, 8\]", model.step, tokens[:1, 0], cache)
  refuse("max_length must be given for the cache of variant 'softmax'", softmax.init_cache, 2)
