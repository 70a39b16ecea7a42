"""Compiles the op for Hopper, on a host that need not have a GPU, and reads what ptxas says of every kernel.

    pip install jax-cuda13-plugin==0.11.2 nvidia-cuda-nvcc nvidia-nvvm nvidia-cuda-nvdisasm   # jax's own version
    JAX_PLATFORMS=cpu python benchmarks/gpu_static.py --lengths=1024,4096,16384 --powers=2,4
    JAX_PLATFORMS=cpu python benchmarks/gpu_static.py --lengths=16384 --dims=32,128
    JAX_PLATFORMS=cpu python benchmarks/gpu_static.py --form=chunked --lengths=65536 --rotated

65,536 tokens at every length, or one sequence of more, 12 heads, bf16, gated, with gradients. Printed for each kernel:
the registers of a thread that it starts with; bytes spilled, for which shared memory leaves the first cache hardly any
room; whether ptxas runs one matrix product after another (C7512 if for want of registers); the instructions of each
innermost loop with products, in the program's order, however often it is run; and how many instructions write to a
register that a product under way may still read, which none should. Kernels of one name that came out alike
are named once. These are counts of what the compiler wrote: nothing is timed.
"""

import argparse
import importlib.util
import itertools
import os
import re
import tempfile
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

import csympow

TOKENS, HEADS = 65_536, 12
# What XLA wants to know of a chip that is not here: an H100's.
CHIP = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448 shared_memory_per_core: 233472
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  registers_per_core_limit: 65536 registers_per_block_limit: 65536 device_address_bits: 64
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98 device_memory_size: 84942979072
  cuda_compute_capability { major: 9 } platform_version: "Compute Capability 9.0a" device_vendor: "NVIDIA Corporation"
  name: "NVIDIA H100 80GB HBM3" driver_version: "13.0.0" runtime_version: "13.0.0" dnn_version: "9.10.0"
  compile_time_toolkit_version: "13.0.0"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 patch: 0 }
"""


class Kernel(NamedTuple):
  """What ptxas made of one."""

  registers: int
  spilled: int  # bytes
  in_a_row: bool  # its matrix products
  loops: tuple[int, ...]  # instructions of each innermost one with matrix products
  overwritten: int  # instructions that write where a product under way may still read


def compile_call(length: int, power: int, head_dim: int, form: str, rotated: bool, directory: Path) -> None:
  """Compiles a call and its gradients; Mosaic leaves what ptxas wrote in the directory."""
  os.environ |= {"MOSAIC_GPU_DUMP_TO": str(directory), "MOSAIC_GPU_DUMP_PTXAS": "1"}
  device = topologies.get_topology_desc(platform="cuda", target_config=CHIP, topology="1x1x1").devices[0]
  lead, place = (max(1, TOKENS // length), length, HEADS), SingleDeviceSharding(device)
  vector = jax.ShapeDtypeStruct((*lead, head_dim), jnp.bfloat16, sharding=place)
  number = jax.ShapeDtypeStruct(lead, jnp.float32, sharding=place)

  def call(q, k, v, log_gate, beta):
    turning = {"beta": beta, "rates": csympow.rotary_rates(head_dim, 65_536)} if rotated else {}
    return csympow.attention(q, k, v, power, log_gate, form=form, implementation="pallas", **turning)

  def with_gradients(*arrays):
    y, transpose = jax.vjp(call, *arrays[:-1])
    return y, transpose(arrays[-1])

  jax.jit(with_gradients).lower(vector, vector, vector, number, number, vector).compile()


def read(report: str, program: str) -> Kernel:
  """From ptxas's report and the program as nvdisasm prints it."""
  registers, spilled = re.search(r"Used (\d+) registers", report), re.search(r"(\d+) bytes spill stores", report)
  if registers is None or spilled is None:
    raise ValueError(
      "ptxas's report does not say what is spilled, or how many registers are used: is it another version?"
    )
  in_a_row = "instructions are serialized" in report
  return Kernel(int(registers[1]), int(spilled[1]), in_a_row, inner_loops(program), overwritten(program))


def inner_loops(program: str) -> tuple[int, ...]:
  """The instructions of every loop with matrix products that has no such loop inside."""
  labels: dict[str, int] = {}
  instructions: list[str] = []
  for line in program.splitlines():
    if label := re.match(r"\s*(\.L_x_\d+):", line):
      labels[label[1]] = len(instructions)
    elif instruction := re.search(r"/\*[0-9a-f]{4,}\*/\s+(\S.*)", line):
      instructions.append(instruction[1])
  jumps = [(re.search(r"\bBRA\b.*`\((\.L_x_\d+)\)", text), end) for end, text in enumerate(instructions)]
  loops = [range(labels[jump[1]], end + 1) for jump, end in jumps if jump and labels[jump[1]] <= end]

  def has(loop: range, word: str) -> bool:
    return any(word in instructions[n] for n in loop)

  # What a wait does that has to is written after the program's end, and jumps back: that is no loop.
  loops = [loop for loop in loops if has(loop, "GMMA") and not has(loop, "EXIT")]
  inner = [x for x in loops if not any(y != x and y.start >= x.start and y.stop <= x.stop for y in loops)]
  return tuple(map(len, inner))


def overwritten(program: str) -> int:
  """Instructions that write to registers from which a product under way may still read its left operand.

  ptxas does not keep them free until a wait for that product. In the program's order: jumps are not followed.
  """
  under_way: list[set[int]] = [set()]  # by groups that are waited for together; the last one is not complete
  found = 0
  for text in re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@\S+ )?(\S.*)", program):
    if wait := re.match(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x(\d)", text):
      under_way = under_way[-1 - int(wait[1]) :]
    elif product := re.match(r"HGMMA\.\S+ R\d+, (?:R(\d+)|gdesc)", text):
      if product[1]:
        under_way[-1].update(range(int(product[1]), int(product[1]) + 4))
      if "gsb0" in text:
        under_way.append(set())
    elif written := re.match(r"(?!ST|RED|BAR|R2UR|UTMA|\w*SETP)(\S+)\s+(?:U?P\w+, )*R(\d+)\b", text):
      many = 4 if re.search(r"\.128|88\.4", written[1]) else 2 if re.search(r"\.64|WIDE|88\.2", written[1]) else 1
      first = int(written[2])
      found += any(not group.isdisjoint(range(first, first + many)) for group in under_way)
  return found


def kernels(directory: Path) -> dict[str, Kernel]:
  """All that were compiled, in their order, by their names and, if several of a name differ, numbers."""
  found: dict[str, Kernel] = {}
  for report in sorted(directory.glob("*.ptxas"), key=lambda path: int(path.stem.rsplit("_", 1)[1])):
    kernel = read(report.read_text(), report.with_suffix(".sass_ctrl").read_text())
    name, number = report.stem.rsplit("_", 1)
    if kernel not in [other for key, other in found.items() if key.split(" ")[0] == name]:
      found[name if name not in found else f"{name} {number}"] = kernel
  return found


def numbers(text: str) -> list[int]:
  """Positive ones, between commas."""
  found = [int(x) for x in text.split(",")]
  if min(found) < 1:
    raise ValueError
  return found


def main() -> None:
  """Prints a line for each kernel of each call."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--lengths", default=[4096], type=numbers)
  parser.add_argument("--powers", default=[2], type=numbers)
  parser.add_argument("--dims", default=[64], type=numbers)
  parser.add_argument("--form", default="attention", choices=["attention", "chunked"])
  parser.add_argument("--rotated", action="store_true")
  flags = parser.parse_args()
  if not all(map(importlib.util.find_spec, ("jax_plugins", "jax_plugins.xla_cuda13"))):
    parser.error("jax's plugin for CUDA 13 is not installed: see --help")
  line = "{:>9} {:>3} {:>4}  {:24} {:>9} {:>8} {:>9} {:>11}  {}"
  print(line.format("T", "p", "d", "kernel", "registers", "spilled", "in a row", "overwritten", "loops"))
  for length, power, head_dim in itertools.product(flags.lengths, flags.powers, flags.dims):
    with tempfile.TemporaryDirectory() as directory:
      compile_call(length, power, head_dim, flags.form, flags.rotated, Path(directory))
      found = kernels(Path(directory))
      if not found:
        parser.exit(1, "Mosaic left no reports: are ptxas and nvdisasm installed? See --help\n")
      for name, x in found.items():
        shown = ["yes" if x.in_a_row else "", x.overwritten or "", ", ".join(map(str, x.loops))]
        print(line.format(f"{length:,}", power, head_dim, name, x.registers, x.spilled, *shown), flush=True)


if __name__ == "__main__":
  main()
