"""The transformer of the paper: GPT-2's shape, with rotary positions and a LayerNorm after the embedding.

    x = LayerNorm(E[tokens])
    x = x + attention(LayerNorm(x));  x = x + W_down gelu(W_up LayerNorm(x))      for every layer
    logits = LayerNorm(x) E^T

There are no biases: the equations of the paper have none, and every linear map stands behind a norm, where a bias has
little left to do.

A fresh 124M model starts at a loss near 15, not ln V = 10.8: behind its LayerNorm the embedding is nearly all of the
stream, and being tied to the logits it bets on the token just read. The first steps unlearn that.

Parameters are float32 and matrix products bfloat16. The layers are one block whose parameters carry a leading layer
axis, under a scan: a program of 48 layers compiles as fast as one of 2, unless it is unrolled.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype
from jax import lax
from jaxtyping import Array, Float, Integer

from csympow.checks import require_count, validated
from csympow.keys import KeyCache
from csympow.lookup import look_up
from csympow.nn import (
  OPTIONS,
  Cache,
  ConformalAttention,
  check_array,
  check_cache,
  check_options,
)
from csympow.sharding import Layout
from csympow.state import State, of_layer, with_layer
from csympow.validation import DTYPES

# What the backward pass finds stored of each layer, beside its input. "none": everything, or in a loop over the layers
# all but what norms and activations are made of, which takes longer to copy than to make again. "dots": the results of
# the projections, so that it repeats norms, activations and the attention itself. "full": nothing.
REMAT: dict[str, Callable[..., bool] | None] = {
  "none": None,
  "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
  "full": jax.checkpoint_policies.nothing_saveable,
}

# Finite, unlike -inf: p log p and a division by a small temperature stay finite, and yet exp of it is 0.
PADDED_LOGIT = -1e30


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """The shape of a model; the default is GPT-2's 124M, conformal at p=2.

  Attributes:
    vocab_size: number of tokens. The embedding has `padded_vocab_size` rows.
    d_model: width of the residual stream.
    num_layers: number of blocks.
    num_heads: number of query heads.
    num_kv_heads: number of key and value heads; None: as many as query heads.
    head_dim: width of a head.
    mlp_ratio: width of the MLP over `d_model`.
    power: the even p of the attention weights.
    variant: "softmax", "sympow", "sympow+gating" or "conformal".
    max_length: the constant N of the rotary rates, the longest document; never the length being run.
    gate_offset: added to the gate's logit; `csympow.nn.ConformalAttention` says why it is 0.
    remat: what the backward pass recomputes: "none" (norms and activations at most), "dots" (all but the projections)
      or "full" (whole layers).
    unroll: whether the program has each layer for itself instead of a loop over them. What the backward pass needs is
      then not copied to where a loop leaves it: faster, more memory, and longer to compile.
    form: the form of the attention, as in `csympow.attention`.
    chunk_size: the chunk of the chunked form, as in `csympow.attention`.
    implementation: the implementation of the attention, as in `csympow.nn.ConformalAttention`.
    dtype: what matrix products compute in.
    param_dtype: what parameters are stored in.
  """

  vocab_size: int = 50_257
  d_model: int = 768
  num_layers: int = 12
  num_heads: int = 12
  num_kv_heads: int | None = None
  head_dim: int = 64
  mlp_ratio: int = 4
  power: int = 2
  variant: str = "conformal"
  max_length: int = 65_536
  gate_offset: float = 0.0
  remat: str = "none"
  unroll: bool = False
  form: str = "auto"
  chunk_size: int | None = None
  implementation: str | None = None
  dtype: str = "bfloat16"
  param_dtype: str = "float32"

  def __post_init__(self) -> None:
    for name in ("vocab_size", "num_layers", "head_dim", "mlp_ratio"):
      require_count(name, getattr(self, name))
    check_options(self.attention_options)
    if self.remat not in REMAT:
      raise ValueError(f"remat must be one of {', '.join(REMAT)}, got {self.remat!r}")
    if self.unroll not in (False, True):
      raise ValueError(f"unroll must be true or false, got {self.unroll!r}")
    for name in ("dtype", "param_dtype"):
      if getattr(self, name) not in DTYPES:
        raise ValueError(f"{name} must be one of {', '.join(DTYPES)}, got {getattr(self, name)!r}")

  @property
  def padded_vocab_size(self) -> int:
    """The vocabulary rounded up to 128, for matrix units and for sharding it: 50,304 for GPT-2's 50,257."""
    return -(-self.vocab_size // 128) * 128

  @property
  def attention_options(self) -> dict[str, Any]:
    """The fields that are arguments of `csympow.nn.ConformalAttention`, by its names."""
    return {name: getattr(self, name) for name in OPTIONS}


class Block(nnx.Module):
  """One layer: attention, then the MLP, each behind a LayerNorm and added to the residual stream."""

  def __init__(self, config: ModelConfig, *, layout: Layout | None = None, rngs: nnx.Rngs) -> None:
    dtype, param_dtype = jnp.dtype(config.dtype), jnp.dtype(config.param_dtype)
    into_stream = _normal_init(1 / math.sqrt(2 * config.num_layers))
    self.makes_again = config.remat == "none" and not config.unroll
    self.attention_norm = _layer_norm(config, rngs)
    self.attention = ConformalAttention(
      **config.attention_options,
      dtype=dtype,
      param_dtype=param_dtype,
      kernel_init=_normal_init(),
      out_kernel_init=into_stream,
      layout=layout,
      rngs=rngs,
    )
    self.mlp_norm = _layer_norm(config, rngs)
    linear = functools.partial(nnx.Linear, use_bias=False, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
    self.up = linear(config.d_model, config.mlp_ratio * config.d_model, kernel_init=_normal_init())
    self.down = linear(config.mlp_ratio * config.d_model, config.d_model, kernel_init=into_stream)

  def __call__(
    self, x: Float[Array, "B T d_model"], segment_ids: Integer[Array, "B T"] | None = None
  ) -> Float[Array, "B T d_model"]:
    """A whole sequence."""
    return self._mlp(x + self.attention(self._made_again(self.attention_norm)(x), segment_ids))

  def prefill(
    self, x: Float[Array, "B T d_model"], cache: Cache, segment_ids: Integer[Array, "B T"] | None = None
  ) -> tuple[Float[Array, "B T d_model"], Cache]:
    """The next tokens."""
    y, cache = self.attention.prefill(self.attention_norm(x), cache, segment_ids)
    return self._mlp(x + y), cache

  def step(
    self, x: Float[Array, "B d_model"], cache: Cache, layer: Integer[Array, ""] | None = None
  ) -> tuple[Float[Array, "B d_model"], Cache]:
    """The next token; with a layer, by that layer's part of a stacked cache."""
    y, cache = self.attention.step(self.attention_norm(x), cache, layer)
    return self._mlp(x + y), cache

  def gates(self, x: Float[Array, "B T d_model"]) -> tuple[Float[Array, "B T H"] | None, Float[Array, "B T H"] | None]:
    """`ConformalAttention.gates` at this layer's place in the stream."""
    return self.attention.gates(self.attention_norm(x))

  def _mlp(self, x: Float[Array, "*lead d_model"]) -> Float[Array, "*lead d_model"]:
    up = self._made_again(lambda x: self.up(self.mlp_norm(x)))(x)
    return x + self._made_again(lambda up: self.down(jax.nn.gelu(up)))(up)

  def _made_again(self, function: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """The function, of which the backward pass finds stored what it was given, and no more."""
    return jax.checkpoint(function, prevent_cse=False) if self.makes_again else function


def _check_sequence(given: Mapping[str, Any]) -> None:
  tokens, segment_ids = given["tokens"], given["segment_ids"]
  check_array("tokens", tokens, ("B", "T"), jnp.integer)
  if segment_ids is not None:
    check_array("segment_ids", segment_ids, tokens.shape, jnp.signedinteger)
  if "cache" in given:
    _check_cache(given["self"], given["cache"], tokens.shape[0])


def _check_token(given: Mapping[str, Any]) -> None:
  check_array("token", given["token"], ("B",), jnp.integer)
  _check_cache(given["self"], given["cache"], given["token"].shape[0])


def _check_cache(model: "Transformer", cache: Any, batch: int) -> None:
  layers = model.config.num_layers
  for leaf in jax.tree.leaves(cache):
    if jnp.shape(leaf)[:1] != (layers,):
      came = list(jnp.shape(leaf))
      raise ValueError(f"cache must be stacked over {layers} layers, as init_cache gives it, got {came}")
  one_layer = jax.eval_shape(lambda cache: jax.tree.map(lambda a: a[0], cache), cache)
  check_cache(model.layers.attention, one_layer, batch)


class Transformer(nnx.Module):
  """A causal language model over any of the four variants of attention.

  Every parameter of `layers` has a leading layer axis. Compile what you call (`jax.jit` or `nnx.jit`): outside of it,
  every call compiles the scan over the layers anew.

  Args:
    config: its shape.
    layout: the mesh that whole sequences run on; None: wherever the arguments lie.
    rngs: the random streams to initialise from.
  """

  def __init__(self, config: ModelConfig, *, layout: Layout | None = None, rngs: nnx.Rngs) -> None:
    self.config = config
    self.layout = layout
    # Rows are looked up, and their gradients added up, in the parameters' dtype: a frequent token's gradient is a sum
    # of thousands, which 8 bits cannot hold.
    self.embedding = nnx.Embed(
      config.padded_vocab_size,
      config.d_model,
      dtype=jnp.dtype(config.param_dtype),
      param_dtype=jnp.dtype(config.param_dtype),
      embedding_init=_normal_init(),
      rngs=rngs,
    )
    self.embedding_norm = _layer_norm(config, rngs)
    self.layers = _stacked_blocks(config, layout, rngs)
    self.final_norm = _layer_norm(config, rngs)

  @validated(_check_sequence)
  def __call__(
    self, tokens: Integer[Array, "B T"], segment_ids: Integer[Array, "B T"] | None = None
  ) -> Float[Array, "B T padded_vocab_size"]:
    """The logits of the token after each."""
    return self.logits(self.hidden(tokens, segment_ids))

  @validated(_check_sequence)
  def hidden(
    self, tokens: Integer[Array, "B T"], segment_ids: Integer[Array, "B T"] | None = None
  ) -> Float[Array, "B T d_model"]:
    """All but the logits, which at a vocabulary of 50,000 are most of the memory: a loss can take them in chunks."""
    return self._hidden_and_gates(tokens, segment_ids, with_gates=False)[0]

  @validated(_check_sequence)
  def gates(
    self, tokens: Integer[Array, "B T"], segment_ids: Integer[Array, "B T"] | None = None
  ) -> tuple[Float[Array, "layers B T H"] | None, Float[Array, "layers B T H"] | None]:
    """`(log_gate, beta)` of every layer and key head, for statistics: see `ConformalAttention.gates`."""
    return self._hidden_and_gates(tokens, segment_ids, with_gates=True)[1]

  def _hidden_and_gates(
    self, tokens: Integer[Array, "B T"], segment_ids: Integer[Array, "B T"] | None, *, with_gates: bool
  ) -> tuple[Float[Array, "B T d_model"], tuple[Array | None, Array | None]]:
    graphdef, layers = nnx.split(self.layers)

    def layer(x: Array, parameters: Any) -> tuple[Array, tuple[Array | None, Array | None]]:
      block = nnx.merge(graphdef, parameters)
      return self._laid_out(block(x, segment_ids)), block.gates(x) if with_gates else (None, None)

    through, policy = layer, REMAT[self.config.remat]
    if policy is not None:
      # Between the bodies of two loops nothing can be merged, so they need no barrier against it.
      through = jax.checkpoint(layer, policy=policy, prevent_cse=self.config.unroll)
    x = self._laid_out(self._embed(tokens, look_up if self.layout is None else self.layout.look_up))
    x, gates = lax.scan(through, x, layers, unroll=bool(self.config.unroll))
    return self.final_norm(x), gates

  def logits(self, hidden: Float[Array, "*lead d_model"]) -> Float[Array, "*lead padded_vocab_size"]:
    """Float32 logits over the padded vocabulary; those of the padding are PADDED_LOGIT, so none gets probability.

    They are masked, not cut off, because 50,304 divides over matrix units and devices and 50,257 = 29 x 1,733 does not.
    """
    logits = _readout(hidden, self.embedding.embedding[...])
    return jnp.where(jnp.arange(logits.shape[-1]) < self.config.vocab_size, logits, PADDED_LOGIT)

  def init_cache(
    self, batch: int, max_length: int | None = None, dtype: Dtype | None = None, *, keep_keys: bool = False
  ) -> Cache:
    """The empty cache of all layers, stacked: see `ConformalAttention.init_cache`. Donate it when you compile."""
    layers = self.config.num_layers
    cache = self.layers.attention.init_cache(batch, max_length, dtype, keep_keys=keep_keys)
    return type(cache)(*(jnp.broadcast_to(a, (layers, *a.shape)) for a in cache))

  def fold(self, cache: KeyCache) -> State:
    """The states of all layers from their caches of keys: see `ConformalAttention.fold`."""
    return State(*lax.map(self.layers.attention.fold, cache))

  @validated(_check_sequence)
  def prefill(
    self, tokens: Integer[Array, "B T"], cache: Cache, segment_ids: Integer[Array, "B T"] | None = None
  ) -> tuple[Float[Array, "B T padded_vocab_size"], Cache]:
    """Logits of the next tokens of sequences whose past is in the cache, in pieces of any length, and the new cache."""
    hidden, cache = self.prefill_hidden(tokens, cache, segment_ids)
    return self.logits(hidden), cache

  @validated(_check_sequence)
  def prefill_hidden(
    self, tokens: Integer[Array, "B T"], cache: Cache, segment_ids: Integer[Array, "B T"] | None = None
  ) -> tuple[Float[Array, "B T d_model"], Cache]:
    """`prefill` without the logits: of a long prompt only the last token's are wanted."""
    return self._extend(self._embed(tokens), cache, _prefilling(segment_ids))[:2]

  @validated(_check_sequence)
  def prefill_gates(
    self, tokens: Integer[Array, "B T"], cache: Cache, segment_ids: Integer[Array, "B T"] | None = None
  ) -> tuple[tuple[Float[Array, "layers B T H"] | None, Float[Array, "layers B T H"] | None], Cache]:
    """`gates` of the next tokens, and the new cache: statistics of texts of any length."""
    _, cache, gates = self._extend(self._embed(tokens), cache, _prefilling(segment_ids), Block.gates)
    return gates, cache

  @validated(_check_token)
  def step(self, token: Integer[Array, "B"], cache: Cache) -> tuple[Float[Array, "B padded_vocab_size"], Cache]:
    """Logits after one more token, and the new cache."""
    hidden, cache, _ = self._extend(self._embed(token), cache, Block.step)
    return self.logits(hidden), cache

  def _laid_out(self, x: Float[Array, "B T d_model"]) -> Float[Array, "B T d_model"]:
    return x if self.layout is None else self.layout.constrain(x, "batch", "time", "width")

  def _embed(
    self, tokens: Integer[Array, "*lead"], find: Callable[[Array, Array], Array] = look_up
  ) -> Float[Array, "*lead d_model"]:
    table = self.embedding.embedding[...]
    if self.layout is not None:
      table = self.layout.constrain(table, None, None)  # a gather from a split table would gather the batch instead
    x: Array = self.embedding_norm(find(table, tokens))
    return x

  def _extend(
    self,
    x: Float[Array, "*lead d_model"],
    cache: Cache,
    through: Callable[[Block, Array, Cache, Array], tuple[Array, Cache]],
    observe: Callable[[Block, Array], Any] = lambda block, x: None,
  ) -> tuple[Float[Array, "*lead d_model"], Cache, Any]:
    """The last hidden states, the new cache, and what `observe` made of every layer and its input."""
    graphdef, layers = nnx.split(self.layers)

    # The cache travels as the carry and is updated in place: as scanned input and output it would exist twice, and at
    # p=4 once is most of a device's memory.
    def layer(carry: tuple[Array, Cache], scanned: tuple[Array, Any]) -> tuple[tuple[Array, Cache], Any]:
      x, cache = carry
      index, parameters = scanned
      block = nnx.merge(graphdef, parameters)
      return through(block, x, cache, index), observe(block, x)

    (x, cache), observed = lax.scan(layer, (x, cache), (jnp.arange(self.config.num_layers), layers))
    return self.final_norm(x), cache, observed


def _prefilling(segment_ids: Integer[Array, "B T"] | None) -> Callable[..., tuple[Array, Cache]]:
  def read(block: Block, x: Array, cache: Cache, layer: Array) -> tuple[Array, Cache]:
    y, part = block.prefill(x, of_layer(cache, layer), segment_ids)
    return y, with_layer(cache, part, layer)

  return read


def _stacked_blocks(config: ModelConfig, layout: Layout | None, rngs: nnx.Rngs) -> Block:
  @nnx.split_rngs(splits=config.num_layers)
  @nnx.vmap(in_axes=0, out_axes=0)
  def make(rngs: nnx.Rngs) -> Block:
    return Block(config, layout=layout, rngs=rngs)

  return make(rngs)


def _normal_init(scale: float = 1.0) -> nnx.Initializer:
  """GPT-2's initialisation, of standard deviation 0.02."""
  return nnx.initializers.normal(0.02 * scale)


def _layer_norm(config: ModelConfig, rngs: nnx.Rngs) -> nnx.LayerNorm:
  return nnx.LayerNorm(
    config.d_model,
    epsilon=1e-5,
    use_bias=False,
    use_fast_variance=False,
    dtype=jnp.dtype(config.dtype),
    param_dtype=jnp.dtype(config.param_dtype),
    rngs=rngs,
  )


@jax.custom_vjp
def _readout(hidden: Float[Array, "*lead d"], embedding: Float[Array, "V d"]) -> Float[Array, "*lead V"]:
  """The hidden states times the transposed embedding: operands in the dtype of the former, results in float32.

  A third of the 124M model's work is here. Left to differentiation, the float32 gradient of the logits would make both
  backward products float32; it is rounded to the operands' dtype instead. The embedding's gradient leaves in float32,
  so that a loss taken in chunks adds up its parts without rounding.
  """
  return jnp.einsum("...d,vd->...v", hidden, embedding.astype(hidden.dtype), preferred_element_type=jnp.float32)


def _readout_forward(
  hidden: Float[Array, "*lead d"], embedding: Float[Array, "V d"]
) -> tuple[Float[Array, "*lead V"], tuple[Array, Array]]:
  return _readout(hidden, embedding), (hidden, embedding)


def _readout_backward(
  saved: tuple[Array, Array], dlogits: Float[Array, "*lead V"]
) -> tuple[Float[Array, "*lead d"], Float[Array, "V d"]]:
  hidden, embedding = saved
  dlogits = dlogits.astype(hidden.dtype)
  dhidden = jnp.einsum("...v,vd->...d", dlogits, embedding.astype(hidden.dtype))
  dembedding = jnp.einsum("...v,...d->vd", dlogits, hidden, preferred_element_type=jnp.float32)
  return dhidden, dembedding.astype(embedding.dtype)


_readout.defvjp(_readout_forward, _readout_backward)
