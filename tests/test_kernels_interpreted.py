"""The Pallas kernels in the interpreter: right, and without races; and who is asked for which gradient."""

import dataclasses
import functools

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

import csympow
from csympow import op
from csympow.forms import fused_chunked, near, near_backward, scales
from csympow.forms.spans import Settings
from kernels_pallas.gpu import attention_forward, turns
from kernels_pallas.gpu.tiles import BLOCK, TILE
from tests import comparing
from tests.comparing import Case, assert_results_close, cotangents, inputs
from tests.test_kernels import FORWARD_ONLY, TOLERANCE, attend, inputs_about, reference, reference_of

slow = functools.partial(pytest.param, marks=pytest.mark.slow)
INTERPRETED = [
  Case(T=200, B=1, H=1, d=32, dv=32, gate="weak", rotation="none", dtype="bfloat16", entry="attention"),
  # Two tiles far, one of them for half of the queries only, and gates that leave something of them.
  slow(Case(T=400, B=1, H=1, d=32, dv=32, gate="weak", rotation="none", dtype="bfloat16", entry="attention")),
  # Queries that the forward kernel rotates, and keys whose gradients the backward one rotates back.
  Case(T=200, B=1, H=1, groups=2, d=32, dv=32, gate="weak", segments="packed", dtype="bfloat16", entry="attention"),
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


@pytest.mark.parametrize(
  ("case", "detect_races"),
  [slow(dataclasses.replace(FORWARD_ONLY, T=100, groups=1, rotation="none"), False), slow(FORWARD_ONLY, True)],
  ids=str,
)
@pytest.mark.usefixtures("no_races")
def test_a_chunked_pass_without_gradients_is_right_in_the_interpreter(case, detect_races, monkeypatch):
  about = recorded(monkeypatch, fused_chunked, "_centre")
  x, rest = inputs_about(2, case)
  results = attend(case, plgpu.InterpretGPUParams(detect_races=detect_races), 256)(x, rest)
  assert_results_close(jax.tree.map(np.asarray, results), reference_of(case, x, rest), 8e-3)
  assert np.all(np.abs(np.float32(about[0]) - 2) < 0.5)


@pytest.mark.parametrize(
  ("case", "without_state", "detect_races"),
  [
    (Case(T=100, B=1, H=1, d=32, dv=64, dtype="bfloat16", entry="continued"), [False], False),
    slow(Case(T=300, B=1, H=1, groups=2, d=64, dv=64, gate="weak", dtype="bfloat16", entry="continued"), [False], True),
    slow(Case(T=300, B=1, H=2, d=64, dv=64, gate="weak", dtype="bfloat16", entry="attention"), [True, False], True),
  ],
  ids=str,
)
@pytest.mark.usefixtures("no_races")
def test_values_with_much_in_common_and_heads_read_without_states_are_right(
  case, without_state, detect_races, monkeypatch
):
  about = recorded(monkeypatch, fused_chunked, "_centre")
  monkeypatch.setattr(fused_chunked, "faint", lambda read, interpret: jnp.asarray([without_state], bool))
  x, rest = inputs_about(2, case)
  run = functools.partial(attend(case, plgpu.InterpretGPUParams(detect_races=detect_races), 256), rest=rest)
  results = comparing.with_gradients(run, x, cotangents(case))
  assert_results_close(jax.tree.map(np.asarray, results), reference_of(case, x, rest), 5e-3)
  assert np.all(np.abs(np.float32(about[0]) - 2) < 0.5)


@pytest.mark.usefixtures("no_races")
def test_queries_that_were_rotated_are_left_rounded_for_gradients():
  x, rest = inputs(Case(T=BLOCK, B=1, H=1, d=32, dv=32, entry="attention", dtype="bfloat16"))
  interpret = plgpu.InterpretGPUParams(detect_races=True)
  given = (x[name] for name in ("q", "k", "v", "log_gate", "beta"))
  tokens = op._padded(op._prepare(*given, rest["rates"], None, None, None, for_kernels=True), BLOCK)
  settings = Settings(2, BLOCK, TILE, TILE, "high", interpret=interpret)
  operands, _ = near.operands(tokens, settings, with_state=False, save=True)
  _, saved = near.forward(operands, power=2, dtype=jnp.bfloat16, save_low=True, interpret=interpret)
  assert saved.q.dtype == jnp.float16
  np.testing.assert_array_equal(saved.rounded_q, scales.rounded(saved.q, scales.BFLOAT16).astype(jnp.bfloat16))


def recorded(monkeypatch, module, name):
  """What that function of a module returns from now on."""
  function, found = getattr(module, name), []

  def call(*arguments):
    result = function(*arguments)
    jax.debug.callback(lambda x: found.append(np.asarray(x)), result)
    return result

  monkeypatch.setattr(module, name, call)
  return found


@pytest.mark.parametrize("remat", [False, True])
def test_whether_the_gradient_of_rates_is_asked_for_does_not_depend_on_who_else_asked(remat, monkeypatch):
  case = Case(T=256, B=1, H=1, d=64, dv=64, dtype="bfloat16", entry="attention")
  x, rest = inputs(case)
  lost = comparing.recorded(monkeypatch, near_backward, "way_back_of")

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
