"""States in pieces, and the kernels that write them, however they are shared out over a chip."""

import itertools

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.gpu import state_write, symmetric_write
from kernels_pallas.gpu.pieces import Piece, Pieces
from tests import comparing


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
