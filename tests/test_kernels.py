"""The Pallas kernels: right on the chip, and right and without races in the interpreter."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import csympow
from csympow.forms import near
from csympow.forms.spans import Settings
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


# Of states that no gradient reads, what is symmetric is written once.
FORWARD_ONLY = Case(T=260, B=1, H=1, groups=2, d=64, dv=64, dtype="bfloat16", entry="continued")


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
