"""States of features that lie in memory, beyond p = 2: the kernels that expand them, and chunks that go on in turn."""

import functools

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

import csympow
from csympow import cost, op
from csympow.features import feature_dim
from csympow.forms import chunked, expanded, fused, in_turn, memory, rotating, visible
from csympow.forms.spans import Settings, Sums
from csympow.rotation import factors
from kernels_pallas.gpu.expand import Table, _parts, _products_of_others
from kernels_pallas.gpu.tiles import BLOCK, ROWS, TILE
from tests import comparing
from tests.comparing import Case, assert_close, assert_results_close, cotangents, inputs
from tests.test_kernels import TOLERANCE, attend, reference
from tests.test_lowering import ATTENTION, assert_lowers, gradients

gpu = pytest.mark.gpu
slow = functools.partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize(
  ("d", "power", "T", "group"), [slow(3, 4, BLOCK, 1), slow(4, 4, BLOCK, 1), slow(3, 6, 2 * BLOCK, 2)]
)
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
  noisy = memory.Memory(state.S, normal(1, 1, D, 1))  # many normalisers are negative
  assert 0.2 < jnp.mean(memory.read(noisy, q, settings).denominator == 0) < 0.8

  def results(states):
    dmemory, dq = states.read_backward(noisy, q, cotangent, start, settings)
    dk, dv = states.write_backward(state, written, settings)
    found = {"written": states.write(start, written, settings), "read": states.read(noisy, q, settings)}
    return found | {"dmemory": dmemory, "dq": dq, "dk": dk, "dv": dv}

  found, exact = (jax.tree_util.tree_leaves_with_path(results(states)) for states in (expanded, memory))
  for (path, x), (_, y) in zip(found, exact, strict=True):
    assert_close(x, y, 1e-5, jax.tree_util.keystr(path))


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


def test_spans_of_a_rotation_turn_as_the_whole_does():
  random = np.random.default_rng(0)
  beta = jnp.asarray(random.uniform(size=(2, 4 * ROWS, 3)), jnp.float32)
  starts, initial = jnp.zeros((2, 4 * ROWS), bool).at[0, 100].set(True), jnp.asarray(random.uniform(size=(2, 3, 4)))
  make = comparing.quick_jit(functools.partial(factors, shape=beta.shape))
  phases = make(beta, csympow.rotary_rates(8, 1000), starts=starts, initial=initial.astype(jnp.float32))
  rotation = rotating.Rotation(beta[..., None], beta, jnp.ones(4), phases)
  angles = comparing.quick_jit(rotating.angles)
  whole, spans = angles(rotation), rotating.by_spans(rotation, 2)
  for n in range(2):
    found = angles(jax.tree.map(lambda x, n=n: x[n], spans))
    tiles, tokens = slice(2 * n, 2 * n + 2), slice(2 * ROWS * n, 2 * ROWS * (n + 1))
    np.testing.assert_array_equal(found.first, whole.first[:, :, tiles])
    np.testing.assert_array_equal(found.since, whole.since[..., tokens])
    np.testing.assert_array_equal(found.same, whole.same[..., tokens])
    np.testing.assert_array_equal(found.cycles, whole.cycles)


def by_xla(x, memory, settings, dtype, return_memory):
  """What stands in for kernels."""
  del dtype
  turns, total, rates, _ = x.rotation
  turns += (total - jax.lax.stop_gradient(total))[..., None] * rates / (2 * jnp.pi)  # kernels have that gradient
  q, k = rotating.rotated(x.q, x.k, x.rotation._replace(turns=turns))
  return chunked.attend(q, k, x.v, x.log_gate, memory, settings, return_memory)


@pytest.mark.parametrize(("entry", "length"), [("attention", 1e12), slow("prefill", 1e-3), slow("continued", 1.0)])
def test_chunks_in_turn_are_the_whole(monkeypatch, entry, length):
  """With XLA's form in the kernels' place, so that there is no rounding to hide in."""
  settings_seen = set()

  def exact(x, memory, settings, dtype, return_memory):
    settings_seen.add(settings.states)
    return by_xla(x, memory, settings, dtype, return_memory)

  monkeypatch.setattr(fused, "attend", exact)
  case = Case(T=70, B=2, H=2, groups=2, d=4, dv=4, power=4, segments="padded", entry=entry)
  x, rest = inputs(case)
  x |= {"k": length * x["k"], "q": x["q"] / length}
  run, weights = comparing.by_kernels(case, "chunked", Settings(4, 20, 20, 20, "highest")), cotangents(case)
  call = comparing.quick_jit(lambda x, w: comparing.with_gradients(lambda x: run(x, rest), x, w))
  exact_results = comparing.quadratic_results if entry == "attention" else comparing.reference_results
  results, expected = call(x, weights), exact_results(x, rest, weights, power=4)
  assert_results_close(jax.tree.map(np.asarray, results), expected, 1e-4)
  assert settings_seen == {"expanded"}


@pytest.mark.parametrize(("by_chunks", "gradients"), [(False, True), (True, False), slow(True, True)])
@pytest.mark.usefixtures("long")
def test_a_call_whose_gates_leave_little_is_the_attention_form(by_chunks, gradients, monkeypatch):
  case = Case(T=3 * TILE, B=1, H=2, groups=2, d=4, dv=4, power=4, entry="attention")
  x, rest = inputs(case)
  share = float(visible.share_in_sight(x["log_gate"]))
  assert 0.1 < share < 0.6

  def only_one(x, memory, settings, dtype, return_memory):
    assert settings.states == "expanded" or x.q.dtype == dtype  # whose gradient the kernels give
    y, memory = by_xla(x._replace(q=x.q.astype(jnp.float32)), memory, settings, dtype, return_memory)
    return y if by_chunks == (settings.states == "expanded") else jnp.full_like(y, jnp.nan), memory

  monkeypatch.setattr(fused, "attend", only_one)
  most = in_turn._MORE * share * (0.9 if by_chunks else 1.1)
  settings = Settings(4, TILE, TILE, TILE, "highest", attention_share=most, interpret=plgpu.InterpretGPUParams())
  run, weights = functools.partial(comparing.by_kernels(case, "chunked", settings), rest=rest), cotangents(case)
  results = comparing.quick_jit(lambda x: comparing.with_gradients(run, x, weights) if gradients else run(x))(x)
  expected = comparing.quadratic_results(x, rest, weights, power=4)
  assert_results_close(jax.tree.map(np.asarray, results), expected, 1e-4)


def test_what_gates_leave_of_all_pairs_of_tiles():
  time = 64 * TILE
  per_tile = jnp.log(visible.LEFT_OUT) / jnp.array([0.5, 8, 1e9])  # so many tiles are left
  share = [float(visible.share_in_sight(jnp.full((2, time, 1), x / TILE))) for x in per_tile]
  np.testing.assert_allclose(share, [2 / 64, 2 * 8 / 64, 63 / 64], atol=0.04)


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
  monkeypatch.setitem(fused._STATES, "expanded", memory)  # to interpret thousands of features would take hours
  x, rest = inputs(case)
  run = attend(case, plgpu.InterpretGPUParams(detect_races=True), BLOCK)
  results = comparing.with_gradients(lambda x: run(x, rest), x, cotangents(case))
  assert_results_close(jax.tree.map(np.asarray, results), reference(case), TOLERANCE[case.dtype])


@pytest.mark.slow
def test_chunks_in_turn_lower():
  case = Case(T=65_536, B=1, H=2, groups=2, d=16, dv=64, power=4, dtype="bfloat16", entry="attention")
  assert_lowers(*gradients(case, chunk=8192), *ATTENTION[:-1], "expanded", "contracted")


@pytest.mark.slow
@pytest.mark.parametrize("entry", ["attention", "continued"])
def test_chunks_in_turn_lower_inside_shard_map(entry):
  case = Case(T=600, B=2, H=1, groups=2, d=16, dv=16, power=4, segments="padded", dtype="bfloat16", entry=entry)
  x, rest = inputs(case)
  rest = {name: array[:1] if name == "segment_ids" else array for name, array in rest.items()}
  mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
  mapped = jax.shard_map(
    lambda x: attend(case, chunk=256)(x, rest)["y"], mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P("data")
  )
  gradient = jax.grad(lambda x: mapped(x).astype(jnp.float32).sum())
  assert_lowers(gradient, x, "expanded", "contracted", "attention_backward")


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
OTHERS = [
  Case(T=513, B=2, H=1, groups=2, d=16, dv=32, power=4, gate="resets", segments="padded", dtype="float16"),
  Case(T=600, B=1, H=1, d=32, dv=32, power=4, dtype="bfloat16", entry="attention"),
  Case(T=300, B=1, H=1, d=16, dv=16, power=6, dtype="bfloat16", entry="attention"),
]


@gpu
@pytest.mark.parametrize("case", [*ON_THE_CHIP, *WITH_STATE, *OTHERS], ids=str)
def test_chunks_in_turn_are_right_on_the_chip(case):
  x, rest = inputs(case)
  options = {"entry": case.entry, "power": case.power, "form": "chunked", "chunk_size": 256, "implementation": "pallas"}
  run = jax.jit(lambda x, w: comparing.with_gradients(lambda x: comparing.call(x, rest, **options), x, w))
  results, expected = run(x, cotangents(case)), reference(case)
  # A rotation's gradient is the rest of sums that cancel.
  turned = {name: results.pop(name) for name in ("dbeta",) if name in results}
  sizes = dict(expected)
  if case == OTHERS[0]:  # dZ is of dy . y, dS of dy: here of a single token's, which all but cancels
    sizes["dZ"] = np.hypot(expected["dZ"], np.linalg.norm(expected["dS"], axis=-1))
  assert_results_close(results, expected, TOLERANCE[case.dtype] if case.entry == "attention" else 8e-3, sizes)
  assert_results_close(turned, {name: expected[name] for name in turned}, 8e-3)


@gpu
@pytest.mark.parametrize("cosine", [0.3, 0.1])
def test_queries_nearly_orthogonal_to_all_keys_are_right_on_the_chip(cosine):
  x = comparing.nearly_orthogonal(cosine, T=1024, d=16, dtype="bfloat16")
  options = {"power": 4, "form": "chunked", "chunk_size": 256, "implementation": "pallas"}
  y = jax.jit(lambda x: csympow.attention(**x, **options))(x)
  assert_close(y, comparing.quadratic_results(x, {}, {"y": np.zeros(y.shape)}, power=4)["y"], 5e-3, "y")


def shape(T, **sizes):
  sizes = {"batch": 1, "query_heads": 12, "heads": 12, "head_dim": 16, "value_dim": 64, "power": 4} | sizes
  return cost.Shape(**sizes, time=T, needs_state=False)


def test_chunks_in_turn_are_taken_where_they_are_faster():
  def taken(T, **sizes):
    found = op._explained(shape(T, **sizes), "bfloat16", "auto", None, None, "gpu")
    return found.form, found.implementation

  assert taken(32_768) == ("attention", "pallas")
  assert taken(2**20) == ("chunked", "pallas")
  assert taken(262_144, head_dim=32) == ("attention", "pallas")
  assert taken(2**23, head_dim=32) == ("chunked", "pallas")


@pytest.mark.parametrize("chunk_size", [None, 512])
@pytest.mark.parametrize("sizes", [{}, {"batch": 9}, {"head_dim": 32}, {"power": 6}, {"query_heads": 36}], ids=str)
@pytest.mark.parametrize("T", [1, 300, 8192, 100_000])
def test_chunks_are_whole_tiles_and_tiles_whole_blocks(T, sizes, chunk_size):
  plan = cost.choose(shape(T, **sizes), "chunked", chunk_size, "gpu", {"pallas": ("chunked",)})
  assert plan.chunk % plan.tile == plan.tile % BLOCK == 0
  assert plan.chunk == chunk_size or chunk_size is None or chunk_size > T
  assert cost.expanded_bytes(shape(T, **sizes), plan.tile) <= max(2**30, cost.expanded_bytes(shape(T, **sizes), BLOCK))


def test_features_that_memory_has_no_room_for_are_refused_in_words():
  found = op._explained(shape(65_536, batch=64, head_dim=32), "bfloat16", "chunked", None, None, "gpu")
  assert found.implementation == "xla"
  with pytest.raises(NotImplementedError, match=r"features of 256 tokens in at most 4 GiB, got 38.3 GiB"):
    op._explained(shape(65_536, batch=64, head_dim=32), "bfloat16", "chunked", None, "pallas", "gpu")
  with pytest.raises(NotImplementedError, match=r"at most 65,536 features, got D=766,480 \(d=64, power=4\)"):
    op._explained(shape(65_536, head_dim=64), "bfloat16", "chunked", None, "pallas", "gpu")
