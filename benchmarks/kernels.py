"""Where the time of a call on a Hopper GPU goes: each of its kernels beside the least that the chip needs for as much.

    python -m benchmarks.kernels                                        # the chunked form's table in docs/kernels.md
    python -m benchmarks.kernels --form=attention --length=4096 --not-rotated

65,536 tokens in the batch, 12 heads, bf16, gated (logits around 6.9) and rotated. Each program is run twenty times
under JAX's profiler, which says how long each launch took; microseconds are those of one run. Beside them stand two
bounds: what the kernel's matrix products would take at the rate of an 8192 x 8192 x 8192 product of bf16 matrices, and
what its arrays, each counted once, would take at the rate of a copy, both measured here; and how much of the time the
larger of the two is. Products are counted as the kernels make them, of all tiles of keys that lie in a chunk, or
before a query: gates that fade some of them, or that leave a head without a state, make the share too large, and of a
kernel that has left out so much that it took less than its bound none is given. Nothing else should use the machine:
the two rates are measured when the programs have not been compiled yet.
"""

import argparse
import collections
import itertools
import math
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.profiler import ProfileData

import csympow
from benchmarks.attention import by_turns, ceiling, inputs, power_attention, with_backward
from kernels_pallas.gpu.tiles import STATE_WIDTH, TILE

TOKENS, HEADS, RUNS = 65_536, 12, 20
LINE = "{:20} {:>9} {:>9} {:>13} {:>10} {:>8}"
_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4}
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")  # as XLA writes it, such as bf16[1,12,64]{2,1,0}
_MOST = 1.1  # of a bound no kernel takes less, unless it has left something out
_SAMPLE = ("heard", "sizes", "bounds", "reach")  # kernels that look at a part of their arrays, which gates decide


class Launched(NamedTuple):
  """What a program's kernels of one name did."""

  launches: int
  microseconds: float


class Shape(NamedTuple):
  """Of a call, whose queries have a key each."""

  tokens: int  # of all sequences and heads
  head_dim: int
  window: int  # tokens that attend to one another: a chunk, or all


def launched(directory: Path, runs: int) -> dict[str, Launched]:
  """From a profile of so many runs, kernels by their names; all launches of XLA's together."""
  (found,) = directory.glob("**/*.xplane.pb")
  taken = collections.defaultdict(list)
  for plane in ProfileData.from_file(str(found)).planes:
    for line in plane.lines if plane.name.startswith("/device:GPU") else ():
      for event in line.events if line.name.startswith("Stream") else ():
        kernel = re.match(r"(\w+)_mosaic_gpu", event.name)
        taken[kernel[1] if kernel else "XLA's"].append(event.duration_ns / 1e3)
  return {name: Launched(round(len(times) / runs), sum(times) / runs) for name, times in taken.items()}


def traffic(program: str, names: set[str]) -> dict[str, int]:
  """Bytes of all arrays of the kernels in a compiled program; of a conditional's, of the branch that has been taken.

  That is the one of most kernels, if all their names are among these.
  """
  places = collections.defaultdict(list)  # calls by where in the program they are
  for line in program.splitlines():
    if 'custom_call_target="mosaic_gpu' in line:
      (results, operands, shapes), *_ = re.findall(
        r" = (.*?) custom-call\((.*?)\), .*?operand_layout_constraints=\{(.*?)\}, api_version", line
      )
      given = dict(zip(re.findall(r"%[\w.-]+", operands), _ARRAY.findall(shapes), strict=True))  # some are given twice
      *place, name, _ = re.findall(r'op_name="([^"]*)"', line)[0].split("/")
      size = sum(itertools.starmap(_bytes, [*_ARRAY.findall(results), *given.values()]))
      places["/".join(place)].append((name, 0 if name in _SAMPLE else size))
  conditionals: dict[str, dict[str, list]] = collections.defaultdict(lambda: collections.defaultdict(list))
  for place, calls in places.items():
    before, is_branch, rest = place.rpartition("cond/branch_")
    conditionals[before if is_branch else place][rest.split("/")[0] if is_branch else ""] += calls
  taken = []
  for branches in conditionals.values():
    launchable = [calls for calls in branches.values() if all(name in names for name, _ in calls)]
    taken += max(launchable, key=len, default=[])
  total: collections.Counter[str] = collections.Counter()
  for name, size in taken:
    total[name] += size
  return total


def _bytes(dtype: str, dims: str) -> int:
  return _BYTES[dtype] * math.prod(int(n) for n in dims.split(",") if n)


def products(x: Shape, *, chunked: bool, gradients: bool) -> dict[str, float]:
  """FLOP of the matrix products of each kernel that has some."""
  d, pieces = x.head_dim, x.head_dim // STATE_WIDTH
  pairs = 2 * x.tokens * (x.window + TILE) / 2 * d  # of one product of all pairs in the same window
  # Of scores and with values; backwards scores, those of cotangents and values, and three for gradients.
  found = {"attention_forward": 2 * pairs, "attention_backward": 5 * pairs if gradients else 0.0}
  if not chunked:
    return found
  state, normaliser = 2 * x.tokens * d**3, 2 * x.tokens * d**2
  # Of products of two coordinates those whose second one's quarter is not before the first one's, or piece.
  later = (10 / 16 * pieces + pieces * (pieces - 1) / 2) / pieces**2
  if not gradients:
    writes = {"symmetric_write": later * state} if pieces == 1 else {"state_write": state}
    return found | writes | {"state_read": later * state + 2 * normaliser, "gram": normaliser}
  reads = (2 * later + 2) * state + 3 * 2 * normaliser
  return found | {"state_write": 2 * state, "state_read": reads, "gram": 3 * normaliser}


def copying() -> float:
  """Bytes a second, read and written."""
  x = jnp.arange(2**28, dtype=jnp.float32)
  program = jax.jit(lambda x: x + 1).lower(x).compile()
  return 2 * x.nbytes / (by_turns({"copy": program}, (x,), 5)["copy"] / 1e3)


def main() -> None:
  """Prints a table for a forward pass and one with the backward pass."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--form", default="chunked", choices=["attention", "chunked"])
  parser.add_argument("--length", type=int, default=65_536)
  parser.add_argument("--dim", type=int, default=64, choices=[64, 128], help="the head dims d = dv")
  parser.add_argument("--power", type=int, default=2, help="of the attention form; chunked it is 2")
  parser.add_argument("--offset", type=float, default=6.9, help="the mean logit of the gates")
  parser.add_argument("--not-rotated", action="store_true")
  args = parser.parse_args()
  device, chunked = jax.devices()[0], args.form == "chunked"
  if device.platform != "gpu":
    parser.error(f"needs an NVIDIA GPU of the Hopper generation; this is a {device.platform}")
  if chunked and args.power != 2:
    parser.error("beyond p=2 the products of chunks are XLA's, whose launches are not told apart here")
  batch = max(1, TOKENS // args.length)
  arrays = inputs(batch, args.length, HEADS, args.dim, [args.offset], 1.0)
  call = power_attention(args.power, args.form, not args.not_rotated, "pallas")
  plan = csympow.explain(*arrays[:3], args.power, form=args.form, implementation="pallas")
  window = plan.chunk_size if chunked else args.length
  shape = Shape(batch * args.length * HEADS, args.dim, window)
  rate, copied = ceiling(5), copying()
  measured = f"a large product: {rate / 1e12:.0f} TFLOP/s, a copy: {copied / 1e12:.2f} TB/s"
  print(f"{device.device_kind}, jax {jax.__version__}; {measured}")
  for gradients in (False, True):
    given = arrays if gradients else arrays[:-1]
    program = jax.jit(with_backward(call) if gradients else call).lower(*given).compile()
    found = profile(program, given)
    moved = traffic(program.as_text(), set(found))
    multiplied = products(shape, chunked=chunked, gradients=gradients)
    print(f"\n{'with the backward pass' if gradients else 'a forward pass'}, {args.length:,} tokens, {args.form}:")
    print(LINE.format("kernel", "launches", "us", "products, us", "bytes, us", "share"))
    for name, (launches, time) in sorted(found.items(), key=lambda item: -item[1].microseconds):
      bounds = 1e6 * multiplied.get(name, 0) / rate, 1e6 * moved.get(name, 0) / copied
      cells = [f"{x:,.0f}" if x else "" for x in bounds]
      share = max(bounds) / time
      print(LINE.format(name, launches, f"{time:,.0f}", *cells, f"{share:.0%}" if 0 < share < _MOST else ""))
    print(LINE.format("all", *(f"{sum(column):,.0f}" for column in zip(*found.values(), strict=True)), "", "", ""))


def profile(program: jax.stages.Compiled, arrays: Sequence[jax.Array]) -> dict[str, Launched]:
  """Of RUNS runs, after one that is not looked at."""
  jax.block_until_ready(program(*arrays))
  with tempfile.TemporaryDirectory() as directory:
    with jax.profiler.trace(directory):
      for _ in range(RUNS):
        out = program(*arrays)
      jax.block_until_ready(out)
    found = launched(Path(directory), RUNS)
  if not found:
    raise SystemExit("the profiler says nothing of the GPU: is CUPTI installed?")
  return found


if __name__ == "__main__":
  main()
