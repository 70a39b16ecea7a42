"""Compiles the TPU kernels for real chips, on any Linux x86-64 host, and reads their schedules.

python benchmarks/tpu_static.py [--chips=v5e,v6e] [--head_dims=64,128] [--kernels=chunked_forward,splash_forward]

A TPU executes one bundle of instructions a cycle. Printed for each kernel: its bundles and the share of them in which a
matrix unit is at work, over the whole kernel and in its innermost loop; vector registers spilled in that loop; VMEM.
These are counts of what the compiler wrote, each bundle once however often it is run. Nothing is timed.
"""

import argparse
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kernels_pallas.tpu import attention_backward, attention_forward, chunked_backward, chunked_forward, pairs
from kernels_pallas.tpu.shifts import Chunks

CHIPS = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}
TIME, CHUNK, SPLASH_TIME = 65_536, 512, 8_192
_SPLASH_BLOCK = 512  # larger than its defaults, with which its matrix units would mostly wait
_FILES = r".*final.*"  # of all that the compiler can write, the passes that are read here


class Schedule(NamedTuple):
  """What a compiled kernel's bundles do."""

  bundles: int
  share: float  # of bundles that use a matrix unit
  loop_bundles: int
  loop_share: float
  loop_spills: int
  vmem: int


def chunks(head_dim: int, size: int) -> Chunks:
  """The shapes that a kernel is compiled for: one head."""
  bf16, f32 = jnp.bfloat16, jnp.float32
  shapes = {
    "q": ((1, 1, 1, head_dim, TIME), bf16),
    "k": ((1, 1, head_dim, TIME), bf16),
    "v": ((1, 1, head_dim, TIME), bf16),
    "gate": ((1, 1, 1, TIME), f32),
    "until": ((1, 1, 1, TIME), f32),
    "across": ((1, 1, 1, TIME // size), f32),
  }
  return Chunks(**{name: jax.ShapeDtypeStruct(*shape) for name, shape in shapes.items()})


def kernels(head_dim: int) -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
  """Functions of one kernel each (JAX's own splash attention: of three), and the shapes of their arguments."""
  x, y = chunks(head_dim, CHUNK), chunks(head_dim, pairs.BLOCK)
  row = jax.ShapeDtypeStruct((1, 1, 1, 1, TIME), jnp.float32)
  dy = jax.ShapeDtypeStruct(x.q.shape, jnp.bfloat16)
  ends = jax.ShapeDtypeStruct((1, 1, 2, TIME // pairs.BLOCK), jnp.float32)
  found = {
    "chunked_forward": (lambda x: chunked_forward.forward(x, None, return_final=False), (x,)),
    "chunked_queries": (
      lambda x, rows: chunked_backward.queries(x, rows, None, 16),
      (x, chunked_backward.Rows(dy, row, row, row)),
    ),
    "chunked_keys": (
      lambda x, rows: chunked_backward.keys(x, rows, None, 16),
      (x, chunked_backward.Rows(dy, row, row, row)),
    ),
  }
  for power in (2, 4):
    found[f"attention_forward p={power}"] = (lambda x, power=power: attention_forward.forward(x, power=power), (y,))
    found[f"attention_backward p={power}"] = (
      lambda *x, power=power: attention_backward.backward(*x, power=power),
      (y, attention_backward.Rows(dy, row, row), ends),
    )
  if head_dim == 128:
    mask = splash_attention_mask.MultiHeadMask([splash_attention_mask.CausalMask((SPLASH_TIME, SPLASH_TIME))])
    names = splash_attention_kernel.BlockSizes.__dataclass_fields__
    sizes = {name: _SPLASH_BLOCK for name in names if name.startswith("block_")}
    splash = splash_attention_kernel.make_splash_mha_single_device(
      mask, block_sizes=splash_attention_kernel.BlockSizes(**sizes)
    )
    q = jax.ShapeDtypeStruct((1, SPLASH_TIME, head_dim), jnp.bfloat16)
    found["splash_forward"] = (splash, (q, q, q))
    found["splash_backward"] = (
      jax.grad(lambda *x: splash(*x).astype(jnp.float32).sum(), argnums=(0, 1, 2)),
      (q, q, q),
    )
  return found


def compile_for(chip: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
  """Compiles for one chip; the compiler leaves its schedules behind."""
  device = topologies.get_topology_desc(CHIPS[chip], "tpu").devices[0]
  mesh = Mesh([device], ("chip",))  # which tells kernels what they are compiled for
  place = NamedSharding(mesh, PartitionSpec())
  placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), arguments)
  with jax.set_mesh(mesh):
    jax.jit(function).lower(*placed).compile()


def schedules(directory: Path) -> dict[str, Schedule]:
  """What was compiled, by the name of the kernel."""
  found = {}
  for table in sorted(directory.glob("*-final_hlo-static-per-bundle-utilization.txt")):
    name = re.match(r"\d+-(.*)-\d+-final_hlo", table.name)
    if name is None or name[1] == "TLP" or name[1].startswith(("<", "copy", "fusion")):
      continue
    found[name[1].split(".")[0]] = _schedule(directory, table, name[1])
  return found


def _schedule(directory: Path, table: Path, name: str) -> Schedule:
  header, rows = table.read_text().split("== UTILIZATION:\n")
  units = header.splitlines()[1].replace(" ", "").split(",")
  used = np.array([line.split() for line in rows.splitlines() if line.strip()], int)
  matrix, spills = used[:, units.index("MXU")] > 0, used[:, units.index("VSTORE:SPILL")]
  stamp = table.name.split("-")[0]
  bundles, before = (
    next(directory.glob(f"{stamp}-{name}-*-{kind}.txt")).read_text()
    for kind in ("final_bundles", "pre-finalize-registers-and-allocations")
  )
  depths = [len(m[1]) for m in re.finditer(r"^\s*(?:0x[0-9a-f]+|0)\s*\w*\s*:\s*(>*)\s*\{", bundles, re.MULTILINE)]
  loop = _longest_run(np.array(depths[: len(used)]))
  vmem = sum(int(m[1], 16) for m in re.finditer(r"#allocation\d+ \[.*space=vmem, size = (0x[0-9a-f]+)", before))
  return Schedule(len(used), matrix.mean(), len(used[loop]), matrix[loop].mean(), int(spills[loop].sum()), vmem)


def _longest_run(depths: np.ndarray, gap: int = 12) -> slice:
  """The longest of the innermost loops; a few bundles in its midst count for an outer one."""
  runs: list[list[int]] = []
  for n in np.flatnonzero(depths == depths.max()):
    if runs and n - runs[-1][1] < gap:
      runs[-1][1] = n
    else:
      runs.append([n, n])
  first, last = max(runs, key=lambda run: run[1] - run[0])
  return slice(first, last + 1)


def main() -> None:
  """Prints a Markdown table, line by line."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--chips", default=",".join(CHIPS))
  parser.add_argument("--head_dims", default="64,128")
  parser.add_argument("--kernels", default="", help="only those whose names begin so")
  flags = parser.parse_args()
  directory = Path(tempfile.mkdtemp(prefix="schedules"))
  os.environ["LIBTPU_INIT_ARGS"] = (
    f"--xla_jf_dump_to={directory} --xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex={_FILES}"
  )
  os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
  print("| kernel | d | chip | bundles | with a matrix unit | in the loop | with one | spills there | VMEM |")
  print("|---|---|---|---|---|---|---|---|---|")
  for head_dim in map(int, flags.head_dims.split(",")):
    for name, (function, arguments) in kernels(head_dim).items():
      if not name.startswith(tuple(flags.kernels.split(","))):
        continue
      for chip in flags.chips.split(","):
        shutil.rmtree(directory)
        directory.mkdir()
        compile_for(chip, function, arguments)
        for kernel, x in schedules(directory).items():
          if not x.share:  # XLA's own, around JAX's kernels
            continue
          shares = f"{x.bundles:,} | {x.share:.0%} | {x.loop_bundles:,} | {x.loop_share:.0%}"
          rest = f"{shares} | {x.loop_spills} | {x.vmem / 2**20:.1f} MiB"
          print(f"| {name}: {kernel} | {head_dim} | {chip} | {rest} |", flush=True)
  shutil.rmtree(directory)


if __name__ == "__main__":
  main()
