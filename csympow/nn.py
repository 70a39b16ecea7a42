"""The attention layer of the paper as a Flax NNX module: projections, gates, rotation, and a cache for decoding.

`ConformalAttention` takes the place of a multi-head self-attention layer in any model. One argument chooses between the
paper's four variants, which differ in nothing but what follows:

| variant       | weights        | gamma        | beta          | cache                           |
|---------------|----------------|--------------|---------------|---------------------------------|
| softmax       | exp(q . k)     | 1            | 1 (rotary)    | KVCache, a slot for every token |
| sympow        | (q . k)^p      | 1            | 1 (rotary)    | csympow.State, of constant size |
| sympow+gating | b_ij (q . k)^p | sigmoid(W x) | 1 (rotary)    | csympow.State, of constant size |
| conformal     | b_ij (q . k)^p | sigmoid(W x) | 1 + tanh(W x) | csympow.State, of constant size |

Where a state is larger than all keys and values so far, `init_cache(keep_keys=True)` keeps those (a
csympow.keys.KeyCache), and `fold` turns them into the state when that has become the cheaper.
"""

import functools
import math
import numbers
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype, Initializer
from jaxtyping import Array, Float, Integer

import csympow
from csympow import keys, softmax
from csympow.checks import require_count, validated
from csympow.keys import KeyCache
from csympow.sharding import Layout
from csympow.softmax import KVCache
from csympow.state import of_layer, with_layer
from csympow.validation import FORMS, IMPLEMENTATIONS, check_chunk_size, check_implementation, check_power

VARIANTS = ("softmax", "sympow", "sympow+gating", "conformal")

# The arguments of the layer that are no dtype, initialiser or random stream: what a config file would name.
_SIZES = ("d_model", "num_heads", "num_kv_heads", "head_dim")
OPTIONS = (*_SIZES, "power", "variant", "max_length", "gate_offset", "form", "chunk_size", "implementation")

Cache = csympow.State | KVCache | KeyCache


def check_array(name: str, array: Any, layout: tuple[str | int, ...], kind: Any) -> None:
  """Raises a ValueError unless it is an array of this kind and layout, in which words stand for any size."""
  shape = getattr(array, "shape", ())
  fits = len(shape) == len(layout) and all(want in (size, str(want)) for want, size in zip(layout, shape, strict=True))
  if not fits or not jnp.issubdtype(array.dtype, kind):
    came = f"{array.dtype}{list(shape)}" if hasattr(array, "dtype") else repr(array)
    raise ValueError(f"{name} must be {kind.__name__} [{', '.join(map(str, layout))}], got {came}")


def check_options(given: Mapping[str, Any]) -> None:
  """Raises a ValueError, in one line, for options of the layer that mean nothing, alone or together."""
  for name in ("d_model", "num_heads", "max_length"):
    require_count(name, given[name])
  if given["max_length"] >= 2**63:
    raise ValueError(f"max_length must be below 2**63, got {given['max_length']}")
  check_power(given["power"])
  check_chunk_size(given["chunk_size"])
  d_model, num_heads, num_kv_heads, head_dim = (given[name] for name in _SIZES)
  if num_kv_heads is not None:
    require_count("num_kv_heads", num_kv_heads)
    if num_heads % num_kv_heads:
      raise ValueError(f"num_kv_heads must divide num_heads={num_heads}, got {num_kv_heads}")
  if head_dim is None:
    if d_model % num_heads:
      raise ValueError(f"num_heads must divide d_model={d_model} unless head_dim is given, got {num_heads}")
    head_dim = d_model // num_heads
  require_count("head_dim", head_dim)
  if head_dim % 2:
    raise ValueError(f"head_dim must be even (rotations turn pairs of coordinates), got {head_dim}")
  offset = given["gate_offset"]
  if isinstance(offset, bool) or not isinstance(offset, numbers.Real) or not math.isfinite(offset):
    raise ValueError(f"gate_offset must be a finite number, got {offset!r}")
  variant = given["variant"]
  softmax = variant == "softmax"
  words = {
    "variant": VARIANTS,
    "form": ("auto", "attention") if softmax else FORMS,
    "implementation": (None, "xla", "cudnn") if softmax else IMPLEMENTATIONS,
  }
  for name, fitting in words.items():
    if given[name] not in fitting:
      fits = ", ".join(map(str, fitting)) + ("" if name == "variant" else f" for variant {variant!r}")
      raise ValueError(f"{name} must be one of {fits}, got {given[name]!r}")
  if not softmax:
    check_implementation(given["implementation"])


def check_cache(layer: "ConformalAttention", cache: Any, batch: int) -> None:
  """Raises a ValueError unless the cache is one of this layer's for this many rows."""
  expected = (KVCache,) if layer.variant == "softmax" else (csympow.State, KeyCache)
  if not isinstance(cache, expected):
    names = " or ".join(kind.__name__ for kind in expected)
    wanted = f"the {names} that init_cache gives for variant {layer.variant!r}"
    raise ValueError(f"cache must be {wanted}, got {type(cache).__name__}")  # noqa: TRY004, every bad input is one
  slots = None if isinstance(cache, csympow.State) else cache.k.shape[-3]
  keep_keys = isinstance(cache, KeyCache)
  fits = jax.eval_shape(functools.partial(layer.init_cache, batch, slots, keep_keys=keep_keys))
  for name, came, fitting in zip(cache._fields, cache, fits, strict=True):
    if came.shape != fitting.shape:
      wanted = f"{list(fitting.shape)} for this layer and {batch} rows"
      raise ValueError(f"cache.{name} must have shape {wanted}, got {list(came.shape)}")


def _check_sequence(given: Mapping[str, Any]) -> None:
  layer, x, segment_ids = given["self"], given["x"], given["segment_ids"]
  check_array("x", x, ("B", "T", layer.d_model), jnp.floating)
  if segment_ids is not None:
    check_array("segment_ids", segment_ids, x.shape[:2], jnp.signedinteger)
  if "cache" in given:
    cache = given["cache"]
    check_cache(layer, cache, x.shape[0])
    slotted = isinstance(cache, KVCache | KeyCache)
    if slotted and segment_ids is None and x.shape[1] > cache.k.shape[1]:
      raise ValueError(f"x must have no more tokens than the cache has slots, {cache.k.shape[1]}, got {x.shape[1]}")


def _check_token(given: Mapping[str, Any]) -> None:
  check_array("x", given["x"], ("B", given["self"].d_model), jnp.floating)
  cache = given["cache"]
  if given["layer"] is not None:
    cache = jax.eval_shape(lambda cache: jax.tree.map(lambda a: a[0], cache), cache)
  check_cache(given["self"], cache, given["x"].shape[0])


class ConformalAttention(nnx.Module):
  """Causal multi-head self-attention with conformal symmetric-power weights, in place of softmax attention.

  Parameters are `query`, `key`, `value` and `out` (kernels `d_model x heads x head_dim` and back), and where the
  variant has them `gamma` and `beta` (`d_model x kv heads`). There are no biases: the equations have none, and with
  none padding stays exactly zero.

  Args:
    d_model: width of the input and of the output.
    num_heads: number of query heads.
    num_kv_heads: number of key and value heads, each shared by a group of query heads; gates and rotations are per
      key head. None: as many as query heads.
    head_dim: width of a head. None: `d_model / num_heads`.
    power: the even p of the weights; softmax has none and ignores it.
    variant: "softmax", "sympow", "sympow+gating" or "conformal".
    max_length: the constant N of the rotary rates: the longest document the model is meant for, not the length at
      hand. Nothing is allocated for it and nothing breaks beyond it.
    gate_offset: added to the gate's logit, `gamma = sigmoid(W_gamma x + gate_offset)`. The default, 0, is the paper's
      equation as printed, and in our one probe (6 layers, context 4,096, one seed) it reached the lower loss: 4.14
      against 4.25 with the 6.906768 of the authors' later code, which starts every head at gamma = 0.999, a memory of a
      thousand tokens, where 0 starts at two tokens. Longer training contexts may prefer the latter.
    form: "auto", "attention", "chunked" or "recurrent", as in `csympow.attention`; softmax has the attention form only.
    chunk_size: as in `csympow.attention`.
    implementation: as in `csympow.attention`. For softmax: None takes cuDNN's flash attention where the program is
      compiled for an NVIDIA GPU and cuDNN takes the shapes (16-bit types, head_dim a multiple of 8 up to 128), and
      XLA's elsewhere, whose scores take memory T x T; "xla" and "cudnn" are obeyed.
    dtype: what the projections and the attention compute in. None, the convention of every Flax layer, promotes the
      input and the parameters together, so that nothing is rounded that the caller did not ask to be; for mixed
      precision pass `jnp.bfloat16` and keep `param_dtype`. Gates, rotations and state are float32 in any case.
    param_dtype: what the parameters are stored in.
    kernel_init: initialises every kernel. `nnx.with_partitioning` works here.
    out_kernel_init: initialises `out`, for models that scale down what enters the residual stream. None: `kernel_init`.
    layout: the mesh that whole sequences are attended to on; `prefill` and `step` run where their arguments lie.
    rngs: the random streams to initialise from.
  """

  @validated(check_options)
  def __init__(
    self,
    d_model: int,
    num_heads: int,
    *,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    power: int = 2,
    variant: str = "conformal",
    max_length: int = 65_536,
    gate_offset: float = 0.0,
    form: str = "auto",
    chunk_size: int | None = None,
    implementation: str | None = None,
    dtype: Dtype | None = None,
    param_dtype: Dtype = jnp.float32,
    kernel_init: Initializer = nnx.initializers.lecun_normal(),  # noqa: B008, a pure function
    out_kernel_init: Initializer | None = None,
    layout: Layout | None = None,
    rngs: nnx.Rngs,
  ) -> None:
    self.d_model = d_model
    self.num_heads = num_heads
    self.num_kv_heads = num_kv_heads or num_heads
    self.head_dim = head_dim or d_model // num_heads
    self.power = power
    self.variant = variant
    self.max_length = max_length
    self.gate_offset = gate_offset
    self.form = form
    self.chunk_size = chunk_size
    self.implementation = implementation
    self.dtype = dtype
    self.param_dtype = param_dtype
    self.layout = layout

    linear = functools.partial(
      nnx.LinearGeneral, use_bias=False, dtype=dtype, param_dtype=param_dtype, kernel_init=kernel_init, rngs=rngs
    )
    queries, keys = (self.num_heads, self.head_dim), (self.num_kv_heads, self.head_dim)
    self.query = linear(d_model, queries)
    self.key = linear(d_model, keys)
    self.value = linear(d_model, keys)
    self.out = linear(queries, d_model, axis=(-2, -1), kernel_init=out_kernel_init or kernel_init)
    # A memory lasts 1 / (1 - gamma) tokens: a logit rounded to the 8 bits of bfloat16 would move long ones by percents.
    logit = functools.partial(linear, d_model, self.num_kv_heads, preferred_element_type=jnp.float32)
    self.gamma = logit() if variant in ("sympow+gating", "conformal") else nnx.data(None)
    self.beta = logit() if variant == "conformal" else nnx.data(None)

  def gates(
    self, x: Float[Array, "*lead d_model"]
  ) -> tuple[Float[Array, "*lead H"] | None, Float[Array, "*lead H"] | None]:
    """`(log_gate, beta)` for an input, float32 and per key head; None where the variant has none.

    They are what the op is given, and what to log: `1 / (1 - exp(log_gate))` tokens is how far back a head would
    remember at a constant gate, and `beta` is its speed of rotation relative to plain rotary.
    """
    log_gate = None if self.gamma is None else jax.nn.log_sigmoid(self.gamma(x) + self.gate_offset)
    beta = None if self.beta is None else 1 + jnp.tanh(self.beta(x))
    return log_gate, beta

  @validated(_check_sequence)
  def __call__(
    self, x: Float[Array, "B T d_model"], segment_ids: Integer[Array, "B T"] | None = None
  ) -> Float[Array, "B T d_model"]:
    """Attends over whole sequences.

    Args:
      x: the input.
      segment_ids: tokens attend within their own run of equal ids, as if each run stood in a row of its own; ids
        below 0 are padding and give 0. Softmax needs a T x T mask for them; the other variants need nothing.
    """
    q, k, v = self.query(x), self.key(x), self.value(x)
    if self.variant == "softmax":
      attend_softmax = softmax.attention if self.layout is None else self.layout.softmax
      return self.out(attend_softmax(q, k, v, self._rates(), segment_ids, self.implementation))
    attend = csympow.attention if self.layout is None else self.layout.attention
    return self.out(attend(q, k, v, segment_ids=segment_ids, **self._gating(x), **self._how()))

  def init_cache(
    self, batch: int, max_length: int | None = None, dtype: Dtype | None = None, *, keep_keys: bool = False
  ) -> Cache:
    """The empty cache to decode from, an immutable pytree.

    Args:
      batch: number of rows.
      max_length: how many tokens a cache of keys and values has room for. A state is of one size whatever the length,
        and ignores it.
      dtype: what it is stored in. None: float32 for a state, since errors stay in it; for keys and values the layer's
        `dtype`.
      keep_keys: whether to keep keys and values instead of a state; up to `tokens_of_a_state` they are the fewer bytes.
        Softmax has nothing else to keep.
    """
    require_count("batch", batch)
    if self.variant != "softmax" and not keep_keys:
      state_dtype = jnp.float32 if dtype is None else dtype
      return csympow.init_state(
        batch, self.num_kv_heads, self.head_dim, self.head_dim, power=self.power, dtype=state_dtype
      )
    if max_length is None:
      which = f"variant {self.variant!r}" + ("" if self.variant == "softmax" else " with keep_keys")
      raise ValueError(f"max_length must be given for the cache of {which}, which keeps every key: got None")
    require_count("max_length", max_length)
    dtype = self._key_dtype if dtype is None else dtype
    if self.variant != "softmax":
      return keys.init_keys(batch, max_length, self.num_kv_heads, self.head_dim, self.head_dim, dtype)
    shape = (batch, max_length, self.num_kv_heads, self.head_dim)
    return KVCache(k=jnp.zeros(shape, dtype), v=jnp.zeros(shape, dtype), length=jnp.zeros((batch,), jnp.int32))

  @property
  def tokens_of_a_state(self) -> int:
    """How many tokens' keys and values take as many bytes as the state."""
    return keys.tokens_of_a_state(self.num_kv_heads, self.head_dim, self.head_dim, self.power, self._key_dtype)

  def fold(self, cache: KeyCache) -> csympow.State:
    """The state that the tokens of a cache of keys add up to, to go on from."""
    return keys.fold(cache, self.power)

  @property
  def _key_dtype(self) -> Dtype:
    return self.param_dtype if self.dtype is None else self.dtype

  @validated(_check_sequence)
  def prefill(
    self, x: Float[Array, "B T d_model"], cache: Cache, segment_ids: Integer[Array, "B T"] | None = None
  ) -> tuple[Float[Array, "B T d_model"], Cache]:
    """Attends over the next tokens of sequences whose past is in the cache, in pieces of any length.

    The cache continues into the first run of `segment_ids`, and the one returned holds the last run. A cache of keys
    that overflows turns the output of its row into NaN, from then on: a compiled program cannot raise, and this cannot
    be overlooked. Softmax needs a mask of T x (slots + T) for a piece of T tokens.
    """
    q, k, v = self.query(x), self.key(x), self.value(x)
    if isinstance(cache, KVCache):
      y, cache = softmax.prefill(q, k, v, cache, self._rates(), segment_ids, self.implementation)
    elif isinstance(cache, KeyCache):
      y, cache = keys.prefill(q, k, v, cache, self.power, segment_ids=segment_ids, **self._gating(x))
    else:
      y, cache = csympow.prefill(q, k, v, state=cache, segment_ids=segment_ids, **self._gating(x), **self._how())
    return self.out(y), cache

  @validated(_check_token)
  def step(
    self, x: Float[Array, "B d_model"], cache: Cache, layer: Integer[Array, ""] | None = None
  ) -> tuple[Float[Array, "B d_model"], Cache]:
    """Attends over one more token: `prefill` of a single token, without the time axis.

    With a layer, the cache is a stack along a first axis, of which that layer's part is meant: a state changes there in
    its place.
    """
    if layer is not None and not isinstance(cache, csympow.State):
      y, part = self.step(x, of_layer(cache, layer))
      return y, with_layer(cache, part, layer)
    q, k, v = self.query(x), self.key(x), self.value(x)
    if isinstance(cache, KVCache):
      y, cache = softmax.step(q, k, v, cache, self._rates())
    elif isinstance(cache, KeyCache):
      y, cache = keys.step(q, k, v, cache, self.power, **self._gating(x))
    else:
      # A step need not have a kernel where attention has one, and XLA divides no kernel among devices.
      how: Literal["xla"] | None = "xla" if self.implementation == "xla" or self.layout is not None else None
      y, cache = csympow.step(q, k, v, cache, power=self.power, **self._gating(x), implementation=how, layer=layer)
    return self.out(y), cache

  def _rates(self) -> Float[Array, "r"]:
    return csympow.rotary_rates(self.head_dim, self.max_length)

  def _gating(self, x: Float[Array, "*lead d_model"]) -> dict[str, Any]:
    log_gate, beta = self.gates(x)
    return {"log_gate": log_gate, "beta": beta, "rates": self._rates()}

  def _how(self) -> dict[str, Any]:
    return {
      "power": self.power,
      "form": self.form,
      "chunk_size": self.chunk_size,
      "implementation": self.implementation,
    }
