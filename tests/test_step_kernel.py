"""The step's kernel: right on the chip and in the interpreter, in place, and where there is none in words."""

import functools

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

import csympow
from csympow import cost, implementations, op
from csympow.features import feature_dim
from csympow.forms import fused_step
from kernels_pallas.gpu.step import least_rows, tiling
from tests import comparing
from tests.comparing import STATE, TIMED, Case, assert_close, assert_results_close, cotangents, inputs, with_gradients

gpu = pytest.mark.gpu
slow = functools.partial(pytest.param, marks=pytest.mark.slow)


def steps(x, rest, step, dtype=jnp.float32, power=2):
  """Token by token, from a state of `dtype`; the results of `comparing.call`."""
  arguments = {"log_gate": None, "beta": None, "rates": None, "scale": None, "layer": None} | rest

  def token(state, now):
    y, state = step(state=state, power=power, **(arguments | now))
    return state, y

  state = csympow.State(x["S"].astype(dtype), x["Z"].astype(dtype), x["phase"])
  state, y = jax.lax.scan(token, state, {n: jnp.moveaxis(a, 1, 0) for n, a in x.items() if n in TIMED})
  return {"y": jnp.moveaxis(y, 0, 1), "S": state.S, "Z": state.Z, "phase": state.phase}


def in_the_interpreter(detect_races=False, **arguments):
  return fused_step.step(**arguments, interpret=plgpu.InterpretGPUParams(detect_races=detect_races))


@functools.partial(comparing.quick_jit, static_argnames=("step", "dtype", "power"))
def quick_steps(x, rest, step=in_the_interpreter, dtype=jnp.float32, power=2):
  return steps(x, rest, step, dtype, power)


by_xla = functools.partial(csympow.step, implementation="xla")

INTERPRETED = [
  Case(T=2, B=2, H=1, groups=2, d=32, dv=32, gate="resets"),
  slow(Case(T=2, B=1, H=1, d=64, dv=64, dtype="bfloat16", gate="none", rotation="none")),
  *(
    slow(Case(T=2, B=1, H=1, **sizes, dtype="float16", rotation="fixed"))
    for sizes in (
      {"d": 32, "dv": 128},
      {"d": 128, "dv": 32},
      {"d": 128, "dv": 128},
      {"d": 64, "dv": 32},
      {"d": 16, "dv": 16},
    )
  ),
]


@pytest.mark.parametrize("case", INTERPRETED, ids=str)
@pytest.mark.usefixtures("no_races")
def test_the_kernel_is_right_in_the_interpreter_and_race_free(case):
  x, rest = inputs(case)
  step = functools.partial(in_the_interpreter, detect_races=True)
  run = comparing.quick_jit(lambda x, w: with_gradients(lambda x: steps(x, rest, step), x, w))
  results = jax.tree.map(np.asarray, run(x, cotangents(case)))
  expected = comparing.reference_results(x, rest, cotangents(case))
  # The state is float32, whatever the token is.
  exact = {name: results.pop(name) for name in STATE}
  assert_results_close(exact, expected, 1e-6)
  assert_results_close(results, expected, comparing.TOLERANCE[case.dtype])


def test_a_bfloat16_state_is_rounded_once_a_step():
  x, rest = inputs(Case(T=1, B=1, H=1, d=32, dv=64))
  found = quick_steps(x, rest, dtype=jnp.bfloat16)
  expected = quick_steps(x, rest, by_xla, jnp.bfloat16)
  for name in ("S", "Z"):
    assert found[name].dtype == jnp.bfloat16
    assert_close(found[name], expected[name], 2e-4, name)  # where rounding to the nearest hangs on the last bit
  assert_close(found["y"], expected["y"], 1e-5, "y")


def test_queries_of_any_length_and_none_at_all():
  x, rest = inputs(Case(T=1, B=4, H=1, d=32, dv=32, gate="none"))
  lengths = jnp.array([1e30, 1e-30, 0.0, jnp.nan])[:, None, None, None]
  y = quick_steps(x | {"q": x["q"] * lengths}, rest)["y"]
  expected = quick_steps(x, rest, by_xla)["y"]
  assert_close(y[:2], expected[:2], 1e-5, "y")
  assert not np.any(y[2])
  assert np.all(np.isnan(y[3]))


@pytest.mark.slow
def test_any_power():
  x, rest = inputs(Case(T=1, B=1, H=1, d=32, dv=32, power=4))
  found, expected = (quick_steps(x, rest, step, power=4) for step in (in_the_interpreter, by_xla))
  assert_results_close(found, expected, 1e-5)


@pytest.mark.slow
def test_a_scale_of_zero_is_no_query():
  x, rest = inputs(Case(T=1, B=1, H=1, d=32, dv=32))
  assert not np.any(quick_steps(x, rest | {"scale": 0.0})["y"])


def test_vmap_is_more_rows():
  x, rest = inputs(Case(T=1, B=2, H=1, d=32, dv=32))
  split = jax.tree.map(lambda a: a[:, None], x)
  found = jax.vmap(lambda x: quick_steps(x, rest))(split)
  expected = quick_steps(x, rest, by_xla)
  assert_results_close(jax.tree.map(lambda a: a[:, 0], found), expected, 1e-5)


@pytest.mark.slow
def test_of_a_stack_one_layer_changes():
  x, rest = inputs(Case(T=1, B=1, H=1, d=32, dv=32))
  now = {name: array[:, 0] for name, array in x.items() if name in TIMED}
  state = csympow.State(*(x[name] for name in STATE))
  stack = jax.tree.map(lambda a: jnp.stack([a, 2 * a, 3 * a]), state)

  def both(step):
    """What a step gives by itself, and as the first layer of three."""
    run = comparing.quick_jit(lambda **x: step(**now, **rest, power=2, scale=None, **x))
    return run(state=state, layer=None), run(state=stack, layer=jnp.int32(0))

  weights = cotangents(Case(T=1, B=1, H=1, d=32, dv=32))
  for step in (in_the_interpreter, by_xla):
    (y, alone), (y_in_stack, stacked) = both(step)
    np.testing.assert_array_equal(y, y_in_stack)
    for name, part, whole, before in zip(STATE, alone, stacked, stack, strict=True):
      np.testing.assert_array_equal(whole[0], part, err_msg=name)
      np.testing.assert_array_equal(whole[1:], before[1:], err_msg=name)

  def gradient(step):
    def loss(stack):
      y, after = step(**now, **rest, state=stack, power=2, scale=None, layer=jnp.int32(0))
      return jnp.sum(y * weights["y"][:, 0]) + jnp.sum(after.S * weights["S"])

    return comparing.quick_jit(jax.grad(loss))(stack)

  found, expected = gradient(in_the_interpreter), gradient(by_xla)
  for name in STATE:
    assert_close(getattr(found, name), getattr(expected, name), 1e-5, name)


def shapes(batch=2, heads=2, groups=1, d=64, dv=64, dtype=jnp.bfloat16, state_dtype=jnp.float32):
  """The arguments of `op._step` up to beta, as shapes."""
  token = [((batch, heads * groups, d), dtype), ((batch, heads, d), dtype), ((batch, heads, dv), dtype)]
  q, k, v, log_gate, beta = (jax.ShapeDtypeStruct(*x) for x in (*token, *(((batch, heads), jnp.float32),) * 2))
  state = jax.eval_shape(lambda: csympow.init_state(batch, heads, d, dv, dtype=state_dtype))
  return {"q": q, "k": k, "v": v, "state": state, "log_gate": log_gate, "beta": beta}


def by_kernel(x, layer=None):
  rates = comparing.rotary(x["k"].shape[-1])
  return op._step(power=2, rates=jnp.asarray(rates), scale=None, implementation="pallas", layer=layer, **x)


def lowered(function, x):
  return jax.jit(function).trace(x).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
  "options",
  [
    {"batch": 8},
    {"batch": 64, "groups": 2, "dtype": jnp.float32},
    {"d": 128, "dv": 128, "state_dtype": jnp.bfloat16},
    {"d": 32, "dv": 128, "dtype": jnp.float16},
    {"d": 64, "dv": 32, "groups": 4},
    slow({"batch": 64, "groups": 8}),
  ],
)
def test_the_kernel_lowers_for_every_shape_and_changes_the_state_in_place(options):
  text = lowered(by_kernel, shapes(heads=12, **options))
  assert "output_operand_alias" in text


def test_the_kernel_lowers_inside_shard_map_and_scan():
  mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])

  def decode(x):
    def again(state, _):
      y, state = by_kernel(x | {"state": state})
      return state, y

    return jax.lax.scan(again, x["state"], length=3)

  specs = (jax.tree.map(lambda _: jax.P("data"), shapes()["state"]), jax.P(None, "data"))
  sharded = jax.shard_map(decode, mesh=mesh, in_specs=jax.P("data"), out_specs=specs)
  assert "mosaic_gpu" in lowered(sharded, shapes())


def test_the_kernel_has_a_gradient():
  both = jax.value_and_grad(lambda x: by_kernel(x)[0].astype(jnp.float32).sum())
  assert "mosaic_gpu" in lowered(both, shapes())


@pytest.mark.parametrize("dv", [16, 32, 64, 128])
@pytest.mark.parametrize(("d", "power"), [(16, 2), (32, 2), (64, 2), (128, 2), (16, 4), (32, 4)])
def test_tiles_cover_all_features(d, power, dv):
  features = feature_dim(d, power)
  for group in range(1, 9):
    how = tiling(features, dv, group)
    if features % least_rows(dv):
      assert how is None
      continue
    assert features % how.tile == 0
    assert how.rows * dv == 128 * how.vector


def refused(device="gpu", **changes):
  sizes = {"batch": 1, "time": 1, "query_heads": 12, "heads": 12, "head_dim": 64, "value_dim": 64, "power": 2}
  shape = cost.Shape(**(sizes | changes), needs_state=True)
  assert implementations.for_step(shape, None, device) == "xla"
  with pytest.raises(NotImplementedError) as error:
    implementations.for_step(shape, "pallas", device)
  return str(error.value)


def test_what_the_kernel_cannot_do_is_refused_in_words():
  assert "kernel for steps on NVIDIA Hopper GPUs, and this call is for a tpu" in refused("tpu")
  assert "d and dv of 16, 32, 64 and 128, got d=48 and dv=64" in refused(head_dim=48)
  assert "at most 8 queries for each key, got 12" in refused(heads=1)
  assert "at most 65,536 features, a multiple of 4, got D=766,480 (d=64, power=4)" in refused(power=4)
  assert "a multiple of 8, got D=3,876 (d=16, power=4)" in refused(head_dim=16, value_dim=16, power=4)
  fits = cost.Shape(1, 1, 12, 12, 64, 64, 2, needs_state=True)
  assert implementations.for_step(fits, None, "gpu") == "pallas"
  assert implementations.for_step(fits, "xla", "gpu") == "xla"
  state = csympow.init_state(1, 1, 32, 32)
  q = jnp.ones((1, 1, 32))
  with pytest.raises(ValueError, match="implementation must be one of"):
    csympow.step(q, q, q, state, implementation="cuda")


def test_a_layer_is_an_integer_and_its_state_a_stack():
  state, q = csympow.init_state(1, 1, 32, 32), jnp.ones((1, 1, 32))
  with pytest.raises(ValueError, match="layer must be an integer array without axes or None, got 0"):
    csympow.step(q, q, q, state, layer=0)
  with pytest.raises(ValueError, match=r"state.S must have shape \[L, B, H, D, dv\]"):
    csympow.step(q, q, q, state, layer=jnp.int32(0))


def reference_arguments(x, rest):
  return {n: x[n] for n in ("log_gate", "beta")} | rest | {"state": csympow.State(*(x[n] for n in STATE))}


@gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("batch", [1, 8, 64])
def test_hundreds_of_steps_are_right_on_the_chip(batch, groups, dtype):
  case = Case(T=300, B=batch, H=2, groups=groups, d=64, dv=64, dtype="bfloat16", entry="continued")
  x, rest = inputs(case)
  step = functools.partial(csympow.step, implementation="pallas")
  found = jax.jit(lambda x: steps(x, rest, step, jnp.dtype(dtype)))(x)
  y, state = comparing.reference_prefill(*(x[n] for n in ("q", "k", "v")), **reference_arguments(x, rest))
  expected = {"y": y, "S": state.S, "Z": state.Z}
  # Every step rounds the phase to 24 bits, at random, and a bfloat16 state to 8.
  assert comparing.turns_apart(found["phase"], state.phase) < 5e-6
  tolerances = {"y": 5e-3, "S": 1e-5, "Z": 1e-5} if dtype == "float32" else {"y": 5e-3, "S": 1e-2, "Z": 1e-2}
  for name, tolerance in tolerances.items():
    assert_close(found[name], expected[name], tolerance, name)


@gpu
@pytest.mark.parametrize("sizes", [(16, 16), (16, 64), (32, 32), (32, 128), (128, 64), (128, 128)])
def test_other_widths_are_right_on_the_chip(sizes):
  case = Case(T=20, B=3, H=2, d=sizes[0], dv=sizes[1], gate="resets", dtype="float32", entry="continued")
  x, rest = inputs(case)
  step = functools.partial(csympow.step, implementation="pallas")
  run = jax.jit(lambda x, w: with_gradients(lambda x: steps(x, rest, step), x, w))
  expected = jax.jit(lambda x, w: with_gradients(lambda x: steps(x, rest, by_xla), x, w))
  assert_results_close(run(x, cotangents(case)), expected(x, cotangents(case)), 1e-4)


@gpu
def test_layers_of_a_stack_are_right_on_the_chip():
  x, rest = inputs(Case(T=1, B=8, H=12, d=64, dv=64, dtype="bfloat16", entry="continued"))
  now = {name: array[:, 0] for name, array in x.items() if name in TIMED}
  stack = jax.tree.map(lambda a: jnp.stack([a, 2 * a, 3 * a]), csympow.State(*(x[name] for name in STATE)))

  @functools.partial(jax.jit, static_argnames="step")
  def through(stack, step):
    def one(carry, layer):
      y, stack = step(**(now | {"q": carry[0]}), **rest, state=carry[1], layer=layer)
      return (y, stack), y

    (_, stack), y = jax.lax.scan(one, (now["q"], stack), jnp.arange(3))
    return {"y": y} | stack._asdict()

  found, expected = (
    through(stack, step) for step in (functools.partial(csympow.step, implementation="pallas"), by_xla)
  )
  assert_close(found.pop("y"), expected.pop("y"), 5e-3, "y")
  assert_results_close(found, expected, 1e-6)


@gpu
def test_two_runs_are_the_same_to_the_bit():
  x, rest = inputs(Case(T=50, B=8, H=12, d=64, dv=64, dtype="bfloat16", entry="continued"))
  run = jax.jit(lambda x: steps(x, rest, csympow.step))
  first, second = (jax.tree.map(np.asarray, run(x)) for _ in range(2))
  for name in first:
    np.testing.assert_array_equal(first[name], second[name], err_msg=name)


@gpu
def test_a_step_takes_the_kernel_by_itself():
  x = {n: a for n, a in shapes().items() if n != "beta"}
  assert "mosaic_gpu" in jax.jit(lambda x: csympow.step(**x)).lower(x).as_text()
