"""Times a decode step on a GPU beside a copy of the same bytes and beside softmax over a cache of keys and values.

    python benchmarks/decode.py                                # both tables of docs/kernels.md, "A step"
    python benchmarks/decode.py --batches=8 --contexts=65536   # a line of each

p = 2, 12 heads of 64, bf16 tokens, a float32 state, gated and rotated. A step reads and writes S and Z: its share is
that of the speed at which `x + 1` goes over as many bytes. All is timed inside one compiled loop in which each query is
the output of the step before, at the median over several calls. Steps by the kernel are compared with XLA's first.
"""

import argparse
import concurrent.futures
import functools
import json
import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import csympow

HEADS, DIM, POWER = 12, 64, 2
UNROLL = 10  # launches that a graph of the driver's can hold together
COPY_LINE = "{:>6} {:>10} {:>16} {:>24} {:>24}"
CONTEXT_LINE = "{:>10} {:>6} {:>24} {:>14} {:>14}"


def tokens(batch: int, count: int):
  """Queries, keys, values, log gates and betas, time first."""
  keys = jax.random.split(jax.random.key(0), 5)
  q, k, v = (jax.random.normal(key, (count, batch, HEADS, DIM), jnp.bfloat16) for key in keys[:3])
  logits, speeds = (jax.random.normal(key, (count, batch, HEADS)) for key in keys[3:])
  return q, k, v, jax.nn.log_sigmoid(4 + logits), 1 + jnp.tanh(speeds)


def step(state, token, implementation: str):
  q, k, v, log_gate, beta = token
  rates = csympow.rotary_rates(DIM, 65_536)
  return csympow.step(q, k, v, state, POWER, log_gate, beta, rates, implementation=implementation)


class Loop:
  """A compiled loop of advance(carry, constants), its carry given up at every call; compiles while others do."""

  pool = concurrent.futures.ThreadPoolExecutor(8)

  def __init__(self, advance, make, moved: int) -> None:
    """`make` makes the carry and the constants; `moved` are the bytes of a round, by which its time is guessed."""
    self.make = make
    self.count = UNROLL * max(1, round(0.02 / (UNROLL * (moved / 3e12 + 1e-5))))
    advance = jax.jit(advance)  # to be lowered once, however often it stands in the loop

    def run(carry, constants):
      def once(_, carry):
        return lax.optimization_barrier(advance(carry, constants))

      return lax.fori_loop(0, self.count, once, carry, unroll=UNROLL)

    shapes = jax.eval_shape(make)
    self.program = self.pool.submit(lambda: jax.jit(run, donate_argnums=0).lower(*shapes).compile())

  def microseconds(self, groups: int) -> float:
    """The median over calls of what one round takes."""
    program, (carry, constants) = self.program.result(), self.make()
    times = []
    for _ in range(1 + groups):
      jax.block_until_ready((carry, constants))
      start = time.perf_counter()
      carry = jax.block_until_ready(program(carry, constants))
      times.append(1e6 * (time.perf_counter() - start) / self.count)
    return float(np.median(times[1:]))


def check(implementation: str) -> dict[str, float]:
  """Relative errors of 200 steps against XLA's in float32."""
  arrays, state = tokens(4, 200), csympow.init_state(4, HEADS, DIM, DIM)

  @functools.partial(jax.jit, static_argnums=1)
  def run(arrays, implementation):
    return lax.scan(lambda state, token: step(state, token, implementation)[::-1], state, arrays)

  found = run(arrays, implementation)
  with jax.default_matmul_precision("highest"):
    expected = run(tuple(x.astype(jnp.float32) for x in arrays), "xla")

  def error(a, b) -> float:
    return float(jnp.linalg.norm((a.astype(jnp.float32) - b).ravel()) / jnp.linalg.norm(b.ravel()))

  return {
    "y": error(found[1], expected[1]),
    "S": error(found[0].S, expected[0].S),
    "Z": error(found[0].Z, expected[0].Z),
  }


def copy(batch: int) -> Loop:
  state = new_state(batch)
  count = state.S.size + state.Z.size
  return Loop(lambda x, _: x + 1, lambda: (jnp.zeros(count, jnp.float32), None), 8 * count)


def decode(batch: int, implementation: str) -> Loop:
  def advance(carry, constants):
    state, q = carry
    y, state = step(state, (q, *constants), implementation)
    return state, y

  def make():
    q, *constants = (x[0] for x in tokens(batch, 1))
    return (csympow.init_state(batch, HEADS, DIM, DIM), q), constants

  return Loop(advance, make, 8 * new_state(batch).S.size)


def new_state(batch: int):
  return jax.eval_shape(functools.partial(csympow.init_state, batch, HEADS, DIM, DIM))


def cudnn(q, cache):
  return jax.nn.dot_product_attention(q[:, None], *cache, implementation="cudnn")[:, 0]


def products(q, cache):
  """By XLA, from a cache in which a head's keys lie together."""
  k, v = cache
  scores = jnp.einsum("bhd,bhtd->bht", q, k, preferred_element_type=jnp.float32) / DIM**0.5
  weights = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
  return jnp.einsum("bht,bhtd->bhd", weights, v, preferred_element_type=jnp.float32).astype(q.dtype)


def softmax(batch: int, context: int, name: str) -> Loop:
  attend = {"cuDNN": cudnn, "XLA": products}[name]
  shape = (batch, context, HEADS, DIM) if name == "cuDNN" else (batch, HEADS, context, DIM)
  make = jax.jit(lambda: (tokens(batch, 1)[0][0], tuple(filled(shape, phase) for phase in (0.0, 1.0))))
  return Loop(attend, make, batch * cache_bytes(context))


def cache_bytes(context: int) -> int:
  """Of a row's keys and values."""
  return 4 * context * HEADS * DIM


def fastest(loops: dict[str, Loop], groups: int) -> tuple[str, float] | None:
  """Of the implementations that can do it."""
  times = {}
  for name, loop in loops.items():
    try:
      times[name] = loop.microseconds(groups)
    except Exception as error:  # of whatever kind: a length or a size that it does not take
      print(f"  softmax by {name}: {str(error).splitlines()[0][:100]}")
  return min(times.items(), key=lambda item: item[1]) if times else None


def filled(shape, phase):
  """Numbers that are cheap to make and not all alike."""
  coordinates = (lax.broadcasted_iota(jnp.int32, shape, axis) % 1009 for axis in range(4))
  return jnp.sin(sum(coordinates).astype(jnp.float32) + phase).astype(jnp.bfloat16)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--batches", default="1,8,64")
  parser.add_argument("--contexts", default="1024,4096,16384,65536,262144,1048576")
  parser.add_argument(
    "--softmax_batch", type=int, default=8, help="rows of the softmax cache, one where they do not fit"
  )
  parser.add_argument("--implementation", default="pallas", choices=["pallas", "xla"])
  parser.add_argument("--groups", type=int, default=5)
  parser.add_argument("--out", type=pathlib.Path, help="a JSON file for the tables")
  args = parser.parse_args()
  batches, contexts = ([int(x) for x in text.split(",") if x] for text in (args.batches, args.contexts))
  device = jax.devices()[0]
  if device.platform != "gpu":
    parser.error(f"needs an NVIDIA GPU, this is a {device.platform}")
  errors = check(args.implementation)
  listed = ", ".join(f"{name} {error:.1e}" for name, error in errors.items())
  print(f"{device.device_kind}, jax {jax.__version__}; relative errors {listed}")
  if not (errors["y"] < 5e-3 and errors["S"] < 1e-4 and errors["Z"] < 1e-4):
    raise SystemExit("that is wrong; nothing was timed")

  memory = (device.memory_stats() or {}).get("bytes_limit", 80e9)
  rows_of = {c: args.softmax_batch if 2.2 * args.softmax_batch * cache_bytes(c) < memory else 1 for c in contexts}
  batches = sorted({*batches, *rows_of.values()})
  loops = {b: (copy(b), decode(b, args.implementation), decode(b, "xla")) for b in batches}
  caches = {c: {name: softmax(rows, c, name) for name in ("cuDNN", "XLA")} for c, rows in rows_of.items()}
  every = [*(x for group in loops.values() for x in group), *(x for group in caches.values() for x in group.values())]
  concurrent.futures.wait([loop.program for loop in every])  # nothing is timed while the host compiles

  steps, lines = {}, []
  print(COPY_LINE.format("batch", "state", "copy us", "step us (of copy)", "XLA's step us (of copy)"))
  for batch in batches:
    copied, ours, xla = (loop.microseconds(args.groups) for loop in loops[batch])
    size = 4 * (new_state(batch).S.size + new_state(batch).Z.size)
    steps[batch] = {"state_bytes": size, "copy_us": copied, "step_us": ours, "xla_us": xla}
    speed = f"{copied:.1f} ({2e-6 * size / copied:.2f} TB/s)"
    cells = [f"{x:.1f} ({copied / x:.0%})" for x in (ours, xla)]
    print(COPY_LINE.format(batch, f"{1e-6 * size:.1f} MB", speed, *cells), flush=True)
  if contexts:
    print(CONTEXT_LINE.format("context", "batch", "softmax us (TB/s)", "by", "softmax / step"))
  for context, rows in rows_of.items():
    if found := fastest(caches[context], args.groups):
      name, taken = found
      ratio = taken / steps[rows]["step_us"]
      speed = f"{taken:.1f} ({1e-6 * rows * cache_bytes(context) / taken:.2f})"
      print(CONTEXT_LINE.format(f"{context:,}", rows, speed, name, f"{ratio:.2f}"), flush=True)
      lines.append({"context": context, "batch": rows, "softmax_us": taken, "by": name})
  if args.out:
    described = {"device": device.device_kind, "jax": jax.__version__, "errors": errors, **vars(args)}
    args.out.write_text(json.dumps(described | {"steps": steps, "contexts": lines}, default=str))


if __name__ == "__main__":
  main()
