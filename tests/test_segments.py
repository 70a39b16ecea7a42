"""Segments and padding: the same as separate calls, forward, backward and in the state."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests import comparing
from tests.comparing import FORMS, FULL, STATE, TIMED, Case, forward, inputs

IDS = {
  "runs": [0, 0, 0, 1, 1, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3],
  "an id that returns is a new run": [4, 4, 1, 1, 1, 4, 4, 4, 1, 4, 4, 4, 4, 4, 1, 1, 4],
  "runs of one": list(range(17)),
  "padding at both ends": [-1, -1, 3, 3, 3, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, -1, -1],
  "padding inside a run does not end it": [0, 0, -1, 0, 0, -1, -1, 0, 1, 1, -1, -1, -1, -1, 1, 1, -1],
  "padding between runs": [0, 0, -1, 1, 1, -7, -1, 2, 2, 2, -1, -1, -1, -1, -1, -1, 5],
  "one token": [-1] * 9 + [0] + [-1] * 7,
  "large ids": [2**31 - 1] * 4 + [0] * 3 + [2**31 - 2] * 5 + [2**31 - 1] * 5,
}


def runs(ids):
  """The positions of each run, padding left out."""
  out, last = [], None
  for i, segment_id in enumerate(ids):
    if segment_id >= 0:
      if segment_id != last:
        out.append([])
      out[-1].append(i)
      last = segment_id
  return out


def with_ids(pattern):
  """FULL's arguments with the same ids in both rows of the batch."""
  x, rest = inputs(FULL)
  return x, rest | {"segment_ids": jnp.asarray([IDS[pattern]] * 2, jnp.int32)}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("pattern", IDS)
def test_segments_are_separate_calls_forward_backward_and_in_the_state(pattern, form):
  """Separate calls of the reference, which here is told nothing of segments."""
  x, rest = with_ids(pattern)
  weights = comparing.cotangents(FULL)
  separate = {"y": np.zeros(weights["y"].shape)} | {f"d{n}": np.zeros(a.shape) for n, a in x.items()}
  positions = runs(IDS[pattern])
  for n, run in enumerate(positions):
    first, last = n == 0, n == len(positions) - 1
    # The state given continues into the first run, every other one starts empty, and only the last one's comes out.
    part = {n: a[:, run] if n in TIMED else a if first else 0 * a for n, a in x.items()}
    asked = {n: a[:, run] if n in TIMED else a if last else 0 * a for n, a in weights.items()}
    out = comparing.reference_results(part, {"rates": rest["rates"]}, asked)
    for name in ("y", *(f"d{n}" for n in x if n in TIMED)):
      separate[name][:, run] = out[name]
    separate |= {f"d{n}": out[f"d{n}"] for n in STATE if first} | {n: out[n] for n in STATE if last}
  packed = comparing.full_results(x, rest, form)
  comparing.assert_results_close(packed, separate, 1e-5)
  assert not np.any(packed["y"][rest["segment_ids"] < 0])


@pytest.mark.parametrize("form", FORMS)
def test_padding_alone_returns_the_state_it_was_given(form):
  x, rest = inputs(FULL)
  out = comparing.full_results(x, rest | {"segment_ids": jnp.full((2, 17), -1, jnp.int32)}, form)
  assert not np.any(out["y"])
  assert comparing.turns_apart(out["phase"], x["phase"]) < 1e-7
  np.testing.assert_array_equal(out["S"], x["S"])
  np.testing.assert_array_equal(out["Z"], x["Z"])
  for name in STATE:
    np.testing.assert_allclose(out[f"d{name}"], comparing.cotangents(FULL)[name], rtol=1e-6)
  for name in ("q", "k", "v", "log_gate", "beta"):
    assert not np.any(out[f"d{name}"]), name


@pytest.mark.parametrize("garbage", [1e30, jnp.nan])
@pytest.mark.parametrize("form", FORMS)
def test_what_stands_in_padding_has_no_effect(form, garbage):
  x, rest = with_ids("padding between runs")
  padding = rest["segment_ids"] < 0
  dirty = x | {n: jnp.where(padding.reshape(2, 17, *[1] * (x[n].ndim - 2)), garbage, x[n]) for n in TIMED if n in x}
  clean, out = comparing.full_results(x, rest, form), comparing.full_results(dirty, rest, form)
  for name in clean:
    np.testing.assert_array_equal(out[name], clean[name], err_msg=name)
  for name in ("q", "k", "v", "log_gate", "beta"):
    assert not np.any(out[f"d{name}"][padding]), name


def test_ids_of_any_signed_integer_type_mean_the_same():
  x, rest = inputs(Case(T=5, rotation="none", gate="none", segments="padded"))
  want = forward(x, rest, form="attention")["y"]
  for dtype in (jnp.int8, jnp.int16):
    same = {"segment_ids": rest["segment_ids"].astype(dtype)}
    np.testing.assert_array_equal(forward(x, same, form="attention")["y"], want)


@pytest.mark.parametrize("form", FORMS)
def test_a_split_inside_a_run_continues_it(form):
  x, rest = inputs(Case(T=14))
  ids = jnp.asarray([[3] * 3 + [1] * 6 + [0] * 5, [5] * 7 + [-1] * 2 + [5] * 3 + [2] * 2], jnp.int32)
  whole = comparing.reference_results(x, rest | {"segment_ids": ids}, {"y": np.zeros(x["v"].shape)})
  halves = [{n: a[:, half] for n, a in x.items() if n in TIMED} for half in (slice(7), slice(7, None))]
  first = forward(halves[0] | {n: x[n] for n in STATE}, rest | {"segment_ids": ids[:, :7]}, form=form)
  second = forward(halves[1] | {n: first[n] for n in STATE}, rest | {"segment_ids": ids[:, 7:]}, form=form)
  joined = second | {"y": np.concatenate([first["y"], second["y"]], axis=1)}
  comparing.assert_results_close(joined, whole, 1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_each_row_of_a_batch_has_its_own_segments(form):
  x, rest = inputs(FULL)
  patterns = [IDS["runs"], IDS["padding between runs"]]
  a, b = (
    comparing.full_results(x, rest | {"segment_ids": jnp.asarray(ids, jnp.int32)}, form)
    for ids in (patterns, [patterns[0]] * 2)
  )
  np.testing.assert_array_equal(a["y"][0], b["y"][0])
  assert np.any(a["y"][1] != b["y"][1])
