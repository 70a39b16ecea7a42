"""Which places a block of the attention kernel's grid takes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.gpu.turns import Turns


def places(turns):
  """Of each block those that it takes, as pairs of a row and a tile."""
  counts = np.asarray(jax.vmap(turns.many)(jnp.arange(turns.blocks, dtype=jnp.int32)))
  block, turn = np.array([(n, turn) for n, count in enumerate(counts) for turn in range(count)], np.int32).T
  found = np.stack(jax.vmap(turns.place)(jnp.asarray(block), jnp.asarray(turn)), axis=-1)
  return [[tuple(place) for place in found[block == n].tolist()] for n in range(turns.blocks)]


@pytest.mark.parametrize("alike", [True, False])
@pytest.mark.parametrize(("rows", "tiles"), [(48, 4), (24, 16), (7, 2), (12, 6), (5, 1), (40, 1), (13, 3), (1, 2)])
def test_every_place_is_taken_once_and_blocks_have_as_much_to_do(rows, tiles, alike):
  turns = Turns.of_few_blocks(rows, tiles, at_once=5, alike=alike)
  blocks = places(turns)
  assert sorted(place for block in blocks for place in block) == [(r, n) for r in range(rows) for n in range(tiles)]
  assert turns.several == (max(map(len, blocks)) > 1)
  assert turns.each is None or all(len(block) == turns.each for block in blocks)
  if turns.several:
    assert turns.blocks == (5 if alike else rows * tiles // 2)
    work = [sum(tile + 1 for _, tile in block) for block in blocks]
    assert max(work) - min(work) <= tiles + 1  # a pair


def test_where_more_blocks_run_at_once_each_has_one_place():
  assert Turns.of_few_blocks(3, 4, at_once=6, alike=True).several
  assert not Turns.of_few_blocks(3, 4, at_once=7, alike=True).several
