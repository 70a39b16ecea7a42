"""Which tiles of keys the attention kernels read: nothing is left out that a sum would notice."""

import itertools

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

from csympow.forms import near, visible
from csympow.forms.spans import Settings
from csympow.prefix import Total, prefix_sum
from kernels_pallas.gpu.bounds import bounds
from kernels_pallas.gpu.reach import reach
from kernels_pallas.gpu.tiles import ROWS, TILE
from tests import comparing
from tests.comparing import Case
from tests.test_kernels import TOLERANCE, attend, reference

INTERPRETED, QUICKLY = plgpu.InterpretGPUParams(detect_races=True), plgpu.InterpretGPUParams()


def tiles_of(x):
  """B T H d to B H n 128 d, in float64."""
  batch, time, heads, dim = x.shape
  return np.moveaxis(np.asarray(x, np.float64), 1, 2).reshape(batch, heads, time // TILE, TILE, dim)


def make(seed, heads, groups, tiles, d, rate):
  """Queries, keys and values of one sequence, and the totals of log gates at the tiles' ends; some queries are 0."""
  random = np.random.default_rng(seed)
  q, k, v = (random.normal(size=(1, tiles * TILE, n, d)) * 0.3 for n in (heads * groups, heads, heads))
  q[0, 5, 0] = q[0, 300, -1] = 0
  end = np.cumsum(-random.exponential(rate, (1, heads, tiles)), axis=-1)
  v[:, TILE // 2 :: TILE] *= 64  # one token of each tile
  return jnp.asarray(q, jnp.float16), jnp.asarray(k, jnp.float16), jnp.asarray(v, jnp.bfloat16), end


def before_of(end):
  return np.concatenate([np.zeros_like(end[..., :1]), end[..., :-1]], axis=-1)


def weights_of(q, k, end, power, n, m):
  """(q_i . k_j) ** p for tile n's queries of all of a head's group and tile m's keys, as it comes to n's start."""
  group = q.shape[1] // k.shape[1]
  queries = q[:, :, n].reshape(1, k.shape[1], group, TILE, -1)
  scores = np.einsum("bhgid,bhjd->bhgij", queries, k[:, :, m])
  return scores**power * np.exp(end[..., n - 1] - end[..., m])[..., None, None, None]


def sizes_of(v):
  return np.max(np.abs(tiles_of(v)), axis=-1)


# Here in the interpreter, on a chip on it.
ANYWHERE = [INTERPRETED, pytest.param(None, marks=pytest.mark.gpu)]


@pytest.mark.parametrize("interpret", ANYWHERE, ids=["interpreted", "compiled"])
@pytest.mark.parametrize(
  ("heads", "groups", "tiles", "d", "power", "rate", "left_out"),
  [
    (1, 2, 5, 32, 4, 3.0, 0.3),
    (2, 1, 6, 64, 2, 2.0, 0.1),
    (1, 1, 5, 128, 6, 20.0, 0.3),
    pytest.param(1, 1, ROWS + 12, 32, 2, 1.5, 0.1, marks=pytest.mark.slow),
  ],
)
def test_a_tile_reaches_as_far_as_the_bounds_say(
  heads, groups, tiles, d, power, rate, left_out, interpret, request, monkeypatch
):
  if interpret is not None:
    request.getfixturevalue("no_races")
  # Several tiles to a block, as where there are many.
  several = 1 if d > 64 else tiles if tiles < ROWS else 4
  monkeypatch.setattr("kernels_pallas.gpu.bounds.tiles_of_a_block", lambda rows, tiles, width: several)
  q, k, v, end = make(0, heads, groups, tiles, d, rate)
  k = k.at[:, : ROWS * TILE].multiply(1 if tiles < ROWS else 4)  # so that what comes from them is heard long after
  end -= 1e7  # of which a float32 would keep nothing behind the point
  decay = np.exp(np.diff(end, axis=-1, prepend=-1e7))
  before = np.concatenate([np.full_like(end[..., :1], -1e7), end[..., :-1]], axis=-1)
  totals = visible.in_whole_rows(*(Total(*map(jnp.asarray, halves(total))) for total in (before, end)))
  fades = jnp.ones((1, heads), jnp.int32)
  found = bounds(q, k, v, jnp.asarray(decay, jnp.float32), fades, power=power, interpret=interpret)
  first = reach(found, totals, fades, tiles, left_out=left_out, interpret=interpret)

  q, k, sizes = tiles_of(q), tiles_of(k), sizes_of(v)
  squares = np.sum(k**2, axis=-1)
  together = bound_by_moments(k, power)
  unheard = np.ones((1, heads, tiles, tiles), bool)
  for value in (np.ones_like(sizes), sizes):
    most = np.sum(value * squares ** (power // 2), axis=-1)
    if d >= ROWS:
      most = np.minimum(most, np.max(value, axis=-1) * together)
    for n in range(1, tiles):
      length = np.sum(q[:, :, n] ** 2, axis=-1).reshape(1, heads, groups, TILE) ** (power // 2)
      near_by = sum(
        np.sum(weights_of(q, k, end, power, n, m) * value[:, :, None, m, None], axis=-1)
        for m in range(max(0, n - 2), n)
      )
      share = np.where(length > 0, near_by / np.where(length > 0, length, 1), np.inf)
      heard = np.cumsum(most[..., :n] * np.exp(end[..., n - 1 : n] - end[..., :n]), axis=-1)
      unheard[..., n, :n] &= heard <= left_out * np.min(share, axis=(2, 3))[..., None]
  expected = np.sum(unheard & np.tri(tiles, k=-1, dtype=bool), axis=-1)
  assert np.any(expected > 0)
  # On a chip exponentials and quotients are not those of float64, and a tile may be just about as much as it may be.
  np.testing.assert_allclose(first, expected, atol=0 if interpret is not None else 1)


def bound_by_moments(k, power):
  """What the second moments of each tile's keys, B H n 128 d, say that a query of length 1 gathers at most."""
  moments = np.einsum("bhnja,bhnjc->bhnac", k, k)
  squares, widest = np.sum(k**2, axis=-1), np.max(np.sum(np.abs(moments), axis=-1), axis=-1)
  trace, longest = np.sum(squares, axis=-1), np.max(squares, axis=-1)
  lost = widest * 2.0**-11 + k.shape[-1] * 2.0**-24 * trace  # when a row of the moments is rounded to float16
  if power == 2:
    return np.sqrt(np.max(np.sum(np.abs(moments @ moments), axis=-1), axis=-1) + 3 * widest * lost)
  by_key = np.einsum("bhnja,bhnac,bhnjc->bhnj", k, moments, k)
  return longest ** (power // 2 - 2) * (np.max(by_key, axis=-1) + longest * lost)


@pytest.mark.parametrize("power", [2, 4, 6])
@pytest.mark.parametrize("what", ["random", "alike", "one", "lengths"])
def test_no_query_gathers_more_than_moments_say(what, power):
  random = np.random.default_rng(0)
  k = random.normal(size=(1, 1, 1, TILE, 64))
  k = {
    "random": k,
    "alike": 1 + 0.1 * k,
    "one": k * (np.arange(TILE) == 3)[:, None],
    "lengths": k * np.exp(3 * k[..., :1]),
  }[what]
  worst = [
    k[0, 0, 0],
    np.linalg.eigh(np.einsum("ja,jb->ab", k[0, 0, 0], k[0, 0, 0]))[1].T,
    random.normal(size=(99, 64)),
  ]
  q = np.concatenate(worst)
  q = q[np.any(q != 0, axis=-1)]
  for _ in range(20):  # uphill
    q = q / np.linalg.norm(q, axis=-1, keepdims=True)
    scores = q @ k[0, 0, 0].T
    q, gathered = scores ** (power - 1) @ k[0, 0, 0], np.sum(scores**power, axis=-1)
  assert 0.05 < np.max(gathered) / bound_by_moments(k, power)[0, 0, 0] <= 1


def halves(x):
  """Two float32s that make a float64."""
  high = x.astype(np.float32)
  return high, (x - high).astype(np.float32)


def found_visible(q, k, v, end, power, monkeypatch, chunk=None, beyond_chunks=False):
  """`visible` of a sequence that counts as long: the first and last tiles, and which heads last, if that is asked."""
  monkeypatch.setattr(visible, "LONG", TILE)
  totals = [Total(*map(jnp.asarray, halves(x))) for x in (before_of(end), end)]
  settings = Settings(power, chunk or q.shape[1], TILE, TILE, "high", interpret=QUICKLY)
  decay = jnp.asarray(np.exp(end - before_of(end)), jnp.float32)
  widths, group = (q.shape[-1], v.shape[-1]), q.shape[2] // k.shape[2]
  assert not beyond_chunks or visible.may_spare_states(q.shape[1], settings)
  has_state = visible.worth_a_state(*totals, settings, widths, group, True) if beyond_chunks else None
  tiles = visible.Tiles(*totals, decay, lambda fades: (q, k), v, has_state)
  found = visible.visible(tiles, settings)
  return [np.asarray(x) for x in found if x is not None]


@pytest.mark.parametrize(
  ("what", "power"),
  [
    ("random", 2),
    ("faint for some", 4),
    ("large values", 2),
    *(
      pytest.param(what, 2, marks=pytest.mark.slow)
      for what in ("small values", "lengths", "one far", "alike", "no values")
    ),
  ],
)
def test_what_is_left_out_is_no_more_than_it_may_be(what, power, monkeypatch):
  q, k, v, end = (np.asarray(x, np.float64) for x in make(1, 1, 2, 8, 64, 4.0))
  random = np.random.default_rng(2)
  if what == "lengths":
    k *= 2.0 ** random.integers(-6, 2, (1, 8 * TILE, 1, 1))
  elif what == "one far":  # all queries of the last tile are what a key of the first is
    k[:, 7, 0] = q[:, -TILE:] = k[:, 7, :1]
  elif what == "alike":
    k = k[:, :1] + 0.01 * k
  elif what == "faint for some":  # near keys are orthogonal to the queries of one head, far ones are not
    q[:, :, 1:, 32:], k[:, 2 * TILE :, :, :32] = 0, 1e-2 * k[:, 2 * TILE :, :, :32]
  elif what.endswith("values") and what != "no values":
    v[:, : 3 * TILE] *= 1e4 if what == "large values" else 1e-4
  elif what == "no values":
    v[:, 3 * TILE :] = 0
  q, k, v = (jnp.asarray(x, dtype) for x, dtype in ((q, jnp.float16), (k, jnp.float16), (v, jnp.bfloat16)))
  first, last = found_visible(q, k, v, end, power, monkeypatch)
  if what == "random":
    assert first[0, 0, -1] > 1
  q, k, sizes = tiles_of(q), tiles_of(k), sizes_of(v)
  for value, n in itertools.product((np.ones_like(sizes), sizes), range(1, 8)):
    by_tile = np.stack([np.sum(weights_of(q, k, end, power, n, m) * value[0, 0, m], axis=-1)[0, 0] for m in range(n)])
    left_out = np.sum(by_tile[: first[0, 0, n]], axis=0)
    # Its own tile's weights would only add to what it gathers.
    assert np.all(left_out <= 1.01 * visible.LEFT_OUT * np.sum(by_tile, axis=0))
    assert all(last[0, 0, m] >= n for m in range(first[0, 0, n], n))


@pytest.mark.slow
def test_what_is_no_number_is_read_by_all_who_can_see_it(monkeypatch):
  q, k, v, end = make(1, 1, 1, 6, 64, 9.0)
  first, _ = found_visible(q, k.at[0, TILE + 5, 0, 3].set(jnp.nan), v, end, 2, monkeypatch)
  assert np.all(first[0, 0, 2:] <= 1)
  assert np.any(found_visible(q, k, v, end, 2, monkeypatch)[0] > 1)


def test_all_is_read_where_gates_leave_something_of_all(monkeypatch):
  q, k, v, end = make(1, 1, 2, 6, 64, 1.0)
  assert np.exp(end[0, 0, -2] - end[0, 0, 0]) > visible.LEFT_OUT
  first, last = found_visible(1e-2 * q, k.at[:, -3 * TILE :].multiply(100), v, end, 2, monkeypatch)
  assert np.all(first == 0)
  assert np.all(last == 5)


def test_a_block_of_the_grid_reads_as_much_as_any_of_its_tiles_and_is_read_by_as_many(monkeypatch):
  random, tile = np.random.default_rng(0), np.arange(12)
  first = random.integers(0, tile + 1, (1, 2, 12))
  monkeypatch.setattr(visible, "reach", lambda *arguments, **options: jnp.asarray(first))
  monkeypatch.setattr(visible, "bounds", lambda *arguments, **options: None)
  end = np.zeros((1, 2, 12))
  vectors = [jnp.zeros((1, 12 * TILE, 2, 64), dtype) for dtype in (jnp.float16, jnp.float16, jnp.bfloat16)]
  found, last = found_visible(*vectors, end, 2, monkeypatch)
  expected = np.repeat(np.min(first.reshape(1, 2, 6, 2), axis=-1), 2, axis=-1)
  np.testing.assert_array_equal(found, expected)
  for m in tile:
    np.testing.assert_array_equal(last[..., m], np.max(np.where(expected <= m, tile, 0), axis=-1))


@pytest.mark.parametrize("chunk", [4 * TILE, 12 * TILE])
def test_no_tile_of_keys_is_seen_less_far_than_one_before_it(chunk):
  # Growing ones are not allowed, but must not make the backward kernel's blocks wait for ever.
  gates = np.random.default_rng(0).choice([-90.0, -1.0, 0.0, 90.0], size=(3, 12 * TILE, 2), p=[0.02, 0.47, 0.5, 0.01])
  _, *totals = near.spans(prefix_sum(jnp.asarray(gates, jnp.float32)), TILE)
  before, end = (Total(*(half[..., 0] for half in total)) for total in totals)
  v = jnp.zeros((3, 12 * TILE, 2, 64), jnp.bfloat16)
  settings = Settings(2, chunk, TILE, TILE, "high")
  tiles = visible.Tiles(before, end, jnp.zeros((3, 2, 12)), lambda fades: pytest.fail("not searched"), v)
  first, last, _ = visible.visible(tiles, settings)
  tile = np.arange(12)
  assert np.all(np.diff(last, axis=2) >= 0)
  assert np.all((tile <= last) & (last < (tile * TILE // chunk + 1) * chunk // TILE))
  assert np.all((tile * TILE // chunk * chunk // TILE <= first) & (first <= tile))


@pytest.mark.parametrize(("gated", "length"), [(True, 2), (False, 2), (True, 1)])
def test_long_gated_sequences_alone_are_searched(gated, length):
  T = length * visible.LONG // 2
  x = {name: jax.ShapeDtypeStruct((1, T, 1, 64), jnp.bfloat16) for name in "qkv"}
  if gated:
    x["log_gate"] = jax.ShapeDtypeStruct((1, T, 1), jnp.float32)
  case = Case(T=T, B=1, H=1, d=64, dv=64, dtype="bfloat16", entry="attention")
  run = attend(case)
  text = str(jax.make_jaxpr(lambda x: run(x, {})["y"])(x))
  assert "attention_forward" in text
  assert ("kernel_name='reach'" in text) == (gated and length == 2)


@pytest.mark.slow
@pytest.mark.parametrize("power", [2, 4])
@pytest.mark.usefixtures("no_races")
def test_kernels_that_leave_tiles_out_are_right_in_the_interpreter(power, monkeypatch):
  monkeypatch.setattr(visible, "LONG", TILE)
  left_out = []

  def recorded(*arguments, **options):
    first = reach(*arguments, **options)
    jax.debug.callback(lambda first: left_out.append(np.max(first)), first)
    return first

  monkeypatch.setattr(visible, "reach", recorded)
  case = Case(T=700, B=1, H=1, groups=2, d=32, dv=32, power=power, dtype="bfloat16", entry="attention")
  x, rest = comparing.inputs(case)
  run = attend(case, INTERPRETED)
  results = comparing.with_gradients(lambda x: run(x, rest), x, comparing.cotangents(case))
  jax.effects_barrier()
  assert left_out[0] > 0
  comparing.assert_results_close(jax.tree.map(np.asarray, results), reference(case), TOLERANCE["bfloat16"])
