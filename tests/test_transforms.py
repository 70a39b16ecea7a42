"""jit, grad, vmap, remat, scan and shard_map over eight devices give the same numbers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import csympow
from tests import reference
from tests.comparing import (
  FORMS,
  STATE,
  TIMED,
  Case,
  assert_close,
  assert_results_close,
  call,
  cotangents,
  expected,
  float64,
  forward,
  inputs,
  quick_jit,
  reference_results,
  with_gradients,
)

CASE = Case(T=7, B=4, H=2, groups=2, d=4, dv=3, segments="packed")


def run(x, rest, form):
  return call(x, rest, entry="continued", form=form, chunk_size=3)


def both(x, rest, form):
  """Results, and gradients that every result enters."""
  return with_gradients(lambda x: run(x, rest, form), x, cotangents(CASE))


def test_jit_changes_nothing():
  case = Case(T=7, rotation="none", entry="attention")
  y = csympow.attention(**inputs(case)[0], form="chunked", chunk_size=3)
  assert_close(y, forward(*inputs(case), entry="attention", form="chunked", chunk_size=3)["y"], 1e-6, "y")


def by_default(*forms):
  """Every form, of which these are not slow."""
  return [form if form in forms else pytest.param(form, marks=pytest.mark.slow) for form in FORMS]


@pytest.mark.parametrize("form", by_default("recurrent"))
def test_vmap_over_some_arguments_is_a_loop_forward_and_backward(form):
  """Over a new axis of some arguments, the others shared."""
  x, rest = inputs(CASE)
  some = ("q", "v", "beta", "S")
  many = x | {n: jnp.stack([0.5 * x[n], x[n]]) for n in some}
  axes = {n: 0 if n in some else None for n in x}
  out = quick_jit(jax.vmap(lambda x: both(x, rest, form), in_axes=(axes,)))(many)
  assert_results_close(jax.tree.map(lambda a: a[1], out), expected(CASE), 1e-5)
  other = reference_results(x | {n: 0.5 * x[n] for n in some}, rest, cotangents(CASE))
  assert_results_close(jax.tree.map(lambda a: a[0], out), other, 1e-5)


def layers():
  """The arguments of two layers, and what is asked of them."""
  x, _ = inputs(Case(T=7, d=4, entry="attention"))
  weights = np.float32(np.random.default_rng(0).normal(size=(2, 4, 4)) / 2 + np.eye(4))
  asked = np.float32(np.random.default_rng(1).normal(size=x["k"].shape))
  return {"k": x["k"], "log_gate": x["log_gate"], "weights": weights}, {"y": asked}


def layer(attention, h, w, log_gate):
  return h + attention(h @ w, h, h, log_gate=log_gate)


@functools.cache
def layers_in_a_row():
  def run(x):
    h = x["k"]
    for w in x["weights"]:
      h = layer(reference.attention, h, w, x["log_gate"])
    return {"y": h}

  with jax.enable_x64(True):
    out = quick_jit(functools.partial(with_gradients, run))(*float64(layers()))
    return jax.tree.map(np.asarray, out)


@pytest.mark.parametrize("form", by_default("chunked"))
def test_scanned_rematerialised_layers_are_layers_in_a_row(form):
  def run(x):
    attention = functools.partial(csympow.attention, form=form, chunk_size=3)
    body = jax.checkpoint(lambda h, w: (layer(attention, h, w, x["log_gate"]), None))
    return {"y": jax.lax.scan(body, x["k"], x["weights"])[0]}

  out = quick_jit(functools.partial(with_gradients, run))(*layers())
  assert_results_close(out, layers_in_a_row(), 1e-5)


def test_a_prefill_and_a_scan_of_steps_compile_into_one_program():
  case = Case(T=11, entry="prefill")
  x, rest = inputs(case)

  @quick_jit
  def generate(x):
    y, state = csympow.prefill(**{n: a[:, :6] for n, a in x.items()}, **rest)
    after = {n: jnp.moveaxis(a[:, 6:], 1, 0) for n, a in x.items()}
    _, tail = jax.lax.scan(lambda state, x: csympow.step(**x, state=state, **rest)[::-1], state, after)
    return jnp.concatenate([y, jnp.moveaxis(tail, 0, 1)], axis=1)

  assert_close(generate(x), expected(case)["y"], 1e-5, "y")


def specs(x, rest, batch="data", heads="model"):
  timed = {n: P(batch, None, heads) for n in ("q", "k", "v", "log_gate", "beta", "y")}
  state = {n: P(batch, heads) for n in ("S", "Z", "phase")}
  return {n: (timed | state)[n] for n in x}, {"rates": P(), "segment_ids": P(batch)}


@pytest.mark.parametrize("form", by_default("chunked"))
def test_shard_map_over_batch_and_heads_changes_nothing(form):
  assert jax.device_count() == 8
  x, rest = inputs(CASE)
  mesh = jax.make_mesh((4, 2), ("data", "model"))
  x_specs, rest_specs = specs(x, rest)
  sharded = jax.shard_map(
    functools.partial(run, form=form),
    mesh=mesh,
    in_specs=(x_specs, rest_specs),
    out_specs=specs(cotangents(CASE), rest)[0],
  )
  x, weights, rest = (
    jax.tree.map(lambda a, s: jax.device_put(a, NamedSharding(mesh, s)), tree, spec)
    for tree, spec in ((x, x_specs), (cotangents(CASE), specs(cotangents(CASE), rest)[0]), (rest, rest_specs))
  )
  out = quick_jit(lambda x, rest, weights: with_gradients(lambda x: sharded(x, rest), x, weights))(x, rest, weights)
  assert len(out["y"].sharding.device_set) == 8
  assert_results_close(jax.tree.map(np.asarray, out), expected(CASE), 1e-5)


def test_arrays_that_lie_on_eight_devices_give_the_same_numbers():
  """The compiler divides the work, with no shard_map."""
  x, rest = inputs(CASE)
  mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
  placed = jax.tree.map(lambda a, s: jax.device_put(a, NamedSharding(mesh, s)), (x, rest), specs(x, rest))
  out = quick_jit(functools.partial(both, form="chunked"))(*placed)
  assert_results_close(jax.tree.map(np.asarray, out), expected(CASE), 1e-5)


def test_step_under_shard_map_and_vmap_changes_nothing():
  case = Case(T=1, B=4, H=2, d=4, dv=3)
  x, rest = inputs(case)
  now = {n: a[:, 0] for n, a in x.items() if n in TIMED}
  state = csympow.State(*(x[n] for n in STATE))

  def one(now, state):
    y, state = csympow.step(**now, state=state, **rest)
    return {"y": y[:, None], "S": state.S, "Z": state.Z, "phase": state.phase}

  mesh = jax.make_mesh((4, 2), ("data", "model"))
  spec = P("data", "model")
  out_specs = {"y": P("data", None, "model"), "S": spec, "Z": spec, "phase": spec}
  sharded = jax.shard_map(one, mesh=mesh, in_specs=(spec, spec), out_specs=out_specs)
  placed = jax.tree.map(lambda a: jax.device_put(a, NamedSharding(mesh, spec)), (now, state))
  assert_results_close(jax.tree.map(np.asarray, quick_jit(sharded)(*placed)), expected(case), 1e-5)
  many = quick_jit(jax.vmap(one))(*jax.tree.map(lambda a: jnp.stack([a, 2 * a]), (now, state)))
  assert_results_close(jax.tree.map(lambda a: a[0], many), expected(case), 1e-5)
