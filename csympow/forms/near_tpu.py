"""What surrounds the attention kernels for TPUs: `near` with time last, and bfloat16 for everything.

bfloat16 has float32's range, so keys need no exponents of their own, only that of the longest of their head.
"""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from csympow.forms import backwards, near, rotating, scales
from csympow.forms.spans import Settings
from csympow.prefix import Total, prefix_sum
from kernels_pallas.gpu.arrays import Outputs
from kernels_pallas.gpu.attention_backward import Gradients
from kernels_pallas.tpu import attention_backward, attention_forward, pairs
from kernels_pallas.tpu.shifts import Chunks, as_one_batch
from kernels_pallas.weights import LOG2E


class Operands(NamedTuple):
  """What the kernels are given, and how it was scaled: queries and keys were divided by 2 to their exponents."""

  chunks: Chunks
  ends: Float[Array, "B H 2 n"]  # of the log gates' totals at each block's end, high and low
  q_exponent: Int[Array, "B T H g"]
  top: Int[Array, "B H"]


def running(log_gate: Float[Array, "B T H"], settings: Settings) -> Total:
  """The running totals of the log gates; without the barrier XLA would compute them again and again."""
  del settings
  return lax.optimization_barrier(prefix_sum(log_gate))


def chunks(x: near.Tokens, G: Total, size: int) -> tuple[Chunks, Int[Array, "B T H g"], Int[Array, "B H"]]:
  """The kernels' inputs, with gates counted from the start of each `size` tokens; queries' and keys' exponents."""
  q_exponent, _, top = near.exponents(x)
  q, k = rotating.rotated(x.q * scales.power_of_two(-q_exponent), x.k * scales.power_of_two(-top)[:, None], x.rotation)
  G, before, end = near.spans(G, size)

  def row(a: Float[Array, "B H n t"]) -> Float[Array, "B H 1 T"]:
    return a.reshape(*a.shape[:2], 1, -1)

  return (
    Chunks(
      q=jnp.moveaxis(scales.rounded(q, scales.BFLOAT16).astype(jnp.bfloat16), 1, -1),
      k=jnp.moveaxis(scales.rounded(k, scales.BFLOAT16).astype(jnp.bfloat16), 1, -1),
      v=jnp.moveaxis(x.v.astype(jnp.bfloat16), 1, -1),
      gate=row((G - before) * LOG2E),
      until=row(jnp.exp(end - G)),
      across=row(jnp.exp(end - before)),
    ),
    q_exponent,
    top,
  )


def operands(x: near.Tokens, settings: Settings, *, with_state: bool, save: bool) -> tuple[Operands, Total]:
  """Operands of attention over whole blocks, and all gates."""
  G = running(x.log_gate, settings)
  del with_state, save
  block = pairs.block_size(x.k.shape[1])
  given, q_exponent, top = chunks(x, G, block)
  ends = jnp.stack([total[:, block - 1 :: block] for total in G], axis=1)
  return Operands(given, jnp.moveaxis(ends, 3, 1), q_exponent, top), G


def forward(x: Operands, *, power: int, dtype: DTypeLike, save_low: bool, interpret: Any) -> tuple[Outputs, Operands]:
  """What each query gathers, and the operands of the backward pass."""
  kernel = functools.partial(attention_forward.forward, power=power, interpret=interpret)
  by_kernel = as_one_batch(kernel, x.chunks)
  batch, _, _, _, time = by_kernel.y.shape
  y = time_first(by_kernel.y).reshape(batch, time, -1, by_kernel.y.shape[3])
  high, bits = y.astype(dtype), scales.FLOAT16 if dtype == jnp.float16 else scales.BFLOAT16
  low = (y - scales.rounded(y, bits)).astype(jnp.bfloat16) if save_low else None
  return Outputs(high, low, by_kernel.normaliser.reshape(batch, -1, time)), x


def backward(x: Operands, given: backwards.Cotangents, power: int, interpret: Any) -> Gradients:
  """The gradients by all pairs, in the op's layout, but for the factor p."""
  batch, heads, group, _, time = x.chunks.q.shape

  def rows(a: Float[Array, "B Hq T"]) -> Float[Array, "B H g 1 T"]:
    return a.reshape(batch, heads, group, 1, time)

  dy = jnp.moveaxis(given.dy.reshape(batch, time, heads, group, -1), 1, -1)
  found = attention_backward.Rows(dy, rows(given.inverse), rows(given.delta))
  kernel = functools.partial(attention_backward.backward, power=power, interpret=interpret)
  by_kernel = as_one_batch(kernel, x.chunks, found, x.ends)
  dq = time_first(by_kernel.q).reshape(batch, time, heads * group, -1)
  return Gradients(dq, *(jnp.moveaxis(a, -1, 1) for a in by_kernel[1:]))


def pulls(
  x: Operands,
  dq: Float[Array, "B T Hq d"],
  dk: Float[Array, "B T H d"],
  rotation: rotating.Rotation | None,
  power: int,
) -> backwards.Pulls:
  """From the gradients by kernels, to which the factor p is missing."""
  q, k = vectors(x.chunks)
  return backwards.pulls_of(q, k, dq.reshape(q.shape), dk.reshape(k.shape), rotation, power)


def unscaled(
  x: Operands, dq: Float[Array, "B T Hq d"], dk: Float[Array, "B T H d"], power: int
) -> tuple[Float[Array, "B T H g d"], Float[Array, "B T H d"]]:
  """From the gradients by kernels those of rotated queries and keys."""
  dq = dq.reshape(*x.q_exponent.shape, -1)
  return power * dq * scales.power_of_two(-x.q_exponent), power * dk * scales.power_of_two(-x.top)[:, None]


def finished(
  x: Operands,
  dx: Gradients,
  rotation: rotating.Rotation | None,
  dtypes: tuple[DTypeLike, DTypeLike],
  settings: Settings,
) -> tuple[Float[Array, "B T H g d"], Float[Array, "B T H d"], backwards.Pulls]:
  """From the gradients by kernels those of queries and keys as they were given, and what is pulled by each."""
  pulled = pulls(x, dx.q, dx.k, rotation, settings.power)
  dq, dk = rotating.unrotated(*unscaled(x, dx.q, dx.k, settings.power), rotation)
  return dq.astype(dtypes[0]), dk.astype(dtypes[1]), pulled


def vectors(x: Chunks) -> tuple[Float[Array, "B T H g d"], Float[Array, "B T H 1 d"]]:
  """Queries and keys as the kernels have them."""
  return time_first(x.q).astype(jnp.float32), time_first(x.k[:, :, None]).astype(jnp.float32)


def time_first(x: Float[Array, "B H g d T"]) -> Float[Array, "B T H g d"]:
  """From the kernels' layout to the op's."""
  return jnp.moveaxis(x, -1, 1)
