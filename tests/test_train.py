"""The step: one batch or many parts, one device or eight, the same loss and gradients; bad steps do no harm."""

import dataclasses
import functools
import importlib.util
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from csympow import overrides
from csympow.command import explained
from csympow.config import Config, GuardConfig, OptimizerConfig
from csympow.data.embedded import embedded
from csympow.data.loader import Batch, Windows, batches
from csympow.model import ModelConfig
from csympow.sharding import PARAMETERS, Layout, make_mesh
from csympow.train import flops
from csympow.train.loss import token_losses
from csympow.train.optimizer import learning_rate
from csympow.train.step import Program
from tests.comparing import quick_jit
from tests.test_config import ROOT, TINY

# Each program here runs a few times at most: compiling it is all it costs.
pytestmark = pytest.mark.usefixtures("quick_compilation")

NO_STOP = jnp.zeros(1, jnp.int32)


def config_of(**changes):
  changes = {"optimizer__warmup_steps": 0, "optimizer__schedule": "constant"} | changes
  return overrides.load(TINY, {name.replace("__", "."): str(value) for name, value in changes.items()})


@functools.cache
def windows():
  return Windows(embedded("train"), 32, 256)


def batch_of(config, layout=None, segments=False):
  sharding = None if layout is None else layout.sharding("batch", "time")
  batch = next(batches(windows(), config, sharding))
  if not segments:
    return batch
  ids = np.zeros((config.rows, config.context), np.int32)
  ids[:, 5:] = 1
  ids[: config.rows // 2, 20:] = 2
  ids[:, -3:] = -1
  targets = np.where(ids < 0, -1, np.asarray(batch.targets))
  return Batch(batch.tokens, *(jax.device_put(x, sharding) for x in (targets, ids)))


def layout_of(*sizes):
  return Layout(make_mesh(dict(zip(("data", "fsdp", "tensor", "context"), sizes, strict=True))))


@functools.cache
def gradients(config, layout=None, segments=False):
  program = Program(config, layout)
  abstract = program.abstract_state()
  state = quick_jit(program.init, out_shardings=jax.tree.map(lambda x: x.sharding, abstract))()
  return quick_jit(program._gradients)(state.parameters, batch_of(config, layout, segments))


def assert_same(found, wanted, tolerance=1e-4):  # the gradient of a rotation is a sum that mostly cancels
  np.testing.assert_allclose(found[0], wanted[0], rtol=tolerance)
  for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(found[1]), jax.tree.leaves(wanted[1]), strict=True):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    error = np.sqrt(np.mean((a - b) ** 2) / np.mean(b**2))
    assert error < tolerance, f"{jax.tree_util.keystr(path)}: {error:.2g}"


@pytest.mark.parametrize(
  ("sizes", "changes"),
  [
    pytest.param((8, 1, 1, 1), {}, marks=pytest.mark.slow),
    pytest.param((1, 8, 1, 1), {}, marks=pytest.mark.slow),
    pytest.param((2, 2, 2, 1), {"model__variant": "softmax"}, marks=pytest.mark.slow),
    pytest.param((1, 2, 2, 2), {"model__form": "chunked", "model__chunk_size": 8}, marks=pytest.mark.slow),
    pytest.param((2, 1, 1, 4), {"model__form": "attention", "model__power": 4}, marks=pytest.mark.slow),
    pytest.param((1, 1, 2, 4), {"model__variant": "softmax"}, marks=pytest.mark.slow),
    ((1, 2, 1, 4), {"accumulation": 2, "model__form": "chunked", "model__remat": "full"}),
  ],
  ids=str,
)
def test_eight_devices_are_one_in_loss_and_gradients(sizes, changes):
  config = config_of(**changes)
  segments = "softmax" in str(changes) or "chunked" in str(changes)
  found = gradients(config, layout_of(*sizes), segments)
  assert_same(found, gradients(dataclasses.replace(config, accumulation=1), None, segments))


@pytest.mark.slow
def test_parts_of_a_batch_add_up_to_it():
  assert_same(gradients(config_of(accumulation=4), None, True), gradients(config_of(), None, True))


@pytest.mark.slow
def test_a_loss_in_blocks_is_the_mean_over_all_targets(monkeypatch):
  config = config_of(optimizer__z_loss=0.1)
  program = Program(config, None)
  state = program.init()
  batch = batch_of(config, segments=True)
  monkeypatch.setattr("csympow.train.loss._LOGITS_AT_ONCE", 8 * 256 * 5)  # blocks of 4 positions: 5 do not divide 32
  found = program.summed_loss(state.parameters, batch)
  logits = program.model(state.parameters)(batch.tokens, batch.segment_ids)[..., : config.model.vocab_size]
  wanted = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(batch.targets, 0))
  valid = batch.targets >= 0
  np.testing.assert_allclose(found.nll, jnp.where(valid, wanted, 0).sum(), rtol=1e-6)
  z = jax.nn.logsumexp(logits, axis=-1) ** 2
  np.testing.assert_allclose(found.objective, jnp.where(valid, wanted + 0.1 * z, 0).sum(), rtol=1e-5)


@pytest.mark.parametrize(
  ("dtypes", "tolerance"),
  [
    ({}, 1e-4),
    pytest.param({"model__dtype": "bfloat16"}, 2e-2, marks=pytest.mark.slow),
    pytest.param({"model__dtype": "bfloat16", "model__param_dtype": "float16"}, 2e-2, marks=pytest.mark.slow),
  ],
)
def test_gradients_are_those_of_the_mean_loss_over_targets_and_of_the_z_loss(monkeypatch, dtypes, tolerance):
  monkeypatch.setattr("csympow.train.loss._LOGITS_AT_ONCE", 8 * 256 * 8)  # four blocks
  config = config_of(optimizer__z_loss=0.1, model__vocab_size=250, **dtypes)  # six rows are padding
  program = Program(config, None)
  parameters = program.init().parameters
  batch = batch_of(config, segments=True)

  def mean_loss(parameters):
    logits = program.model(parameters)(batch.tokens, batch.segment_ids)[..., : config.model.vocab_size]
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(batch.targets, 0))
    z = jax.nn.logsumexp(logits, axis=-1) ** 2
    return jnp.mean(nll + 0.1 * z, where=batch.targets >= 0), jnp.mean(nll, where=batch.targets >= 0)

  wanted, loss = quick_jit(jax.grad(mean_loss, has_aux=True))(parameters)
  assert_same(quick_jit(program._gradients)(parameters, batch), (loss, wanted), tolerance)


def test_the_configs_of_the_benchmark_are_such():
  spec = importlib.util.spec_from_file_location("training", ROOT / "benchmarks" / "training.py")
  benchmark = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(benchmark)
  configs = list(benchmark.runs("124m", ["softmax", "conformal"], [1024, 65_536], 65_536))
  assert [(config.model.variant, config.context) for config in configs[1:3]] == [
    ("conformal", 1024),
    ("softmax", 65_536),
  ]
  for config in configs:
    config.check_platform("gpu")


def test_a_target_that_is_not_there_costs_nothing():
  logits = jnp.asarray([[1.0, 2.0], [jnp.inf, 0.0]])
  np.testing.assert_array_equal(token_losses(logits, jnp.asarray([-1, -1]))[0], [0, 0])


def test_every_parameter_has_a_row_in_the_table_and_the_optimizer_follows():
  for variant in ("softmax", "sympow", "sympow+gating", "conformal"):
    layout = layout_of(1, 2, 2, 2)
    state = Program(config_of(model__variant=variant), layout).abstract_state()
    named = {jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in jax.tree.leaves_with_path(state)}
    kernels = [name for name in named if name.endswith(("kernel", "embedding"))]
    assert kernels
    for name in kernels:
      assert not named[name].sharding.is_fully_replicated, name
    moments = [name for name in named if name.startswith("optimizer") and name.endswith("up/kernel")]
    assert len(moments) == 2
    for name in moments:
      assert named[name].sharding == named["parameters/layers/up/kernel"].sharding
  assert {name.split("/")[0] for name in PARAMETERS} > {"query", "out", "up", "embedding"}


def stepped(config, steps, poison=(), layout=None):
  """The states and metrics of some steps; the batches of `poison` come with parameters that are not finite."""
  program = Program(config, layout)
  state = quick_jit(program.init)()
  step = quick_jit(program.step)
  data = batches(windows(), config, None)
  found = []
  for n, batch in enumerate(itertools.islice(data, steps)):
    given = state
    if n in poison:
      bad = jax.tree.map(lambda x: x * jnp.nan, state.parameters)
      given = state._replace(parameters=bad)
    new, metrics = step(given, batch, NO_STOP)
    if n in poison:  # what the step kept are the parameters it was given
      kept = jax.tree.map(lambda a, b: jnp.where(jnp.isnan(b), a, b), state.parameters, new.parameters)
      new = new._replace(parameters=kept)
    state = new
    found.append((state, metrics))
  return found


def test_training_lowers_the_loss_and_counts_its_steps():
  found = stepped(config_of(), 30)
  losses = [float(metrics.loss) for _, metrics in found]
  assert losses[0] > 5
  assert losses[-1] < 3.6
  assert int(found[-1][0].step) == 30
  assert not any(bool(metrics.bad) for _, metrics in found)


def test_a_bad_step_halts_before_the_update_and_nothing_moves_after():
  found = stepped(config_of(), 5, poison=(2,))
  before, halted, after = found[1][0], found[2], found[4]
  assert bool(halted[1].halted)
  assert bool(halted[1].bad)
  for state in (halted[0], after[0]):
    assert int(state.step) == 2
    jax.tree.map(np.testing.assert_array_equal, state.parameters, before.parameters)
    jax.tree.map(np.testing.assert_array_equal, state.optimizer, before.optimizer)
  assert int(after[1].skipped) == 1


@pytest.mark.slow
def test_bad_steps_are_skipped_up_to_a_limit_in_a_row():
  config = dataclasses.replace(config_of(), guard=GuardConfig(skip_limit=2))
  found = stepped(config, 9, poison=(1, 2, 4, 6, 7, 8))
  assert [bool(m.halted) for _, m in found] == [False] * 8 + [True]
  assert [int(m.skipped) for _, m in found] == [0, 1, 2, 2, 3, 3, 4, 5, 6]
  assert int(found[7][0].step) == 8  # a skipped step is over: its batch is not tried again
  jax.tree.map(np.testing.assert_array_equal, found[2][0].optimizer, found[0][0].optimizer)


@pytest.mark.slow
def test_a_spike_of_the_loss_is_a_bad_step():
  config = dataclasses.replace(config_of(), guard=GuardConfig(skip_limit=1, spike=1.5, spike_warmup=2))
  program = Program(config, None)
  state = quick_jit(program.init)()
  step = quick_jit(program.step)
  for n, batch in enumerate(itertools.islice(batches(windows(), config, None), 6)):
    if n == 4:  # as if all losses before had been half of what they were
      state = state._replace(guard=state.guard._replace(mean_loss=state.guard.mean_loss / 2))
    before = state
    state, metrics = step(state, batch, NO_STOP)
    assert bool(metrics.spike) == (n >= 4), n
    assert bool(metrics.halted) == (n == 5)
    if n >= 4:
      jax.tree.map(np.testing.assert_array_equal, state.parameters, before.parameters)
  assert int(metrics.skipped) == 2


def test_the_wish_of_one_device_to_stop_reaches_the_metrics():
  config = config_of()
  program = Program(config, None)
  flags = jnp.asarray([0, 0, 1, 0], jnp.int32)
  metrics = jax.eval_shape(program.step, program.abstract_state(), batch_of(config), flags)[1]
  assert metrics.stop.shape == ()
  assert int(quick_jit(program.step)(program.init(), batch_of(config), flags)[1].stop) == 1


@pytest.mark.parametrize(
  ("settings", "wanted"),
  [
    (OptimizerConfig(learning_rate=1.0), {0: 1, 99: 1}),
    (OptimizerConfig(learning_rate=1.0, warmup_steps=10), {0: 0.1, 9: 1, 10: 1, 99: 1}),
    (OptimizerConfig(learning_rate=1.0, schedule="cosine", final_share=0.1), {0: 1, 50: 0.55, 100: 0.1}),
    (OptimizerConfig(learning_rate=1.0, schedule="cosine", warmup_steps=20), {19: 1, 60: 0.5, 100: 0}),
    (
      OptimizerConfig(learning_rate=1.0, schedule="wsd", warmup_steps=10, decay_steps=20),
      {50: 1, 80: 1, 90: 0.5, 100: 0},
    ),
  ],
)
def test_the_rate_follows_its_schedule(settings, wanted):
  schedule = learning_rate(Config(optimizer=settings, steps=100))
  for step, rate in wanted.items():
    np.testing.assert_allclose(schedule(step), rate, atol=1e-6, err_msg=f"step {step}")


@pytest.mark.slow
def test_adam_is_optaxs_and_weight_decay_leaves_norms_alone():
  plain = config_of(optimizer__learning_rate=1e-3, optimizer__clip_norm="none")
  adamw = dataclasses.replace(plain.optimizer, name="adamw", weight_decay=0.1)
  batch = batch_of(plain)
  moved = []
  for config in (plain, dataclasses.replace(plain, optimizer=adamw)):
    program = Program(config, None)
    start = program.init()
    moved.append(quick_jit(program.step)(start, batch, NO_STOP)[0].parameters)
  adam = optax.adam(1e-3)
  slopes = quick_jit(program._gradients)(start.parameters, batch)[1]
  updates, _ = adam.update(slopes, adam.init(start.parameters))
  wanted = optax.apply_updates(start.parameters, updates)
  close = functools.partial(np.testing.assert_allclose, atol=2e-6)
  jax.tree.map(close, moved[0], wanted)

  def decayed(path, x, before):
    scale = jax.tree_util.keystr(path).endswith("['scale']")
    return x if scale else x - 1e-3 * 0.1 * before

  jax.tree.map(close, moved[1], jax.tree_util.tree_map_with_path(decayed, wanted, start.parameters))


def test_the_arithmetic_of_124m_is_six_flops_a_parameter_and_the_attention():
  config = Config(model=ModelConfig(variant="softmax"), context=1024)
  parameters = Program(config, None).abstract_state().parameters
  found = flops.per_token(config, parameters, "gpu")
  matrices = 12 * 12 * 768**2 + 50_304 * 768
  assert found == 6 * matrices + 3 * 12 * 2 * 1024 * 768
  assert flops.utilisation(1e6, found, 8, "NVIDIA H200") == pytest.approx(1e6 * found / (8 * 989e12))
  assert flops.utilisation(1e6, found, 8, "TPU v5p") == pytest.approx(1e6 * found / (8 * 459e12))
  assert flops.utilisation(1e6, found, 8, "an abacus") is None


def test_a_program_that_is_too_large_is_told_in_the_compilers_numbers():
  tpu = "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 31.26G of 15.75G hbm. Exceeded it by 15.51G."
  gpu = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 17179869184 bytes."
  assert explained(RuntimeError(tpu), "a file") == "there is not enough memory for this: Used 31.26G of 15.75G hbm"
  assert explained(RuntimeError(gpu), "a file") == "there is not enough memory for this: allocate 17179869184 bytes"
