"""Times power attention on a GPU beside cuDNN's softmax attention in the same process.

    python benchmarks/attention.py                                      # the attention form's table in docs/kernels.md
    python benchmarks/attention.py --lengths=4096 --powers=2 --rotated  # one line of it, with rotations
    python benchmarks/attention.py --form=chunked --powers=2 --rotated --heads=8 --chunk_size=1024 --lengths=65536
    python benchmarks/attention.py --form=chunked --powers=2 --rotated --lengths=16384,65536,1048576 --without_softmax

65,536 tokens at every length, or one sequence of more, 12 heads, bf16, gated (a logit offset of 6.9; `--offset=5` for
another, `--offset=3,11` for heads that differ). The time is that of the whole call, preparation included: the median
over groups of launches, which all programs of a length take by turns. Each line gives both times of both, cuDNN's over
ours (above 1 is faster than cuDNN), and for the attention form the products' rate as a share of what an 8192 x 8192 x
8192 product of bf16 matrices reaches (of all pairs of tokens: where tiles are left out that gates have faded, it can
be above 1); then how much memory ours needs, arguments and results included, by the compiler's count. With `--rotated`
a last column has cuDNN with the usual rotary embedding of queries and keys before it, by XLA, and its times over ours.
A form is compared with XLA's in float32 at a short length before it is timed.
"""

import argparse
import concurrent.futures
import contextlib
import functools
import json
import pathlib
import time
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import csympow
from csympow import rotation
from csympow.forms import visible

LINE = "{:>9} {:>3} {:>4} {:>18} {:>18} {:>13} {:>22} {:>13}"
ROTATED_LINE = LINE + " {:>34}"


def inputs(batch: int, length: int, heads: int, dim: int, offsets: list[float], spread: float):
  """Queries, keys, values, log gates, betas and the cotangent of the output.

  Logits of the gates are around `offsets`, from the first head's to the last one's.
  """
  keys = jax.random.split(jax.random.key(0), 6)
  q, k, v, dy = (jax.random.normal(key, (batch, length, heads, dim), jnp.bfloat16) for key in keys[:4])
  logit = jnp.linspace(offsets[0], offsets[-1], heads) + spread * jax.random.normal(keys[4], (batch, length, heads))
  beta = 1 + jnp.tanh(jax.random.normal(keys[5], (batch, length, heads)))
  return q, k, v, jax.nn.log_sigmoid(logit), beta, dy


def power_attention(power: int, form: str, rotated: bool, implementation: str | None, chunk_size: int | None = None):
  def call(q, k, v, log_gate, beta):
    turning = {"beta": beta, "rates": csympow.rotary_rates(q.shape[-1], 65_536)} if rotated else {}
    how = {"form": form, "chunk_size": chunk_size, "implementation": implementation}
    return csympow.attention(q, k, v, power, log_gate, **turning, **how)

  return call


def softmax_attention(q, k, v, log_gate, beta):
  del log_gate, beta
  return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")


def rotated_softmax_attention(q, k, v, log_gate, beta):
  rates = csympow.rotary_rates(q.shape[-1], 65_536) / (2 * jnp.pi)
  turns = (jnp.arange(q.shape[1])[:, None] * rates)[:, None]
  return softmax_attention(rotation.rotate(q, turns), rotation.rotate(k, turns), v, log_gate, beta)


def with_backward(function):
  def call(*arrays):
    y, transpose = jax.vjp(function, *arrays[:-1])
    return y, transpose(arrays[-1])

  return call


def milliseconds(compiled, *arrays) -> float:
  """Of a launch, in a group of them that takes about 20 ms, or one that takes longer."""

  def run(times: int) -> float:
    start = time.perf_counter()
    for _ in range(times):
      out = compiled(*arrays)
    jax.block_until_ready(out)
    return 1e3 * (time.perf_counter() - start) / times

  run(1)
  return run(max(1, round(20 / run(2))))


def by_turns(programs: dict, arrays, groups: int) -> dict:
  """The median over groups of each program's time. Turns, because a chip that is warm is slower than one that rests."""
  times = [{name: milliseconds(compiled, *arrays) for name, compiled in programs.items()} for _ in range(groups)]
  return {name: float(np.median([turn[name] for turn in times])) for name in programs}


def check(power: int, form: str, dim: int, rotated: bool, implementation: str | None) -> tuple[float, float]:
  """The largest relative errors, of y, alone and with gradients, and those of vectors, and of those of gates and betas.

  Against XLA's attention form in float32. Gates' and betas' gradients are sums over time of terms that cancel. In the
  chunked form states are taken to be cheap: heads of so short a sequence would have none.
  """
  several = 1024 if form == "chunked" else None

  def error(a, b) -> float:
    return float(jnp.linalg.norm(a.astype(jnp.float32) - b) / jnp.maximum(jnp.linalg.norm(b), 1e-30))

  def errors(length: int) -> tuple[float, float]:
    # As many heads as are timed, some of which forget.
    arrays = inputs(1, length, 12, dim, [3.0, 9.0], 1.0)
    ours = power_attention(power, form, rotated, implementation, several)
    alone, found = jax.jit(ours)(*arrays[:-1]), jax.jit(with_backward(ours))(*arrays)
    with jax.default_matmul_precision("highest"):
      exact = power_attention(power, "attention", rotated, "xla")
      expected = jax.jit(with_backward(exact))(*(x.astype(jnp.float32) for x in arrays))
    y, (dq, dk, dv, *rest) = jax.tree.map(error, found, expected)
    return max(error(alone, expected[0]), y, dq, dk, dv), max(rest)

  # Short, as the attention form has a way of its own for, and long enough for forgetting to count in heads of 64.
  cheap = {"MULTIPROCESSORS": 1, "cost_of_states": lambda states, *rest: 6.0 * states}
  with mock.patch.multiple(visible, **cheap) if form == "chunked" else contextlib.nullcontext():
    both = [errors(length) for length in ((1000, 4600) if form == "attention" else (4600,))]
  return max(error for error, _ in both), max(error for _, error in both)


def gigabytes(compiled) -> float:
  """That a program needs, arguments and results included, as the compiler counts them."""
  found = compiled.memory_analysis()
  sizes = found.argument_size_in_bytes, found.output_size_in_bytes, found.temp_size_in_bytes
  return (sum(sizes) - found.alias_size_in_bytes) / 1e9


def both(numbers: list[float], how: str = ".3f") -> str:
  return " / ".join(f"{x:{how}}" for x in numbers)


def over(theirs: list[float], ours: list[float]) -> list[float]:
  return [a / b for a, b in zip(theirs, ours, strict=True)]


def ceiling(groups: int) -> float:
  """FLOP/s of a large product."""
  a, b = jax.random.normal(jax.random.key(1), (2, 8192, 8192), jnp.bfloat16)
  return 2 * 8192**3 / by_turns({"product": jax.jit(jnp.matmul).lower(a, b).compile()}, (a, b), groups)["product"] * 1e3


class Programs:
  """Programs that compile beside one another while others wait for them."""

  def __init__(self) -> None:
    self.pool = concurrent.futures.ThreadPoolExecutor(8)
    self.programs: dict = {}

  def add(self, key, function, shapes) -> None:
    self.programs[key] = self.pool.submit(lambda: jax.jit(function).lower(*shapes).compile())

  def __getitem__(self, key):
    return self.programs[key].result()

  def settle(self) -> None:
    """Waits for all: nothing is timed while the host compiles."""
    concurrent.futures.wait(self.programs.values())


def logits(text: str) -> list[float]:
  """One, or two: the first head's and the last's."""
  numbers = [float(x) for x in text.split(",")]
  if len(numbers) > 2:
    raise argparse.ArgumentTypeError(f"one logit or two, the first head's and the last's; got {text}")
  return numbers


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--lengths", default="1024,4096,16384,65536")
  parser.add_argument("--powers", default="2,4")
  parser.add_argument("--dims", default="64", help="head dims d = dv")
  parser.add_argument("--tokens", type=int, default=65_536, help="tokens in the batch at every length")
  parser.add_argument("--heads", type=int, default=12)
  parser.add_argument("--form", default="attention")
  parser.add_argument("--chunk_size", type=int, help="tokens in a chunk; by default as many as the op chooses")
  parser.add_argument("--implementation", default="pallas", choices=["pallas", "xla", "none"])
  parser.add_argument("--without_softmax", action="store_true", help="for lengths at which it takes long")
  parser.add_argument("--rotated", action="store_true")
  parser.add_argument(
    "--offset", type=logits, default=[6.9], help="the mean logit of the gates, or the first head's and the last's"
  )
  parser.add_argument("--spread", type=float, default=1.0, help="the deviation of the logits")
  parser.add_argument("--groups", type=int, default=5)
  parser.add_argument("--out", type=pathlib.Path, help="a JSON file for the table")
  args = parser.parse_args()
  implementation = None if args.implementation == "none" else args.implementation
  lengths, powers, dims = ([int(x) for x in text.split(",")] for text in (args.lengths, args.powers, args.dims))
  device = jax.devices()[0]
  if device.platform != "gpu":
    parser.error(f"needs an NVIDIA GPU, for cuDNN is what it compares with; this is a {device.platform}")

  def made(length: int, dim: int):
    return inputs(max(1, args.tokens // length), length, args.heads, dim, args.offset, args.spread)

  peak = ceiling(args.groups)
  print(f"{device.device_kind}, jax {jax.__version__}; a large product: {peak / 1e12:.0f} TFLOP/s")
  for power in powers:
    for dim in dims:
      error, of_gates = check(power, args.form, dim, args.rotated, implementation)
      print(f"p={power} d={dim}: relative error {error:.1e}, of the gradients of gates and betas {of_gates:.1e}")
      if not (error < 5e-3 and of_gates < 8e-3):
        raise SystemExit("that is wrong; nothing was timed")
  functions = {} if args.without_softmax else {"softmax": softmax_attention}
  if args.rotated and not args.without_softmax:
    functions["rotated softmax"] = rotated_softmax_attention
  how = args.form, args.rotated, implementation, args.chunk_size
  functions |= {power: power_attention(power, *how) for power in powers}
  programs = Programs()
  for length in lengths:
    for dim in dims:
      shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in jax.eval_shape(functools.partial(made, length, dim))]
      for name, function in functions.items():
        programs.add((length, dim, name, "forward"), function, shapes[:-1])
        programs.add((length, dim, name, "both"), with_backward(function), shapes)
  programs.settle()
  both_ways = ["cuDNN ms", "ours ms", "ratio", "of the ceiling", "GB"]
  titles = ["T", "p", "d", *(f"{title} f / f+b" for title in both_ways)]
  line = ROTATED_LINE if args.rotated else LINE
  print(line.format(*titles, "rotated cuDNN ms f / f+b, ratio"))
  rows = []
  for length in lengths:
    for dim in dims:
      arrays = made(length, dim)
      forward, with_gradients = (
        by_turns({name: programs[length, dim, name, what] for name in functions}, given, args.groups)
        for what, given in (("forward", arrays[:-1]), ("both", arrays))
      )
      found = {name: [forward[name], with_gradients[name]] for name in functions}
      softmax, rotated = found.get("softmax"), found.get("rotated softmax")
      for power in powers:
        times = found[power]
        shares = []
        if args.form == "attention":  # whose products alone are two, and seven with the backward pass
          product = 2 * arrays[0].size * length / 2 * 1e3 / peak
          shares = [2 * product / times[0], 7 * product / times[1]]
        memory = [gigabytes(programs[length, dim, power, what]) for what in ("forward", "both")]
        beside = ["", ""] if softmax is None else [both(softmax), both(over(softmax, times), ".2f")]
        cells = [beside[0], both(times), beside[1], both(shares, ".0%"), both(memory, ".2f")]
        cells.append("" if rotated is None else f"{both(rotated)}, {both(over(rotated, times), '.2f')}")
        print(line.format(f"{length:,}", power, dim, *cells), flush=True)
        row = {"T": length, "power": power, "dim": dim, "cudnn_ms": softmax, "ms": times, "share_of_ceiling": shares}
        row["gigabytes"] = memory
        rows.append(row | ({} if rotated is None else {"rotated_cudnn_ms": rotated}))
  if args.out:
    args.out.write_text(
      json.dumps({"device": device.device_kind, "jax": jax.__version__, **vars(args), "rows": rows}, default=str)
    )


if __name__ == "__main__":
  main()
