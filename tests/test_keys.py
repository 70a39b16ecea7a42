"""A cache of keys and values tells the same story as the state, and folds into it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import csympow
from csympow import keys
from csympow.features import feature_dim
from csympow.model import ModelConfig, Transformer
from csympow.nn import ConformalAttention
from tests.comparing import FULL, inputs, quick_jit

SLOTS = 24
RTOL = 2e-5


def close(a, b, tolerance=RTOL):
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance), a, b)


def empty(x, slots=SLOTS):
  batch, _, heads, head_dim = x["k"].shape
  return keys.init_keys(batch, slots, heads, head_dim, x["v"].shape[-1], jnp.float32)


def arguments(segments=True, power=2):
  """Everything a call may have: grouped queries, gates, rotations, packed rows with holes."""
  x, rest = inputs(dataclasses.replace(FULL, power=power))
  x = {name: x[name] for name in ("q", "k", "v", "log_gate", "beta")} | {"rates": rest["rates"]}
  return x, rest["segment_ids"] if segments else None


def part(x, where):
  return {name: array if name == "rates" else array[:, where] for name, array in x.items()}


@functools.partial(quick_jit, static_argnames="power")
def by_keys(x, cache, segment_ids, power=2):
  return keys.prefill(
    x["q"], x["k"], x["v"], cache, power, x["log_gate"], x["beta"], x["rates"], segment_ids=segment_ids
  )


@functools.partial(quick_jit, static_argnames="power")
def by_state(x, state, segment_ids, power=2):
  return csympow.prefill(**x, power=power, segment_ids=segment_ids, state=state)


fold = quick_jit(keys.fold, static_argnames="power")


def state_of(x, power=2):
  batch, _, heads, head_dim = x["k"].shape
  return csympow.init_state(batch, heads, head_dim, x["v"].shape[-1], power=power)


@pytest.mark.parametrize("power", [2, 4])
def test_keys_give_what_the_state_gives_and_fold_into_it(power):
  x, segment_ids = arguments(power=power)
  y, cache = by_keys(x, empty(x), segment_ids, power=power)
  wanted, state = by_state(x, state_of(x, power), segment_ids, power=power)
  close(y, wanted)
  folded = fold(cache, power=power)
  close((folded.S, folded.Z), (state.S, state.Z))
  np.testing.assert_array_equal(folded.phase, state.phase)


@pytest.mark.slow
def test_any_pieces_are_one_and_a_fold_between_any_two_changes_nothing():
  x, _ = arguments(segments=False)
  wanted, _ = by_state(x, state_of(x), None)
  for split in (1, 8):
    first, cache = by_keys(part(x, slice(split)), empty(x), None)
    rest = part(x, slice(split, None))
    second, _ = by_keys(rest, cache, None)
    close(jnp.concatenate([first, second], axis=1), wanted)
    folded, _ = by_state(rest, fold(cache, power=2), None)
    close(jnp.concatenate([first, folded], axis=1), wanted)


def test_slots_that_are_read_in_parts_give_the_same(monkeypatch):
  x, segment_ids = arguments()
  wanted, _ = by_keys(x, empty(x), segment_ids)
  monkeypatch.setattr(keys, "_SCORES_AT_ONCE", 7 * x["q"].shape[1])  # parts of 7 slots, of 24
  in_parts = quick_jit(lambda *rest: keys.prefill(x["q"], x["k"], x["v"], empty(x), 2, *rest))
  y, _ = in_parts(x["log_gate"], x["beta"], x["rates"], segment_ids)
  close(y, wanted)


def test_a_reset_long_ago_is_still_a_reset_and_a_gate_of_one_does_not_drift():
  x, _ = arguments(segments=False)
  for log_gate in (0.0, -1e-6, -200.0, -jnp.inf):
    given = x | {"log_gate": jnp.full_like(x["log_gate"], log_gate)}
    close(by_keys(given, empty(x), None)[0], by_state(given, state_of(x), None)[0])


def test_rows_that_overflow_cannot_be_overlooked():
  x, _ = arguments(segments=False)
  time = x["k"].shape[1]
  y, cache = by_keys(x, empty(x, slots=time), None)
  assert np.isfinite(y).all()
  y, _ = by_keys(part(x, slice(1)), cache, None)
  assert np.isnan(y).all()


def test_a_state_is_worth_as_many_tokens_as_fit_in_its_bytes():
  layer = nnx.eval_shape(lambda: ConformalAttention(64, 2, head_dim=64, power=4, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
  features = feature_dim(64, 4)
  assert layer.tokens_of_a_state == 4 * (features * 65 + 32) // (2 * 128 + 8)
  caches = (jax.eval_shape(lambda keep=keep: layer.init_cache(1, 1000, keep_keys=keep)) for keep in (False, True))
  state, cache = (sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache)) for cache in caches)
  assert state / cache == pytest.approx(layer.tokens_of_a_state / 1000, rel=1e-2)


@pytest.mark.slow
def test_a_model_without_gates_decodes_by_keys_then_by_its_state():
  shape = {"vocab_size": 50, "d_model": 16, "num_layers": 2, "num_heads": 2, "head_dim": 8, "mlp_ratio": 2}
  model = Transformer(ModelConfig(**shape, variant="sympow", dtype="float32"), rngs=nnx.Rngs(0))
  tokens = np.random.default_rng(0).integers(0, 50, (2, 6))

  @quick_jit
  def decode(model, tokens):
    first, cache = model.prefill(tokens[:, :3], model.init_cache(2, 4, keep_keys=True))
    second, cache = model.step(tokens[:, 3], cache)
    third, _ = model.prefill(tokens[:, 4:], model.fold(cache))
    return jnp.concatenate([first, second[:, None], third], axis=1), model(tokens)

  found, wanted = decode(model, tokens)
  np.testing.assert_allclose(found[..., :50], wanted[..., :50], rtol=1e-4, atol=1e-4)


def test_what_is_no_cache_of_this_layer_is_refused():
  layer = ConformalAttention(8, 2, head_dim=4, rngs=nnx.Rngs(0))
  with pytest.raises(ValueError, match="max_length must be given for the cache of variant 'conformal' with keep_keys"):
    layer.init_cache(1, keep_keys=True)
  cache = layer.init_cache(2, 5, keep_keys=True)
  with pytest.raises(ValueError, match="no more tokens than the cache has slots, 5"):
    layer.prefill(jnp.zeros((2, 6, 8)), cache)
  with pytest.raises(ValueError, match=r"cache\.k must have shape \[3, 5, 2, 4\]"):
    layer.prefill(jnp.zeros((3, 2, 8)), cache)
