"""Most cases of tests/test_kernels.py, compiled on a host without a GPU and run on one that was lent for minutes.

    JAX_PLATFORMS=cpu python -m tests.ahead compile DIR attention    # or alone, or chunked
    python -m tests.ahead run DIR                                    # on a Hopper GPU, with the same version of JAX

The first needs what benchmarks/gpu_static.py does.

A case takes some 20 s to compile, a chunked one 60, of one core, and less than 0.1 s on the chip. A program comes with
some of the numbers that float64 has in its place; inputs are made again. What is traced is what a jitted function finds
whose rates and documents are arguments. Chunked cases have chunks of 256 or of 1,024. `compile` goes on where it
stopped, for kernels that have not changed since, and `--part=0/2` is the half of it.
"""

import argparse
import concurrent.futures
import functools
import hashlib
import lzma
import os
import pickle
import sys
from pathlib import Path

import jax
import numpy as np
from jax.experimental import serialize_executable, topologies
from jax.sharding import SingleDeviceSharding

from benchmarks import gpu_static
from tests import test_kernels
from tests.comparing import cotangents, inputs

SOME = 4096  # numbers of each result


def programs():
  """(call, its options, case, what asserts that results are right) by name."""
  found = {}
  for case in test_kernels.ATTENTION_CASES:
    options = {"form": "attention", "power": case.power}
    found[f"attention {case}"] = test_kernels.both_ways, options, case, test_kernels.assert_attention_right
  for case in test_kernels.CASES:
    options = {"form": "attention", "power": case.power}
    found[f"alone {case}"] = test_kernels.alone, options, case, test_kernels.assert_attention_right
  for n, case in enumerate(test_kernels.CHUNKED_CASES):
    options = {"form": "chunked", "power": 2, "chunk_size": (256, 1024)[n % 2]}
    found[f"chunked {case}"] = test_kernels.both_ways, options, case, test_kernels.assert_chunked_right
  return found


def some(x):
  """The same ones of any array of that size."""
  x = np.asarray(x, np.float64).reshape(-1)
  return x if x.size <= SOME else x[np.random.default_rng(x.size).integers(0, x.size, SOME)]


@functools.cache
def version():
  """Of all that is compiled."""
  root = Path(test_kernels.__file__).parents[1]
  sources = sorted(path for part in ("csympow", "kernels_pallas") for path in (root / part).rglob("*.py"))
  return hashlib.sha256(b"".join([jax.__version__.encode(), *(path.read_bytes() for path in sources)])).hexdigest()


def file_of(directory, name):
  return directory / f"{hashlib.sha256((name + version()).encode()).hexdigest()[:16]}.program"


def compile_all(directory, kind, part):
  """Leaves a file for each program of the kind."""
  this, of = (int(x) for x in part.split("/"))
  device = topologies.get_topology_desc(platform="cuda", target_config=gpu_static.CHIP, topology="1x1x1").devices[0]

  def shape(a):
    return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=SingleDeviceSharding(device))

  for n, (name, (call, options, case, _)) in enumerate(programs().items()):
    if not name.startswith(kind) or n % of != this or file_of(directory, name).exists():
      continue
    jax.clear_caches()
    x, rest = inputs(case)
    run = jax.jit(functools.partial(call, case=case, **options))
    with jax.default_matmul_precision("highest"):
      compiled = run.lower(*jax.tree.map(shape, (x, cotangents(case), rest))).compile()
      expected = jax.tree.map(some, test_kernels.reference(case))
    saved = name, serialize_executable.serialize(compiled), expected
    unfinished = file_of(directory, name).with_suffix(".part")
    unfinished.write_bytes(lzma.compress(pickle.dumps(saved), preset=1))
    os.replace(unfinished, file_of(directory, name))
    print(name, flush=True)


def run_all(directory):
  """Prints what is not right; whether there is something, and all is."""
  known = programs()

  def check(path):
    name = path.name
    try:
      name, (program, arguments, results), expected = pickle.loads(lzma.decompress(path.read_bytes()))
      assert path == file_of(directory, name), "compiled of other kernels than are here, or by another JAX"
      _, _, case, assert_right = known[name]
      x, rest = inputs(case)
      run = serialize_executable.deserialize_and_load(program, arguments, results, execution_devices=jax.devices()[:1])
      assert_right(jax.tree.map(some, run(x, cotangents(case), rest)), expected, case)
    except Exception as error:  # whatever it is, the others are still to be seen
      print(f"{name}: {error!r}", flush=True)
      return False
    return True

  with concurrent.futures.ThreadPoolExecutor(8) as pool:
    right = list(pool.map(check, sorted(directory.glob("*.program"))))
  print(f"{sum(right)} of {len(right)} are right")
  return bool(right) and all(right)


def main():
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("what", choices=["compile", "run"])
  parser.add_argument("directory", type=Path)
  parser.add_argument("kind", nargs="?", default="", choices=["", "attention", "alone", "chunked"])
  parser.add_argument("--part", default="0/1")
  flags = parser.parse_args()
  if flags.what == "run":
    sys.exit(not run_all(flags.directory))
  flags.directory.mkdir(parents=True, exist_ok=True)
  compile_all(flags.directory, flags.kind, flags.part)


if __name__ == "__main__":
  main()
