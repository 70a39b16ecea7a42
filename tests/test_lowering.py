"""The Hopper kernels lower where there is no GPU: for every shape, inside shard_map, under vmap and with 64 bits."""

import functools
import itertools

import jax
import jax.numpy as jnp
import pytest

from csympow import context, cost
from csympow.forms import near
from kernels_pallas.gpu import attention_forward
from kernels_pallas.gpu.tiles import BLOCK
from tests import comparing
from tests.comparing import Case, inputs
from tests.test_context import mesh_of, place, sharded
from tests.test_kernels import attend

KERNELS = ("totals", "copies", "attention_forward", "attention_backward", "gradients")
SHORT = ("gates", *KERNELS)  # without a state
ATTENTION = ("totals_and_sizes", *KERNELS)
STATES = ("state_write", "state_read", "gram", "scan")
FAINT = ("heard",)  # where there are several chunks, and no gradient by a state but that of y
SEARCH = ("sizes", "bounds", "reach")


def assert_lowers(function, x, *kernels):
  """The function lowers for CUDA, to a program with these kernels."""
  text = jax.jit(function).trace(x).lower(lowering_platforms=("cuda",)).as_text()
  for kernel in kernels:
    assert f"{kernel}_mosaic_gpu" in text, f"{kernel} is not in the program"
  return text


def gradients(case, chunk=None):
  """The gradient of a call, and the shapes of what it is a function of."""
  heads = (case.B, case.T, case.H)
  shapes = {"q": (case.B, case.T, case.H * case.groups, case.d), "k": (*heads, case.d), "v": (*heads, case.dv)}
  x = {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in shapes.items()}
  rotated = case.rotation != "none"
  x |= {name: jax.ShapeDtypeStruct(heads, jnp.float32) for name in ("log_gate", *(("beta",) if rotated else ()))}
  run, rest = attend(case, chunk=chunk), {"rates": comparing.rotary(case.d)} if rotated else {}
  return jax.grad(lambda x: run(x, rest)["y"].astype(jnp.float32).sum()), x


@pytest.mark.slow
def test_shards_of_a_split_sequence_take_the_kernels(monkeypatch):
  monkeypatch.setattr(cost, "named", lambda: "gpu")
  case, mesh = Case(T=1024, B=1, H=1, d=64, dv=64, dtype="bfloat16", entry="attention"), mesh_of(context=2)
  (x, rest), attention = inputs(case), functools.partial(context.attention, form="chunked", implementation="pallas")

  def run(x):
    return sharded(attention, x, placed[1], mesh)(x, placed[1])["y"].astype(jnp.float32).sum()

  placed = place(x, mesh), place(rest, mesh)
  assert_lowers(jax.grad(run), placed[0], *ATTENTION, *STATES)


@pytest.mark.slow
def test_a_state_alone_needs_no_attention():
  """As shards want it that write theirs before they attend."""
  case = Case(T=1024, B=1, H=1, d=64, dv=64, dtype="bfloat16", entry="prefill")
  (x, rest), run = inputs(case), attend(case, chunk=1024)
  text = assert_lowers(lambda x: run(x, rest)["S"], x, "symmetric_write")
  assert "attention_forward" not in text


@pytest.mark.slow
def test_a_pass_without_gradients_writes_symmetric_states_once():
  case = Case(T=2048, B=1, H=8, groups=2, d=64, dv=64, dtype="bfloat16", entry="attention")
  run, (_, x) = attend(case, chunk=1024), gradients(case)
  rest = {"rates": comparing.rotary(case.d)}
  kernels = ("symmetric_write", "state_read", "gram", "scan", "attention_forward", *FAINT)
  with jax.enable_x64(True):  # integers and constants of 64 bits make no difference
    text = assert_lowers(lambda x: run(x, rest)["y"], x, *kernels)
  assert "state_write_mosaic_gpu" not in text


@pytest.mark.slow  # one is lowered with 64 bits
@pytest.mark.parametrize(
  ("d", "dv", "power"),
  [(64, 64, 2), (128, 128, 4), (32, 64, 2), (64, 64, 4), (32, 32, 6), (64, 128, 4)],
)
@pytest.mark.parametrize(("T", "rotation"), [(65_536, "learned"), (1024, "learned"), (1024, "none")])
def test_kernels_lower_for_every_shape(d, dv, power, T, rotation):
  sizes = {"T": T, "B": 65_536 // T, "H": 2, "groups": 2, "d": d, "dv": dv}
  case = Case(**sizes, power=power, rotation=rotation, dtype="bfloat16", entry="attention")
  given = T <= near.SHORT
  text = assert_lowers(*gradients(case), *(kernel for kernel in (SHORT if given else ATTENTION) if kernel != "copies"))
  assert ("copies_mosaic_gpu" in text) == (rotation != "none")
  assert ("totals_and_sizes_mosaic_gpu" in text) != given


@pytest.mark.slow
def test_wide_heads_lower_with_a_state():  # whose outputs are float32, and so take most shared memory
  case = Case(T=512, B=1, H=1, d=128, dv=128, dtype="bfloat16", entry="prefill")
  x, rest = inputs(case)
  assert_lowers(lambda x: attend(case)(x, rest), x, "attention_forward")


@pytest.mark.slow
@pytest.mark.parametrize(("d", "dv"), [(64, 64), (32, 64), (128, 128), (64, 128), (128, 32)])
def test_chunked_kernels_lower_at_a_million_tokens(d, dv):
  case = Case(T=2**20, B=1, H=2, groups=2, d=d, dv=dv, dtype="bfloat16", entry="attention")
  assert_lowers(*gradients(case, chunk=1024), *ATTENTION, *STATES, *FAINT)


def in_shard_map(case, chunk=None):
  """The gradient of y summed, of a batch that two devices share, and its argument."""
  mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
  x, rest = inputs(case)
  specs = {"in_specs": jax.P("data"), "out_specs": jax.P("data")}
  sharded = jax.shard_map(lambda x: attend(case, chunk=chunk)(x, rest)["y"], mesh=mesh, **specs)
  return jax.grad(lambda x: sharded(x).astype(jnp.float32).sum()), x


@pytest.mark.slow
@pytest.mark.usefixtures("long")
@pytest.mark.parametrize(
  ("chunk", "dv", "rotation"),
  [(None, 64, "learned"), (None, 64, "none"), (BLOCK, 64, "learned"), (BLOCK, 128, "learned")],
)
@pytest.mark.parametrize("entry", ["attention", "continued"])
def test_kernels_lower_inside_shard_map(chunk, entry, dv, rotation):
  case = Case(T=512, B=2, H=1, d=64, dv=dv, rotation=rotation, dtype="bfloat16", entry=entry)
  by_itself = SHORT if entry == "attention" else ATTENTION[:-1]  # with a state that is XLA's
  kernels = by_itself if chunk is None else ATTENTION
  kernels += () if chunk is None else STATES
  all_have_states = (chunk, entry) == (BLOCK, "continued")
  kernels += () if all_have_states else SEARCH
  text = assert_lowers(*in_shard_map(case, chunk), *kernels)
  assert ("reach_mosaic_gpu" in text) != all_have_states


def several_places(monkeypatch):
  """As if so few blocks of a grid ran at once that each has several places."""
  monkeypatch.setattr(attention_forward, "multiprocessors", lambda: 1)


@pytest.mark.parametrize("pairs", [False, True])
def test_several_places_trace_inside_shard_map(pairs, monkeypatch):
  several_places(monkeypatch)
  monkeypatch.setattr(near, "all_alike", lambda time: not pairs)
  gradient, x = in_shard_map(Case(T=512, B=2, H=1, d=64, dv=64, rotation="none", dtype="bfloat16", entry="attention"))
  assert "attention_forward" in str(jax.make_jaxpr(gradient)(x))


@pytest.mark.usefixtures("long")
@pytest.mark.parametrize(
  ("d", "dv"), [(64, 128), *(pytest.param(*widths, marks=pytest.mark.slow) for widths in [(64, 64), (128, 64)])]
)
def test_states_trace_inside_shard_map(d, dv):
  gradient, x = in_shard_map(Case(T=512, B=2, H=1, d=d, dv=dv, dtype="bfloat16", entry="attention"), BLOCK)
  program = str(jax.make_jaxpr(gradient)(x))
  assert all(kernel in program for kernel in STATES)


@pytest.mark.slow
@pytest.mark.parametrize("pairs", [False, True])
def test_several_places_lower_inside_shard_map_and_under_vmap(pairs, monkeypatch):
  several_places(monkeypatch)
  monkeypatch.setattr(near, "all_alike", lambda time: not pairs)
  case = Case(T=512, B=2, H=1, d=64, dv=64, rotation="none", dtype="bfloat16", entry="attention")
  gradient, x = in_shard_map(case)
  kernels = [name for name in SHORT if name != "copies"]  # tokens are read as they were given
  assert_lowers(gradient, x, *kernels)
  _, rest = inputs(case)
  alone = jax.grad(lambda x: attend(case)(x, rest)["y"].astype(jnp.float32).sum())
  assert_lowers(jax.vmap(alone), jax.tree.map(lambda a: jnp.stack([a, a]), x), *kernels)


@pytest.mark.slow
@pytest.mark.usefixtures("long")
@pytest.mark.parametrize(("chunk", "rotation"), [(None, "learned"), (None, "none"), (BLOCK, "learned")])
def test_kernels_lower_under_vmap(chunk, rotation):
  case = Case(T=512, B=1, H=1, d=64, dv=64, rotation=rotation, dtype="bfloat16", entry="attention")
  x, rest = inputs(case)
  gradient = jax.grad(lambda x: attend(case, chunk=chunk)(x, rest)["y"].astype(jnp.float32).sum())
  stacked = jax.tree.map(lambda a: jnp.stack([a, a, a]), x)
  assert_lowers(jax.vmap(gradient), stacked, *SEARCH, *(SHORT if chunk is None else ATTENTION + STATES + FAINT))


@pytest.mark.slow
@pytest.mark.usefixtures("long")
@pytest.mark.parametrize(("chunk", "rotation"), [(None, "learned"), (None, "none"), (BLOCK, "learned")])
def test_kernels_lower_where_integers_and_constants_have_64_bits(chunk, rotation, monkeypatch):
  several_places(monkeypatch)
  case = Case(T=512, B=1, H=1, groups=2, d=64, dv=64, rotation=rotation, dtype="bfloat16", entry="attention")
  with jax.enable_x64(True):
    assert_lowers(*gradients(case, chunk), *SEARCH, *(SHORT if chunk is None else ATTENTION + STATES + FAINT))


def inside(equation):
  """The programs that it is made of: of a loop, branches or a kernel."""
  leaves = jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr"))
  return [x for x in (getattr(leaf, "jaxpr", leaf) for leaf in leaves) if hasattr(x, "eqns")]


def flattened(jaxpr):
  """All equations as they are written, without those that hold others."""
  for equation in jaxpr.eqns:
    programs = inside(equation)
    yield from itertools.chain.from_iterable(map(flattened, programs)) if programs else [equation]


def kernel_of(name, jaxpr):
  """The program of the kernel of that name."""
  for equation in jaxpr.eqns:
    for program in inside(equation):
      found = program if equation.params.get("name") == name else kernel_of(name, program)
      if found is not None:
        return found
  return None


@pytest.mark.slow
@pytest.mark.parametrize(("d", "rotation"), [(64, "none"), (64, "learned"), (32, "none"), (128, "none")])
def test_what_another_warpgroup_is_told_of_has_been_committed(d, rotation):
  """The backward kernel has no barriers but its own, and the interpreter does not see that products need a fence.

  Nor is it seen here where nobody is told: of keys that are rounded before the first visit.
  """
  function, x = gradients(Case(T=512, B=1, H=1, d=d, dv=d, rotation=rotation, dtype="bfloat16", entry="attention"))
  written, told = [], 0
  for equation in flattened(kernel_of("attention_backward", jax.make_jaxpr(function)(x).jaxpr)):
    what, of = equation.primitive.name, str(equation.invars[0].aval) if equation.invars else ""
    if what == "swap" and "smem" in of:
      written.append(equation)
    elif what == "commit_smem":
      told += len(written)
      written = []
    elif what == "copy_smem_to_gmem" or (
      what == "barrier_arrive" and "barrier[]" in of
    ):  # those in rings are of queries
      assert not written, f"{written} is not committed before {equation}"
  assert told > 2
