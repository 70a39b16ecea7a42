"""The chunked form by Pallas kernels at any power: chunk after chunk, each from the state that those before it left.

The same function as `chunked.attend`, for NVIDIA Hopper. Inside chunks it is the attention form. **So is a whole call
whose gates leave little to read**, if no form was asked for: which it is is known on the device.
"""

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from csympow.forms import fused, near, rotating, scales
from csympow.forms.memory import Memory, empty
from csympow.forms.spans import Settings, in_spans
from csympow.forms.visible import anywhere, may_spare_states, share_in_sight

_MORE = 1.4  # is read than gates alone leave


def attend(
  x: near.Tokens, memory: Memory | None, settings: Settings, dtype: DTypeLike, return_memory: bool
) -> tuple[Float[Array, "B T H g dv"], Memory | None]:
  """`chunked.attend` with y in `dtype`. Queries beside a state are of about unit length, chunks whole BLOCKs."""
  time = x.k.shape[1]
  may_fade = settings.attention_share > 0 and may_spare_states(time, settings)
  if not may_fade or memory is not None or return_memory:
    return _attend(x, memory, settings, dtype, return_memory)

  def by_chunks(x: near.Tokens) -> Float[Array, "B T H g dv"]:
    return _attend(x, None, settings, dtype, return_memory=False)[0]

  def by_keys(x: near.Tokens) -> Float[Array, "B T H g dv"]:
    return fused.attend(x, None, settings._replace(chunk=time), dtype, return_memory=False)[0]

  much = _MORE * share_in_sight(lax.stop_gradient(x.log_gate)) > settings.attention_share
  y: Array = lax.cond(anywhere(much.astype(jnp.int32)[None, None]), by_chunks, by_keys, x)  # as if of one head
  return y, None


def _attend(
  x: near.Tokens, memory: Memory | None, settings: Settings, dtype: DTypeLike, return_memory: bool
) -> tuple[Float[Array, "B T H g dv"], Memory | None]:
  count, settings = x.k.shape[1] // settings.chunk, settings._replace(states="expanded")
  longest = jnp.zeros_like(x.k[:, 0, :, 0], jnp.int32)
  if memory is None:  # then all keys can be scaled alike, and no power of them is out of range
    x = x._replace(q=scales.unit(x.q.astype(jnp.float32)))
    longest = lax.stop_gradient(near.exponents(x).top)
    memory = empty(x.k.astype(jnp.float32), x.v, settings.power)
  k = (x.k * scales.power_of_two(-longest)[:, None]).astype(x.k.dtype)

  def advance(memory: Memory, x: near.Tokens) -> tuple[Memory, Float[Array, "B t H g dv"]]:
    y, after = fused.attend(x, memory, settings, dtype, return_memory=True)
    assert after is not None
    return after, y

  q, k, v, log_gate = (in_spans(a, count) for a in (x.q, k, x.v, x.log_gate))
  chunks = near.Tokens(q, k, v, log_gate, rotating.by_spans(x.rotation, count))
  final, y = lax.scan(advance, memory, chunks)
  y = jnp.moveaxis(y, 0, 1)
  scale = scales.power_of_two(jnp.clip(settings.power * longest, -126, 126))[..., None]
  return y.reshape(y.shape[0], -1, *y.shape[3:]), Memory(*(a * scale for a in final)) if return_memory else None
