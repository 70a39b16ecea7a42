"""What the attention kernels on TPU share: blocks of tokens, and a grid over the pairs of blocks that see each other.

Tokens lie on lanes and coordinates on sublanes; scores stand with keys down and queries across. A query's weights for
keys of an earlier block are discounted to that block's end, and the sums so far by one number when the next block
begins; only inside a block are gates exponentials of pairs.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, BFloat16, Float

from kernels_pallas.tpu.shifts import LANES, VMEM, Chunks, column, discounts, tokens_down

BLOCK = 512  # tokens in a block, at most
_PIECE = 256  # queries and keys whose scores are made at once

PARAMETERS = pltpu.CompilerParams(
  dimension_semantics=("parallel", "parallel", "arbitrary", "arbitrary", "arbitrary"), vmem_limit_bytes=VMEM
)
type Place = Callable[..., tuple[Any, Any, Any]]  # (query of a group, block of queries, block of keys) in the grid


def block_size(time: int) -> int:
  """Tokens in a block; time is filled up to whole blocks."""
  return min(BLOCK, -(-time // LANES) * LANES)


class Triangle(NamedTuple):
  """A grid over the pairs a >= b of n blocks without holes: rows a and n - 1 - a make one row of n + 1.

  Of an odd n the last row stands alone, and those before it make rows of n.
  """

  blocks: int

  @property
  def grid(self) -> tuple[int, int]:
    """Its two axes."""
    return (self.blocks + 1) // 2, self._even + 1

  def pair(self, row: Any, col: Any) -> tuple[Any, Any]:
    """(a, b) at a place of the grid: b from 0 to a."""
    if self._even < self.blocks:
      row = jnp.where(row == self.blocks // 2, self.blocks - 1, row)
    first = col <= row
    return jnp.where(first, row, self._even - 1 - row), jnp.where(first, col, col - row - 1)

  def reversed_pair(self, row: Any, col: Any) -> tuple[Any, Any]:
    """(a, b) at a place of the grid: a from n - 1 to b."""
    b, a = self.pair(row, col)
    return self.blocks - 1 - a, self.blocks - 1 - b

  @property
  def _even(self) -> int:
    return self.blocks - self.blocks % 2


def specs(x: Chunks, block: int, place: Place) -> list[pl.BlockSpec]:
  """The blocks of a pair."""
  head_dim, value_dim = x.k.shape[2], x.v.shape[2]
  whole = pl.BlockSpec((1, 1, 1, x.across.shape[-1]), lambda b, h, *at: (b, h, 0, 0), memory_space=pltpu.SMEM)
  keys = [of_keys(rows, block, place) for rows in (head_dim, value_dim)]
  gate = pl.BlockSpec((1, 1, 1, block), lambda b, h, *at: (b, h, 0, place(*at)[1]))
  return [of_queries(head_dim, block, place), *keys, gate, of_keys(1, block, place), whole]


def of_queries(rows: int, block: int, place: Place) -> pl.BlockSpec:
  """The block of an array B H g rows T."""

  def index(b: Any, h: Any, *at: Any) -> tuple[Any, ...]:
    g, i, _ = place(*at)
    return b, h, g, 0, i

  return pl.BlockSpec((1, 1, 1, rows, block), index)


def of_keys(rows: int, block: int, place: Place) -> pl.BlockSpec:
  """The block of an array B H rows T."""
  return pl.BlockSpec((1, 1, rows, block), lambda b, h, *at: (b, h, 0, place(*at)[2]))


class Piece(NamedTuple):
  """Some queries and some keys of a pair of blocks."""

  queries: slice
  keys: slice


def pieces(block: int, *, near: bool) -> list[Piece]:
  """All of a pair of blocks, by queries; of a block with itself, what has a query after a key."""
  parts = _parts(block, piece_size(block))
  return [Piece(i, j) for i in parts for j in parts if j.start < i.stop or not near]


def piece_size(block: int) -> int:
  """Tokens in a piece."""
  return _PIECE if block % _PIECE == 0 else LANES


def _parts(block: int, size: int) -> list[slice]:
  return [slice(start, start + size) for start in range(0, block, size)]


def lay_down(out: Any, x: BFloat16[Array, "d t"]) -> None:
  """Writes the vectors of a block with tokens down, once for all that reads them."""
  for part in _parts(x.shape[1], LANES):
    out[part] = tokens_down(x[:, part])


def spread(out: Any, row: Float[Array, "1 t"]) -> None:
  """Writes the numbers of a block's tokens down, each across a whole row."""
  for part in _parts(row.shape[1], LANES):
    out[part] = jnp.broadcast_to(column(row[:, part]), (LANES, out.shape[1]))


def within_block(gate_ref: Any, piece: Piece) -> Float[Array, "j i"]:
  """The discounts of pairs in one block."""
  pulls = column(gate_ref[0, 0, :, piece.keys])
  return discounts(gate_ref[0, 0, :, piece.queries], pulls, piece.queries.start - piece.keys.start)


def scratch(*sizes: int, block: int) -> list[Any]:
  """Memory for a block's vectors of these sizes and for its discounts, tokens down."""
  vectors = [pltpu.VMEM((block, size), jnp.bfloat16) for size in sizes]
  return [*vectors, pltpu.VMEM((block, piece_size(block)), jnp.float32)]
