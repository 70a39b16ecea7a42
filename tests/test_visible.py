"""Which tiles of keys the attention kernels read: nothing is left out that a sum would notice."""

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

import csympow
from csympow.forms import near, visible
from csympow.forms.spans import Settings
from csympow.prefix import Total, prefix_sum
from kernels_pallas.gpu.bounds import Totals, bounds
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
  """Queries and keys of one sequence in float16, and the totals of log gates at the tiles' ends; some queries are 0."""
  random = np.random.default_rng(seed)
  q, k = (random.normal(size=(1, tiles * TILE, n, d)) * 0.3 for n in (heads * groups, heads))
  q[0, 5, 0] = q[0, 300, -1] = 0
  end = np.cumsum(-random.exponential(rate, (1, heads, tiles)), axis=-1)
  return jnp.asarray(q, jnp.float16), jnp.asarray(k, jnp.float16), end


def before_of(end):
  return np.concatenate([np.zeros_like(end[..., :1]), end[..., :-1]], axis=-1)


def weights_of(q, k, end, power, n, m):
  """(q_i . k_j) ** p for tile n's queries of all of a head's group and tile m's keys, as it comes to n's start."""
  group = q.shape[1] // k.shape[1]
  queries = q[:, :, n].reshape(1, k.shape[1], group, TILE, -1)
  scores = np.einsum("bhgid,bhjd->bhgij", queries, k[:, :, m])
  return scores**power * np.exp(end[..., n - 1] - end[..., m])[..., None, None, None]


@pytest.mark.parametrize(
  ("heads", "groups", "tiles", "d", "power", "rate", "leaves"),
  [
    (1, 2, 5, 32, 4, 3.0, 0.3),
    (2, 1, 6, 64, 2, 2.0, 0.1),
    (1, 1, 5, 128, 6, 20.0, 0.3),
    (1, 1, ROWS + 3, 64, 2, 0.3, 2**-8),
  ],
)
@pytest.mark.usefixtures("no_races")
def test_a_tile_reaches_as_far_as_the_bounds_say(heads, groups, tiles, d, power, rate, leaves):
  q, k, end = make(0, heads, groups, tiles, d, rate)
  decay = np.exp(end - before_of(end))
  padding = ((0, 0),) * 3 + ((0, -tiles % ROWS),)
  totals = Totals(*(jnp.pad(jnp.float32([total, 0 * total]), padding) for total in (before_of(end), end)))
  how = {"leaves": leaves, "interpret": INTERPRETED}
  found = bounds(q, k, jnp.asarray(decay, jnp.float32), totals, power=power, **how)
  first = reach(found, totals, tiles, **how)

  q, k = tiles_of(q), tiles_of(k)
  squares = np.sum(k**2, axis=-1)
  most = np.sum(squares ** (power // 2), axis=-1)
  if d >= ROWS:
    spread = np.max(np.sum(np.abs(np.einsum("bhnja,bhnjc->bhnac", k, k)), axis=-1), axis=-1)
    most = np.minimum(most, np.max(squares, axis=-1) ** (power // 2 - 1) * spread)
  expected = np.zeros((1, heads, tiles), int)
  for n in range(1, tiles):
    size = np.sum(q[:, :, n] ** 2, axis=-1).reshape(1, heads, groups, TILE) ** (power // 2)
    near_by = sum(np.sum(weights_of(q, k, end, power, n, m), axis=-1) for m in range(max(0, n - 2), n))
    share = np.where(size > 0, near_by / np.where(size > 0, size, 1), np.inf)
    heard = np.cumsum(most[..., :n] * np.exp(end[..., n - 1 : n] - end[..., :n]), axis=-1)
    expected[..., n] = np.sum(heard <= leaves * np.min(share, axis=(2, 3))[..., None], axis=-1)
  assert np.any(expected > 0)
  np.testing.assert_array_equal(first, expected)


def found_visible(q, k, end, power, monkeypatch):
  """`visible` of a sequence that counts as long."""
  monkeypatch.setattr(visible, "LONG", TILE)
  totals = [Total(jnp.asarray(x, jnp.float32)[..., None], jnp.zeros((*x.shape, 1))) for x in (before_of(end), end)]
  settings = Settings(power, q.shape[1], TILE, TILE, "high", interpret=QUICKLY)
  decay = jnp.asarray(np.exp(end - before_of(end)), jnp.float32)
  return [np.asarray(x) for x in visible.visible(*totals, q, k, decay, settings)]


@pytest.mark.parametrize(
  ("what", "power"),
  [
    ("random", 2),
    ("faint", 4),
    *(pytest.param(what, 2, marks=pytest.mark.slow) for what in ("lengths", "one far", "alike")),
  ],
)
def test_what_is_left_out_is_no_more_than_it_may_be(what, power, monkeypatch):
  q, k, end = (np.asarray(x, np.float64) for x in make(1, 1, 2, 8, 64, 4.0))
  random = np.random.default_rng(2)
  if what == "lengths":
    k *= 2.0 ** random.integers(-6, 2, (1, 8 * TILE, 1, 1))
  elif what == "one far":  # all queries of the last tile are what a key of the first is
    k[:, 7, 0] = q[:, -TILE:] = k[:, 7, :1]
  elif what == "alike":
    k = k[:, :1] + 0.01 * k
  elif what == "faint":  # near keys are orthogonal to queries, far ones are not
    q[..., 32:], k[:, 2 * TILE :, :, :32] = 0, 1e-2 * k[:, 2 * TILE :, :, :32]
  q, k = (jnp.asarray(x, jnp.float16) for x in (q, k))
  first, last = found_visible(q, k, end, power, monkeypatch)
  if what == "random":
    assert first[0, 0, -1] > 2
  q, k = tiles_of(q), tiles_of(k)
  for n in range(1, 8):
    by_tile = np.stack([np.sum(weights_of(q, k, end, power, n, m), axis=-1)[0, 0] for m in range(n)])
    left_out = np.sum(by_tile[: first[0, 0, n]], axis=0)
    # Its own tile's weights would only add to what it gathers.
    assert np.all(left_out <= 1.01 * visible.LEAVES * np.sum(by_tile, axis=0))
    assert all(last[0, 0, m] >= n for m in range(first[0, 0, n], n))
  assert np.all(np.diff(last[0, 0]) >= 0)


def test_what_is_no_number_is_read_by_all_who_can_see_it(monkeypatch):
  q, k, end = make(1, 1, 1, 6, 64, 9.0)
  first, _ = found_visible(q, k.at[0, TILE + 5, 0, 3].set(jnp.nan), end, 2, monkeypatch)
  assert np.all(first[0, 0, 2:] <= 1)
  assert np.any(found_visible(q, k, end, 2, monkeypatch)[0] > 1)


def test_all_is_read_where_gates_leave_something_of_all(monkeypatch):
  q, k, end = make(1, 1, 2, 6, 64, 1.0)
  assert np.exp(end[0, 0, -2] - end[0, 0, 0]) > visible.LEAVES
  first, last = found_visible(1e-2 * q, k.at[:, -3 * TILE :].multiply(100), end, 2, monkeypatch)
  assert np.all(first == 0)
  assert np.all(last == 5)


@pytest.mark.parametrize("chunk", [4 * TILE, 12 * TILE])
def test_no_tile_of_keys_is_seen_less_far_than_one_before_it(chunk):
  # Growing ones are not allowed, but must not make the backward kernel's blocks wait for ever.
  gates = np.random.default_rng(0).choice([-90.0, -1.0, 0.0, 90.0], size=(3, 12 * TILE, 2), p=[0.02, 0.47, 0.5, 0.01])
  _, before, end = near.spans(prefix_sum(jnp.asarray(gates, jnp.float32)), TILE)
  unused, settings = jnp.zeros((3, 12 * TILE, 2, 64), jnp.float16), Settings(2, chunk, TILE, TILE, "high")
  first, last = visible.visible(before, end, unused, unused, jnp.zeros((3, 2, 12)), settings)
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
  text = jax.jit(lambda x: run(x, {})["y"]).trace(x).lower(lowering_platforms=("cuda",)).as_text()
  assert ("reach_mosaic_gpu" in text) == (gated and length == 2)


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


@pytest.mark.gpu
@pytest.mark.parametrize("d", [32, 64, 128])
@pytest.mark.parametrize("power", [2, 4])
def test_long_sequences_are_right_on_the_chip(power, d):
  """Gates as models learn them, some of whose heads forget sooner than others: float32 by XLA is what is right."""
  T, heads = visible.LONG + 1000, 3
  random = np.random.default_rng(0)
  q, k, v, dy = (jnp.asarray(random.normal(size=(1, T, heads, d)), jnp.bfloat16) for _ in range(4))
  logits = np.array([4.0, 6.0, 8.0]) + 2 * random.normal(size=(1, T, heads))
  log_gate = jnp.asarray(-np.logaddexp(0, -logits), jnp.float32)

  def with_gradients(implementation, dtype):
    def call(q, k, v, log_gate):
      return csympow.attention(q, k, v, power, log_gate, form="attention", implementation=implementation)

    y, transpose = jax.vjp(call, *(x.astype(dtype) for x in (q, k, v)), log_gate)
    return y, *transpose(dy.astype(dtype))

  results = jax.jit(with_gradients, static_argnums=(0, 1))("pallas", jnp.bfloat16)
  expected = jax.jit(with_gradients, static_argnums=(0, 1))("xla", jnp.float32)
  for name, found, exact in zip(("y", "dq", "dk", "dv", "dlog_gate"), results, expected, strict=True):
    comparing.assert_close(found, exact, 5e-3, name)
