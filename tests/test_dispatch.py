"""One traced program is right, and by kernels, for whatever chip it is compiled for."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import csympow
from csympow import cost
from tests import comparing
from tests.comparing import Case, inputs, quick_jit

CASE = Case(T=130, B=1, H=1, d=64, dv=64, rotation="none", dtype="bfloat16", entry="attention")
LONG = dataclasses.replace(CASE, T=4096, H=4)  # such that kernels are worth it
KERNELS = {"cpu": (), "cuda": ("attention_forward_mosaic_gpu",), "tpu": ('kernel_name = "chunked_forward"',)}


def attend(x, rest, **options):
  return comparing.call(x, rest, entry="attention", **options)["y"]


def loss(x, rest, **options):
  return attend(x, rest, **options).astype(jnp.float32).sum()


def lowered(traced, platform):
  return traced.lower(lowering_platforms=(platform,)).as_text()


def kernels_in(text):
  return [name for names in KERNELS.values() for name in names if name in text]


@pytest.fixture(scope="module")
def traced():
  return jax.jit(loss).trace(*inputs(LONG))


@pytest.mark.parametrize("platform", KERNELS)
def test_a_program_has_the_kernels_of_the_chip_it_is_compiled_for(traced, platform):
  assert kernels_in(lowered(traced, platform)) == list(KERNELS[platform])


def test_so_have_its_gradients():
  traced = jax.jit(jax.grad(functools.partial(loss, implementation="pallas"))).trace(*inputs(CASE))
  assert 'kernel_name = "chunked_keys"' in lowered(traced, "tpu")


def test_a_pass_without_gradients_has_the_form_that_is_faster_alone(monkeypatch):
  monkeypatch.setattr(cost, "named", lambda: "gpu")

  def has_states(time, form="auto", wrap=lambda call: call):
    x = jax.ShapeDtypeStruct((1, time, 96, 64), jnp.bfloat16)
    call = wrap(lambda q: csympow.attention(q, q, q, log_gate=jnp.zeros((1, time, 96)), form=form))
    return "kernel_name='state_read'" in str(jax.make_jaxpr(call)(x))

  def with_gradients(call):
    return jax.grad(lambda q: call(q).astype(jnp.float32).sum())

  assert not has_states(8192)
  assert has_states(8192, wrap=with_gradients)
  assert has_states(8192, form="chunked")
  assert has_states(16384)
  q = jax.ShapeDtypeStruct((1, 8192, 96, 64), jnp.bfloat16)
  explained = csympow.explain(q, q, q, device="gpu")
  assert explained.form == "chunked"
  assert "a pass without gradients is the attention form's" in explained.reason


def test_kernels_that_the_chip_does_not_have_are_refused_in_words_when_it_is_known():
  x, rest = inputs(CASE)
  by_kernels = functools.partial(attend, implementation="pallas")
  traced = jax.jit(by_kernels).trace(x, rest)
  assert lowered(traced, "tpu")
  of_narrow_heads = jax.jit(by_kernels).trace(*inputs(Case(T=130, d=32, dv=32, dtype="bfloat16", entry="attention")))
  for_a_cpu = "has kernels for NVIDIA Hopper GPUs and for TPUs, and this call is for a cpu"
  for refused, why in (
    (lambda: lowered(traced, "cpu"), for_a_cpu),
    (lambda: jax.jit(by_kernels)(x, rest), for_a_cpu),
    (lambda: by_kernels(x, rest), for_a_cpu),
    (lambda: jax.vmap(by_kernels)(*jax.tree.map(lambda a: a[None], (x, rest))), for_a_cpu),
    (lambda: lowered(of_narrow_heads, "tpu"), "for TPUs with d and dv of 64 and 128, got d=32 and dv=32"),
  ):
    with pytest.raises(NotImplementedError, match=why):
      refused()


def test_what_no_chip_has_is_refused_while_it_is_traced():
  with pytest.raises(NotImplementedError, match="implementation='pallas' has kernels for"):
    jax.jit(functools.partial(loss, implementation="pallas")).trace(*inputs(Case(d=64, dv=64, entry="attention")))


def test_arrays_say_where_a_call_runs_whatever_is_named(monkeypatch):
  x, rest = jax.device_put(inputs(LONG), jax.devices("cpu")[0])
  expected = attend(x, rest, implementation="xla")
  monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
  monkeypatch.setattr(cost, "named", lambda: "gpu")
  comparing.assert_close(attend(x, rest), expected, 5e-3, "y")


def test_a_traced_call_of_arrays_that_it_closes_over_is_traced_all_the_same():
  x, rest = inputs(CASE)
  traced = jax.jit(lambda scale: scale * loss(x, rest, implementation="pallas")).trace(1.0)
  assert kernels_in(lowered(traced, "tpu")) == list(KERNELS["tpu"])


@pytest.mark.slow
def test_gradients_need_no_more_memory_for_the_choice():
  x, rest = inputs(dataclasses.replace(LONG, H=1, T=2048))

  def needed():
    return comparing.temporaries(jax.grad(functools.partial(loss, form="chunked", chunk_size=512)), x, rest)

  at_choice = needed()
  with jax.default_device(jax.devices("cpu")[0]):
    assert at_choice == needed()


@pytest.mark.parametrize("by", [pytest.param("the arguments", marks=pytest.mark.slow), "the state", "the cotangents"])
def test_a_second_derivative_is_for_xla_alone(by):
  case = dataclasses.replace(CASE, entry="continued" if by == "the state" else "attention")
  x, rest = inputs(case)
  weights = comparing.cotangents(case)

  def gradients(x, weights, implementation):
    def total(x):
      y = comparing.call(x, rest, entry=case.entry, form="chunked", chunk_size=512, implementation=implementation)
      return jax.tree.reduce(jnp.add, jax.tree.map(jnp.vdot, y, weights)).astype(jnp.float32)

    return jax.tree.reduce(jnp.add, jax.tree.map(lambda a: jnp.vdot(a, a), jax.grad(total)(x))).astype(jnp.float32)

  def again(implementation):
    def of_state(S):
      return gradients(x | {"S": S}, weights, implementation)

    function, argument = {
      "the arguments": (lambda x: gradients(x, weights, implementation), x),
      "the state": (of_state, x.get("S")),
      "the cotangents": (lambda weights: gradients(x, weights, implementation), weights),
    }[by]
    jax.eval_shape(jax.grad(function), argument)

  again("xla")
  with pytest.raises(NotImplementedError, match="the kernels have no second derivative; implementation='xla' has"):
    again("pallas")


def test_a_step_has_a_kernel_where_there_is_one():
  state, q = csympow.init_state(1, 1, 64, 64), jnp.ones((1, 1, 64), jnp.bfloat16)
  traced = jax.jit(lambda state: csympow.step(q, q, q, state)).trace(state)
  assert "mosaic_gpu" in lowered(traced, "cuda")
  assert "custom_call" not in lowered(traced, "tpu")
  y, _ = csympow.step(q, q, q, state)
  np.testing.assert_allclose(quick_jit(lambda state: csympow.step(q, q, q, state))(state)[0], y, rtol=1e-2)
