"""Which heads ask their states for what rounding has drowned, at p = 2.

A state is read as a sum over all products of two coordinates, and these are rounded, as its numbers are. Where queries
are nearly orthogonal to the keys in it the terms cancel, and what is left may be small beside their rounding,

    noise_i = ROUNDING b_i |q_i|^2 |S| / d          b_i: the discount since the chunk began; |S|: over all its numbers

in which |q_i|^2 / d stands for a product of two coordinates. That is compared with what queries have found, for some of
each head, and if it would be heard in y the head's queries had better read the keys themselves, or a finer state
(`csympow.forms.finely`). Who will ask a state that a call returns is not known: it is judged as if some of the
call's own tokens came again.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from csympow.forms.spans import scattered
from kernels_pallas.gpu.heard import heard
from kernels_pallas.gpu.state_read import Found
from kernels_pallas.gpu.tiles import ROWS

# Of coordinates, their products, values times these, and sums, all to bfloat16: emulated it was 0.7 to 1.4 times this.
ROUNDING = 2.0**-8
AUDIBLE = 4e-3  # of what y is beside the values' centre
_UNIT = 2.0**-9  # of a value is what rounding it may lose: values that are all but the same differ by that
_WINDOWS = 8  # of so many, at most, of 64 queries that follow one another, a head is judged


class Read(NamedTuple):
  """What is known of a sequence when its states have been read. Keys are k times scale; gates are counted by chunk."""

  q: Float[Array, "B T Hq d"]
  k: Float[Array, "B T H d"]
  k_scale: Float[Array, "B H T"]
  log_gate: Float[Array, "B H n t"]  # since the chunk began
  found: Found
  squares: Float[Array, "B H n"]  # of all numbers of the states that chunks find, summed
  centre_size: Float[Array, "B H"]  # of the vector that values are less in them
  head_dim: int  # so many of q's coordinates can be other than 0
  first: int  # of the chunks: those before it find no state


def faint(x: Read, interpret: Any = None) -> Bool[Array, "B H"]:
  """Heads whose y, less the centre, would be wrong by more than AUDIBLE."""
  batch, heads, count, chunk = x.log_gate.shape
  chunks, places = some_places(count, chunk, x.first)
  tokens = (chunks * chunk + places)[:, None] + np.arange(ROWS)
  by_time = x.log_gate.reshape(batch, heads, -1)
  found = heard(x.q, x.k, x.k_scale, by_time, x.found.numerator, tokens[:, 0], chunk, interpret=interpret)
  near, asked, square = (part.reshape(batch, heads, -1, *tokens.shape) for part in found)

  def of_each(x: Float[Array, "B Hx T"]) -> Float[Array, "B H gx m rows"]:
    return x.reshape(batch, heads, -1, x.shape[-1])[..., tokens]

  since_start = jnp.exp(of_each(by_time))
  state = jnp.sqrt(x.squares[:, :, None, chunks, None])
  noise = ROUNDING / x.head_dim * since_start * asked * state

  # Whom the chunk's own keys tell more than the state does need not hear it well.
  far = jnp.abs(of_each(x.found.normaliser))  # negative if it is drowned itself
  share = far / jnp.maximum(far + near, 2.0**-120)

  size = jnp.sqrt(square) + _UNIT * x.centre_size[:, :, None, None, None] * far
  error = jnp.minimum(share * noise / jnp.maximum(size, 2.0**-120), 1.0)
  # The mean square of those who ask, and what it may be; of numbers, whatever else there is in the sequence.
  excess = jnp.where((noise > 0) & jnp.isfinite(error), error**2 - AUDIBLE**2, 0.0)
  return jnp.sum(excess, axis=(-2, -1)).max(axis=-1) > 0


def some_places(count: int, chunk: int, first: int) -> tuple[Int[np.ndarray, "m"], Int[np.ndarray, "m"]]:
  """Of windows in `count` chunks, from the `first` on that finds a state: the chunk, and the place in it."""
  in_chunk = chunk // ROWS
  others = (count - first) * in_chunk
  windows = first * in_chunk + scattered(others, min(_WINDOWS, others))
  return windows // in_chunk, ROWS * (windows % in_chunk)
