"""What each form costs, and so which one `form="auto"` takes.

A form's time is estimated as FLOPs / rate + bytes / bandwidth + loop steps * latency, with rates that XLA reaches on
one chip of each kind. The constants need only be right to a factor: they decide between forms whose costs cross at some
length, and near the crossing either will do. docs/forms.md derives the counts and tables the crossings.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax

from csympow.features import feature_dim
from csympow.forms.expanded import COLUMNS
from kernels_pallas.gpu.tiles import BLOCK, STATE_WIDTH, TILE, attention_widths
from kernels_pallas.tpu.pairs import block_size
from kernels_pallas.tpu.shifts import LANES, largest_chunk

type Form = Literal["attention", "chunked", "recurrent"]
type Implementation = Literal["xla", "pallas"]


@dataclasses.dataclass(frozen=True)
class Device:
  """Rates that XLA's code reaches, not the chip's peaks."""

  flops: float  # a second, in matrix products
  bandwidth: float  # bytes a second
  latency: float  # seconds that a loop iteration takes beside its work
  block: int  # tokens in a block of scores, where its arithmetic is efficient


DEVICES = {
  "cpu": Device(flops=4e10, bandwidth=8e9, latency=2e-5, block=256),
  "gpu": Device(flops=2e14, bandwidth=2e12, latency=5e-6, block=1024),
  "tpu": Device(flops=1e14, bandwidth=8e11, latency=5e-6, block=1024),
}

# Bytes of scores, and of features, that may be alive at once: a block or a tile of tokens is cut to fit.
_SCRATCH = 256 * 2**20


@dataclasses.dataclass(frozen=True)
class Shape:
  """The sizes that a call's cost depends on."""

  batch: int
  time: int
  query_heads: int
  heads: int
  head_dim: int
  value_dim: int
  power: int
  needs_state: bool  # a state is given or wanted

  @property
  def features(self) -> int:
    """D."""
    return feature_dim(self.head_dim, self.power)

  @property
  def state_bytes(self) -> int:
    """S, Z and phase in float32, over the batch and all heads."""
    return 4 * self.batch * self.heads * (self.features * (self.value_dim + 1) + self.head_dim // 2)


@dataclasses.dataclass(frozen=True)
class Plan:
  """How a call will be run, and what that is estimated to cost."""

  form: Form
  chunk: int  # tokens between two states
  block: int  # tokens in a block of scores
  tile: int  # tokens whose features are expanded at once
  flops: int
  bytes: int
  seconds: float  # of the forward pass
  implementation: Implementation = "xla"
  with_backward: float = 3.0  # what both passes cost, relative to the forward one


@dataclasses.dataclass(frozen=True)
class Explanation:
  """What a call would do. FLOPs are the forward pass's; the backward pass takes two to three times as many."""

  form: str
  implementation: str
  chunk_size: int
  state_bytes: int
  flops: int
  reason: str


def named() -> str | None:
  """The kind of chip that a program being traced is for, if the mesh or `jax.default_device` says so."""
  device = jax.sharding.get_abstract_mesh().abstract_device or jax.config.jax_default_device
  return kind(device) if device else None


def platform() -> str:
  """The kind of chip that is named, or else that this machine has: a guess, where a program is only traced."""
  return named() or kind(jax.default_backend())


def kind(device: Any) -> str:
  """That of a device, or of a platform by name."""
  name = getattr(device, "platform", device)
  return "gpu" if name in ("cuda", "rocm") else name


# Of the kernels on an H200, as benchmarks/attention.py measures them: the rate of their products, how often the
# preparation passes over the inputs, tokens in a chunk, and what both passes cost relative to the forward one.
_KERNEL_FLOPS = 6.6e14
_KERNEL_PASSES = 2
_KERNEL_CHUNK = 1024
# Beyond p=2, where features lie in memory: tokens in a chunk for as many features, bytes at once, and their speed.
_CHUNK_IN_TURN, _FEATURES_IN_TURN = 8192, 4096
_EXPANDED = 2**30
_EXPANDED_BANDWIDTH = 3.8e12
# At p=2, what a forward pass alone takes of what products and bytes say, which both passes are told by: states in one
# piece are written by half of the products then.
_OF_ONE_PIECE, _OF_SEVERAL_PIECES = 0.77, 1.13
_KERNEL_WITH_BACKWARD = {"attention": 4.4, "chunked": 3.15, "chunked, in turn": 3.7}
# Of the kernels on TPU, which have been compiled and counted but never timed: 60 % of a v5e's peak.
_TPU_KERNEL_FLOPS = 1.2e14
_TPU_KERNEL_PASSES = 3
_TPU_WITH_BACKWARD = {"attention": 4.5, "chunked": 3.5}  # by products: 2 forward; 7 and 5 backward


def choose(
  shape: Shape,
  form: str,
  chunk_size: int | None,
  device: str,
  implementations: dict[Implementation, tuple[Form, ...]] | None = None,
) -> Plan:
  """The plan for `form`, or for "auto" the one that trains fastest of all that the implementations have."""
  rates = DEVICES.get(device, DEVICES["cpu"])
  planners: dict[Implementation, dict[Form, Callable[[Shape, int | None, Device], Plan]]] = {
    "xla": {"attention": _attention, "chunked": _chunked, "recurrent": _recurrent},
    "pallas": {"attention": _attention_on_tpu, "chunked": _chunked_on_tpu}
    if device == "tpu"
    else {"attention": _attention_kernels, "chunked": _chunked_kernels},
  }
  if implementations is None:
    implementations = {"xla": ("attention", "chunked", "recurrent")}
  plans = [
    planners[implementation][name](shape, chunk_size, rates)
    for implementation, forms in implementations.items()
    for name in forms
    if form in ("auto", name)
  ]
  return min(plans, key=lambda plan: plan.seconds * plan.with_backward)


class Instead(NamedTuple):
  """Where "auto" that has chunks on a GPU takes the attention form all the same, by what is known later."""

  alone: bool = False  # in a pass without gradients
  share: float = 0.0  # in a call whose gates leave less than that of all pairs of tokens


def attention_instead(
  plan: Plan, shape: Shape, chunk_size: int | None, implementations: dict[Implementation, tuple[Form, ...]]
) -> Instead:
  """Of the plan for both passes. Chunks of p=2 find out by themselves what gates leave."""
  if (plan.form, plan.implementation) != ("chunked", "pallas") or shape.needs_state:
    return Instead()
  other = choose(shape, "attention", chunk_size, "gpu", implementations)
  if other.implementation != "pallas":
    return Instead()
  if shape.power != 2:
    return Instead(share=plan.seconds * plan.with_backward / (other.seconds * other.with_backward))
  whole = shape.head_dim % STATE_WIDTH == shape.value_dim % STATE_WIDTH == 0  # others are filled up for states
  return Instead(alone=whole and other.seconds < plan.seconds)


def _plan(form: Form, sizes: tuple[int, int, int], flops: int, traffic: int, steps: int, device: Device) -> Plan:
  seconds = flops / device.flops + traffic / device.bandwidth + steps * device.latency
  return Plan(form, *sizes, flops, traffic, seconds)


def _attention(shape: Shape, chunk_size: int | None, device: Device) -> Plan:
  default = min(device.block, _fitting(shape.batch * shape.query_heads))
  block = _part(shape.time, chunk_size, default)
  length = _round_up(shape.time, block)
  tile = _tile(shape, block)
  flops, traffic, steps = _scores(shape, length, block)
  if shape.needs_state:
    more_flops, more_traffic, more_steps = _state(shape, length, tile)
    flops, traffic, steps = flops + more_flops, traffic + more_traffic, steps + more_steps
  return _plan("attention", (length, block, tile), flops, traffic, steps, device)


def _attention_kernels(shape: Shape, chunk_size: int | None, device: Device) -> Plan:
  del chunk_size  # blocks have a size of their own
  widths = attention_widths(shape.head_dim, shape.value_dim)
  rest = (_KERNEL_FLOPS, _KERNEL_PASSES, _KERNEL_WITH_BACKWARD["attention"])
  return _attention_by_kernels(shape, widths, device, _round_up(shape.time, BLOCK), TILE, *rest)


def _attention_on_tpu(shape: Shape, chunk_size: int | None, device: Device) -> Plan:
  del chunk_size  # blocks have a size of their own
  block = block_size(shape.time)
  rest = (_TPU_KERNEL_FLOPS, _TPU_KERNEL_PASSES, _TPU_WITH_BACKWARD["attention"])
  widths = shape.head_dim, shape.value_dim
  return _attention_by_kernels(shape, widths, device, _round_up(shape.time, block), block, *rest)


def _attention_by_kernels(
  shape: Shape,
  widths: tuple[int, int],
  device: Device,
  length: int,
  block: int,
  rate: float,
  passes: int,
  with_backward: float,
) -> Plan:
  """Scores are of heads that are filled up to `widths`, states of heads as they are."""
  filled_up = dataclasses.replace(shape, head_dim=widths[0], value_dim=widths[1])
  tile, (flops, _, _) = _tile(shape, length), _scores(filled_up, length, block)
  traffic = passes * _inputs(filled_up, length)
  seconds = flops / rate + traffic / device.bandwidth + 10 * device.latency
  if shape.needs_state:
    more_flops, more_traffic, steps = _state(shape, length, tile)
    seconds += more_flops / device.flops + more_traffic / device.bandwidth + steps * device.latency
    flops, traffic = flops + more_flops, traffic + more_traffic
  return Plan("attention", length, block, tile, flops, traffic, seconds, "pallas", with_backward)


def _chunked_kernels(shape: Shape, chunk_size: int | None, device: Device) -> Plan:
  plan = _chunked_squares if shape.power == 2 else _chunked_in_turn
  return plan(shape, chunk_size, device)


def _chunked_in_turn(shape: Shape, chunk_size: int | None, device: Device) -> Plan:
  """Attention inside chunks by kernels; states of features that lie in memory for a tile of tokens at a time."""
  longer = max(1, shape.features // _FEATURES_IN_TURN)  # the larger a state, the longer it must last
  chunks = -(-shape.time // (longer * _CHUNK_IN_TURN))
  chunk = _round_up(min(chunk_size or -(-shape.time // chunks), shape.time), BLOCK)
  chunks = -(-shape.time // chunk)
  inside = _attention_kernels(dataclasses.replace(shape, time=chunk, needs_state=False), None, device)
  tile = BLOCK * _divisor(chunk // BLOCK, _EXPANDED // expanded_bytes(shape, BLOCK))
  expanded = chunks * expanded_bytes(shape, chunk) * (shape.query_heads + shape.heads) // shape.query_heads
  state = 3 * expanded // 4 * 2 * (shape.value_dim + COLUMNS)  # 4 bytes of a feature, and three products
  states = chunks * (chunk // tile) * 6 * shape.state_bytes
  flops, traffic = chunks * inside.flops + state, chunks * inside.bytes + 2 * expanded + states
  steps = chunks * (20 + 20 * chunk // tile)
  seconds = chunks * inside.seconds + state / _KERNEL_FLOPS + (2 * expanded + states) / _EXPANDED_BANDWIDTH
  with_backward = _KERNEL_WITH_BACKWARD["chunked, in turn"]
  return Plan("chunked", chunk, TILE, tile, flops, traffic, seconds + steps * device.latency, "pallas", with_backward)


def expanded_bytes(shape: Shape, tokens: int) -> int:
  """Of the features of so many queries of every row."""
  return 4 * shape.batch * shape.query_heads * shape.features * tokens


def _chunked_squares(shape: Shape, chunk_size: int | None, device: Device) -> Plan:
  """P = 2. States are products of all pairs of coordinates of heads of whole STATE_WIDTHs."""
  head_dim, value_dim = (_round_up(width, STATE_WIDTH) for width in (shape.head_dim, shape.value_dim))
  numbers = head_dim**2 * value_dim  # of a state
  longer = head_dim * value_dim // STATE_WIDTH**2  # the larger a state, the longer it must last
  chunks = -(-shape.time // (longer * _KERNEL_CHUNK))  # of one size, so that little is filled up
  chunk = min(chunk_size or -(-shape.time // chunks), shape.time)
  chunk = _round_up(chunk, BLOCK)
  length = _round_up(shape.time, chunk)
  shape = dataclasses.replace(shape, head_dim=head_dim, value_dim=value_dim)
  inside, _, _ = _scores(shape, chunk, TILE)
  state = 2 * shape.batch * length * (shape.query_heads + shape.heads) * numbers
  flops = length // chunk * inside + state
  states = 2 * shape.batch * shape.heads * length // chunk * numbers
  traffic = _KERNEL_PASSES * _inputs(shape, length) + 2 * states
  alone = _OF_ONE_PIECE if longer == 1 else _OF_SEVERAL_PIECES
  seconds = alone * (flops / _KERNEL_FLOPS + traffic / device.bandwidth + 30 * device.latency)
  with_backward = _KERNEL_WITH_BACKWARD["chunked"] / alone
  return Plan("chunked", chunk, TILE, chunk, flops, traffic, seconds, "pallas", with_backward)


def _chunked_on_tpu(shape: Shape, chunk_size: int | None, device: Device) -> Plan:
  """P = 2. The state stays on the chip, with one feature for each product of two coordinates."""
  group = shape.query_heads // shape.heads
  chunk = chunk_size or min(largest_chunk(group), _round_up(shape.time, LANES))
  length = _round_up(shape.time, chunk)
  inside, _, _ = _scores(shape, chunk, LANES)
  state = 2 * shape.batch * length * (shape.query_heads + shape.heads) * shape.features * shape.value_dim
  flops, traffic = length // chunk * inside + state, _TPU_KERNEL_PASSES * _inputs(shape, length)
  seconds = flops / _TPU_KERNEL_FLOPS + traffic / device.bandwidth + 10 * device.latency
  return Plan("chunked", chunk, LANES, chunk, flops, traffic, seconds, "pallas", _TPU_WITH_BACKWARD["chunked"])


def _inputs(shape: Shape, length: int) -> int:
  """Bytes of q, k, v and y in 16 bits."""
  return 2 * shape.batch * length * (shape.query_heads + shape.heads) * (shape.head_dim + shape.value_dim)


def _chunked(shape: Shape, chunk_size: int | None, device: Device) -> Plan:
  # The states kept for the backward pass take at most twice the room of q, k, v and y.
  token = (shape.query_heads + shape.heads) * (shape.head_dim + shape.value_dim)
  smallest = shape.heads * shape.features * (shape.value_dim + 1) / (2 * token)
  candidates = [2**n for n in range(6, 15) if 2**n >= smallest] or [2**14]
  candidates = candidates if chunk_size is None else [chunk_size]
  plans = []
  for candidate in candidates:
    chunk = _part(shape.time, chunk_size, candidate)
    block = min(device.block, _fitting(shape.batch * shape.query_heads))
    if chunk > block:
      chunk = _round_up(chunk, 64)
      block = _divisor(chunk, block)
    else:
      block = chunk
    length, tile = _round_up(shape.time, chunk), _tile(shape, chunk)
    inside, state = _scores(shape, chunk, block), _state(shape, chunk, tile)
    flops, traffic, steps = (length // chunk * (a + b) for a, b in zip(inside, state, strict=True))
    plans.append(_plan("chunked", (chunk, block, tile), flops, traffic, steps, device))
  return min(plans, key=lambda plan: plan.seconds)


def _recurrent(shape: Shape, chunk_size: int | None, device: Device) -> Plan:
  interval = _part(shape.time, chunk_size, math.isqrt(shape.time - 1) + 1)
  length = _round_up(shape.time, interval)
  state = shape.features * (shape.value_dim + 1)
  flops = shape.batch * length * (4 * shape.heads + 2 * shape.query_heads) * state
  traffic = 3 * length * shape.state_bytes  # read and written, then read by the query
  return _plan("recurrent", (interval, 1, 1), flops, traffic, 4 * length, device)


def _scores(shape: Shape, span: int, block: int) -> tuple[int, int, int]:
  """FLOPs, bytes and loop steps of the attention form over one span: the blocks on and below the diagonal."""
  blocks = span // block
  pairs = blocks * (blocks + 1) // 2
  scores = shape.batch * shape.query_heads * pairs * block**2
  return scores * 2 * (shape.head_dim + shape.value_dim), scores * 4 * 4, pairs + blocks


def _state(shape: Shape, span: int, tile: int) -> tuple[int, int, int]:
  """FLOPs, bytes and loop steps to read and write the state by one span of tokens."""
  heads = shape.query_heads + shape.heads
  flops = shape.batch * span * heads * shape.features * 2 * (shape.value_dim + 1)
  expanded = shape.batch * span * heads * shape.features * 4
  return flops, 3 * expanded + 4 * shape.state_bytes, 2 * (span // tile)


def _round_up(x: int, multiple: int) -> int:
  return -(-x // multiple) * multiple


def _part(length: int, wanted: int | None, default: int) -> int:
  """The size into which `length` tokens are cut: what is wanted, or about `default` and with little padding."""
  if wanted is not None:
    return min(wanted, length)
  part = -(-length // -(-length // default))
  return _round_up(part, 64 if part > 256 else 16 if part > 64 else 1)  # with divisors to make blocks and tiles of


def _fitting(rows: int) -> int:
  """The largest power of two such that `rows` square blocks of float32 scores fit the scratch space, at least 64."""
  return max(64, 1 << int(math.log2(max(1.0, _SCRATCH / (4 * rows))) / 2))


def _divisor(x: int, most: int) -> int:
  return max(n for n in range(1, min(x, max(1, most)) + 1) if x % n == 0)


def _tile(shape: Shape, span: int) -> int:
  # The derivative of the features gathers p times as many numbers as there are features.
  token = 4 * shape.batch * shape.query_heads * shape.features * shape.power
  return _divisor(span, _SCRATCH // token)
