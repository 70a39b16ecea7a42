"""The Pallas kernels for TPUs: right and without races in the interpreter, lowered for every shape, and dispatched."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu

import csympow
from csympow import context, cost, op
from csympow.forms.spans import Settings
from csympow.segments import find_runs
from kernels_pallas.tpu import pairs, shifts
from kernels_pallas.tpu.features import Shifts, coordinates, for_all_shifts
from kernels_pallas.tpu.pairs import block_size
from kernels_pallas.tpu.shifts import LANES
from tests import comparing
from tests.comparing import Case, assert_results_close, cotangents, inputs
from tests.test_context import mesh_of, place, sharded

STRICT = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan", out_of_bounds_reads="raise")
KERNELS = {
  "chunked": ("chunked_forward", "chunked_queries", "chunked_keys"),
  "attention": ("attention_forward", "attention_queries", "attention_keys"),
}
slow = functools.partial(pytest.param, marks=pytest.mark.slow)
case_of = functools.partial(Case, B=1, H=1, d=64, dv=64, dtype="bfloat16", entry="attention")

# Around whole tiles and chunks, with all that the op takes; every pair of levels. An attention form has no chunk size.
COMMON = dict(
  sizes=[{"d": d, "dv": dv} for d, dv in [(64, 64), (128, 128), (64, 128), (128, 64)]],
  length=[{"T": T} for T in (1, 127, 128, 129, 500)],
  gate=[{"gate": "none"}, {"gate": "learned"}, {"gate": "resets"}],
  rotation=[{"rotation": "none"}, {"rotation": "fixed"}, {"rotation": "learned"}],
  segments=[{"segments": "none"}, {"segments": "packed"}, {"segments": "padded"}],
  heads=[{"B": 2, "H": 1}, {"B": 1, "H": 2, "groups": 3}],
  dtype=[{"dtype": "bfloat16"}, {"dtype": "float16"}],
)
CASES = [
  *comparing.covering(
    chunk=[{"chunk_size": 128}, {"chunk_size": 256}],
    entry=[{"entry": "attention"}, {"entry": "prefill"}, {"entry": "continued"}],
    **COMMON,
  ),
  *comparing.covering(power=[{"power": 2}, {"power": 4}], entry=[{"entry": "attention", "chunk_size": None}], **COMMON),
  *(case_of(T=200, chunk_size=None, entry=entry, gate="resets") for entry in ("prefill", "continued")),
]


def form_of(case):
  return "attention" if case.chunk_size is None else "chunked"


def attend(case, interpret=None):
  """The op as `implementation="pallas"` runs it on a TPU, wherever this is traced."""
  size = case.chunk_size or -(-case.T // block_size(case.T)) * block_size(case.T)
  settings = Settings(case.power, size, LANES, LANES, "high", chip="tpu", interpret=interpret)
  return comparing.by_kernels(case, form_of(case), settings)


@pytest.fixture
def races(monkeypatch):
  """What the interpreter's race detector found in each kernel that ran."""
  return comparing.recorded(monkeypatch, interpret_pallas_call, "RaceDetectionState")


def reference(case):
  results = comparing.quadratic_results if case.entry == "attention" else comparing.reference_results
  return results(*inputs(case), cotangents(case), power=case.power)


def assert_right(case):
  x, rest = inputs(case)
  run = comparing.quick_jit(lambda x, w: comparing.with_gradients(lambda x: attend(case, STRICT)(x, rest), x, w))
  results = jax.tree.map(np.asarray, run(x, cotangents(case)))
  expected = reference(case)
  of_dtype = {"bfloat16": 5e-3, "float16": 7e-3}[case.dtype]
  if case.entry == "attention":
    turned = {name: results.pop(name) for name in ("dbeta",) if name in results}
    assert_results_close(turned, expected, 8e-3)  # the rest of sums that cancel
  else:
    inner = without_state(x, rest)
    for name, added in added_by_tokens(x, rest, expected, case.power).items():
      found = results.pop(name)
      comparing.assert_close(found, expected[name], of_dtype, name, exact=added)
      if np.any(inner):
        comparing.assert_close(found[inner], expected[name][inner], 8e-3, f"{name} of runs with no state at either end")
  assert_results_close(results, expected, of_dtype if case.entry == "attention" else 8e-3)


def runs_of(x, rest):
  """Which tokens are no padding, and the number of each one's run."""
  valid, begins = map(np.asarray, find_runs(rest.get("segment_ids", jnp.zeros(x["k"].shape[:2], jnp.int32))))
  return valid, np.cumsum(begins, axis=1)


def without_state(x, rest):
  """Which tokens belong to runs with no state at either end."""
  valid, run = runs_of(x, rest)
  return valid & (run > 0) & (run < run[:, -1:])


def added_by_tokens(x, rest, expected, power):
  """The root of the squares of what the gradients of gates and betas are sums of: what tokens of the run add by each
  pair of coordinates, as lengths, those before a gate and those from a beta on; and what is in an initial state.

  Through a state whose cotangent is random the sum is of that order, but now and then near 0; its rounding is not.
  """
  valid, run = runs_of(x, rest)
  x, rest = comparing.float64((x, rest))
  B, T, H, d = x["k"].shape
  together = (run[:, :, None] == run[:, None]) & valid[..., None]

  def added(speed, tokens):
    squares = 0.0
    for name in ("q", "k"):
      lengths = (np.linalg.norm(a.reshape(B, T, H, -1, d // 2, 2), axis=-1) for a in (x[name], expected[f"d{name}"]))
      squares += np.sum(np.square(speed * math.prod(lengths)), axis=(3, 4))
    return np.einsum("btu,buh->bth", together & tokens, squares)

  found = {}
  if "log_gate" in x:
    from_state = sum(
      np.sum((x[n] * expected[f"d{n}"]).reshape(B, 1, H, -1) ** 2, axis=-1) for n in ("S", "Z") if n in x
    )
    found["dlog_gate"] = np.sqrt(added(1 / power, np.tri(T, k=-1, dtype=bool)) + (run == 0)[..., None] * from_state)
  if "beta" in x:
    found["dbeta"] = np.sqrt(added(rest["rates"], np.tri(T, dtype=bool).T))
  return found


@pytest.fixture
def small_blocks(monkeypatch):
  """Blocks of attention as small as they can be: many of them in a short sequence."""
  monkeypatch.setattr(pairs, "BLOCK", LANES)


@pytest.mark.parametrize(
  "case",
  [
    case_of(T=130, chunk_size=128, entry="continued"),
    case_of(T=130, chunk_size=None, power=4),
    *map(slow, CASES),
  ],
  ids=str,
)
@pytest.mark.usefixtures("small_blocks")
def test_kernels_are_right_in_the_strict_interpreter_and_race_free(case, races):
  assert_right(case)
  assert len(races) == 3
  assert not any(race.races_found for race in races)


@pytest.fixture
def no_pairs(monkeypatch):
  """Nobody makes features of coordinates in pairs; nor is anything left that was traced when somebody did."""
  monkeypatch.delattr(Shifts, "_of_pairs")
  jax.clear_caches()
  yield
  jax.clear_caches()


@pytest.mark.slow
@pytest.mark.usefixtures("no_pairs")
@pytest.mark.parametrize("d", [64, 128])
def test_kernels_are_right_for_chips_that_multiply_no_bfloat16s(d, races, monkeypatch):
  monkeypatch.setattr(shifts, "multiplies_pairs", lambda: False)
  assert_right(case_of(T=130, d=d, chunk_size=128, entry="continued"))
  assert len(races) == 3
  assert not any(race.races_found for race in races)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case_of(T=1100, chunk_size=None), case_of(T=1100, chunk_size=512)], ids=str)
def test_kernels_are_right_with_blocks_and_chunks_of_full_size(case):
  assert_right(case)


def gradients(case):
  """The gradient of a call, and the shapes of what it is a function of."""
  heads = (case.B, case.T, case.H)
  shapes = {"q": (case.B, case.T, case.H * case.groups, case.d), "k": (*heads, case.d), "v": (*heads, case.dv)}
  x = {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in shapes.items()}
  x |= {name: jax.ShapeDtypeStruct(heads, jnp.float32) for name in ("log_gate", "beta")}
  run, rest = attend(case), {"rates": comparing.rotary(case.d)}
  return jax.grad(lambda x: run(x, rest)["y"].astype(jnp.float32).sum()), x


def assert_lowers(function, x, form):
  """The function lowers for TPUs, to a program with the form's kernels, and these to what the chip can do."""
  traced = jax.jit(function).trace(x)
  text = traced.lower(lowering_platforms=("tpu",)).as_text()
  for kernel in KERNELS[form]:
    assert f'kernel_name = "{kernel}"' in text, f"{kernel} is not in the program"
  found = list(products(traced.jaxpr))
  assert found
  for product in found:  # whatever the caller's precision, for the chip has no other of 16 bits: see exact_products
    assert all(operand.aval.dtype == jnp.bfloat16 for operand in product.invars)
    assert product.params["precision"] == (jax.lax.Precision.DEFAULT,) * 2


def products(jaxpr, in_kernel=False):
  """All matrix products of a program's kernels."""
  for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
    if in_kernel and equation.primitive.name == "dot_general":
      yield equation
    for value in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
      if hasattr(value, "eqns") or hasattr(value, "jaxpr"):
        yield from products(value, in_kernel or equation.primitive.name == "pallas_call")


LOWERED = [
  slow(case_of(T=65_536, chunk_size=512, H=2)),  # by default only inside shard_map, and for v5e, below
  slow(case_of(T=2**20, chunk_size=512, d=128, dv=128)),
  slow(case_of(T=65_536, chunk_size=512, dv=128, groups=2)),
  slow(case_of(T=65_536, chunk_size=512, d=128, groups=8)),
  case_of(T=65_536, chunk_size=None, power=4, H=2),
  slow(case_of(T=2**20, chunk_size=None, d=128, dv=128)),
  slow(case_of(T=65_536, chunk_size=None, dv=128, groups=2)),
]


@pytest.mark.parametrize("case", LOWERED, ids=str)
def test_kernels_lower_for_every_shape(case):
  assert_lowers(*gradients(case), form_of(case))


def compiling_for(kind):
  """What a mesh of such chips says, wherever this is traced."""
  device = jax.sharding.AbstractDevice(kind, num_cores=1, platform="tpu")
  return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("chip",), abstract_device=device))


@pytest.mark.parametrize(
  ("kind", "in_pairs"),
  [("TPU v5 lite", False), ("TPU v5", False), ("TPU v6 lite", True), ("TPU7x", True), ("cpu", True)],
)
def test_features_are_made_as_the_chip_multiplies(kind, in_pairs):
  with compiling_for(kind):
    assert (shifts.scratch_of_factors(1, 64).dtype == jnp.uint32) is in_pairs


@pytest.mark.usefixtures("no_pairs")
def test_kernels_lower_for_chips_that_multiply_no_bfloat16s():
  case = case_of(T=128, chunk_size=128)
  with compiling_for("TPU v5 lite"):
    assert_lowers(*gradients(case), "chunked")


class Memory:
  """What a kernel's memory is to `shifts`: rows that there are not cannot be read."""

  def __init__(self, shape, dtype):
    self.array = np.zeros(shape, dtype)
    self.dtype = self.array.dtype

  def at(self, index):
    *lead, rows = index
    start, stop = (rows.start, rows.stop) if isinstance(rows, slice) else (rows.start, rows.start + rows.size)
    start, stop = int(start or 0), self.array.shape[-2] if stop is None else int(stop)
    assert 0 <= start < stop <= self.array.shape[-2]
    return (*map(int, lead), slice(start, stop))

  def __getitem__(self, index):
    return jnp.asarray(self.array[self.at(index)])

  def __setitem__(self, index, value):
    self.array[self.at(index)] = value


@pytest.mark.parametrize("pieces", [1, 8])
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("in_pairs", [True, False])
def test_features_are_the_products_of_all_pairs_of_coordinates_in_the_order_of_a_state(
  in_pairs, d, pieces, monkeypatch
):
  monkeypatch.setattr(shifts, "multiplies_pairs", lambda: in_pairs)
  compiled = jax.jit(pltpu.bitcast, static_argnums=1)  # which is lowered, but not evaluated
  with_jit = jax.disable_jit(False)
  monkeypatch.setattr(pltpu, "bitcast", lambda x, dtype: with_jit(compiled)(x, dtype))
  first, second = coordinates(d)
  assert len({frozenset(pair) for pair in zip(first.tolist(), second.tolist(), strict=True)}) == d * (d + 1) // 2
  x = jax.random.normal(jax.random.key(d), (d, LANES), jnp.bfloat16)
  room = shifts.scratch_of_factors(1, d)
  factors = Memory(room.shape, room.dtype)
  shifts.write_factors(factors, 0, x)
  found = np.full((d * (d + 1) // 2, LANES), np.nan, jnp.bfloat16)

  def visit(turn):
    for piece in turn.pieces(pieces):
      found[int(piece.rows.start) :][: piece.size] = piece.features(factors, 0)

  with jax.disable_jit():
    for_all_shifts(d, visit)
  np.testing.assert_array_equal(found, x[first] * x[second])


@pytest.mark.parametrize("chunk", [128, None])
@pytest.mark.parametrize("entry", ["attention", slow("continued")])
def test_kernels_lower_inside_shard_map(entry, chunk):
  case = case_of(T=128, B=2, entry=entry, chunk_size=chunk)
  mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
  x, rest = inputs(case)
  sharded = jax.shard_map(
    lambda x: attend(case)(x, rest)["y"], mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P("data")
  )
  assert_lowers(jax.grad(lambda x: sharded(x).astype(jnp.float32).sum()), x, form_of(case))


@pytest.mark.slow
@pytest.mark.parametrize(
  "case",
  [case_of(T=256, d=128, groups=2, chunk_size=256), case_of(T=256, chunk_size=128), case_of(T=256, chunk_size=None)],
  ids=str,
)
def test_kernels_lower_where_integers_have_64_bits(case):
  with jax.enable_x64(True):
    assert_lowers(*gradients(case), form_of(case))


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [128, None])
def test_kernels_lower_under_vmap(chunk):
  case = case_of(T=128, chunk_size=chunk)
  x, rest = inputs(case)
  gradient = jax.grad(lambda x: attend(case)(x, rest)["y"].astype(jnp.float32).sum())
  assert_lowers(jax.vmap(gradient), jax.tree.map(lambda a: jnp.stack([a, a, a]), x), form_of(case))


@pytest.mark.slow
def test_under_vmap_is_one_after_another():
  case = case_of(T=128, B=2, chunk_size=128)
  x, rest = inputs(case)
  both = jax.tree.map(lambda a: jnp.stack([a, jnp.flip(a, axis=0)]), x)

  def call(x):
    return attend(case, interpret=True)(x, rest)["y"]

  found = comparing.quick_jit(jax.vmap(call))(both)
  for n in range(2):
    expected = comparing.quick_jit(call)(jax.tree.map(lambda a, n=n: a[n], both))
    np.testing.assert_allclose(found[n].astype(jnp.float32), expected.astype(jnp.float32), atol=1e-2)


@pytest.mark.slow
def test_wide_heads_and_tiles_by_twos_are_right():
  """As XLA's code: the strict interpreter takes minutes for these. Gates leave much of one chunk to the next."""
  case = case_of(T=600, chunk_size=256, d=128, gate="weak", rotation="none")
  x, rest = inputs(case)
  run = comparing.quick_jit(
    lambda x, w: comparing.with_gradients(lambda x: attend(case, interpret=True)(x, rest), x, w)
  )
  assert_results_close(jax.tree.map(np.asarray, run(x, cotangents(case))), reference(case), 5e-3)


def explain(d=64, dv=64, groups=1, dtype="bfloat16", **options):
  q, k, v = (jax.ShapeDtypeStruct((1, 65_536, *size), dtype) for size in ((2 * groups, d), (2, d), (2, dv)))
  return csympow.explain(q, k, v, device="tpu", **options)


def test_the_kernels_are_taken_where_the_shape_fits():
  assert explain().implementation == "pallas"
  assert explain(d=128, groups=4, chunk_size=256).implementation == "pallas"
  assert explain(dtype="float32").implementation == "xla"
  assert explain(d=32).implementation == "xla"
  assert explain(power=4, form="attention").implementation == "pallas"
  assert explain(power=4, form="chunked").implementation == "xla"
  assert explain(groups=40, form="chunked").implementation == "xla"


@pytest.mark.parametrize(
  ("options", "why"),
  [
    ({"form": "recurrent"}, "no kernel for form='recurrent'"),
    ({"form": "attention", "chunk_size": 64}, "blocks have a size of their own, got chunk_size=64"),
    ({"form": "attention", "dv": 32}, "d and dv of 64 and 128, got d=64 and dv=32"),
    ({"form": "chunked", "d": 32}, "d and dv of 64 and 128, got d=32"),
    ({"form": "chunked", "power": 4}, "at power=2, got power=4"),
    ({"form": "chunked", "chunk_size": 100}, "a chunk_size of whole 128s up to 512, got chunk_size=100"),
    ({"form": "chunked", "chunk_size": 512, "groups": 16}, "up to 256, got chunk_size=512"),
    ({"form": "chunked", "groups": 40}, "at most 32 queries for each key, got 40"),
    ({"form": "chunked", "dtype": "float32"}, "bfloat16 and float16, got float32"),
  ],
)
def test_what_no_kernel_serves_is_refused_in_words(options, why):
  with pytest.raises(NotImplementedError, match=why):
    explain(implementation="pallas", **options)


@pytest.mark.parametrize("blocks", range(1, 8))
def test_the_grid_visits_every_pair_of_blocks_once_and_those_of_one_block_in_turn(blocks):
  triangle = pairs.Triangle(blocks)
  places = list(itertools.product(*map(range, triangle.grid)))
  by_queries = [tuple(map(int, triangle.pair(*place))) for place in places]
  by_keys = [tuple(map(int, triangle.reversed_pair(*place))) for place in places]
  rows = [list(group) for _, group in itertools.groupby(by_queries, key=lambda pair: pair[0])]
  columns = [list(group) for _, group in itertools.groupby(by_keys, key=lambda pair: pair[1])]
  assert sorted(rows) == [[(a, b) for b in range(a + 1)] for a in range(blocks)]
  assert sorted(columns, key=lambda group: group[0][1]) == [
    [(a, b) for a in range(blocks - 1, b - 1, -1)] for b in range(blocks)
  ]


@pytest.mark.slow
@pytest.mark.parametrize(
  "case",
  [
    Case(T=256, B=1, H=1, d=64, dv=64, segments="padded", dtype="bfloat16", entry="attention"),
    Case(T=500, B=2, H=1, d=64, dv=64, gate="resets", segments="packed", dtype="bfloat16", entry="attention"),
  ],
  ids=str,
)
def test_shards_of_a_split_sequence_give_the_whole_by_kernels(case, monkeypatch):
  """With what `implementation=None` plans where there is a TPU."""
  monkeypatch.setattr(cost, "named", lambda: "tpu")
  monkeypatch.setattr(op, "_settings", lambda power, plan, *_: settings_of(plan))
  planned = []

  def settings_of(plan):
    planned.append(plan.implementation)
    return Settings(case.power, plan.chunk, plan.block, plan.tile, "high", chip="tpu", interpret=STRICT)

  mesh = mesh_of(context=2)
  attention = functools.partial(context.attention, form="chunked", chunk_size=LANES)

  def run(x, rest, weights):
    return comparing.with_gradients(lambda x: sharded(attention, x, rest, mesh)(x, rest), x, weights)

  placed = (place(tree, mesh) for tree in (*inputs(case), cotangents(case)))
  results = jax.tree.map(np.asarray, comparing.quick_jit(run)(*placed))
  assert set(planned) == {"pallas"}
  expected = reference(case)
  turned = {name: results.pop(name) for name in ("dbeta",) if name in results}
  assert_results_close(results, expected, 8e-3)
  assert_results_close(turned, {name: expected[name] for name in turned}, 1.2e-2)
