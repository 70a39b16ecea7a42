"""Cases, their inputs, and both sides of a comparison: csympow's public functions and the float64 reference."""

import collections
import dataclasses
import functools
import itertools
import math
import random

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

import csympow
from csympow import op
from tests import reference

FORMS = ("attention", "chunked", "recurrent")
TIMED = ("q", "k", "v", "log_gate", "beta", "y")
STATE = ("S", "Z", "phase")
TOLERANCE = {"float32": 1e-5, "bfloat16": 5e-3, "float16": 5e-3}

# How a test runs one of the kernels for Hopper: see the fixture `no_races_if_interpreted`.
WHERE = [
  pytest.param(plgpu.InterpretGPUParams(detect_races=True), id="interpreted"),
  pytest.param(None, id="chip", marks=pytest.mark.gpu),
]

# Nearly all of the suite's time is compilation. The compiler's own effort does not matter where nothing is timed.
quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


@dataclasses.dataclass(frozen=True)
class Case:
  """One way to call the op.

  gate: "none", "learned", "weak" (which leave something after hundreds of tokens) or "resets" (some log gates are -80,
  -200 or -inf); rotation: "none", "fixed" (beta=None) or "learned"; segments: "none", "packed" (runs of random lengths)
  or "padded" (the same with holes); entry: "attention", "prefill" or "continued" (prefill from the state of an earlier
  call).
  """

  T: int = 17
  B: int = 2
  H: int = 2
  groups: int = 1
  d: int = 8
  dv: int = 8
  power: int = 2
  gate: str = "learned"
  rotation: str = "learned"
  segments: str = "none"
  entry: str = "continued"
  chunk_size: int | None = 5
  dtype: str = "float32"
  seed: int = 0

  def __str__(self):
    changed = (f for f in dataclasses.fields(self) if getattr(self, f.name) != f.default)
    return ",".join(f"{f.name}={getattr(self, f.name)}" for f in changed) or "default"


def covering(**levels):
  """Few cases that between them hold every pair of levels of any two factors; each level is a dict of Case fields."""
  names = list(levels)
  rows = list(itertools.product(*(range(len(levels[name])) for name in names)))
  random.Random(21).shuffle(rows)  # a seed whose order makes few rows suffice
  bit: dict = collections.defaultdict(itertools.count().__next__)  # of a pair of levels, in a number that is a set
  columns = list(itertools.combinations(range(len(names)), 2))
  pairs = {row: sum(1 << bit[i, row[i], j, row[j]] for i, j in columns) for row in rows}
  missing = (1 << len(bit)) - 1
  cases = []
  while missing:
    best = max(rows, key=lambda row: (pairs[row] & missing).bit_count())
    missing &= ~pairs[best]
    chosen = [levels[name][level] for name, level in zip(names, best, strict=True)]
    cases.append(Case(**dict(itertools.chain.from_iterable(level.items() for level in chosen))))
  return cases


def rotary(d):
  """Rates that turn every pair by an angle that is no whole turn, even where beta is 1."""
  return (2.1 / 3.0 ** np.arange(d // 2)).astype(np.float32)


def random_log_gate(rng, shape, offset=3.0):
  """The log sigmoid of a logit around `offset`: gammas near 0.95, now and then 0.6."""
  return (-np.logaddexp(0.0, -rng.normal(offset, 1.0, shape))).astype(np.float32)


def random_beta(rng, shape):
  return (1.0 + np.tanh(rng.normal(size=shape))).astype(np.float32)


def random_segments(rng, B, T, holes):
  """Runs of random lengths whose ids come back later; with holes, padding at both ends, inside and between runs."""
  ids = np.cumsum(rng.random((B, T)) < 0.2, axis=1) % 3
  return np.where(holes & (rng.random((B, T)) < 0.25), -1, ids).astype(np.int32)


def random_state(rng, B, H, d, dv, power, tokens=5):
  """The state after `tokens` random tokens: a random S and Z would make no weights that are >= 0."""
  keys, values = rng.normal(size=(B, H, tokens, d)), rng.normal(size=(B, H, tokens, dv))
  with jax.enable_x64(True):
    features = np.asarray(reference.phi(jnp.asarray(keys), power))
  S, Z = np.einsum("bhtD,bhte->bhDe", features, values), features.sum(2)
  return csympow.State(*(jnp.asarray(a, jnp.float32) for a in (S, Z, rng.random((B, H, d // 2)))))


def inputs(case):
  """(differentiable arguments by name, the other arguments) of one call; a state's leaves are S, Z and phase.

  The lengths of keys differ by no more than |k|^p = 1 to 4, and each query is so near its own key that their weight is
  at least a third of (|q| |k|)^p. Otherwise some row's weights would be tiny by chance, and a state form's error,
  rounding times (|q| |k| / q.k)^p, would say more of the draw than of the code; test_numerics goes there on purpose.
  """
  rng = np.random.default_rng([case.seed, case.T, case.d, case.power])
  heads = (case.B, case.T, case.H)

  def directions(*shape):
    x = rng.normal(size=shape)
    return x / np.linalg.norm(x, axis=-1, keepdims=True)

  k = np.sqrt(case.d) * 2 ** (rng.uniform(-1, 1, (*heads, 1)) / case.power) * directions(*heads, case.d)
  own = np.repeat(k, case.groups, axis=2)
  sine = np.sqrt(1 - 3 ** (-2 / case.power))  # of the greatest angle
  q = own + sine * np.linalg.norm(own, axis=-1, keepdims=True) * directions(*own.shape)
  x = {"q": q, "k": k, "v": rng.normal(size=(*heads, case.dv))}
  x = {name: jnp.asarray(a, case.dtype) for name, a in x.items()}
  log_gate = random_log_gate(rng, heads, offset=5.0 if case.gate == "weak" else 3.0)
  beta = random_beta(rng, heads)
  resets = rng.choice([-80.0, -200.0, -np.inf], heads)
  log_gate = np.where((case.gate == "resets") & (rng.random(heads) < 0.2), resets, log_gate)
  if case.gate != "none":
    x["log_gate"] = jnp.asarray(log_gate, jnp.float32)
  if case.rotation == "learned":
    x["beta"] = jnp.asarray(beta)
  if case.entry == "continued":
    state = random_state(rng, case.B, case.H, case.d, case.dv, case.power)
    x |= {"S": state.S, "Z": state.Z, "phase": state.phase}
  rest = {}
  if case.rotation != "none":
    rest["rates"] = jnp.asarray(rotary(case.d))
  if case.segments != "none":
    rest["segment_ids"] = jnp.asarray(random_segments(rng, case.B, case.T, case.segments == "padded"))
  return x, rest


def cotangents(case):
  """Random weights for every output, so that no part of a gradient can hide."""
  rng = np.random.default_rng([case.seed, 1])
  D = math.comb(case.d + case.power - 1, case.power)
  out = {"y": jnp.asarray(rng.normal(size=(case.B, case.T, case.H * case.groups, case.dv)), case.dtype)}
  if case.entry != "attention":
    shapes = {"S": (D, case.dv), "Z": (D,), "phase": (case.d // 2,)}
    out |= {n: jnp.asarray(rng.normal(size=(case.B, case.H, *s)), jnp.float32) for n, s in shapes.items()}
  return out


def call(x, rest, *, entry, **options):
  """One public call on the arguments of `inputs`, its results by name."""
  x = dict(x)
  leaves = [x.pop(name) for name in STATE if name in x]
  if entry == "attention":
    return {"y": csympow.attention(**x, **rest, **options)}
  y, state = csympow.prefill(**x, **rest, **options, state=csympow.State(*leaves) if leaves else None)
  return {"y": y, "S": state.S, "Z": state.Z, "phase": state.phase}


def with_gradients(function, x, weights):
  """The function's results by name, and the gradients of their weighted sum as d<name>."""
  out, vjp = jax.vjp(function, x)
  return out | {f"d{name}": g for name, g in vjp(weights)[0].items()}


@functools.partial(quick_jit, static_argnames=("entry", "power", "form", "chunk_size", "scale"))
def forward(x, rest, *, entry="continued", power=2, form="auto", chunk_size=5, scale=None):
  """`call`, compiled once for all tests that agree on shapes and options."""
  return call(x, rest, entry=entry, power=power, form=form, chunk_size=chunk_size, scale=scale)


@functools.partial(quick_jit, static_argnames=("entry", "power", "form", "chunk_size"))
def results(x, rest, weights, *, entry="continued", power=2, form="auto", chunk_size=5):
  """`call` with its gradients, compiled once for all tests that agree on shapes and options."""
  options = {"entry": entry, "power": power, "form": form, "chunk_size": chunk_size}
  return with_gradients(lambda x: call(x, rest, **options), x, weights)


FULL = Case(T=17, groups=2, segments="padded")  # every argument there is


def full_results(x, rest, form):
  """`results` of FULL's arguments or of others in their place: one program per form serves many tests."""
  return results(x, rest, cotangents(FULL), form=form)


@functools.cache
def actual(case, form):
  """The results and gradients of csympow, by name."""
  options = {"entry": case.entry, "power": case.power, "form": form, "chunk_size": case.chunk_size}
  return jax.tree.map(np.asarray, results(*inputs(case), cotangents(case), **options))


@functools.cache
def expected(case):
  """The reference's results and gradients, by name, of the same rounded inputs."""
  return reference_results(*inputs(case), cotangents(case), power=case.power)


def reference_results(x, rest, weights, *, power=2):
  """The reference's results and gradients by name, in float64, of the arguments of `results`.

  Compilation is what this costs, so calls share programs: every default is written out (gates and betas of 1, rates of
  0, one segment, an empty state) and T is filled up with padding, which the recurrence steps over.
  """
  x, rest, weights = float64((x, rest, weights))
  (B, T, H, d), dv = x["k"].shape, x["v"].shape[-1]
  D = math.comb(d + power - 1, power)
  turns = "rates" in rest
  x = {"log_gate": np.zeros((B, T, H)), "beta": np.ones((B, T, H))} | x
  x = {"S": np.zeros((B, H, D, dv)), "Z": np.zeros((B, H, D)), "phase": np.zeros((B, H, d // 2))} | x
  rest = {"rates": np.zeros(d // 2), "segment_ids": np.zeros((B, T), np.int32)} | rest
  weights = {name: np.zeros(x[name].shape) for name in STATE} | weights

  def pad(a, fill=0):
    return np.pad(a, [(0, 0), (0, -T % 64)] + [(0, 0)] * (a.ndim - 2), constant_values=fill)

  def crop(name, a):
    return np.asarray(a)[:, :T] if name.removeprefix("d") in TIMED else np.asarray(a)

  padded_x, padded_weights = ({n: pad(a) if n in TIMED else a for n, a in t.items()} for t in (x, weights))
  if not turns:
    padded_x["phase"] = 0 * x["phase"]
  with jax.enable_x64(True):
    rest = {"rates": rest["rates"], "segment_ids": pad(rest["segment_ids"], -1).astype(np.int32)}
    out = _reference_results(padded_x, rest, padded_weights, power)
  out = {name: crop(name, a) for name, a in out.items()}
  if not turns:  # rates of 0 are no rotation only from a phase of 0; the phase that was given passes by
    out |= {"phase": x["phase"], "dphase": weights["phase"]}
  return out


@functools.partial(quick_jit, static_argnames="power")
def _reference_results(x, rest, weights, power):
  def run(x):
    x = dict(x)
    y, state = reference.prefill(state=reference.State(*(x.pop(n) for n in STATE)), **x, **rest, power=power)
    return {"y": y, "S": state.S, "Z": state.Z, "phase": state.phase}

  return with_gradients(run, x, weights)


def quadratic_results(x, rest, weights, *, power=2):
  """`reference_results` by the formula over pairs, for heads too wide to expand features; "y" only, and no state."""
  x, rest, weights = float64((x, rest, weights))
  B, T, H = x["k"].shape[:3]
  ids = rest.get("segment_ids", np.zeros((B, T), int))
  runs = reference.runs_of(ids, x.get("log_gate", np.zeros((B, T, H))))

  def run(x):
    options = {name: a for name, a in rest.items() if name != "segment_ids"}
    return {"y": reference.quadratic(**x, **options, segment_ids=ids, power=power, runs=runs)}

  with jax.enable_x64(True):
    return jax.tree.map(np.asarray, jax.jit(lambda x, w: with_gradients(run, x, w))(x, weights))


def float64(tree):
  """The same numbers as float64 numpy arrays, integers left alone."""

  def convert(a):
    a = np.asarray(a)
    return a if np.issubdtype(a.dtype, np.integer) else a.astype(np.float64)

  return jax.tree.map(convert, tree)


def reference_prefill(q, k, v, **options):
  """The reference's forward pass on float32 arguments."""
  static = {name: options.pop(name) for name in ("power", "scale") if name in options}
  with jax.enable_x64(True):
    out = quick_jit(functools.partial(reference.prefill, **static))(*float64((q, k, v)), **float64(options))
    return jax.tree.map(np.asarray, out)


def relative_rmse(a, b):
  a, b = float64((a, b))
  return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def turns_apart(a, b):
  """The greatest distance on the circle between phases in turns."""
  a, b = float64((a, b))
  return float(np.max(np.abs((a - b + 0.5) % 1.0 - 0.5)))


def nearly_orthogonal(cosine, T, d, dtype, seed=0):
  """Queries at an angle of about acos(cosine) to every key: keys near a hyperplane that has the queries as normal."""
  rng = np.random.default_rng(seed)
  q = np.zeros((1, T, 1, d))
  q[..., 0] = rng.choice([-1.0, 1.0], (1, T, 1)) * rng.uniform(0.5, 2.0, (1, T, 1))
  k = rng.normal(size=(1, T, 1, d))
  k /= np.linalg.norm(k[..., 1:], axis=-1, keepdims=True)
  k[..., 0] = cosine * rng.uniform(0.5, 1.5, (1, T, 1)) * rng.choice([-1.0, 1.0], (1, T, 1))
  # Turned so that the small component is no axis of its own, where nothing could cancel.
  P = np.linalg.qr(rng.normal(size=(d, d)))[0]
  q, k, v = q @ P, k @ P, rng.normal(size=(1, T, 1, d))
  return {n: jnp.asarray(a, dtype) for n, a in {"q": q, "k": k, "v": v}.items()}


def assert_close(a, b, tolerance, name, exact=None):
  """Relative RMSE below the tolerance; relative to `exact` where b is no more exact than a.

  Where the value is zero in exact arithmetic (the gradient to q of the only token: y = v whatever q is), there is
  nothing to be relative to, and inputs and cotangents being of order 1, the tolerance is taken as absolute.
  """
  a, b = float64((a, b))
  assert a.shape == b.shape, f"{name}: shape {a.shape} instead of {b.shape}"
  assert np.all(np.isfinite(a)), f"{name}: {np.sum(~np.isfinite(a))} values are not finite"
  size = np.sqrt(np.mean(np.square(b if exact is None else float64(exact))))
  error = np.sqrt(np.mean((a - b) ** 2)) / (size if size > 1e-12 else 1.0)
  assert error < tolerance, f"{name}: relative RMSE {error:.2e} is not below {tolerance:.0e}"


def assert_results_close(a, b, tolerance, exact=None):
  """`assert_close` for each of a's results and gradients; phases are compared on the circle, in radians."""
  for name in a:
    if name == "phase":
      assert 2 * np.pi * turns_apart(a[name], b[name]) < 1e-5, "phase"
    else:
      assert_close(a[name], b[name], tolerance, name, exact and exact[name])


def temporaries(function, *shapes, **options):
  """Bytes of temporaries that the compiled function needs; nothing runs."""
  compiled = quick_jit(functools.partial(function, **options)).lower(*shapes).compile()
  return compiled.memory_analysis().temp_size_in_bytes


def recorded(monkeypatch, module, name):
  """All that a module's class or function makes from now on."""
  found, made = [], getattr(module, name)

  def make(*arguments, **options):
    found.append(made(*arguments, **options))
    return found[-1]

  monkeypatch.setattr(module, name, make)
  return found


def by_kernels(case, form, settings):
  """The op as `implementation="pallas"` runs it with these settings, wherever this is traced."""

  def run(x, rest):
    x = dict(x)
    leaves = [x.pop(name) for name in STATE if name in x]
    state = csympow.State(*leaves) if leaves else None
    names = ("q", "k", "v", "log_gate", "beta", "rates", "segment_ids", "scale")
    arguments = ((x | rest).get(name) for name in names)
    y, state = op._attend(*arguments, state, form, "pallas", settings, case.entry != "attention")
    return {"y": y} if state is None else {"y": y} | state._asdict()

  return run
