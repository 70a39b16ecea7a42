"""Attention over a time axis that is sharded: the numbers of the whole sequence, for the traffic of its states."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import csympow.softmax
from csympow import context, cost, op
from csympow.forms import chunked
from csympow.forms.rotating import rotated
from tests.comparing import (
  TOLERANCE,
  Case,
  assert_close,
  assert_results_close,
  cotangents,
  inputs,
  quick_jit,
  random_segments,
  reference_results,
  with_gradients,
)

T = 48  # 6 tokens for each of 8 shards: one chunk of 5 and a part of one
CASE = Case(T=T, groups=2, dv=6, gate="resets", segments="padded", entry="attention")

IDS = {
  "one run": [[7] * T, [0] * T],
  "runs that end inside shards": [[7] * 25 + [3] * 23, [0] * 7 + [1] * 1 + [0] * 22 + [5] * 18],
  "runs that end with shards": [[0] * 12 + [1] * 12 + [0] * 24, list(np.arange(T) // 6)],
  "padding over whole shards of a run": [[5] * 4 + [-1] * 30 + [5] * 10 + [2] * 4, [-1] * 20 + [1] * 28],
  "padding over whole shards between runs": [[5] * 4 + [-1] * 30 + [6] * 14, [0] * 6 + [-1] * 6 + [1] * 30 + [-1] * 6],
  "padding alone": [[-1] * T, [-1] * 47 + [3]],
  "many runs with holes": random_segments(np.random.default_rng(0), 2, T, True),
}


def mesh_of(**axes):
  sizes = tuple(axes.values())
  return jax.make_mesh(sizes, tuple(axes), devices=jax.devices()[: math.prod(sizes)])


def specs(tree, mesh):
  """Batch, time and heads over the mesh axes that there are; rates on every device."""
  names = [axis if axis in mesh.axis_names else None for axis in ("data", "context", "model")]
  return jax.tree.map(lambda a: P(*names[: a.ndim]) if a.ndim > 1 else P(), tree)


def place(tree, mesh):
  return jax.tree.map(lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec)), tree, specs(tree, mesh))


def sharded(function, x, rest, mesh):
  """`function` of this mesh's shards, as a function of x and rest that gives the results by name."""
  return jax.shard_map(
    lambda x, rest: {"y": function(**x, **rest, axis="context")},
    mesh=mesh,
    in_specs=specs((x, rest), mesh),
    out_specs={"y": specs(x["q"], mesh)},
  )


@functools.cache
def program(case, form, mesh):
  """The compiled function (x, rest, weights) -> results and gradients, which the tests of one case share."""

  def run(x, rest, weights):
    attention = functools.partial(context.attention, power=case.power, form=form, chunk_size=case.chunk_size)
    return with_gradients(lambda x: sharded(attention, x, rest, mesh)(x, rest), x, weights)

  placed = [place(tree, mesh) for tree in (*inputs(case), cotangents(case))]
  return quick_jit(run).lower(*placed).compile()


def assert_the_whole(case, form, mesh, **other):
  """The shards' results and gradients are those of the reference; `other` are arguments in place of the case's."""
  x, rest = ({n: other.get(n, a) for n, a in tree.items()} for tree in inputs(case))
  weights = cotangents(case)
  out = program(case, form, mesh)(*(place(tree, mesh) for tree in (x, rest, weights)))
  assert out["y"].sharding.device_set == set(mesh.devices.flat)
  out = jax.tree.map(np.asarray, out)
  assert_results_close(out, reference_results(x, rest, weights, power=case.power), 1e-5)
  return out


@pytest.mark.parametrize(
  ("shards", "form"),
  [
    (2, "chunked"),
    pytest.param(8, "attention", marks=pytest.mark.slow),
    pytest.param(4, "recurrent", marks=pytest.mark.slow),
    pytest.param(8, "chunked", marks=pytest.mark.slow),
  ],
)
def test_shards_give_the_whole_sequence_forward_and_backward(shards, form):
  """Whatever the runs; with resets, and with gates of 1, where the first token counts as much as the last."""
  mesh = mesh_of(context=shards)
  for ids in IDS.values():
    ids = jnp.asarray(ids, jnp.int32)
    out = assert_the_whole(CASE, form, mesh, segment_ids=ids)
    assert not np.any(out["y"][ids < 0])
  ones = jnp.zeros((CASE.B, T, CASE.H))
  for runs in ("one run", "padding over whole shards of a run"):
    assert_the_whole(CASE, form, mesh, segment_ids=jnp.asarray(IDS[runs], jnp.int32), log_gate=ones)


def test_shards_that_attend_from_states_give_the_whole_sequence(monkeypatch):
  """As they do by kernels, with XLA's chunked form in their place."""

  def attend(x, memory, settings, dtype, return_memory):
    y, memory = chunked.attend(*rotated(x.q, x.k, x.rotation), x.v, x.log_gate, memory, settings, return_memory)
    return y.astype(dtype), memory

  plan = context._plan
  monkeypatch.setattr(op, "_chunked_by_kernels", attend)
  monkeypatch.setattr(context, "_plan", lambda *call: dataclasses.replace(plan(*call), implementation="pallas"))
  case = dataclasses.replace(CASE, rotation="fixed")  # betas' gradients are for kernels to take
  for ids in IDS.values():
    assert_the_whole(case, "chunked", mesh_of(context=2), segment_ids=jnp.asarray(ids, jnp.int32))


@pytest.mark.parametrize("chip", ["gpu", "tpu"])
def test_long_split_sequences_are_for_kernels(chip, monkeypatch):
  monkeypatch.setattr(cost, "named", lambda: chip)
  shape = cost.Shape(
    batch=1, time=65_536, query_heads=12, heads=12, head_dim=64, value_dim=64, power=2, needs_state=False
  )

  def plan(form, implementation, dtype="bfloat16", shape=shape):
    return context._plan(shape, dtype, 16, form, None, implementation)

  whole = cost.choose(shape, "chunked", None, chip, {"pallas": ("chunked",)})
  assert plan("auto", None) == plan("chunked", "pallas") == whole
  assert plan("attention", None).implementation == plan("auto", None, "float32").implementation == "xla"
  with pytest.raises(NotImplementedError, match="over a split sequence for form='chunked' only"):
    plan("attention", "pallas")
  with pytest.raises(NotImplementedError, match="power=2, got power=4"):
    plan("chunked", "pallas", shape=dataclasses.replace(shape, power=4))


def test_one_shard_is_the_whole_sequence():
  (x, rest), mesh = inputs(CASE), mesh_of(context=1)
  attention = functools.partial(context.attention, form="chunked", chunk_size=5)
  y = quick_jit(sharded(attention, x, rest, mesh))(place(x, mesh), place(rest, mesh))["y"]
  assert_close(y, reference_results(x, rest, cotangents(CASE))["y"], 1e-5, "y")


@pytest.mark.slow
@pytest.mark.parametrize("form", ["attention", "chunked"])
def test_context_batch_and_heads_are_sharded_together(form):
  case = Case(T=32, power=4, groups=2, dv=6, rotation="fixed", segments="packed", entry="attention")
  assert_the_whole(case, form, mesh_of(data=2, context=2, model=2))


@pytest.mark.parametrize("form", [pytest.param("attention", marks=pytest.mark.slow), "chunked"])
def test_what_is_left_out_has_its_default_and_nothing_is_quadratic(form):
  """No gates, no rotation, no segments, and three shards, which are no power of two."""
  case, mesh = Case(T=768, gate="none", rotation="none", entry="attention", chunk_size=16), mesh_of(context=3)
  assert_the_whole(case, form, mesh)
  scores = 4 * case.B * case.H * 256 * 768
  assert program(case, form, mesh).memory_analysis().temp_size_in_bytes < scores / 2


@pytest.mark.parametrize("form", ["attention", "chunked"])
def test_16_bit_inputs_give_16_bit_outputs(form):
  case, mesh = dataclasses.replace(CASE, dtype="bfloat16"), mesh_of(context=4)
  x, rest = inputs(case)
  attention = functools.partial(context.attention, form=form, chunk_size=5)
  y = quick_jit(sharded(attention, x, rest, mesh))(place(x, mesh), place(rest, mesh))["y"]
  assert y.dtype == jnp.bfloat16
  assert_close(y, reference_results(x, rest, cotangents(case))["y"], TOLERANCE["bfloat16"], "y")


def test_auto_decides_by_the_whole_length():
  shape = cost.Shape(1, 4096, 4, 4, 64, 64, 2, False)
  alone, among = (context._plan(shape, "float32", shards, "auto", None, None) for shards in (1, 64))
  assert (alone.form, among.form) == ("attention", "chunked")
  assert among.chunk <= 4096


def moved(compiled):
  """Bytes that each kind of collective operation of a compiled program hands on, in one device."""
  kinds = "all-gather|all-reduce|all-to-all|reduce-scatter|collective-permute|collective-broadcast"
  sizes = {"f32": 4, "s32": 4, "pred": 1}
  total = dict.fromkeys(kinds.split("|"), 0)
  for shapes, kind in re.findall(rf"= (.*?) ({kinds})(?:-start)?\(", compiled.as_text()):
    for dtype, shape in re.findall(r"(\w+)\[([\d,]*)\]", shapes):
      total[kind] += sizes[dtype] * math.prod(map(int, filter(None, shape.split(","))))
  return {kind: size for kind, size in total.items() if size}


def test_the_chunked_form_exchanges_states_and_nothing_else():
  """Each of 1 + log2(8) rounds hands on a state and, forward, what tells runs apart: an id, a restart."""
  rounds, D = 4, math.comb(CASE.d + 1, 2)
  state = 4 * CASE.B * CASE.H * (D * CASE.dv + D + 1 + CASE.d // 2)  # S, Z, the discount and the phase
  runs = CASE.B * (4 + 1 + 1)
  sent = moved(program(CASE, "chunked", mesh_of(context=8)))
  assert set(sent) == {"collective-permute"}
  assert 2 * rounds * state * 0.99 < sent["collective-permute"] <= rounds * (2 * state + runs)


def test_softmax_is_the_whole_sequence_and_takes_queries_block_by_block(monkeypatch):
  monkeypatch.setattr(cost, "_SCRATCH", 1)  # the smallest blocks: the 96 queries of a shard in two of 48
  case = Case(T=8 * T, groups=2, gate="none", rotation="fixed", segments="padded", entry="attention")
  (x, rest), weights, mesh = inputs(case), cotangents(case), mesh_of(context=4)
  ids = jnp.asarray(IDS["padding over whole shards of a run"], jnp.int32)
  rest = rest | {"segment_ids": jnp.repeat(ids, 8, axis=1)}

  def whole(x, rest):
    return {"y": csympow.softmax.attention(**x, **rest, implementation=None)}

  def run(function, *arguments):
    return quick_jit(lambda x, rest, weights: with_gradients(lambda x: function(x, rest), x, weights))(*arguments)

  out = run(sharded(context.softmax, x, rest, mesh), *(place(tree, mesh) for tree in (x, rest, weights)))
  want = run(whole, x, rest, weights)
  for name in want:
    assert_close(out[name], want[name], 1e-5, name)


def test_an_axis_that_is_not_there_is_named():
  x, rest = inputs(Case(T=4, entry="attention"))
  with pytest.raises(ValueError, match=r"axis must name a mesh axis .* got 'time'"):
    context.attention(**x, **rest, axis="time")
