"""Times every form of the attention on the device at hand, beside softmax attention in the same process.

    python benchmarks/forms.py                                # a CPU in about three minutes: 4,096 tokens, 4 heads
    python benchmarks/forms.py --tokens=65536 --heads=12 --dtype=bfloat16 --lengths=1024,4096,16384,65536     # one GPU

Each line gives the median over the repeats (and the 20th and 80th percentile) of the forward pass and of forward and
backward together, the compiler's count of the latter's temporary memory, softmax's time over this one's (forward, and
forward+backward: above 1 is faster than softmax), and the forward time that the cost model of `form="auto"` expects.
All inputs are random, gated and rotated; before anything is timed each form is compared with the recurrence at a short
length.
"""

import argparse
import json
import pathlib
import platform
import time

import jax
import jax.numpy as jnp
import numpy as np

import csympow
from csympow import cost

LINE = "{:>8} {:>10} {:>6} {:>24} {:>24} {:>6} {:>13} {:>9}"


def inputs(batch: int, length: int, heads: int, dim: int, dtype: str) -> tuple[jax.Array, ...]:
  """Queries, keys, values, log gates, betas and the cotangent of the output."""
  keys = jax.random.split(jax.random.key(0), 6)
  q, k, v, dy = (jax.random.normal(key, (batch, length, heads, dim)).astype(dtype) for key in keys[:4])
  log_gate = jax.nn.log_sigmoid(jax.random.normal(keys[4], (batch, length, heads)) + 4)
  beta = 1 + jnp.tanh(jax.random.normal(keys[5], (batch, length, heads)))
  return q, k, v, log_gate, beta, dy


def power_attention(form: str, power: int, chunk_size: int | None):
  def call(q, k, v, log_gate, beta):
    rates = csympow.rotary_rates(q.shape[-1], 65_536)
    return csympow.attention(q, k, v, power, log_gate, beta, rates, form=form, chunk_size=chunk_size)

  return call


def softmax_attention(q, k, v, log_gate, beta):
  """JAX's own: cuDNN's kernel for 16-bit inputs on a GPU, plain XLA elsewhere."""
  del log_gate, beta
  cudnn = jax.default_backend() == "gpu" and q.dtype != jnp.float32
  return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn" if cudnn else "xla")


def with_backward(function):
  def call(*arrays):
    y, transpose = jax.vjp(function, *arrays[:-1])
    return y, transpose(arrays[-1])

  return call


def measure(function, arrays, repeats: int) -> dict[str, float]:
  compiled = jax.jit(function).lower(*arrays).compile()
  jax.block_until_ready(compiled(*arrays))
  times = []
  for _ in range(repeats):
    start = time.perf_counter()
    jax.block_until_ready(compiled(*arrays))
    times.append(1e3 * (time.perf_counter() - start))
  p20, median, p80 = np.percentile(times, (20, 50, 80))
  return {"ms": median, "p20": p20, "p80": p80, "temp_MiB": compiled.memory_analysis().temp_size_in_bytes / 2**20}


def check(form: str, power: int, heads: int, dim: int, dtype: str) -> float:
  """The relative error of y and of all gradients against the recurrence on the same inputs in float32."""
  arrays = inputs(1, 192, heads, dim, dtype)
  found = jax.jit(with_backward(power_attention(form, power, 64)))(*arrays)
  with jax.default_matmul_precision("highest"):
    exact = jax.jit(with_backward(power_attention("recurrent", power, None)))(*(x.astype(jnp.float32) for x in arrays))

  def error(a, b) -> float:
    return float(jnp.linalg.norm(a.astype(jnp.float32) - b) / jnp.linalg.norm(b))

  return max(jax.tree.leaves(jax.tree.map(error, found, exact)))


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--tokens", type=int, default=4096, help="tokens in the batch at every length")
  parser.add_argument("--lengths", default="512,1024,2048,4096")
  parser.add_argument("--heads", type=int, default=4)
  parser.add_argument("--dim", type=int, default=64)
  parser.add_argument("--power", type=int, default=2)
  parser.add_argument("--dtype", default="float32")
  parser.add_argument("--forms", default="attention,chunked")
  parser.add_argument("--chunk_sizes", default="auto", help="comma-separated; `auto` for the library's choice")
  parser.add_argument("--repeats", type=int, default=5)
  parser.add_argument("--no_softmax", action="store_true")
  parser.add_argument("--out", type=pathlib.Path, help="a JSON file for the table")
  args = parser.parse_args()
  lengths = [int(length) for length in args.lengths.split(",")]
  if max(lengths) > args.tokens:
    parser.error(f"--tokens={args.tokens} is less than the length {max(lengths)}; every batch needs a sequence")
  device = jax.devices()[0]
  print(f"{device.device_kind} ({device.platform}), jax {jax.__version__}, Python {platform.python_version()}")
  print(f"{args.tokens} tokens, {args.heads} heads of {args.dim}, power {args.power}, {args.dtype}, gated and rotated")
  forms = args.forms.split(",")
  for form in forms:
    error = check(form, args.power, args.heads, args.dim, args.dtype)
    print(f"{form}: relative error {error:.1e}")
    if not error < (5e-3 if args.dtype != "float32" or device.platform != "cpu" else 1e-5):
      raise SystemExit(f"{form} is wrong; nothing was timed")
  heads = ("T", "form", "chunk", "fwd ms", "fwd+bwd ms", "MiB", "vs softmax", "model ms")
  print(LINE.format(*heads))
  rows = []
  for length in lengths:
    arrays = inputs(args.tokens // length, length, args.heads, args.dim, args.dtype)
    softmax = None
    if not args.no_softmax:
      softmax = [measure(f, a, args.repeats) for f, a in _both(softmax_attention, arrays)]
      rows.append(_row(length, "softmax", 0, *softmax, softmax, None))
    for form in forms:
      for size in args.chunk_sizes.split(","):
        chunk_size = None if size == "auto" else int(size)
        plan = csympow.explain(*arrays[:3], args.power, form=form, chunk_size=chunk_size)
        shape = cost.Shape(*arrays[0].shape[:3], args.heads, args.dim, args.dim, args.power, False)
        model = cost.choose(shape, form, chunk_size, cost.platform()).seconds * 1e3
        timed = [measure(f, a, args.repeats) for f, a in _both(power_attention(form, args.power, chunk_size), arrays)]
        rows.append(_row(length, form, plan.chunk_size, *timed, softmax, model))
  if args.out:
    header = {"device": device.device_kind, "jax": jax.__version__, **vars(args)}
    args.out.write_text(json.dumps({**header, "rows": rows}, default=str))


def _both(function, arrays):
  return (function, arrays[:-1]), (with_backward(function), arrays)


def _row(length, form, chunk, forward, both, softmax, model) -> dict[str, object]:
  times = (f"{m['ms']:.2f} ({m['p20']:.2f}-{m['p80']:.2f})" for m in (forward, both))
  ratio = "" if softmax is None else f"{softmax[0]['ms'] / forward['ms']:.2f} / {softmax[1]['ms'] / both['ms']:.2f}"
  expected = "" if model is None else f"{model:.2f}"
  print(LINE.format(length, form, chunk or "", *times, round(both["temp_MiB"]), ratio, expected), flush=True)
  return {"T": length, "form": form, "chunk": chunk, "forward": forward, "forward_backward": both, "model_ms": model}


if __name__ == "__main__":
  main()
