"""Which heads have a state, and that calls whose heads differ are right."""

import functools
import itertools

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

import csympow
from csympow.forms import near, visible
from csympow.forms.spans import Settings
from csympow.prefix import Total
from kernels_pallas.gpu import arrays, attention_forward
from kernels_pallas.gpu.tiles import TILE
from tests import comparing
from tests.comparing import Case, quick_jit
from tests.test_kernels import TOLERANCE, attend
from tests.test_visible import before_of, found_visible, halves

INTERPRETED, QUICKLY = plgpu.InterpretGPUParams(detect_races=True), plgpu.InterpretGPUParams()


@pytest.mark.gpu
@pytest.mark.parametrize(
  ("form", "power", "d"),
  [
    *(("attention", *rest) for rest in itertools.product((2, 4), (32, 64, 128))),
    *(("chunked", 2, d) for d in (64, 128)),
  ],
)
def test_long_sequences_are_right_on_the_chip(form, power, d, monkeypatch):
  """Gates as models learn them, some of whose heads forget sooner than others: float32 by XLA is what is right."""
  found = recorded(monkeypatch)
  mixed(monkeypatch)
  T, heads = visible.LONG + 1000 if d < 128 or form == "attention" else 9_472, 3
  random = np.random.default_rng(0)
  q, k, v, dy = (jnp.asarray(random.normal(size=(1, T, heads, d)), jnp.bfloat16) for _ in range(4))
  logits = np.array([4.0, 6.0, 8.0]) + 2 * random.normal(size=(1, T, heads))
  log_gate = jnp.asarray(-np.logaddexp(0, -logits), jnp.float32)

  def with_gradients(form, implementation, dtype):
    def call(q, k, v, log_gate):
      return csympow.attention(q, k, v, power, log_gate, form=form, implementation=implementation)

    y, transpose = jax.vjp(call, *(x.astype(dtype) for x in (q, k, v)), log_gate)
    return y, *transpose(dy.astype(dtype))

  results = jax.jit(with_gradients, static_argnums=(0, 1, 2))(form, "pallas", jnp.bfloat16)
  expected = jax.jit(with_gradients, static_argnums=(0, 1, 2))("attention", "xla", jnp.float32)
  jax.effects_barrier()
  assert form == "attention" or np.unique(found[0][1]).tolist() == [0, 1]
  for name, result, exact in zip(("y", "dq", "dk", "dv", "dlog_gate"), results, expected, strict=True):
    comparing.assert_close(result, exact, 5e-3, name)


@pytest.mark.usefixtures("long")
def test_heads_that_forget_soon_enough_read_beyond_their_chunks_and_need_no_state(monkeypatch):
  monkeypatch.setattr(visible, "cost_of_states", lambda states, *rest: 2.0 * states)
  tile = np.arange(8)
  # Gates leave hardly anything of the first and the last head, of whose keys the last one's have to be read all the
  # same, something of the second for long, and of the third nothing but then everything.
  far = np.stack([np.maximum(tile - 3, 0), tile, 0 * tile, 0 * tile])[None]
  monkeypatch.setattr(visible, "reach", lambda *arguments, **options: jnp.asarray(far))
  monkeypatch.setattr(visible, "bounds", lambda *arguments, **options: None)
  end = np.array([-9.0, -1.0, -9.0, -9.0])[None, :, None] * np.arange(1, 9)
  end[:, 2, 1:] = end[:, 2, 1:2]
  vectors = [jnp.zeros((1, 8 * TILE, 4, 64), dtype) for dtype in (jnp.float16, jnp.float16, jnp.bfloat16)]
  found_in = functools.partial(found_visible, *vectors, end, 2, monkeypatch, chunk=2 * TILE)
  whole_first, whole_last = found_in(chunk=None)
  in_chunk_first, in_chunk_last = found_in()
  first, last, has_state = found_in(beyond_chunks=True)
  np.testing.assert_array_equal(has_state, [[0, 1, 1, 0]])
  for head, stays in enumerate(has_state[0]):
    expected = (in_chunk_first, in_chunk_last) if stays else (whole_first, whole_last)
    np.testing.assert_array_equal(first[0, head], expected[0][0, head])
    np.testing.assert_array_equal(last[0, head], expected[1][0, head])
  assert np.any(first[0, 0] < in_chunk_first[0, 0])


@pytest.mark.parametrize(
  ("batch", "heads", "tiles", "widths", "group", "gradients"),
  [
    (1, 12, 512, (64, 64), 1, True),
    (4, 12, 128, (64, 64), 1, False),
    (1, 1, 64, (64, 64), 4, True),
    (3, 5, 40, (64, 128), 1, False),
    (1, 6, 256, (128, 128), 2, True),
  ],
)
def test_as_many_heads_have_states_as_is_cheapest(batch, heads, tiles, widths, group, gradients):
  random = np.random.default_rng(0)
  remembered = np.exp(random.uniform(0, 6, (batch, heads, 1)))  # tiles
  end = np.cumsum(np.log(visible.LEFT_OUT) / remembered * random.uniform(0, 2, (batch, heads, tiles)), axis=-1)
  before = before_of(end)
  totals = (Total(*map(jnp.asarray, halves(x))) for x in (before, end))
  settings = Settings(2, 8 * TILE, TILE, TILE, "high")
  found = np.asarray(visible.worth_a_state(*totals, settings, widths, group, gradients))
  seen = (before[..., None] - end[..., None, :] >= np.log(visible.LEFT_OUT)) | np.eye(tiles, dtype=bool)
  reads = np.sum(seen & np.tri(tiles, dtype=bool), axis=-1) - 1

  inside = np.minimum(reads, np.arange(tiles) % 8)
  # Tiles of queries that a block of the grid has, of each of a group's heads.
  by_block = group if gradients else 1 if max(widths) > 64 else 2

  def cost(b, without, with_state):
    read = np.concatenate([reads[b, without], inside[b, with_state]])
    of_states = visible.cost_of_states(jnp.int32(len(with_state)), batch, widths, group, gradients)
    longest = np.max(read) * by_block * 132 / (batch * group * tiles)
    return max(np.sum(np.mean(read, axis=-1)), longest) + float(of_states)

  for b in range(batch):
    order = np.argsort(-np.mean(reads[b], axis=-1), kind="stable")
    costs = [cost(b, order[n:], order[:n]) for n in range(heads + 1)]
    chosen = cost(b, np.flatnonzero(found[b] == 0), np.flatnonzero(found[b]))
    assert chosen <= min(costs) * (1 + 1e-5)


@pytest.mark.parametrize(("in_chunk", "has_state"), [(8, 1), (64, 0)])
@pytest.mark.usefixtures("long")
def test_a_head_with_a_state_reads_its_own_chunk_besides(in_chunk, has_state, monkeypatch):
  monkeypatch.setattr(visible, "cost_of_states", lambda states, *rest: 4.0 * states)
  end = np.log(visible.LEFT_OUT) / 10 * np.arange(1, 129.0)[None, None]  # of so many tiles it remembers ten
  totals = (Total(*map(jnp.asarray, halves(x))) for x in (before_of(end), end))
  settings = Settings(2, in_chunk * TILE, TILE, TILE, "high")
  assert visible.worth_a_state(*totals, settings, (64, 64), 1, True).tolist() == [[has_state]]


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("widths", [(64, 64), (128, 128), (64, 128)])
def test_states_cost_more_the_more_there_are_but_those_of_a_walk_are_written_at_once(widths, gradients):
  def costs(batch=1, group=1):
    return np.asarray(visible.cost_of_states(jnp.arange(26), batch, widths, group, gradients))

  cost, of_four, by_four = costs(), costs(batch=4), costs(group=4)
  assert cost[0] == 0
  by_number = np.diff(cost)
  assert np.all(by_number > 0)
  if widths == (64, 64):
    np.testing.assert_allclose(by_number[np.r_[1:12, 13:24]], by_number[1], rtol=1e-5)
    assert by_number[12] > by_number[11]  # a second walk
    np.testing.assert_allclose(of_four[12], cost[12], rtol=1e-5)  # four walks of a quarter the length
  # Queries of all heads of a group read, but their keys are written once.
  assert cost[12] / 4 < by_four[12] < cost[12]


def test_many_calls_at_once_are_of_one_mind():
  def call(has_state):
    return jax.lax.cond(visible.anywhere(has_state), lambda: 1, lambda: 0)

  has_state = jnp.zeros((3, 2, 4), jnp.int32)
  many = jax.vmap(call)
  assert "cond[" in str(jax.make_jaxpr(many)(has_state))  # and not what selects from both
  np.testing.assert_array_equal(many(has_state), 0)
  np.testing.assert_array_equal(many(has_state.at[1, 0, 2].set(1)), 1)


def forgetting_and_not(case, slowest=1e-2):
  """Inputs of a case whose first row, or first head of several, forgets at once, and whose last one does not."""
  x, rest = comparing.inputs(case)
  rate = jnp.array([2.0, slowest])
  return x | {"log_gate": x["log_gate"] * (rate if case.H == 2 else rate[:, None, None])}, rest


def mixed(monkeypatch):
  """Makes states so cheap that short sequences have some of heads that remember much, and none of others."""
  monkeypatch.setattr(visible, "MULTIPROCESSORS", 1)
  monkeypatch.setattr(visible, "cost_of_states", lambda states, *rest: 6.0 * states)


def recorded(monkeypatch):
  """What `visible` finds for the kernels: the first tiles, and which heads have a state."""
  found = []

  def and_record(*arguments, **options):
    seen = visible.visible(*arguments, **options)
    jax.debug.callback(lambda *x: found.append(x), seen.first, seen.has_state)
    return seen

  monkeypatch.setattr(near, "visible", and_record)
  return found


@pytest.mark.usefixtures("long")
def test_what_is_left_out_does_not_depend_on_how_long_keys_are():
  settings = Settings(2, 512, TILE, TILE, "high", interpret=QUICKLY)
  x, _ = comparing.inputs(Case(T=512, B=1, H=1, d=32, dv=32, rotation="none", dtype="bfloat16", entry="attention"))

  @quick_jit
  def first(scale):
    tokens = near.Tokens(x["q"][:, :, :, None], x["k"] * scale.astype(jnp.bfloat16), x["v"], 4 * x["log_gate"], None)
    return near.operands(tokens, settings, with_state=False, save=False)[0].keys.first

  expected = first(jnp.float32(1))
  assert np.any(expected > 0)
  np.testing.assert_array_equal(first(jnp.float32(2.0**40)), expected)  # float16 would not hold them


@pytest.mark.slow
def test_nothing_is_added_to_heads_without_a_state():
  case = Case(T=256, B=2, H=1, groups=2, d=32, dv=32, rotation="none", dtype="bfloat16", entry="attention")
  x, _ = comparing.inputs(case)
  settings = Settings(2, 256, TILE, TILE, "high", interpret=QUICKLY)
  # Two sequences that are the same, of which one has a state.
  q, k, v, log_gate = (jnp.repeat(x[name][:1], 2, axis=0) for name in ("q", "k", "v", "log_gate"))
  tokens = near.Tokens(q.reshape(2, 256, 1, 2, 32), k, v, log_gate, None)
  G, largest = near.survey(tokens, settings)
  operands, _, _ = near.operands_and_copies(tokens, G, near.exponents(tokens, largest), (), (), settings)
  has_state = jnp.array([[0], [1]], jnp.int32)
  by_query_head = jnp.repeat(has_state, 2, axis=1)[..., None] > 0
  weight = jnp.where(by_query_head, jnp.full((2, 2, 256), 2.0), jnp.nan)
  numerator = jnp.moveaxis(jnp.broadcast_to(3 * weight[..., None], (2, 2, 256, 32)), 1, 2)
  centre = jnp.arange(32.0)
  carried = arrays.Carried(numerator, weight, has_state, jnp.broadcast_to(centre, (2, 1, 32)))
  how = {"power": 2, "dtype": jnp.float32, "save_low": False, "interpret": QUICKLY}
  found = attention_forward.forward(operands.q, operands.keys, operands.v, carried, **how)
  first = {name: array[:1] for name, array in x.items()}
  expected = comparing.quadratic_results(first, {}, {"y": jnp.zeros((1, 256, 2, 32))}, power=2)["y"]
  np.testing.assert_allclose(found.normaliser[1], found.normaliser[0] + 2, rtol=1e-6)
  own, total = (jnp.moveaxis(n, 0, 1)[..., None] for n in found.normaliser)
  comparing.assert_close(found.high[:1], expected, 5e-3, "y")
  np.testing.assert_allclose(found.high[1], (found.high[0] * own + 6 + 2 * centre) / total, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("d", "some", "gradients"), [*itertools.product([64], [True, False], [False, True]), (128, False, True)]
)
@pytest.mark.usefixtures("long", "no_races")
def test_heads_with_a_state_and_without_are_right_in_the_interpreter(d, some, gradients, monkeypatch):
  found = recorded(monkeypatch)
  case = Case(T=512, B=2, H=1, groups=128 // d, d=d, dv=d, dtype="bfloat16", entry="attention")
  x, rest = forgetting_and_not(case, 1e-2 if some else 2.0)
  run, weights = functools.partial(attend(case, INTERPRETED, 256), rest=rest), comparing.cotangents(case)
  results = comparing.with_gradients(run, x, weights) if gradients else run(x)
  jax.effects_barrier()
  first, has_state = found[0]
  np.testing.assert_array_equal(has_state, [[0], [int(some)]])
  assert np.any(first[0] < np.arange(4) // 2 * 2)  # beyond chunks of two tiles
  expected = comparing.quadratic_results(x, rest, weights, power=2)
  turned = {"dbeta": results.pop("dbeta")} if gradients else {}
  comparing.assert_results_close(jax.tree.map(np.asarray, results), expected, TOLERANCE["bfloat16"])
  comparing.assert_results_close(jax.tree.map(np.asarray, turned), expected, 8e-3)  # as on the chip


@pytest.mark.parametrize(("entry", "searched"), [("attention", True), ("prefill", False), ("continued", False)])
@pytest.mark.usefixtures("long")
def test_where_a_state_comes_in_or_goes_out_all_heads_have_one(entry, searched, monkeypatch):
  found = comparing.recorded(monkeypatch, near, "visible")
  case = Case(T=512, B=1, H=1, d=64, dv=64, dtype="bfloat16", entry=entry)
  x, rest = comparing.inputs(case)
  jax.eval_shape(functools.partial(attend(case, INTERPRETED, 256), rest=rest), x)
  assert [seen.has_state is not None for seen in found] == [searched]


@pytest.mark.gpu
@pytest.mark.parametrize(
  "case",
  [
    Case(T=4600, B=2, H=2, groups=3, d=64, dv=64, dtype="bfloat16", entry="attention"),
    Case(T=4600, B=2, H=2, groups=2, d=64, dv=64, segments="padded", dtype="bfloat16", entry="attention"),
    Case(T=4600, B=2, H=2, groups=2, d=128, dv=128, segments="padded", dtype="bfloat16", entry="attention"),
    Case(T=4300, B=1, H=2, d=32, dv=32, dtype="float16", entry="attention"),
    Case(T=4600, B=1, H=2, d=64, dv=128, dtype="bfloat16", entry="attention"),
    Case(T=9000, B=1, H=2, d=128, dv=64, rotation="fixed", dtype="bfloat16", entry="attention"),
  ],
  ids=str,
)
def test_heads_with_a_state_and_without_are_right_on_the_chip(case, monkeypatch):
  mixed(monkeypatch)
  found = recorded(monkeypatch)
  (x, rest), weights = forgetting_and_not(case), comparing.cotangents(case)
  how = {"entry": "attention", "power": 2, "form": "chunked", "implementation": "pallas"}
  call = functools.partial(comparing.call, rest=rest, **how)
  results = jax.jit(lambda x, w: comparing.with_gradients(call, x, w))(x, weights)
  jax.effects_barrier()
  np.testing.assert_array_equal(found[0][1], [[0, int(case.segments == "none")]] * case.B)  # documents are short
  expected = comparing.quadratic_results(x, rest, weights, power=2)
  turned = {name: results.pop(name) for name in ("dbeta",) if name in results}
  comparing.assert_results_close(results, expected, TOLERANCE[case.dtype])
  comparing.assert_results_close(turned, expected, 8e-3)
