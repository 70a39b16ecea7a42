"""What the attention kernels on Hopper read and write."""

from typing import NamedTuple

from jaxtyping import Array, BFloat16, Float, Float16, Int


class Keys(NamedTuple):
  """Keys and gates as the kernels read them. Gates are logarithms to base 2, counted from the start of a tile."""

  folded: Float16[Array, "B T H d"] | None  # times `fold`: discounted to the end of their tile
  plain: Float[Array, "B T H d"]
  fold: Float[Array, "B H T"]
  gate: Float[Array, "B H T"]  # of a query: the discount since its tile began
  pull: Float[Array, "B H T"]  # of a key: the same, less the logarithm of its scale
  decay: Float[Array, "B H n"]  # the discount across each tile, of which there may be more than of the sequence
  first: Int[Array, "B H tiles"]  # the earliest tile that is read: by a block of the grid, its first tile's
  totals: Float[Array, "4 B H n"]  # of the log gates before each tile and at its end, high and low each
  top: Int[Array, "B H"] | None = None  # they come as they were given: scaled queries are divided by 2 to this


class Carried(NamedTuple):
  """What each query has found in a state. Where rounding left a negative normaliser there is nothing to be found."""

  numerator: Float[Array, "B T Hq dv"]
  normaliser: Float[Array, "B Hq T"]
  has_state: Int[Array, "B H"] | None = None  # 0: in the head there was none, and the first two are anything
  centre: Float[Array, "B H dv"] | None = None  # the numerator is that of values less this


class Outputs(NamedTuple):
  """What each query gathers: y = high + low, and the normaliser in the keys' scale."""

  high: Float[Array, "B T Hq dv"]
  low: Float[Array, "B T Hq dv"] | None  # what rounding `high` lost
  normaliser: Float[Array, "B Hq T"]
  scaled: Float[Array, "B T Hq d"] | None = None  # queries that were scaled and rotated here, for the backward pass
  rounded: BFloat16[Array, "B T Hq d"] | None = None  # the same, if they were rotated and are as wide as values
  exponent: Int[Array, "B Hq T"] | None = None  # they were divided by 2 to this, and by 2 to the keys' `top`, if any
