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


# How pairs are shared out is known when the kernel is compiled, who forgets is not.
@pytest.mark.parametrize(("batch", "heads"), [(16, 12), (16, 8), (32, 12), (15, 12), (5, 20), (3, 64)])
@pytest.mark.parametrize("forgetting", [slice(0, None, 2), slice(0, None, 4), slice(0, 6), slice(1, 2)], ids=str)
def test_blocks_have_as_much_to_do_whichever_heads_forget_or_there_is_one_for_each_pair(batch, heads, forgetting):
  turns = Turns.of_few_blocks(batch * heads, 16, at_once=132, alike=False, heads=heads)
  if not turns.by_head:
    assert turns.blocks == batch * heads * 8
    return
  assert turns.blocks == 132
  reads = np.full(heads, 1.0)
  reads[forgetting] = 0.2  # of what others read
  work = [sum(reads[row // batch] * (tile + 1) for row, tile in block) for block in places(turns)]
  assert max(work) <= 1.07 * sum(work) / turns.blocks


def test_some_numbers_of_heads_can_be_shared_out_evenly_and_others_not():
  def even(batch, heads):
    return Turns.of_few_blocks(batch * heads, 16, at_once=132, alike=False, heads=heads).by_head

  assert even(16, 12)  # 65,536 tokens
  assert not even(5, 20)


def test_where_more_blocks_run_at_once_each_has_one_place():
  assert Turns.of_few_blocks(3, 4, at_once=6, alike=True).several
  assert not Turns.of_few_blocks(3, 4, at_once=7, alike=True).several
