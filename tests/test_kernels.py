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
from csympow.forms import fused_chunked, near, near_backward
from csympow.forms.spans import Settings
from kernels_pallas.gpu import attention_forward, turns
from kernels_pallas.gpu.tiles import BLOCK, TILE
from tests import comparing
from tests.comparing import Case, assert_results_close, cotangents, inputs

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


ATTENTION_CASES = [*CASES, *WITH_STATE, *STATE_AND_SEGMENTS, *WIDE_WITH_STATE, *NARROW]
CHUNKED_CASES = [*CHUNKED, *CHUNKED_WITH_STATE, *WIDE, *STATE_AND_SEGMENTS, *NARROW]


def alone(x, w, rest, case, **options):
  """A call by kernels; there is no gradient of its results' sum weighted by w."""
  del w
  return comparing.call(x, rest, entry=case.entry, implementation="pallas", **options)


def both_ways(x, w, rest, case, **options):
  """The same with the gradient."""
  return comparing.with_gradients(lambda x: alone(x, w, rest, case, **options), x, w)


def assert_right(results, expected, *, tolerance, of_rotations):
  """Rotations' gradients are the rest of sums that cancel."""
  results = dict(results)
  turned = {name: results.pop(name) for name in ("dbeta",) if name in results}
  assert_results_close(results, expected, tolerance)
  assert_results_close(turned, expected, of_rotations)


def assert_attention_right(results, expected, case):
  assert_right(results, expected, tolerance=TOLERANCE[case.dtype], of_rotations=7e-3)


def assert_chunked_right(results, expected, case):
  """All that a single token gets from a state is the rest of such sums, too."""
  tolerance = TOLERANCE[case.dtype] if case.entry == "attention" else 8e-3
  assert_right(results, expected, tolerance=tolerance, of_rotations=8e-3)


def run_on_chip(call, case, **options):
  """The call's results; what is not differentiated is known when it is traced."""
  x, rest = inputs(case)
  return jax.jit(functools.partial(call, rest=rest, case=case, **options))(x, cotangents(case))


@gpu
@pytest.mark.parametrize("case", ATTENTION_CASES, ids=str)
def test_kernels_are_right_on_the_chip(case):
  results = run_on_chip(both_ways, case, form="attention", power=case.power)
  assert_attention_right(results, reference(case), case)


@gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_pass_without_gradients_is_right_on_the_chip(case):
  results = run_on_chip(alone, case, form="attention", power=case.power)
  assert_attention_right(results, reference(case), case)


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
    {"T": 4096, "B": 16, "H": 4, "groups": 3, "d": 64, "dv": 64},  # and of so many heads that it has many pairs
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
@pytest.mark.parametrize("case", CHUNKED_CASES, ids=str)
def test_chunked_kernels_are_right_on_the_chip(case, chunk):
  results = run_on_chip(both_ways, case, form="chunked", power=2, chunk_size=chunk)
  assert_chunked_right(results, reference(case), case)


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
  x = comparing.nearly_orthogonal(cosine, T=5000, d=64, dtype="bfloat16")
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
  Case(T=200, B=1, H=1, d=32, dv=32, gate="weak", rotation="none", dtype="bfloat16", entry="attention"),
  # Two tiles far, one of them for half of the queries only, and gates that leave something of them.
  slow(Case(T=400, B=1, H=1, d=32, dv=32, gate="weak", rotation="none", dtype="bfloat16", entry="attention")),
  # Queries that the forward kernel rotates, and keys whose gradients the backward one rotates back.
  Case(T=300, B=1, H=1, groups=2, d=32, dv=32, gate="weak", segments="packed", dtype="bfloat16", entry="attention"),
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


@pytest.mark.usefixtures("no_races")
@pytest.mark.parametrize(
  "case",
  [
    Case(T=400, B=1, H=1, d=32, dv=32, gate="weak", rotation="none", dtype="bfloat16", entry="attention"),
    slow(Case(T=400, B=1, H=1, groups=2, d=64, dv=64, gate="weak", power=4, dtype="bfloat16", entry="attention")),
    slow(
      Case(
        T=600,
        B=1,
        H=2,
        d=64,
        dv=32,
        gate="resets",
        rotation="none",
        segments="packed",
        dtype="bfloat16",
        entry="attention",
      )
    ),
    slow(Case(T=400, B=1, H=1, d=128, dv=128, gate="resets", power=6, dtype="float16", entry="attention")),
  ],
  ids=str,
)
def test_a_pass_without_gradients_is_right_in_the_interpreter_and_race_free(case, monkeypatch):
  monkeypatch.setattr(attention_forward, "multiprocessors", lambda: 1)
  y = attend(case, plgpu.InterpretGPUParams(detect_races=True))(*inputs(case))["y"]
  comparing.assert_close(y, reference(case)["y"], TOLERANCE[case.dtype], "y")


@pytest.mark.slow
@pytest.mark.parametrize("power", [2, 4, 8])
def test_queries_that_are_near_no_key_get_what_far_tiles_have_as_exactly(power):
  case = Case(
    T=512, B=1, H=1, d=32, dv=32, power=power, gate="weak", rotation="none", dtype="bfloat16", entry="attention"
  )
  random, (x, rest) = np.random.default_rng(0), inputs(case)
  x |= {name: jnp.asarray(random.normal(size=x[name].shape), jnp.bfloat16) for name in ("q", "k", "v")}
  y = attend(case, plgpu.InterpretGPUParams())(x, rest)["y"]
  exact = comparing.quadratic_results(x, rest, cotangents(case), power=power)["y"]
  comparing.assert_close(y, exact, 3.5e-3, "y")


@pytest.mark.slow
@pytest.mark.usefixtures("no_races")
def test_a_late_place_and_an_early_one_are_right_in_the_interpreter_and_race_free(monkeypatch):
  monkeypatch.setattr(near, "all_alike", lambda time: False)
  monkeypatch.setattr(turns, "_even", lambda *arguments: False)  # each block has a pair of its own
  case = Case(T=500, B=2, H=1, d=64, dv=32, power=4, rotation="none", dtype="bfloat16", entry="attention")
  test_kernels_are_right_in_the_interpreter_and_race_free(case, monkeypatch)


@pytest.mark.slow
def test_pairs_of_places_that_a_block_takes_head_by_head_are_right_in_the_interpreter(monkeypatch):
  monkeypatch.setattr(near, "all_alike", lambda time: False)
  monkeypatch.setattr(attention_forward, "multiprocessors", lambda: 1)
  monkeypatch.setattr(turns, "_even", lambda *arguments: True)
  sizes = {"T": 500, "B": 2, "H": 2, "groups": 2, "d": 32, "dv": 32}
  case = Case(**sizes, gate="weak", rotation="none", dtype="bfloat16", entry="attention")
  y = attend(case, plgpu.InterpretGPUParams())(*inputs(case))["y"]
  comparing.assert_close(y, reference(case)["y"], TOLERANCE[case.dtype], "y")


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
  monkeypatch.setattr(fused_chunked, "faint", lambda read, interpret: jnp.asarray([without_state]))
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


@pytest.mark.parametrize("remat", [False, True])
def test_whether_the_gradient_of_rates_is_asked_for_does_not_depend_on_who_else_asked(remat, monkeypatch):
  case = Case(T=256, B=1, H=1, d=64, dv=64, dtype="bfloat16", entry="attention")
  x, rest = inputs(case)
  lost = comparing.recorded(monkeypatch, near_backward, "way_back")

  def call(q, rates):
    return attend(case)(x | {"q": q}, rest | {"rates": rates})["y"]

  def gradients(q, rates, dy):
    function = jax.checkpoint(call) if remat else call
    _, with_rates = jax.vjp(function, q, rates)
    _, without = jax.vjp(lambda q: function(q, rates), q)
    found = with_rates(dy)
    assert not lost
    without(dy)
    assert len(lost) == 1
    return found

  jax.eval_shape(gradients, x["q"], rest["rates"], cotangents(case)["y"])  # traced for the chip, and not run
  assert len(lost) == 1


@pytest.mark.slow
@pytest.mark.parametrize("used", [["y"], ["S", "Z"]], ids=str)
def test_results_that_nobody_uses_take_no_part_in_gradients(used):
  case = Case(T=100, B=1, H=1, d=32, dv=32, rotation="none", dtype="bfloat16", entry="prefill")
  (x, rest), weights = inputs(case), cotangents(case)
  run = attend(case, plgpu.InterpretGPUParams())
  results = comparing.with_gradients(
    lambda x: {name: y for name, y in run(x, rest).items() if name in used}, x, {name: weights[name] for name in used}
  )
  weights = {name: w if name in used else jnp.zeros_like(w) for name, w in weights.items()}
  expected = comparing.reference_results(x, rest, weights, power=2)
  assert_results_close(jax.tree.map(np.asarray, results), expected, 8e-3)


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
