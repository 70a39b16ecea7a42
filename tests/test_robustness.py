"""Places where an implementation that passes on ordinary inputs goes wrong in silence."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import csympow

FORMS = ("attention", "chunked", "recurrent")
B, T, Hq, H, d = 2, 6, 4, 2, 4
RATES = csympow.rotary_rates(d, 100)


def tensors(key=0, **scales):
  q, k, v, weights = (
    jax.random.normal(seed, (B, T, heads, d))
    for seed, heads in zip(jax.random.split(jax.random.key(key), 4), (Hq, H, H, Hq), strict=True)
  )
  return q * scales.get("q", 1), k * scales.get("k", 1), v, weights


def relative(a, b):
  return float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b))


def results(form, q, k, v, weights, **options):
  """The output, and the gradients of q, k and v."""
  y, transpose = jax.vjp(lambda *x: csympow.attention(*x, form=form, chunk_size=2, **options), q, k, v)
  return y, *transpose(weights)


@pytest.mark.slow
@pytest.mark.parametrize("gate", [-1.0, -7.0, -14.0, -20.0])
@pytest.mark.parametrize("form", ["chunked", "recurrent"])
def test_what_a_strong_gate_leaves_is_exact_where_nothing_else_is_left(form, gate):
  """The keys after the gate are zero, so the outputs there rest on what the gate let through."""
  q, k, v, weights = tensors()
  k = k.at[:, 3:].set(0.0)
  log_gate = jnp.zeros((B, T, H)).at[:, 3].set(gate)
  found, exact = (results(f, q, k, v, weights, log_gate=log_gate) for f in (form, "attention"))
  assert max(map(relative, found, exact)) < 1e-4  # a state of three keys is ill-conditioned; a lost one is off by 1


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize(("power", "size"), [(2, 1e-8), (2, 1e8), (4, 1e5), (4, 1e-5), (8, 1e-2), (8, 300.0)])
def test_gradients_are_right_at_every_size_of_keys(power, size):
  q, k, v, weights = tensors(k=size)
  exact = results("attention", q, k / size, v, weights, power=power)
  for form in FORMS:
    y, dq, dk, dv = results(form, q, k, v, weights, power=power)
    assert max(map(relative, (y, dq, dk * size, dv), exact)) < 1e-2  # the state's own rounding, p=8


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
  "name", ["q", "v", "log_gate", *(pytest.param(x, marks=pytest.mark.slow) for x in ("k", "beta"))]
)
def test_a_nan_is_not_hidden(form, name):
  q, k, v, _ = tensors()
  x = {"q": q, "k": k, "v": v, "log_gate": jnp.zeros((B, T, H)) - 0.1, "beta": jnp.ones((B, T, H))}
  x[name] = x[name].at[0, 2].set(jnp.nan)
  assert jnp.isnan(csympow.attention(**x, rates=RATES, form=form, chunk_size=2)[0, 2]).any()


@pytest.mark.parametrize("form", FORMS)
def test_the_gradient_of_an_empty_state_is_that_of_its_definition(form):
  """At zero, where cutting off negative normalisers has no derivative of its own."""
  q, k, v, weights = tensors()
  state = csympow.init_state(B, H, d, d)

  def loss(Z):
    y, _ = csympow.prefill(q, k, v, form=form, chunk_size=2, state=state._replace(Z=Z))
    return jnp.sum(y * weights)

  gradient = jax.grad(loss)(state.Z)[0, 0, 0]
  slope = (loss(state.Z.at[0, 0, 0].set(1e-2)) - loss(state.Z)) / 1e-2
  assert float(gradient) == pytest.approx(float(slope), rel=0.1)


def test_an_empty_states_gradient_through_a_step_is_that_of_prefill():
  q, k, v, weights = (x[:, 0] for x in tensors())
  state = csympow.init_state(B, H, d, d)
  by_step = jax.grad(lambda s: jnp.sum(csympow.step(q, k, v, s)[0] * weights))(state)
  one = [x[:, None] for x in (q, k, v)]
  by_prefill = jax.grad(lambda s: jnp.sum(csympow.prefill(*one, state=s)[0][:, 0] * weights))(state)
  for a, b in zip(by_step[:2], by_prefill[:2], strict=True):
    assert relative(a, b) < 1e-5


@pytest.mark.parametrize("kind", [np.uint8, np.uint32, np.int8, np.int64])
def test_segment_ids_of_any_integer_type_leave_a_given_state_in_place(kind):
  q, k, v, _ = tensors()
  _, state = csympow.prefill(q, k, v)
  ids = np.repeat([[0, 0, 1, 1, 2, 2]], B, axis=0)
  expected, _ = csympow.prefill(q, k, v, segment_ids=jnp.asarray(ids, jnp.int32), state=state)
  found, _ = csympow.prefill(q, k, v, segment_ids=ids.astype(kind), state=state)
  np.testing.assert_array_equal(found, expected)


def test_segment_ids_that_jax_would_truncate_are_refused():
  q, k, v, _ = tensors()
  with pytest.raises(ValueError, match=r"segment_ids must fit int32.*4294967296"):
    csympow.attention(q, k, v, segment_ids=np.full((B, T), 2**32))


@pytest.mark.parametrize("scale", [1e30, 1e-30, -1.0])
def test_no_scale_changes_the_result(scale):
  q, k, v, _ = tensors()
  assert relative(csympow.attention(q * 1e10, k, v, scale=scale), csympow.attention(q, k, v)) < 1e-6


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("form", ["chunked", "attention", "recurrent"])
@pytest.mark.parametrize("spec", [P("data"), P(None, None, "model"), P("data", None, "model")])
def test_explicitly_sharded_batch_and_heads_give_the_same_numbers(form, spec):
  *x, weights = tensors()
  beta = 1 + 0.5 * jnp.tanh(x[1][..., 0])
  log_gate = jax.nn.log_sigmoid(x[1][..., 1])

  def loss(q, k, v, weights, log_gate, beta, rates):
    y, state = csympow.prefill(q, k, v, 2, log_gate, beta, rates, form=form, chunk_size=2)
    return jnp.sum(y * weights) + jnp.sum(state.S)

  differentiate = jax.jit(jax.value_and_grad(loss, argnums=range(7)))
  arrays = (*x, weights, log_gate, beta)
  expected = jax.device_get(differentiate(*arrays, RATES))
  with jax.set_mesh(jax.make_mesh((2, 2), ("data", "model"), devices=jax.devices()[:4])):
    found = jax.device_get(differentiate(*(jax.device_put(a, P(*spec[: a.ndim])) for a in arrays), RATES))
  for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
    assert relative(a, b) < 1e-5


@pytest.mark.parametrize("spec", [P("x"), P(None, None, "x")])
def test_shared_rates_get_their_gradient_through_shard_map(spec):
  """With the fixed rotation, where nothing else about the phases varies over the mesh."""
  q, k, v, weights = tensors()
  mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])

  def total(q, k, v, weights, rates):
    return jnp.sum(csympow.attention(q, k, v, rates=rates) * weights)

  sharded = jax.shard_map(
    lambda *x: jax.lax.psum(total(*x), "x"), mesh=mesh, in_specs=(spec, spec, spec, spec, P()), out_specs=P()
  )
  found, expected = (jax.jit(jax.grad(f, argnums=4))(q, k, v, weights, RATES) for f in (sharded, total))
  assert relative(found, expected) < 1e-5


def test_eager_calls_compile_once():
  q, k, v, _ = tensors(key=7)
  csympow.attention(q, k, v, form="chunked", chunk_size=3)
  with jax.log_compiles(True), pytest.MonkeyPatch.context() as patch:
    compiled = []
    patch.setattr("logging.Logger.warning", lambda *args: compiled.append(args))
    csympow.attention(q + 1, k, v, form="chunked", chunk_size=3)
  assert not [line for line in compiled if "Compiling" in str(line) and "_attend" in str(line)]
