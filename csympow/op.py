"""The public functions: check the arguments, prepare the inputs, choose a form, run it."""

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float, Integer

from csympow import cost, dispatch, implementations, rotation, validation
from csympow.checks import validated
from csympow.cost import Explanation, Implementation
from csympow.features import feature_dim
from csympow.forms import carried, chunked, fused, fused_chunked, fused_step, in_turn, near, recurrent, rotating, scales
from csympow.forms.memory import Memory
from csympow.forms.spans import Settings
from csympow.gates import effective_log_gate
from csympow.prefix import TotalsKernel
from csympow.segments import find_runs
from csympow.state import State, of_layer, with_layer
from kernels_pallas.gpu.tiles import ROWS

type Form = Literal["auto", "attention", "chunked", "recurrent"]
type _Shaped = Array | jax.ShapeDtypeStruct

# Tokens of which each one's gradients may be the rest of a sum that cancels, too little for states of 16 bits.
_FEW = 16


@validated(validation.check_sequence)
def attention(
  q: Float[Array, "B T Hq d"],
  k: Float[Array, "B T H d"],
  v: Float[Array, "B T H dv"],
  power: int = 2,
  log_gate: Float[Array, "B T H"] | None = None,
  beta: Float[Array, "B T H"] | None = None,
  rates: Float[Array, "r"] | None = None,
  segment_ids: Integer[Array, "B T"] | None = None,
  scale: ArrayLike | None = None,
  form: Form = "auto",
  chunk_size: int | None = None,
  implementation: Implementation | None = None,
) -> Float[Array, "B T Hq dv"]:
  """Causal attention with weights b_ij (q'_i . k'_j) ** power, normalised by their sum.

  Args:
    q: queries. Query head h attends with key head h // (Hq / H).
    k: keys, of q's dtype: float32, bfloat16 or float16.
    v: values, of q's dtype.
    power: the even power p.
    log_gate: log gamma <= 0 of every step, float32; b_ij is the product of gamma over j+1..i, and -inf forgets all
      before. None: gamma = 1.
    beta: the speed of rotation at every step, float32. None with rates: 1, the fixed rotary embedding.
    rates: radians per unit of beta for each pair of coordinates; see `rotary_rates`. None: no rotation.
    segment_ids: tokens attend inside their own run of equal ids, where state and phase begin anew. A negative id is
      padding: the token is as if absent, and its output 0.
    scale: multiplies the scores; None for 1/sqrt(d). The normalisation cancels it, unless it is 0.
    form: "attention" (quadratic), "chunked" (linear), "recurrent" (token by token), or "auto" for the cheapest; see
      `explain`.
    chunk_size: tokens in a chunk, in the attention form in a block of keys, in the recurrent form between the states
      kept for the backward pass; None to choose. The attention kernels have blocks of their own, the chunked ones
      chunks of whole 256s on GPU and of whole 128s, at most 512, on TPU; with another size they are not taken.
    implementation: "xla", "pallas", or None for the fastest that this call can have.

  Returns:
    The outputs in q's dtype; 0, with zero gradient, where a row's weights sum to 0.
  """
  way_on = functools.partial(_way_on, _shape(q, k, v, power, needs_state=False), q.dtype, form, chunk_size)
  y, _ = dispatch.run(way_on, implementation, q, k, v, log_gate, beta, rates, segment_ids, scale, None)
  return y


@validated(validation.check_sequence)
def prefill(
  q: Float[Array, "B T Hq d"],
  k: Float[Array, "B T H d"],
  v: Float[Array, "B T H dv"],
  power: int = 2,
  log_gate: Float[Array, "B T H"] | None = None,
  beta: Float[Array, "B T H"] | None = None,
  rates: Float[Array, "r"] | None = None,
  segment_ids: Integer[Array, "B T"] | None = None,
  scale: ArrayLike | None = None,
  form: Form = "auto",
  chunk_size: int | None = None,
  implementation: Implementation | None = None,
  state: State | None = None,
) -> tuple[Float[Array, "B T Hq dv"], State]:
  """`attention` that starts from a state and returns the state after its last token.

  A given state continues into the first run of segment ids; the state returned is the last run's. Calls joined by a
  state give what one call over all tokens gives, at any split, and gradients flow through the state.
  """
  way_on = functools.partial(_way_on, _shape(q, k, v, power, needs_state=True), q.dtype, form, chunk_size)
  return dispatch.run(way_on, implementation, q, k, v, log_gate, beta, rates, segment_ids, scale, state)


@validated(validation.check_token)
def step(
  q: Float[Array, "B Hq d"],
  k: Float[Array, "B H d"],
  v: Float[Array, "B H dv"],
  state: State,
  power: int = 2,
  log_gate: Float[Array, "B H"] | None = None,
  beta: Float[Array, "B H"] | None = None,
  rates: Float[Array, "r"] | None = None,
  scale: ArrayLike | None = None,
  implementation: Implementation | None = None,
  layer: Integer[Array, ""] | None = None,
) -> tuple[Float[Array, "B Hq dv"], State]:
  """One token of `attention`, and the state with it, changed in place if it is a loop's carry or donated to `jit`.

  A layer says which one of states that are stacked along a first axis is meant.
  """
  shape = _shape(q[:, None], k[:, None], v, power, needs_state=True)

  def way_on(chip: str, asked: Implementation | None) -> dispatch.Way:
    chosen = implementations.for_step(shape, asked, chip)
    return dispatch.Way(chosen, functools.partial(_step, power=power, implementation=chosen))

  return dispatch.run(way_on, implementation, q, k, v, state, log_gate, beta, rates, scale, layer)


@functools.partial(jax.jit, static_argnames=("power", "implementation"), inline=True)
def _step(
  q: Array,
  k: Array,
  v: Array,
  state: State,
  log_gate: Array | None,
  beta: Array | None,
  rates: Array | None,
  scale: ArrayLike | None,
  layer: Array | None,
  power: int,
  implementation: Implementation,
) -> tuple[Array, State]:
  if implementation == "pallas":
    q, k, v, state, log_gate, beta, rates = _equally_varying((q, k, v, state, log_gate, beta, rates))
    return fused_step.step(q, k, v, state, power, log_gate, beta, rates, scale, layer)
  log_gate, beta = (x if x is None else x[:, None] for x in (log_gate, beta))
  whole, state = state, state if layer is None else of_layer(state, layer)
  x = _prepare(q[:, None], k[:, None], v[:, None], log_gate, beta, rates, None, scale, state)
  assert x.memory is not None
  memory, y = recurrent.step(x.memory, x.q[:, 0], x.k[:, 0], x.v[:, 0], x.log_gate[:, 0], power)
  new_state = _state(memory, x.phase, state)
  y = y.reshape(q.shape[:-1] + v.shape[-1:]).astype(q.dtype)
  return y, new_state if layer is None else with_layer(whole, new_state, layer)


@validated(validation.check_new_state)
def init_state(
  batch: int, heads: int, head_dim: int, value_dim: int, power: int = 2, dtype: DTypeLike = jnp.float32
) -> State:
  """The empty state. `dtype` is that of S and Z; the phase stays float32, for no 16-bit type can hold an angle."""
  features = feature_dim(head_dim, power)
  return State(
    S=jnp.zeros((batch, heads, features, value_dim), dtype),
    Z=jnp.zeros((batch, heads, features), dtype),
    phase=jnp.zeros((batch, heads, head_dim // 2), jnp.float32),
  )


@validated(validation.check_sequence)
def explain(
  q: Float[Array | jax.ShapeDtypeStruct, "B T Hq d"],
  k: Float[Array | jax.ShapeDtypeStruct, "B T H d"],
  v: Float[Array | jax.ShapeDtypeStruct, "B T H dv"],
  power: int = 2,
  log_gate: Float[Array | jax.ShapeDtypeStruct, "B T H"] | None = None,
  beta: Float[Array | jax.ShapeDtypeStruct, "B T H"] | None = None,
  rates: Float[Array | jax.ShapeDtypeStruct, "r"] | None = None,
  segment_ids: Integer[Array | jax.ShapeDtypeStruct, "B T"] | None = None,
  scale: ArrayLike | None = None,
  form: Form = "auto",
  chunk_size: int | None = None,
  implementation: Implementation | None = None,
  state: State | None = None,
  device: str | None = None,
) -> Explanation:
  """What `attention` (or with a state `prefill`) would do with these arguments, without running anything.

  Arrays may be given as jax.ShapeDtypeStruct. `device` is "cpu", "gpu" or "tpu", or None for the one at hand. For a
  `prefill` from nothing, give it the state of `init_state`: making one counts.
  """
  # What gates make the attention form leave out is known when it runs, no sooner; the rest costs every form the same.
  del log_gate, beta, rates, segment_ids, scale
  shape = _shape(q, k, v, power, needs_state=state is not None)
  return _explained(shape, q.dtype, form, chunk_size, implementation, device or cost.platform())


def _explained(
  shape: cost.Shape,
  dtype: DTypeLike,
  form: str,
  chunk_size: int | None,
  implementation: str | None,
  device: str,
  split: bool = False,
) -> Explanation:
  """`explain`, of a sequence that may be split between devices."""
  allowed = implementations.allowed(shape, dtype, form, chunk_size, implementation, device, split)
  plan = cost.choose(shape, form, chunk_size, device, allowed)
  if "xla" not in allowed:
    reason = f"implementation='pallas' was asked for; estimated forward time on {device}: {plan.seconds * 1e3:.3g} ms"
  elif form == "auto":
    rest = [name for name in validation.FORMS[1:] if name != plan.form]
    others = [cost.choose(shape, name, chunk_size, device, allowed) for name in rest]
    estimates = [
      f"{x.form} {x.seconds * 1e3:.3g} ms forward and {x.seconds * x.with_backward * 1e3:.3g} ms with backward"
      for x in (plan, *others)
    ]
    reason = f"estimated on {device}: {'; '.join(estimates)}"
    on_gpu = device == "gpu" and not split
    instead = cost.attention_instead(plan, shape, chunk_size, allowed) if on_gpu else cost.Instead()
    if instead.alone:
      reason += "; a pass without gradients is the attention form's"
    if instead.share:
      least = f"{instead.share:.0%} of all pairs"
      reason += f"; a call is the attention form's if its gates leave less than {least} to be read"
  else:
    reason = f"form={form!r} was asked for; estimated forward time on {device}: {plan.seconds * 1e3:.3g} ms"
  size = plan.block if plan.form == "attention" else plan.chunk
  return Explanation(plan.form, plan.implementation, size, shape.state_bytes, plan.flops, reason)


class _Prepared(NamedTuple):
  """Inputs of the forms: rotated, queries of about unit length, resets and padding written into gates and zeros.

  For kernels queries and keys are still to be rotated and have 16 bits, and without a state queries keep their length:
  the kernels scale them.
  """

  q: Float[Array, "B T H g d"]
  k: Float[Array, "B T H d"]
  v: Float[Array, "B T H dv"]
  log_gate: Float[Array, "B T H"]
  memory: Memory | None
  phase: Float[Array, "B H r"]  # after the last token
  rotation: rotating.Rotation | None  # still to be done


def _prepare(
  q: Array,
  k: Array,
  v: Array,
  log_gate: Array | None,
  beta: Array | None,
  rates: Array | None,
  segment_ids: Array | None,
  scale: ArrayLike | None,
  state: State | None,
  for_kernels: bool = False,
  phase: Array | None = None,
  kernel: TotalsKernel | None = None,
) -> _Prepared:
  """Checked arguments as the forms take them; `phase` is what the rotation goes on from where there is no state.

  With a `kernel` sums over time are not XLA's.
  """
  (batch, time, query_heads, head_dim), heads = q.shape, k.shape[2]
  if rates is not None and beta is None:
    beta = jnp.ones((1, time, 1), jnp.float32)
  q, k, v, log_gate, beta, rates, segment_ids, state, phase = _equally_varying(
    (q, k, v, log_gate, beta, rates, segment_ids, state, phase)
  )
  log_gate = jnp.zeros_like(k[..., 0], jnp.float32) if log_gate is None else log_gate
  valid, starts = None, None
  if segment_ids is not None:
    valid, starts = find_runs(segment_ids)
    q, k, v = (jnp.where(valid[..., None, None], x, jnp.zeros_like(x)) for x in (q, k, v))
  if not for_kernels:
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
  q = q.reshape(batch, time, heads, query_heads // heads, head_dim)

  initial, remaining = phase if state is None else state.phase, None
  phase = jnp.zeros_like(k[:, 0, :, : head_dim // 2], jnp.float32) if initial is None else initial
  if rates is not None:
    if valid is not None:
      beta = jnp.where(valid[..., None], beta, 0.0)
    rates = rates.astype(jnp.float32)
    known = rotation.totals(beta, starts, kernel) if for_kernels else None  # once, for all that wants them
    how: dict[str, Any] = {"starts": starts, "known": known, "kernel": kernel}
    turns, last = rotation.phases(beta, rates, initial=initial, **how)
    if for_kernels:
      turns, _ = rotation.phases(lax.stop_gradient(beta), rates, initial=initial, **how)
      total, _ = rotation.phases(beta, 2 * jnp.pi + 0 * lax.stop_gradient(rates[:1]), **how)
      turns, total = (jnp.broadcast_to(x, (batch, time, heads, x.shape[-1])) for x in (turns, total))
      factors = rotation.factors(beta, rates, (batch, time, heads), initial=initial, **how)
      remaining = rotating.Rotation(turns, total[..., 0], lax.stop_gradient(rates), factors)
    else:
      q, k = rotation.rotate(q, turns[..., None, :]), rotation.rotate(k, turns)
    phase = last + jnp.zeros_like(phase)

  if not for_kernels or state is not None:
    q = scales.unit(q.astype(jnp.float32))
  return _Prepared(
    q=q if scale is None else q * jnp.where(scale == 0, 0.0, 1.0).astype(q.dtype),  # the normalisation cancels all else
    k=k,
    v=v,
    log_gate=effective_log_gate(log_gate, valid, starts),
    memory=None if state is None else Memory(state.S.astype(jnp.float32), state.Z.astype(jnp.float32)[..., None]),
    phase=phase,
    rotation=remaining,
  )


def _equally_varying(tree: Any) -> Any:
  """Inside shard_map, marks every array as varying over all mesh axes that any of them varies over."""

  def axes_of(x: Array) -> frozenset[str]:
    return jax.typeof(x).manual_axis_type.varying

  axes = frozenset[str]().union(*map(axes_of, jax.tree.leaves(tree)))

  def spread(x: Array) -> Array:
    missing = axes - axes_of(x)
    return lax.pcast(x, tuple(missing), to="varying") if missing else jnp.asarray(x)

  return jax.tree.map(spread, tree)


def _shape(q: _Shaped, k: _Shaped, v: _Shaped, power: int, *, needs_state: bool) -> cost.Shape:
  batch, time, query_heads, head_dim = q.shape
  return cost.Shape(batch, time, query_heads, k.shape[2], head_dim, v.shape[-1], power, needs_state)


def _way_on(
  shape: cost.Shape, dtype: DTypeLike, form: str, chunk_size: int | None, chip: str, asked: Implementation | None
) -> dispatch.Way:
  """How to attend on a kind of chip."""
  allowed = implementations.allowed(shape, dtype, form, chunk_size, asked, chip)
  plan = cost.choose(shape, form, chunk_size, chip, allowed)
  settings = _settings(shape.power, plan, dtype, chip)
  if form == "auto" and chip == "gpu":
    instead = cost.attention_instead(plan, shape, chunk_size, allowed)
    settings = settings._replace(attention_alone=instead.alone, attention_share=instead.share)
  how = {"form": plan.form, "implementation": plan.implementation, "settings": settings}
  return dispatch.Way(plan.implementation, functools.partial(_attend, **how, return_state=shape.needs_state))


def _settings(power: int, plan: cost.Plan, dtype: DTypeLike, chip: str) -> Settings:
  """The constants of the compiled program.

  float32 is taken at its word unless the caller has set JAX's default precision. For 16-bit inputs less will do, though
  not as few as 8 bits: powers and gradients multiply the rounding of a product's operands.
  """
  precision = jax.config.jax_default_matmul_precision or "highest" if dtype == jnp.float32 else "high"
  return Settings(power, plan.chunk, plan.block, plan.tile, precision, chip=chip)


# Compiled, so that calls outside of jit need not trace and compile their loops anew each time.
@functools.partial(jax.jit, static_argnames=("form", "implementation", "settings", "return_state"), inline=True)
def _attend(
  q: Array,
  k: Array,
  v: Array,
  log_gate: Array | None,
  beta: Array | None,
  rates: Array | None,
  segment_ids: Array | None,
  scale: ArrayLike | None,
  state: State | None,
  form: cost.Form,
  implementation: Implementation,
  settings: Settings,
  return_state: bool,
) -> tuple[Float[Array, "B T Hq dv"], State | None]:
  kernels, settings = implementation == "pallas", settings._replace(gated=log_gate is not None)
  prepare = _preparation_for_kernels(settings) if kernels else _prepare
  x = prepare(q, k, v, log_gate, beta, rates, segment_ids, scale, state)
  tokens = _padded(x, settings.chunk)
  batch, time, query_heads, _ = q.shape
  memory: Memory | None
  if form == "recurrent":
    y, memory = recurrent.attend(*tokens[:4], x.memory, settings.power, settings.chunk)
  elif kernels and form == "chunked":
    y, memory = _chunked_by_kernels(tokens, x.memory, settings, q.dtype, return_state, few=time <= _FEW)
  elif kernels:
    y, memory = fused.attend(tokens, x.memory, settings, q.dtype, return_state)
  else:
    y, memory = chunked.attend(*tokens[:4], x.memory, settings, return_state)
  y = y[:, :time].reshape(batch, time, query_heads, -1).astype(q.dtype)
  return y, _state(memory, x.phase, state) if return_state and memory is not None else None


def _preparation_for_kernels(settings: Settings) -> Callable[..., _Prepared]:
  """`_prepare`, computed again in the backward pass: what it would save is large, unlike all that the kernels save."""
  # On a chip only: what is interpreted has effects, and jax.checkpoint refuses to differentiate those.
  kernel = near.totals_kernel(settings) if settings.interpret is None else None
  return jax.checkpoint(functools.partial(_prepare, for_kernels=True, kernel=kernel), prevent_cse=False)


def _padded(x: _Prepared, size: int) -> near.Tokens:
  """The tokens, filled up to whole chunks."""
  padding = -x.k.shape[1] % size
  q, k, v, log_gate = (
    jnp.pad(array, ((0, 0), (0, padding)) + ((0, 0),) * (array.ndim - 2)) for array in (x.q, x.k, x.v, x.log_gate)
  )
  return near.Tokens(q, k, v, log_gate, rotating.padded(x.rotation, padding, k.shape[-1]))


def _chunked_by_kernels(
  x: near.Tokens, memory: Memory | None, settings: Settings, dtype: DTypeLike, return_memory: bool, *, few: bool = False
) -> tuple[Float[Array, "B T H g dv"], Memory | None]:
  """`chunked.attend` by the kernels for this power and chip; `few` tokens beside a state by the attention form's."""
  if settings.power != 2:
    return in_turn.attend(x, memory, settings, dtype, return_memory)
  if settings.chip == "tpu":
    return carried.attend(x, memory, settings, dtype, return_memory)
  if few and (memory is not None or return_memory):
    settings = settings._replace(tile=ROWS, precision="highest")
    return fused.attend(x, memory, settings, dtype, return_memory)
  return fused_chunked.attend(x, memory, settings, dtype, return_memory)


def _state(memory: Memory, phase: Float[Array, "B H r"], given: State | None) -> State:
  S_dtype, Z_dtype = (jnp.float32, jnp.float32) if given is None else (given.S.dtype, given.Z.dtype)
  return State(memory.S.astype(S_dtype), memory.Z[..., 0].astype(Z_dtype), phase)
