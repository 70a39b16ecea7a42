"""States of features that lie in memory, beyond p = 2: the kernels that expand them, and chunks that go on in turn."""

import functools

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

from csympow import cost, op
from csympow.features import feature_dim
from csympow.forms import chunked, expanded, fused, memory, rotating
from csympow.forms.spans import Settings, Sums
from kernels_pallas.gpu.expand import Table, _parts, _products_of_others
from kernels_pallas.gpu.tiles import BLOCK, TILE
from tests import comparing
from tests.comparing import Case, assert_close, assert_results_close, cotangents, inputs
from tests.test_kernels import ATTENTION, TOLERANCE, assert_lowers, attend, gradients, reference

gpu = pytest.mark.gpu
slow = functools.partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize(("d", "power", "T", "group"), [(4, 4, BLOCK, 1), slow(3, 6, 2 * BLOCK, 2)])
@pytest.mark.usefixtures("no_races")
def test_a_state_by_features_in_memory_is_the_state(d, power, T, group):
  random = np.random.default_rng(0)

  def normal(*shape):
    return jnp.asarray(random.normal(size=shape), jnp.float32)

  dv, settings = 8, Settings(power, T, TILE, BLOCK, "highest", interpret=plgpu.InterpretGPUParams(detect_races=True))
  written = memory.Written(normal(1, 1, T, d), normal(1, 1, T, dv), jnp.exp(-jnp.abs(normal(1, 1, T, 1))))
  q, cotangent = normal(1, 1, group, T, d), Sums(normal(1, 1, group, T, dv), normal(1, 1, group, T, 1))
  D = feature_dim(d, power)
  start = memory.Memory(normal(1, 1, D, dv), jnp.abs(normal(1, 1, D, 1)))
  state = memory.write(start, written, settings)

  def results(states):
    dmemory, dq = states.read_backward(state, q, cotangent, start, settings)
    dk, dv = states.write_backward(state, written, settings)
    found = {"written": states.write(start, written, settings), "read": states.read(state, q, settings)}
    return found | {"dmemory": dmemory, "dq": dq, "dk": dk, "dv": dv}

  found, exact = (jax.tree_util.tree_leaves_with_path(results(states)) for states in (expanded, memory))
  for (path, x), (_, y) in zip(found, exact, strict=True):
    assert_close(x, y, 4e-3, jax.tree_util.keystr(path))


def test_a_normaliser_has_more_bits_than_16():
  nothing, z, Z = jnp.zeros((1, 1, 1, 1, 8)), 1 + 2.0**-12, 1 + 2.0**-10
  tokens = expanded._tokens(nothing, jnp.full((1, 1, 1, 1, 1), z))
  whole = memory.Memory(jnp.zeros((1, 1, 35, 8)), jnp.full((1, 1, 35, 1), Z))
  state = expanded._state(whole, jnp.zeros((1, 1, 1, BLOCK, 4)), Settings(4, BLOCK, TILE, BLOCK, "highest"))
  product = np.asarray(tokens, np.float64)[0, 0, 0] @ np.asarray(state, np.float64)[0, 0].T
  np.testing.assert_allclose(product[0, :35], z * Z, rtol=2.0**-20)
  assert not np.any(product[0, 35:])


@pytest.mark.parametrize("count", [2, 3, 4, 6])
def test_products_of_others(count):
  xs = [float(x) for x in (2, 3, 5, 7, 11, 13)[:count]]
  assert _products_of_others(xs) == [np.prod(xs) / x for x in xs]


@pytest.mark.parametrize(("d", "power"), [(16, 4), (32, 4), (16, 6)])
@pytest.mark.parametrize("tokens", [BLOCK, 12 * 8192])
def test_parts_have_all_features(d, power, tokens):
  D = feature_dim(d, power)
  parts, features = _parts(Table(np.zeros((power, D)), np.zeros(D)), 1, tokens)
  assert features % (parts * 32) == 0
  assert D <= features < D + parts * 32


@pytest.mark.parametrize("entry", [slow("attention"), "continued"])
def test_chunks_in_turn_are_the_whole(monkeypatch, entry):
  """With XLA's form in the kernels' place, so that there is no rounding to hide in."""

  def exact(x, memory, settings, dtype, return_memory):
    del dtype
    turns, total, rates, _ = x.rotation
    turns += (total - jax.lax.stop_gradient(total))[..., None] * rates / (2 * jnp.pi)  # kernels have that gradient
    q, k = rotating.rotated(x.q, x.k, x.rotation._replace(turns=turns))
    return chunked.attend(q, k, x.v, x.log_gate, memory, settings, return_memory)

  monkeypatch.setattr(fused, "attend", exact)
  case = Case(T=70, B=2, H=2, groups=2, d=4, dv=4, power=4, segments="padded", entry=entry)
  x, rest = inputs(case)
  run = comparing.by_kernels(case, "chunked", Settings(4, 20, 20, 20, "highest"))
  call = comparing.quick_jit(lambda x, w: comparing.with_gradients(lambda x: run(x, rest), x, w))
  assert_results_close(jax.tree.map(np.asarray, call(x, cotangents(case))), reference(case), 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
  "case",
  [
    Case(T=300, B=1, H=1, d=16, dv=32, power=4, dtype="bfloat16", entry="attention"),
    Case(T=300, B=1, H=1, groups=2, d=16, dv=64, power=4, gate="resets", segments="padded", dtype="bfloat16"),
  ],
  ids=str,
)
@pytest.mark.usefixtures("no_races")
def test_chunks_in_turn_are_right_in_the_interpreter_and_race_free(monkeypatch, case):
  monkeypatch.setitem(fused._STATES, True, memory)  # to interpret thousands of features would take hours
  x, rest = inputs(case)
  run = attend(case, plgpu.InterpretGPUParams(detect_races=True), BLOCK)
  results = comparing.with_gradients(lambda x: run(x, rest), x, cotangents(case))
  assert_results_close(jax.tree.map(np.asarray, results), reference(case), TOLERANCE[case.dtype])


@pytest.mark.slow
def test_chunks_in_turn_lower():
  case = Case(T=65_536, B=1, H=2, groups=2, d=16, dv=64, power=4, dtype="bfloat16", entry="attention")
  assert_lowers(*gradients(case, chunk=8192), *ATTENTION[:-1], "expanded", "contracted")


ON_THE_CHIP = comparing.covering(
  sizes=[{"d": 16, "dv": 64}, {"d": 16, "dv": 16}],
  length=[{"T": T} for T in (1, 257, 600, 1300)],
  gate=[{"gate": "none"}, {"gate": "learned"}, {"gate": "resets"}],
  rotation=[{"rotation": "none"}, {"rotation": "fixed"}, {"rotation": "learned"}],
  segments=[{"segments": "none"}, {"segments": "packed"}, {"segments": "padded"}],
  heads=[{"B": 2, "H": 1}, {"B": 1, "H": 2, "groups": 3}],
  dtype=[{"dtype": "bfloat16", "entry": "attention"}, {"dtype": "float16", "entry": "attention"}],
  power=[{"power": 4}],
)
WITH_STATE = [
  Case(T=300, B=1, H=1, d=16, dv=16, power=4, dtype="bfloat16", entry="prefill"),
  Case(T=300, B=1, H=1, groups=2, d=16, dv=16, power=4, gate="resets", segments="padded", dtype="bfloat16"),
]
WIDER = Case(T=600, B=1, H=1, d=32, dv=32, power=4, dtype="bfloat16", entry="attention")


@gpu
@pytest.mark.parametrize("case", [*ON_THE_CHIP, *WITH_STATE, WIDER], ids=str)
def test_chunks_in_turn_are_right_on_the_chip(case):
  x, rest = inputs(case)
  options = {"entry": case.entry, "power": 4, "form": "chunked", "chunk_size": 256, "implementation": "pallas"}
  run = jax.jit(lambda x, w: comparing.with_gradients(lambda x: comparing.call(x, rest, **options), x, w))
  results, expected = run(x, cotangents(case)), reference(case)
  # A rotation's gradient is the rest of sums that cancel.
  turned = {name: results.pop(name) for name in ("dbeta",) if name in results}
  assert_results_close(results, expected, TOLERANCE[case.dtype] if case.entry == "attention" else 8e-3)
  assert_results_close(turned, {name: expected[name] for name in turned}, 8e-3)


def test_chunks_in_turn_are_taken_where_they_are_faster():
  def explained(T, **sizes):
    shape = cost.Shape(
      **({"batch": 1, "query_heads": 12, "heads": 12, "value_dim": 64} | sizes), time=T, needs_state=False
    )
    return op._explained(shape, "bfloat16", "auto", None, None, "gpu")

  assert explained(32_768, head_dim=16, power=4).form == "attention"
  long = explained(262_144, head_dim=16, power=4)
  assert (long.form, long.implementation) == ("chunked", "pallas")
  assert explained(262_144, head_dim=32, power=4).form == "attention"
  assert explained(2**22, head_dim=32, power=4).form == "chunked"
