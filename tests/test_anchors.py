"""Sums over chunks that are known another way, too: where what they miss is put."""

import jax.numpy as jnp
import numpy as np

from csympow.forms import anchors


def test_what_a_sum_misses_is_not_put_where_little_was_added():
  random = np.random.default_rng(0)
  tokens, pairs, quiet = 64, 8, 16
  exact = random.normal(size=(1, tokens, 1, pairs))
  exact[:, quiet:] *= 1e4
  exact[..., -1] /= np.where(np.arange(tokens) < quiet, 1.0, 1e4)[:, None]  # of which one pair saw nothing
  rounded = exact * (1 + 1e-3 * random.normal(size=exact.shape))
  ends = np.concatenate([np.zeros((1, 1, 1, pairs)), exact.sum(axis=1)[:, None]], axis=1)
  found = np.asarray(anchors._anchored((jnp.asarray(rounded), jnp.zeros(exact.shape)), jnp.asarray(ends)), np.float64)
  np.testing.assert_allclose(found.sum(axis=1), exact.sum(axis=1), rtol=1e-4, atol=0.1)
  before, after = (np.abs(x[:, :quiet] - exact[:, :quiet]).max() for x in (rounded, found))
  assert after < 2 * before


def test_what_no_state_reached_is_left_as_it_was():
  random = np.random.default_rng(1)
  tokens, reached = 64, 48
  parts = tuple(jnp.asarray(random.normal(size=(1, tokens, 1)), jnp.float32) for _ in range(2))
  none = jnp.zeros((1, tokens, 1))
  reach = anchors.Reach(none, none.at[:, reached:].set(1.0))
  ends = jnp.asarray([0.0, 3.0])[None, :, None]
  found = np.asarray(anchors._anchored(parts, ends, reach))
  np.testing.assert_array_equal(found[:, :reached], np.asarray(parts[0] + parts[1])[:, :reached])
  np.testing.assert_allclose(found.sum(), 3.0, rtol=1e-5)


def test_heads_without_a_state_keep_their_sums():
  parts = tuple(jnp.asarray(np.random.default_rng(n).normal(size=(1, 64, 2)), jnp.float32) for n in range(2))
  ends = jnp.asarray([0.0, 5.0, 7.0])[None, :, None] * jnp.asarray([0.0, 1.0])
  found = np.asarray(anchors._anchored(parts, ends, has_state=jnp.asarray([[0, 1]], jnp.int32)))
  np.testing.assert_array_equal(found[..., 0], (parts[0] + parts[1])[..., 0])
  np.testing.assert_allclose(found[..., 1].reshape(2, 32).sum(axis=1), [5.0, 2.0], rtol=1e-5)
