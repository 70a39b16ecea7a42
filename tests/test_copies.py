"""The kernels before and after all others on Hopper, interpreted, against float64: copies, and gradients going back."""

import functools

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

import csympow
from csympow import rotation
from csympow.forms import near, near_backward, rotating, scales
from csympow.forms.spans import Settings
from kernels_pallas.gpu import arrays, attention_backward
from kernels_pallas.gpu.copies import Copy, copies
from kernels_pallas.gpu.gates import gates
from kernels_pallas.gpu.gradients import gradients
from kernels_pallas.gpu.tiles import ROWS, TILE
from tests import comparing

T, H, G, D = 2 * ROWS, 1, 2, 64
INTERPRETED = plgpu.InterpretGPUParams()


def make(seed, start, time=T):
  """Vectors of two heads that share their angles, those angles as kernels take them, and in float64 radians."""
  random = np.random.default_rng(seed)
  x = jnp.asarray(random.normal(size=(1, time, H * G, D)), jnp.bfloat16)
  # From far along, so that a float32 total would not do.
  beta = jnp.asarray(random.uniform(0.5, 2.0, size=(1, time, H)).astype(np.float32))
  beta = beta.at[0, ROWS // 2].add(1e6).at[0, ROWS + 1].add(-2e6)
  rates = csympow.rotary_rates(D, 2**20)
  starts, initial = None, None
  if start:  # a state's phase, that counts until another document begins
    starts = jnp.zeros((1, time), bool).at[0, time // 2 + 5].set(True)
    initial = jnp.asarray(random.uniform(size=(1, H, D // 2)), jnp.float32)
  phases = rotation.factors(beta, rates, (1, time, H), starts=starts, initial=initial)
  angles = rotating.angles(rotating.Rotation(None, None, rates, phases))
  total = np.cumsum(np.asarray(beta, np.float64), axis=1)
  first = np.zeros((1, time, H, D // 2))
  if start:
    late = np.arange(time) >= time // 2 + 5
    total[:, late] -= total[:, time // 2 + 4]
    first = np.where(late[:, None, None], 0.0, 2 * np.pi * np.asarray(initial, np.float64)[:, None])
  return x, angles, np.repeat(first + total[..., None] * np.asarray(rates, np.float64), G, axis=2)


def test_angles_are_the_same_of_betas_that_were_summed_up_beside_gates():
  random = np.random.default_rng(2)
  beta = jnp.asarray(random.uniform(0.0, 2.0, size=(2, 2 * TILE, 3)), jnp.float32).at[0, 5].add(1e4)
  rates, initial = csympow.rotary_rates(8, 2**20), jnp.asarray(random.uniform(size=(2, 3, 4)), jnp.float32)
  rotation_ = rotating.Rotation(None, None, rates, rotation.factors(beta, rates, beta.shape, initial=initial))
  by_head = jnp.swapaxes(rotation_.phases.beta, 1, 2)
  run = jax.jit(functools.partial(gates, interpret=INTERPRETED))
  both = rotating.angles(rotation_), rotating.angles(rotation_, run(-by_head, beta=by_head).turning)

  def turns(angles):
    since, cycles = (np.sum(np.asarray(x, np.float64), axis=0) for x in (angles.since, angles.cycles))
    return np.repeat(np.asarray(angles.first, np.float64), ROWS, axis=2) + since[..., None] * cycles

  difference = turns(both[0]) - turns(both[1])
  assert np.max(np.abs(difference - np.round(difference))) < 3e-7


def turn(x, radians):
  even, odd = np.asarray(x, np.float64)[..., 0::2], np.asarray(x, np.float64)[..., 1::2]
  cos, sin = np.cos(radians), np.sin(radians)
  return np.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1).reshape(x.shape)


@pytest.mark.parametrize("start", [False, True])
def test_copies_are_rotated_scaled_and_laid_out_as_asked(start):
  x, angles, radians = make(0, start)
  random = np.random.default_rng(1)
  factor = jnp.asarray(random.uniform(size=(1, H * G, T)), jnp.float32)
  wanted = [Copy(jnp.float16), Copy(jnp.bfloat16, factor, time_last=True)]
  plain, last = copies(x, wanted, scale=jnp.full(factor.shape, 0.25), angles=angles, interpret=INTERPRETED)
  expected = 0.25 * turn(x, radians)
  assert plain.dtype == jnp.float16
  assert last.shape == (1, H * G, D, T)
  comparing.assert_close(plain, expected, 4e-4, "plain")
  expected = np.moveaxis(np.asarray(plain, np.float64) * np.moveaxis(np.asarray(factor), 1, 2)[..., None], 1, 3)
  np.testing.assert_array_equal(last, expected.astype(np.float32).astype(jnp.bfloat16))


def test_copies_find_powers_of_two_for_themselves():
  x, angles, radians = make(5, start=False)
  sizes = jnp.asarray(2.0) ** jnp.asarray(np.random.default_rng(6).integers(-60, 60, size=(1, T, H * G, 1)))
  x = (x * sizes).astype(jnp.bfloat16).at[0, 3].set(0.0).at[0, 4].set(1.0).at[0, 5].set(1e37).at[0, 6].set(1e-39)
  tokens = near.Tokens(x.reshape(1, T, H, G, D), x[:, :, :H], x[:, :, :H], None, rotating.Rotation(*(None,) * 4))
  expected = np.moveaxis(np.asarray(near.exponents(tokens).q.reshape(1, T, H * G)), 1, 2)
  found, largest = copies(x, [Copy(jnp.float16)], room=1, angles=angles, interpret=INTERPRETED)
  np.testing.assert_array_equal(scales.of_queries(largest, room=1), expected)
  scaled = turn(x, radians) * 2.0 ** -np.moveaxis(expected, 1, 2)[..., None].astype(np.float64)
  comparing.assert_close(found, scaled, 4e-4, "found")
  assert np.max(np.abs(found)) < 1


def test_copies_without_a_rotation_are_exact():
  x, _, _ = make(2, start=False)
  same, narrow = copies(x.astype(jnp.float16), [Copy(jnp.float16), Copy(jnp.bfloat16)], interpret=INTERPRETED)
  np.testing.assert_array_equal(same, x.astype(jnp.float16))
  np.testing.assert_array_equal(narrow, x.astype(jnp.float16).astype(jnp.bfloat16))


def test_all_vectors_of_a_head_may_be_divided_by_one_power_of_two_before_they_are_rounded():
  x, _, _ = make(4, start=False)
  factor = jnp.asarray(np.random.default_rng(7).uniform(size=(1, H * G, T)), jnp.float32)
  exponent = jnp.asarray([[20, -14]], jnp.int32)  # what float16 could not hold
  x = x.at[:, :, 0].multiply(jnp.bfloat16(2.0**20)).at[:, :, 1].multiply(jnp.bfloat16(2.0**-14))
  (found,) = copies(x, [Copy(jnp.float16, factor)], exponent=exponent, interpret=INTERPRETED)
  whole = np.asarray(x, np.float32) * np.exp2(np.asarray([-20.0, 14.0], np.float32))[:, None]
  whole = whole.astype(np.float16).astype(np.float32)
  expected = whole * np.moveaxis(np.asarray(factor), 1, 2)[..., None]
  np.testing.assert_array_equal(found, expected.astype(np.float16))


def test_only_heads_that_are_wanted_are_copied():
  x, _, _ = make(8, start=False)
  only = jnp.asarray([[0, 1]], jnp.int32)
  found, size = copies(x, [Copy(jnp.float16)], room=0, only=only, interpret=INTERPRETED)
  everything, sizes = copies(x, [Copy(jnp.float16)], room=0, interpret=INTERPRETED)
  np.testing.assert_array_equal(found[:, :, 1], everything[:, :, 1])
  np.testing.assert_array_equal(size[:, 1], sizes[:, 1])
  assert not np.array_equal(found[:, :, 0], everything[:, :, 0])  # but anything


@pytest.mark.usefixtures("no_races")
@pytest.mark.parametrize("time_last", [False, True])
def test_a_copy_may_be_of_some_heads_where_another_is_of_all(time_last):
  x, _, _ = make(8, start=False)
  some, axis = jnp.asarray([[0, 1]], jnp.int32), 1 if time_last else 2
  wanted = [Copy(jnp.float16), Copy(jnp.bfloat16, jnp.full((1, H * G, T), 3.0), time_last, of_some=True)]
  how = {"room": 0, "interpret": plgpu.InterpretGPUParams(detect_races=True)}
  whole, found, size = copies(x, wanted, some=some, **how)
  whole_before, found_before, size_before = copies(x, wanted, **how)
  np.testing.assert_array_equal(whole, whole_before)
  np.testing.assert_array_equal(size, size_before)
  of_heads, of_heads_before = (np.moveaxis(np.asarray(a), axis, 0) for a in (found, found_before))
  np.testing.assert_array_equal(of_heads[1], of_heads_before[1])
  assert not np.array_equal(of_heads[0], of_heads_before[0])  # but anything


@pytest.mark.slow
@pytest.mark.usefixtures("no_races")
def test_tiles_that_a_block_takes_one_after_another_are_those_of_a_block_each(monkeypatch):
  x, angles, _ = make(9, start=True, time=4 * ROWS)
  wanted = [Copy(jnp.float16), Copy(jnp.bfloat16, time_last=True)]
  speed, factor = jnp.arange(D // 2, dtype=jnp.float32).repeat(2), jnp.full((1, H * G, 4 * ROWS), 3.0)
  dx = jnp.asarray(np.random.default_rng(4).normal(size=x.shape), jnp.float32)

  def both():
    how = {"angles": angles, "interpret": plgpu.InterpretGPUParams(detect_races=True)}
    back = gradients(x.astype(jnp.float16), dx, factor, jnp.bfloat16, speed=speed, **how)
    return *copies(x, wanted, room=1, **how), *back

  each = both()
  monkeypatch.setattr("kernels_pallas.gpu.tiles.MULTIPROCESSORS", 0)  # then no number of blocks is too small
  for one, other in zip(each, both(), strict=True):
    np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("rotated", [False, True])
def test_gradients_go_back_through_the_rotation_and_are_summed(rotated):
  x, angles, radians = make(3, start=True)
  random = np.random.default_rng(4)
  x, dx = x.astype(jnp.float16), jnp.asarray(random.normal(size=x.shape), jnp.float32)
  factor, speed = jnp.full((1, H * G, T), 3.0), jnp.asarray(random.uniform(size=D // 2).repeat(2), jnp.float32)
  how = {"angles": angles, "speed": speed} if rotated else {"unit": jnp.full((1, H), 2.0)}
  found = gradients(x, dx, factor, jnp.float32, **how, interpret=INTERPRETED)
  comparing.assert_close(found.given, 3 * turn(dx, -radians if rotated else 0 * radians), 1e-4, "given")
  exact, dx = np.asarray(x.astype(jnp.bfloat16), np.float64) / (1 if rotated else 2), np.asarray(dx, np.float64)
  comparing.assert_close(found.pulled, np.moveaxis(np.sum(exact * dx, axis=-1), 1, 2), 1e-5, "pulled")
  if rotated:
    quarter = turn(exact, np.full_like(radians, np.pi / 2))
    expected = np.sum(np.asarray(speed, np.float64) * quarter * dx, axis=-1)
    comparing.assert_close(found.turned, np.moveaxis(expected, 1, 2), 1e-5, "turned")
  else:
    assert found.turned is None


def test_a_key_of_nothing_has_no_gradient_at_a_high_power():
  k = jnp.ones((1, ROWS, 1, 32), jnp.bfloat16).at[:, 3].set(0.0)
  exponents = near.exponents(near.Tokens(k[:, :, :, None], k, k, None, None))
  keys = arrays.Keys(None, k.astype(jnp.float16), *[None] * 6)
  x = near.Operands(k.astype(jnp.float16), keys, None, k, *exponents)
  settings = Settings(10, ROWS, ROWS, ROWS, "high", interpret=INTERPRETED)
  dx = jnp.ones(k.shape).at[:, 3].set(0.0)
  found = attention_backward.Gradients(dx, dx, None)
  _, dk, pulls = near_backward.finished(x, found, None, (jnp.bfloat16, jnp.bfloat16), settings)
  np.testing.assert_array_equal(dk[0, :, 0, 0], 10 / 2 * (np.arange(ROWS) != 3))  # a key of 1 was divided by 2
  assert np.all(np.isfinite(pulls.G[1]))


def test_vectors_of_any_size_are_scaled_by_normal_numbers():
  sizes = jnp.asarray([1e-38, 1e-20, 1.0, 1e38, 3e38], jnp.bfloat16)
  k = jnp.broadcast_to(sizes[None, :, None, None], (1, 5, 1, 32))
  q, k, top = near.exponents(near.Tokens(k[:, :, :, None], k, k, None, None))
  assert np.all(np.abs(np.concatenate([np.ravel(x) for x in (q, k, top)])) <= 125)
  scaled = np.asarray(sizes, np.float64) * 2.0 ** -np.asarray(k)[0, :, 0]
  assert np.all((scaled >= 0.25) & (scaled < 16))
