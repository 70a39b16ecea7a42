"""The Pallas kernels: right on the chip, and right and without races in the interpreter."""

import dataclasses
import functools
import itertools

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

import csympow
from csympow.forms import fused_chunked, near
from csympow.forms.spans import Settings
from csympow.prefix import prefix_sum
from kernels_pallas.gpu import attention_forward, state_write, symmetric_write
from kernels_pallas.gpu.pieces import Piece, Pieces
from kernels_pallas.gpu.tiles import BLOCK, TILE
from tests import comparing
from tests.comparing import Case, assert_results_close, cotangents, inputs
from tests.test_numerics import nearly_orthogonal

gpu = pytest.mark.gpu
# The kernels take values and cotangents as bfloat16.
TOLERANCE = {"bfloat16": 5e-3, "float16": 7e-3}

# Every pair of levels: sizes, lengths around tiles, and all that the op takes.
CASES = comparing.covering(
  sizes=[{"d": d, "dv": dv} for d, dv in [(64, 64), (32, 32), (128, 128), (32, 64), (64, 128), (128, 32)]],
  length=[{"T": T} for T in (1, 63, 128, 129, 256, 257, 500, 700)],
  power=[{"power": 2}, {"power": 4}, {"power": 6}],
  gate=[{"gate": "none"}, {"gate": "learned"}, {"gate": "resets"}],
  rotation=[{"rotation": "none"}, {"rotation": "fixed"}, {"rotation": "learned"}],
  segments=[{"segments": "none"}, {"segments": "packed"}, {"segments": "padded"}],
  heads=[{"B": 2, "H": 1}, {"B": 1, "H": 2, "groups": 3}],
  dtype=[{"dtype": "bfloat16", "entry": "attention"}, {"dtype": "float16", "entry": "attention"}],
)
WITH_STATE = comparing.covering(
  sizes=[{"d": 64, "dv": 64}, {"d": 32, "dv": 64}, {"d": 64, "dv": 32}],
  length=[{"T": T} for T in (1, 130, 300)],
  gate=[{"gate": "learned"}, {"gate": "resets"}],
  segments=[{"segments": "none"}, {"segments": "padded"}],
  heads=[{"groups": 1}, {"groups": 2}],
  entry=[{"dtype": "bfloat16", "entry": "prefill"}, {"dtype": "bfloat16", "entry": "continued"}],
)


# The chunked form: chunks of 256, and of 1,024.
CHUNKED = comparing.covering(
  sizes=[{"d": 64, "dv": 64}, {"d": 32, "dv": 64}, {"d": 64, "dv": 32}, {"d": 32, "dv": 32}],
  length=[{"T": T} for T in (1, 255, 256, 513, 1025, 2300)],
  gate=[{"gate": "none"}, {"gate": "learned"}, {"gate": "resets"}],
  rotation=[{"rotation": "none"}, {"rotation": "fixed"}, {"rotation": "learned"}],
  segments=[{"segments": "none"}, {"segments": "packed"}, {"segments": "padded"}],
  heads=[{"B": 2, "H": 1}, {"B": 1, "H": 2, "groups": 3}, {"B": 1, "H": 12}, {"B": 3, "H": 6}],
  dtype=[{"dtype": "bfloat16", "entry": "attention"}, {"dtype": "float16", "entry": "attention"}],
)
CHUNKED_WITH_STATE = comparing.covering(
  sizes=[{"d": 64, "dv": 64}, {"d": 32, "dv": 64}, {"d": 64, "dv": 32}],
  length=[{"T": T} for T in (1, 300, 600)],
  gate=[{"gate": "learned"}, {"gate": "resets"}],
  segments=[{"segments": "none"}, {"segments": "padded"}],
  heads=[{"groups": 1}, {"groups": 2}],
  entry=[{"dtype": "bfloat16", "entry": "prefill"}, {"dtype": "bfloat16", "entry": "continued"}],
)

WIDE = [
  Case(T=513, B=1, H=1, d=128, dv=128, dtype="bfloat16", entry="attention"),
  Case(T=1025, H=2, groups=3, d=128, dv=128, dtype="bfloat16", entry="attention"),
  Case(T=513, B=2, d=64, dv=128, gate="resets", segments="packed", dtype="bfloat16", entry="attention"),
  Case(T=700, H=3, d=128, dv=32, segments="padded", dtype="float16", entry="attention"),
  Case(T=260, B=1, groups=2, d=32, dv=128, segments="packed", dtype="float16", entry="attention"),
  Case(T=300, B=1, d=128, dv=64, gate="resets", dtype="bfloat16", entry="attention"),
  # The reference keeps every token's state.
  Case(T=280, B=1, H=1, d=128, dv=32, dtype="bfloat16", entry="prefill"),
  Case(T=140, B=1, H=1, groups=2, d=128, dv=128, gate="resets", dtype="bfloat16", entry="continued"),
  Case(T=300, B=1, H=1, groups=2, d=64, dv=128, segments="padded", dtype="bfloat16", entry="continued"),
]

# Of which a state is seen by some of the tokens only.
STATE_AND_SEGMENTS = [
  Case(T=300, groups=3, d=64, dv=64, segments="packed", dtype="bfloat16", entry="continued"),
  Case(T=300, groups=2, d=32, dv=64, gate="resets", segments="padded", dtype="bfloat16", entry="continued"),
]
WIDE_WITH_STATE = [
  Case(T=130, B=1, H=1, groups=2, d=128, dv=128, gate="resets", dtype="bfloat16", entry="prefill"),
  Case(T=130, B=1, H=1, d=64, dv=128, dtype="bfloat16", entry="continued"),
]
# Filled up to what the kernels have.
NARROW = [
  Case(T=300, B=1, groups=2, d=16, dv=16, segments="packed", dtype="bfloat16", entry="attention"),
  Case(T=257, B=1, d=16, dv=64, gate="resets", dtype="float16", entry="attention"),
  Case(T=260, B=1, H=1, groups=2, d=16, dv=32, dtype="bfloat16", entry="continued"),
]


def reference(case):
  return reference_of(case, *inputs(case))


def reference_of(case, x, rest):
  results = comparing.quadratic_results if case.entry == "attention" else comparing.reference_results
  return results(x, rest, cotangents(case), power=case.power)


def inputs_about(mean, case):
  """Values that have that in common, and those of a state."""
  x, rest = inputs(case)
  x |= {"v": x["v"] + jnp.asarray(mean, x["v"].dtype)}
  return (x | {"S": x["S"] + mean * x["Z"][..., None]} if "S" in x else x), rest


@gpu
@pytest.mark.parametrize("case", [*CASES, *WITH_STATE, *STATE_AND_SEGMENTS, *WIDE_WITH_STATE, *NARROW], ids=str)
def test_kernels_are_right_on_the_chip(case):
  x, rest = inputs(case)
  options = {"entry": case.entry, "power": case.power, "form": "attention", "implementation": "pallas"}
  run = jax.jit(lambda x, w: comparing.with_gradients(lambda x: comparing.call(x, rest, **options), x, w))
  results, expected = run(x, cotangents(case)), reference(case)
  tolerances = {"dbeta": 7e-3}  # a rotation's gradient is the rest of sums that cancel
  for name in tolerances.keys() & results.keys():
    assert_results_close({name: results.pop(name)}, {name: expected[name]}, tolerances[name])
  assert_results_close(results, expected, TOLERANCE[case.dtype])


@gpu
@pytest.mark.parametrize(
  ("d", "power", "rotation"),
  [(32, 4, "none"), (64, 2, "none"), (32, 4, "learned"), (64, 2, "learned"), (128, 2, "learned")],
)
def test_kernels_with_discounted_copies_of_keys_are_right_on_the_chip(d, power, rotation, monkeypatch):
  monkeypatch.setattr(near, "SHORT", 0)
  sizes = {"T": 900, "H": 2, "groups": 2, "d": d, "dv": d}
  case = Case(**sizes, power=power, gate="weak", rotation=rotation, dtype="bfloat16", entry="attention")
  test_kernels_are_right_on_the_chip(case)


@gpu
@pytest.mark.parametrize(
  "sizes",
  [
    {"T": 1024, "B": 40, "H": 1, "groups": 2, "d": 64, "dv": 64},  # so many rows that a block has places by turns
    {"T": 700, "B": 60, "H": 1, "d": 64, "dv": 64},  # an odd number of them in a row
    {"T": 600, "B": 40, "H": 1, "groups": 2, "d": 128, "dv": 128},
    {"T": 1300, "B": 1, "H": 2, "d": 64, "dv": 64, "power": 6},
    {"T": 1024, "B": 40, "H": 2, "d": 64, "dv": 32, "power": 4},
    {"T": 700, "B": 1, "H": 1, "groups": 2, "d": 128, "dv": 128},
    {"T": 4096, "B": 6, "H": 3, "d": 64, "dv": 64},  # so many that a block has a late place and an early one
    {"T": 5000, "B": 1, "H": 3, "d": 128, "dv": 128},
  ],
  ids=str,
)
def test_tokens_as_they_were_given_are_right_on_the_chip(sizes):
  test_kernels_are_right_on_the_chip(
    Case(**sizes, gate="weak", rotation="none", dtype="bfloat16", entry="attention"),
  )


@gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rotated_places_by_turns_are_right_on_the_chip(dtype):
  test_kernels_are_right_on_the_chip(Case(T=900, B=30, H=2, d=64, dv=64, gate="weak", dtype=dtype, entry="attention"))


@gpu
@pytest.mark.parametrize("chunk", [256, 1024])
@pytest.mark.parametrize("case", [*CHUNKED, *CHUNKED_WITH_STATE, *WIDE, *STATE_AND_SEGMENTS, *NARROW], ids=str)
def test_chunked_kernels_are_right_on_the_chip(case, chunk):
  x, rest = inputs(case)
  options = {"power": 2, "form": "chunked", "chunk_size": chunk, "implementation": "pallas"}
  call = functools.partial(comparing.call, rest=rest, entry=case.entry, **options)
  results = jax.jit(lambda x, w: comparing.with_gradients(call, x, w))(x, cotangents(case))
  expected = reference(case)
  # A rotation's gradient is the rest of sums that cancel, and so is all that a single token gets from a state.
  turned = {name: results.pop(name) for name in ("dbeta",) if name in results}
  assert_results_close(results, expected, TOLERANCE[case.dtype] if case.entry == "attention" else 8e-3)
  assert_results_close(turned, {name: expected[name] for name in turned}, 8e-3)


def chunked_results(x, rest, weights, entry):
  """Of the chunked form on a chip, and of the reference."""
  options = {"entry": entry, "power": 2, "form": "chunked", "chunk_size": 1024, "implementation": "pallas"}
  call = functools.partial(comparing.call, rest=rest, **options)
  results = jax.jit(lambda x, w: comparing.with_gradients(call, x, w))(x, weights)
  exact = comparing.quadratic_results if entry == "attention" else comparing.reference_results
  return results, exact(x, rest, weights, power=2)


@gpu
@pytest.mark.parametrize("mean", [0.0, 1.0])
@pytest.mark.parametrize("cosine", [0.3, 0.1, 0.07, 0.05, 0.03, 0.01])
def test_queries_nearly_orthogonal_to_all_keys_are_right_on_the_chip(cosine, mean):
  x = nearly_orthogonal(cosine, T=5000, d=64, dtype="bfloat16")
  x |= {"v": x["v"] + jnp.bfloat16(mean)}
  weights = {"y": jnp.asarray(np.random.default_rng(1).normal(size=x["v"].shape), jnp.bfloat16)}
  results, expected = chunked_results(x, {}, weights, "attention")
  assert_results_close(results, expected, 5e-3)
  options = {"power": 2, "form": "chunked", "chunk_size": 1024, "implementation": "pallas"}
  y = jax.jit(functools.partial(csympow.attention, **options))(**x)  # without gradients
  comparing.assert_close(y, expected["y"], 5e-3, "y")


@gpu
@pytest.mark.parametrize(
  "case",
  [
    Case(T=2300, B=1, H=3, d=64, dv=64, dtype="bfloat16", entry="attention"),
    Case(T=1100, B=1, H=1, groups=2, d=32, dv=64, gate="weak", dtype="bfloat16", entry="continued"),
    Case(T=1100, B=1, H=2, d=128, dv=128, gate="weak", dtype="bfloat16", entry="attention"),
  ],
  ids=str,
)
def test_values_that_have_much_in_common_are_right_on_the_chip(case):
  x, rest = inputs_about(3, case)
  results, expected = chunked_results(x, rest, cotangents(case), case.entry)
  options = {"entry": case.entry, "power": 2, "form": "chunked", "chunk_size": 1024, "implementation": "pallas"}
  without_gradients = jax.jit(functools.partial(comparing.call, rest=rest, **options))(x)
  comparing.assert_close(without_gradients["y"], expected["y"], 5e-3, "y")
  turned = {name: results.pop(name) for name in ("dbeta",)}
  assert_results_close(results, expected, 5e-3 if case.entry == "attention" else 8e-3)
  assert_results_close(turned, {name: expected[name] for name in turned}, 8e-3)


@gpu
@pytest.mark.parametrize(("form", "power"), [("attention", 2), ("attention", 4), ("chunked", 2)])
def test_two_runs_are_the_same_to_the_bit(form, power):
  case = Case(T=4600, H=3, d=64, dv=64, power=power, dtype="bfloat16", entry="attention")
  x, rest = inputs(case)
  x |= {"log_gate": x["log_gate"] * jnp.array([2.0, 1.0, 1e-2])}  # of which some heads forget
  options = {"entry": "attention", "power": power, "form": form, "implementation": "pallas"}
  run = jax.jit(lambda x, w: comparing.with_gradients(lambda x: comparing.call(x, rest, **options), x, w))
  first, *others = (jax.tree.map(np.asarray, run(x, cotangents(case))) for _ in range(5))
  for other, name in itertools.product(others, first):
    np.testing.assert_array_equal(other[name], first[name], err_msg=name)


@gpu
def test_the_fastest_implementation_is_taken_by_itself():
  q = jnp.ones((4, 2048, 8, 64), jnp.bfloat16)
  assert csympow.explain(q, q, q, form="attention").implementation == "pallas"
  assert csympow.explain(q, q, q, form="chunked").implementation == "pallas"
  assert csympow.explain(q, q, q, form="chunked", chunk_size=100).implementation == "xla"
  assert csympow.explain(q, q, q, power=4, form="chunked").implementation == "xla"
  odd = jnp.ones((1, 512, 2, 48), jnp.bfloat16)
  assert csympow.explain(odd, odd, odd, form="attention").implementation == "xla"
  with pytest.raises(NotImplementedError, match="head dims d and dv of 16, 32, 64 and 128, got d=48"):
    csympow.attention(odd, odd, odd, form="attention", implementation="pallas")


def attend(case, interpret=None, chunk=None):
  """The op as `implementation="pallas"` runs it, wherever this is traced; the chunked form if `chunk` is given."""
  form = "attention" if chunk is None else "chunked"
  tile = 64 if case.power == 2 else BLOCK  # of features
  settings = Settings(case.power, chunk or -(-case.T // BLOCK) * BLOCK, TILE, tile, "high", interpret=interpret)
  return comparing.by_kernels(case, form, settings)


slow = functools.partial(pytest.param, marks=pytest.mark.slow)
INTERPRETED = [
  # Two tiles far, one of them for half of the queries only, and gates that leave something of them.
  Case(T=400, B=1, H=1, d=32, dv=32, gate="weak", rotation="none", dtype="bfloat16", entry="attention"),
  slow(Case(T=400, B=1, H=1, d=32, dv=32, gate="weak", dtype="bfloat16", entry="attention")),
  slow(
    Case(
      T=600,
      B=2,
      H=1,
      groups=2,
      d=64,
      dv=32,
      gate="resets",
      rotation="none",
      power=4,
      dtype="bfloat16",
      entry="attention",
    )
  ),
  # A block that takes eight places by turns.
  slow(Case(T=500, B=2, groups=2, H=1, d=32, dv=32, gate="weak", rotation="none", dtype="bfloat16", entry="attention")),
  slow(Case(T=100, B=1, H=1, d=64, dv=64, dtype="bfloat16", entry="attention")),
  slow(
    Case(T=300, B=1, H=1, d=64, dv=64, groups=2, gate="resets", segments="padded", dtype="bfloat16", entry="attention")
  ),
  slow(Case(T=200, B=1, H=1, d=16, dv=32, dtype="bfloat16", entry="continued")),
  slow(Case(T=530, B=1, H=1, d=32, dv=64, power=4, dtype="float16", entry="attention")),
  slow(Case(T=1, B=2, H=1, d=64, dv=32, dtype="bfloat16", entry="attention")),
  slow(Case(T=260, B=1, H=1, d=128, dv=128, dtype="bfloat16", entry="attention")),
  slow(Case(T=260, B=1, H=1, d=128, dv=128, rotation="none", dtype="bfloat16", entry="attention")),
]


INTERPRETED_CHUNKS = [
  slow(Case(T=100, B=1, H=1, d=64, dv=64, dtype="bfloat16", entry="continued"), 256),
  slow(Case(T=260, B=1, H=1, d=64, dv=64, dtype="bfloat16", entry="attention"), 256),
  slow(
    Case(T=700, B=1, H=1, groups=2, d=32, dv=64, gate="resets", segments="padded", dtype="bfloat16", entry="attention"),
    512,
  ),
  slow(Case(T=300, B=1, H=1, d=64, dv=32, dtype="bfloat16", entry="continued"), 256),
  slow(Case(T=200, B=1, H=1, groups=2, d=64, dv=64, segments="packed", dtype="bfloat16", entry="continued"), 256),
  slow(Case(T=300, B=1, H=1, d=128, dv=128, dtype="bfloat16", entry="continued"), 256),
  slow(Case(T=300, B=1, H=1, groups=2, d=64, dv=128, gate="resets", dtype="bfloat16", entry="attention"), 256),
]


@pytest.mark.parametrize("case", INTERPRETED, ids=str)
@pytest.mark.usefixtures("no_races")
def test_kernels_are_right_in_the_interpreter_and_race_free(case, monkeypatch):
  monkeypatch.setattr(attention_forward, "multiprocessors", lambda: 1)  # so that a block has several places
  x, rest = inputs(case)
  run = attend(case, plgpu.InterpretGPUParams(detect_races=True))
  results = comparing.with_gradients(lambda x: run(x, rest), x, cotangents(case))
  assert_results_close(jax.tree.map(np.asarray, results), reference(case), TOLERANCE[case.dtype])


@pytest.mark.slow
@pytest.mark.usefixtures("no_races")
def test_a_late_place_and_an_early_one_are_right_in_the_interpreter_and_race_free(monkeypatch):
  monkeypatch.setattr(near, "all_alike", lambda time: False)
  case = Case(T=500, B=2, H=1, d=64, dv=32, power=4, rotation="none", dtype="bfloat16", entry="attention")
  test_kernels_are_right_in_the_interpreter_and_race_free(case, monkeypatch)


@pytest.mark.parametrize(("case", "chunk"), INTERPRETED_CHUNKS, ids=str)
@pytest.mark.usefixtures("no_races")
def test_chunked_kernels_are_right_in_the_interpreter_and_race_free(case, chunk):
  x, rest = inputs(case)
  run = attend(case, plgpu.InterpretGPUParams(detect_races=True), chunk)
  results = comparing.with_gradients(lambda x: run(x, rest), x, cotangents(case))
  tolerance = TOLERANCE[case.dtype] if case.entry == "attention" else 8e-3  # as on the chip
  assert_results_close(jax.tree.map(np.asarray, results), reference(case), tolerance)


# Of states that no gradient reads, what is symmetric is written once.
FORWARD_ONLY = Case(T=260, B=1, H=1, groups=2, d=64, dv=64, dtype="bfloat16", entry="continued")


@pytest.mark.parametrize(
  ("case", "detect_races"),
  [(dataclasses.replace(FORWARD_ONLY, T=100, groups=1, rotation="none"), False), slow(FORWARD_ONLY, True)],
  ids=str,
)
@pytest.mark.usefixtures("no_races")
def test_a_chunked_pass_without_gradients_is_right_in_the_interpreter(case, detect_races, monkeypatch):
  about = recorded(monkeypatch, fused_chunked, "_centre")
  x, rest = inputs_about(2, case)
  results = attend(case, plgpu.InterpretGPUParams(detect_races=detect_races), 256)(x, rest)
  assert_results_close(jax.tree.map(np.asarray, results), reference_of(case, x, rest), 8e-3)
  assert np.all(np.abs(np.float32(about[0]) - 2) < 0.5)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("case", "without_state"),
  [
    (Case(T=300, B=1, H=1, groups=2, d=64, dv=64, gate="weak", dtype="bfloat16", entry="continued"), []),
    (Case(T=300, B=1, H=2, d=64, dv=64, gate="weak", dtype="bfloat16", entry="attention"), [True, False]),
  ],
  ids=str,
)
@pytest.mark.usefixtures("no_races")
def test_values_with_much_in_common_and_heads_read_without_states_are_right(case, without_state, monkeypatch):
  about = recorded(monkeypatch, fused_chunked, "_centre")
  monkeypatch.setattr(fused_chunked, "faint", lambda heard: jnp.asarray([without_state]))
  x, rest = inputs_about(2, case)
  run = functools.partial(attend(case, plgpu.InterpretGPUParams(detect_races=True), 256), rest=rest)
  results = comparing.with_gradients(run, x, cotangents(case))
  assert_results_close(jax.tree.map(np.asarray, results), reference_of(case, x, rest), 5e-3)
  assert np.all(np.abs(np.float32(about[0]) - 2) < 0.5)


def recorded(monkeypatch, module, name):
  """What that function of a module returns from now on."""
  function, found = getattr(module, name), []

  def call(*arguments):
    result = function(*arguments)
    jax.debug.callback(lambda x: found.append(np.asarray(x)), result)
    return result

  monkeypatch.setattr(module, name, call)
  return found


def shared_out(heads):
  """The same with as many heads: products are shared out in another way."""
  return dataclasses.replace(FORWARD_ONLY, H=heads)


@gpu
@pytest.mark.parametrize("case", [*map(shared_out, (1, 8, 12)), *CHUNKED, *CHUNKED_WITH_STATE, *WIDE], ids=str)
def test_a_chunked_pass_without_gradients_is_right_on_the_chip(case):
  x, rest = inputs(case)
  call = functools.partial(comparing.call, rest=rest, entry=case.entry, power=2, form="chunked", chunk_size=256)
  results = jax.jit(functools.partial(call, implementation="pallas"))(x)
  tolerance = TOLERANCE[case.dtype] if case.entry == "attention" else 8e-3
  assert_results_close(jax.tree.map(np.asarray, results), reference(case), tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [None, 256])
def test_rates_get_their_gradient(chunk):
  case = Case(T=300, B=1, H=1, d=64, dv=64, dtype="bfloat16", entry="attention")
  x, rest = inputs(case)
  weights = cotangents(case)["y"].astype(jnp.float32)

  def gradient(call):
    return jax.grad(lambda rates: jnp.sum(weights * call(rest | {"rates": rates}).astype(jnp.float32)))(rest["rates"])

  found = gradient(lambda rest: attend(case, plgpu.InterpretGPUParams(), chunk)(x, rest)["y"])
  exact = {name: array.astype(jnp.float32) for name, array in x.items()}
  expected = gradient(lambda rest: csympow.attention(**exact, **rest, power=2, implementation="xla"))
  # Sums over all tokens that cancel, times running totals of beta.
  comparing.assert_close(found, expected, 1.5e-2, "drates")


def test_heads_without_keys_and_keys_that_are_no_numbers_do_not_set_the_scale():
  k = jnp.ones((1, TILE, 3, 32)).at[:, :, 1].set(0.0).at[:, 7, 2].set(jnp.nan)
  G = prefix_sum(jnp.zeros((1, TILE, 3)))
  np.testing.assert_array_equal(near.exponents(near.Tokens(k[:, :, :, None], k, k, G.hi, None)).top, [[1, 0, 1]])


# Of queries and of keys, in exponents of 2.
SIZES = np.array([[0, 0], [60, -110], [-80, 105]])


def of_sizes(a, which):
  """Rows that are alike but for a power of two."""
  return a * jnp.asarray(2.0 ** SIZES[:, which], a.dtype).reshape(-1, *(1,) * (a.ndim - 1))


def rows_of_sizes(**options):
  case = Case(
    T=BLOCK, B=1, H=1, d=32, dv=32, gate="weak", rotation="none", dtype="bfloat16", entry="attention", **options
  )
  x, rest = inputs(case)
  x |= {name: of_sizes(x[name], which) for which, name in enumerate("qk")}
  return case, x | {name: jnp.repeat(x[name], len(SIZES), axis=0) for name in ("v", "log_gate")}, rest


@pytest.mark.slow
def test_queries_and_keys_as_they_were_given_weigh_the_same_whatever_their_size():
  case, x, _ = rows_of_sizes(power=4)
  interpret = plgpu.InterpretGPUParams()
  settings = Settings(case.power, BLOCK, TILE, TILE, "high", interpret=interpret)
  tokens = near.Tokens(x["q"][:, :, :, None], x["k"], x["v"], x["log_gate"], None)
  given = near.operands(tokens, near.running(x["log_gate"], settings), settings, with_state=False, save=True)
  y, scaled = near.forward(given, power=case.power, dtype=jnp.bfloat16, save_low=True, interpret=interpret)
  for found in (y.high, y.low, y.normaliser, of_sizes(scaled.q, 1)):
    np.testing.assert_array_equal(found, jnp.repeat(found[:1], len(SIZES), axis=0))
  by_query = np.broadcast_to(SIZES[:, :1, None, None], scaled.q_exponent.shape)
  np.testing.assert_array_equal(scaled.q_exponent - scaled.q_exponent[:1], by_query)
  np.testing.assert_array_equal(scaled.top - scaled.top[:1], SIZES[:, 1:])


@pytest.mark.slow
def test_gradients_of_queries_and_keys_as_they_were_given_are_as_large_as_these_are_small():
  case, x, rest = rows_of_sizes()
  weights = {name: jnp.repeat(a, len(SIZES), axis=0) for name, a in cotangents(case).items()}
  run = attend(case, plgpu.InterpretGPUParams())
  found = comparing.with_gradients(lambda x: run(x, rest), x, weights)
  found |= {"dq": of_sizes(found["dq"], 0), "dk": of_sizes(found["dk"], 1)}
  for name, array in found.items():
    assert np.any(array)
    alike = jnp.repeat(array[:1], len(SIZES), axis=0).astype(jnp.float32)
    # Of the smallest keys some coordinates are no normal numbers.
    np.testing.assert_allclose(array.astype(jnp.float32), alike, rtol=0, atol=1e-5, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("size", [0, 1])
@pytest.mark.usefixtures("no_races")
def test_weights_too_small_for_float32_make_empty_rows_without_a_gradient_unless_there_is_a_state(size):
  case = Case(T=40, B=1, H=1, d=32, dv=32, gate="weak", dtype="bfloat16", entry="continued")
  x, rest = inputs(case)
  x |= {"k": 1e-20 * x["k"], "S": size * x["S"], "Z": size * x["Z"]}
  results = {}
  for name, run in (
    ("kernels", attend(case, plgpu.InterpretGPUParams(detect_races=True))),
    ("xla", functools.partial(comparing.call, entry=case.entry, power=2, form="chunked", implementation="xla")),
  ):
    results[name] = comparing.with_gradients(lambda x, run=run: run(x, rest), x, cotangents(case))
  nothing = ("y", "dq", "dv") if size == 0 else ("dv",)
  for name in nothing:
    assert not np.any(results["kernels"][name]), name
  for name in ("dS", "dZ", "dbeta", "dphase", *(("dk",) if size == 0 else ("y", "dq"))):
    comparing.assert_close(results["kernels"][name], results["xla"][name], 1e-3, name)


@pytest.mark.parametrize(("d", "dv"), [(64, 64), (64, 128), (128, 64), (128, 128)])
def test_a_state_in_pieces_is_the_state(d, dv):
  S, pieces = np.arange(2 * d * dv * d).reshape(1, 2, d, dv, d), Pieces.of(d, dv)
  cut = pieces.cut(S)
  np.testing.assert_array_equal(pieces.joined(cut), S)
  for piece in itertools.starmap(Piece, itertools.product(*map(range, pieces))):
    i, j, u = (slice(64 * n, 64 * n + 64) for n in piece)
    np.testing.assert_array_equal(cut[:, :, pieces.number(piece)], S[:, :, i, u, j])
    assert pieces.at(jnp.int32(pieces.number(piece))) == piece


@pytest.mark.slow
@pytest.mark.parametrize("shares", state_write._SHARES)
def test_states_do_not_depend_on_how_coordinates_are_shared_out(monkeypatch, shares):
  monkeypatch.setattr(state_write, "_shares", lambda rows: shares)
  random = np.random.default_rng(0)
  x = jnp.asarray(random.normal(size=(1, 2, 64, 128)), jnp.bfloat16)
  v, k = (jnp.asarray(random.normal(size=(1, 128, 2, 64)), jnp.bfloat16) for _ in range(2))
  decay = jnp.full((1, 1, 2), 0.5)
  initial = jnp.asarray(random.normal(size=(1, 1, 1, 64, 64, 64)), jnp.float32)
  interpreted = plgpu.InterpretGPUParams()
  centre = jnp.full((1, 1, 64), 0.5, jnp.bfloat16)
  states = state_write.write(x, v, k, decay, initial, centre=centre, interpret=interpreted)
  state = np.asarray(initial[0, 0, 0], np.float64)
  for chunk in range(2):
    comparing.assert_close(states.found[0, 0, 0, chunk], state, 5e-3, "found")
    np.testing.assert_allclose(states.squares[0, 0, chunk], np.sum(state**2), rtol=5e-3)
    tokens = slice(64 * chunk, 64 * chunk + 64)
    added = (np.asarray(a, np.float64) for a in (x[0, :, :, tokens], v[0, tokens] - 0.5, k[0, tokens]))
    state = 0.5 * state + np.einsum("hat,thv,thw->avw", *added)
  comparing.assert_close(states.final[0, 0, 0], state, 5e-3, "final")

  # Backwards, with the inner products of what is found between the two chunks.
  back = state_write.write(x, v, k, decay, None, others=states.found, reverse=True, interpret=interpreted)
  added, found = (np.asarray(a, np.float64) for a in (back.found[0, 0, 0, 0], states.found[0, 0, 0, 1]))
  swapped = found.reshape(32, 2, 64, 64)[:, ::-1].reshape(found.shape)
  expected = np.stack([np.sum(added * other, axis=(1, 2)) for other in (found, swapped)], axis=-1)
  comparing.assert_close(np.sum(back.inner[0, 0, 0, 0], axis=-1), expected, 5e-3, "inner")


@pytest.mark.slow
@pytest.mark.parametrize("shares", symmetric_write._SHARES)
@pytest.mark.usefixtures("no_races")
def test_symmetric_states_do_not_depend_on_how_products_are_shared_out(monkeypatch, shares):
  monkeypatch.setattr(symmetric_write, "_shares", lambda rows: shares)
  random = np.random.default_rng(0)
  x = jnp.asarray(random.normal(size=(1, 1, 64, 512)), jnp.bfloat16)
  v = jnp.asarray(random.normal(size=(1, 512, 1, 64)), jnp.bfloat16)
  given = random.normal(size=(64, 64, 64))
  given = given + given.transpose(2, 1, 0)
  interpreted = plgpu.InterpretGPUParams(detect_races=True)
  initial = jnp.asarray(given[None, None, None], jnp.float32)
  Z, middle = random.normal(size=(2, 64, 64)), random.normal(size=64)
  Z = Z + Z.transpose(0, 2, 1)
  centre = symmetric_write.Centre(jnp.float32(middle)[None, None], jnp.float32(Z)[None, None])
  states = symmetric_write.write(x, v, jnp.full((1, 1, 2), 0.5), centre, initial, interpret=interpreted)

  quarter = np.arange(64) // 16
  written = np.broadcast_to((quarter[:, None] <= quarter)[:, None], given.shape)
  state = given
  for chunk in range(2):
    found, about = np.swapaxes(states.found[0, 0, 0, chunk], 1, 2), state - Z[chunk][:, None] * middle[:, None]
    comparing.assert_close(found[written], about[written], 5e-3, "found")
    np.testing.assert_allclose(states.squares[0, 0, chunk], np.sum(about**2), rtol=5e-3)
    some = slice(256 * chunk, 256 * chunk + 256)
    keys, values = (np.asarray(a, np.float64) for a in (x[0, 0, :, some], v[0, some, 0]))
    state = 0.5 * state + np.einsum("at,tv,bt->avb", keys, values, keys)
  comparing.assert_close(states.final[0, 0, 0][written], state[written], 5e-3, "final")
  assert not np.any(states.final[0, 0, 0][~written])
