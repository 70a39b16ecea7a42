"""The backward kernel of heads of 128: gradients in the interpreter, without races, and on the chip."""

import functools

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import numpy as np
import pytest

from csympow.forms import near
from tests import comparing
from tests.comparing import Case, cotangents, inputs
from tests.test_kernels import (
  assert_attention_right,
  assert_chunked_right,
  attend,
  both_ways,
  reference,
  run_on_chip,
)


def wide(**sizes):
  return Case(**({"d": 128, "dv": 128, "dtype": "bfloat16", "entry": "attention"} | sizes))


CASES = [
  # Keys as they were given, and copies of them; of discounted copies are those beside a state, and of long sequences.
  wide(T=260, B=1, H=1, gate="weak", rotation="none"),
  wide(T=260, B=1, H=1, gate="weak"),
  wide(T=300, B=1, H=1, groups=2, gate="weak", rotation="none", segments="packed"),
  wide(T=300, B=1, H=1, groups=3, dv=64, gate="weak", power=4),
  wide(T=600, B=1, H=2, gate="resets", power=6, rotation="none", segments="padded"),
  wide(T=1, B=2, H=1),
]
ON_CHIP = [
  *CASES,
  wide(T=2300, H=12, gate="weak", rotation="none"),
  wide(T=2300, H=12, gate="weak"),
  wide(T=1025, H=3, groups=4, gate="none", rotation="fixed", segments="packed"),
  wide(T=1025, H=3, groups=4, gate="none", rotation="none", power=4),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.usefixtures("no_races")
def test_gradients_are_right_in_the_interpreter_and_race_free(case):
  x, rest = inputs(case)
  run = attend(case, plgpu.InterpretGPUParams(detect_races=True))
  results = comparing.with_gradients(lambda x: run(x, rest), x, cotangents(case))
  assert_attention_right(jax.tree.map(np.asarray, results), reference(case), case)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.usefixtures("no_races")
def test_gradients_by_discounted_copies_are_right_in_the_interpreter_and_race_free(dtype, monkeypatch):
  monkeypatch.setattr(near, "SHORT", 0)  # as in long sequences
  case = wide(T=260, B=1, H=1, gate="weak", dtype=dtype)
  x, rest = inputs(case)
  run = attend(case, plgpu.InterpretGPUParams(detect_races=True))
  results = comparing.with_gradients(lambda x: run(x, rest), x, cotangents(case))
  assert_attention_right(jax.tree.map(np.asarray, results), reference(case), case)


@pytest.mark.slow
@pytest.mark.parametrize(("d", "dv"), [(128, 128), (128, 32), (32, 128)])
@pytest.mark.usefixtures("no_races")
def test_gradients_beside_a_state_are_right_in_the_interpreter_and_race_free(d, dv):
  case = wide(T=300, B=1, H=1, d=d, dv=dv, entry="continued")
  x, rest = inputs(case)
  run = attend(case, plgpu.InterpretGPUParams(detect_races=True), 256)
  results = comparing.with_gradients(lambda x: run(x, rest), x, cotangents(case))
  assert_chunked_right(jax.tree.map(np.asarray, results), reference(case), case)


@pytest.mark.gpu
@pytest.mark.parametrize("case", ON_CHIP, ids=str)
def test_gradients_are_right_on_the_chip(case):
  run = functools.partial(run_on_chip, both_ways, case, form="attention", power=case.power)
  results = run()
  assert_attention_right(results, reference(case), case)
  jax.tree.map(np.testing.assert_array_equal, run(), results)  # to the bit
