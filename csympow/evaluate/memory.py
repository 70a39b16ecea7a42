"""What a model decided to keep: `--task=memory`.

Of every layer and head, over held-out text:

- how long tokens are remembered: after a token, the gates multiply up to 1/e within some number of tokens. At a
  constant gate that is -1 / log gamma, which is what the training program logs, of the mean log gate;
- how fast it turns: beta times theta, radians a token, for each pair of coordinates.
"""

import argparse
import functools
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float, Int
from matplotlib.figure import Figure

from csympow.command import NotFiniteError
from csympow.config import ConfigError
from csympow.data.progress import Progress
from csympow.evaluate import results, stretches
from csympow.evaluate.caches import Shape, memory_of, shape_for
from csympow.evaluate.halfway import HalfWay
from csympow.evaluate.kept import Kept, digest
from csympow.evaluate.reading import read
from csympow.evaluate.runs import Run, open_runs
from csympow.evaluate.stretches import Stretches
from csympow.gates import memory_length
from csympow.model import Transformer
from csympow.nn import Cache
from csympow.rotation import rotary_rates

_QUANTILES = (5, 25, 50, 75, 95)


class Heads(NamedTuple):
  """The statistics of all heads of one run; quantiles are over tokens, in percent of them as `_QUANTILES` has it.

  Attributes:
    at_mean_gate: `memory_length` of the mean log gate, in tokens.
    memory: quantiles of the tokens after which a token has faded to 1/e; infinite if the text ends before.
    unfaded: the share of tokens that had not faded at the end of the text.
    beta_mean: the mean of beta.
    beta_spread: its standard deviation.
    beta: its quantiles.
  """

  at_mean_gate: Float[np.ndarray, "layers H"]
  memory: Float[np.ndarray, "quantiles layers H"]
  unfaded: Float[np.ndarray, "layers H"]
  beta_mean: Float[np.ndarray, "layers H"]
  beta_spread: Float[np.ndarray, "layers H"]
  beta: Float[np.ndarray, "quantiles layers H"]


READS_RUNS = True


def add_options(parser: argparse.ArgumentParser) -> None:
  """The task's own options."""
  stretches.add_options(parser, "memory", documents=4)


def run(args: argparse.Namespace) -> None:
  """The task."""
  runs = open_runs(args)
  for each in runs:
    if each.config.model.variant not in ("sympow+gating", "conformal"):
      fitting = "only sympow+gating and conformal have them"
      raise ConfigError(f"{each.directory} is a {each.config.model.variant} model, which has no gates; {fitting}")
  text = stretches.asked_for(args, runs, "what is kept")
  kept = Kept(args.out, "memory")
  work = len(text.tokens) * text.length
  progress = Progress(len(runs) * work)
  found = []
  for each in runs:
    key = digest(each.identity, each.config.model, text.length, *text.tokens)
    heads = kept.once(key, functools.partial(_measured, each, text, kept, progress), progress, work)
    found.append((each, Heads(**{name: np.asarray(value) for name, value in heads.items()})))
  progress.end(f"read {progress.done:,} tokens")
  rows = [row for pair in found for row in _rows(*pair, text.length)]
  record = text.record() | {"quantiles": list(_QUANTILES), "runs": [_record(*pair, text.length) for pair in found]}
  line = results.write(args.out, "memory", rows, record, _figure(found, text))
  print("\n\n".join([*(_table(*pair, text) for pair in found), line]), flush=True)
  lost = [each.label for each, heads in found if np.isnan(heads.at_mean_gate).any()]
  if lost:
    raise NotFiniteError(f"{'; '.join(lost)}: gates are not finite")


def measure(run: Run, text: Stretches, kept: Kept, progress: Progress) -> Heads:
  """The statistics of a run's heads over some stretches."""
  shape = shape_for(run.model, text.length, len(text.tokens))
  groups = []
  for first in range(0, len(text.tokens), shape.rows):
    group = list(range(first, min(first + shape.rows, len(text.tokens))))
    key = digest(run.identity, run.config.model, text.length, *(text.tokens[index] for index in group))
    groups.append(Group(run, text.rows(group)[0], shape, kept, key, progress))
    groups[-1].read()
  log_gate, beta = (
    np.concatenate(parts, axis=1) for parts in zip(*((g.log_gate, g.beta) for g in groups), strict=True)
  )
  faded = fading(log_gate)
  heads = Heads(
    at_mean_gate=np.asarray(memory_length(jax.numpy.asarray(log_gate.mean(axis=(1, 2))))),
    # A quantile between a number and infinity would be infinite: the lower one is taken.
    memory=np.percentile(faded, _QUANTILES, axis=(1, 2), method="lower"),
    unfaded=np.isinf(faded).mean(axis=(1, 2)),
    beta_mean=beta.mean(axis=(1, 2)),
    beta_spread=beta.std(axis=(1, 2)),
    beta=np.percentile(beta, _QUANTILES, axis=(1, 2)),
  )
  for done in groups:
    done.halfway.end()
  return heads


def _measured(run: Run, text: Stretches, kept: Kept, progress: Progress) -> dict[str, Any]:
  return _plain(measure(run, text, kept, progress))


def _plain(heads: Heads) -> dict[str, Any]:
  return {name: value.tolist() for name, value in heads._asdict().items()}


class Group:
  """The log gates and betas of some texts, side by side through the state; a model without beta turns at 1."""

  def __init__(
    self, run: Run, tokens: Int[np.ndarray, "b T"], shape: Shape, kept: Kept, key: str, progress: Progress
  ) -> None:
    self._run, self._tokens, self._shape, self._progress = run, tokens, shape, progress
    model = run.config.model
    whole = (model.num_layers, *tokens.shape, model.num_kv_heads or model.num_heads)
    self.log_gate, self.beta = np.zeros(whole, np.float32), np.ones(whole, np.float32)
    found = {"log_gate": self.log_gate, "beta": self.beta}
    resumed = functools.partial(self._count, fresh=False)
    self.halfway = HalfWay(kept, key, found, resumed, to_the_end=True)

  def read(self) -> None:
    """Fills them in."""
    texts, length = self._tokens.shape
    for start, gates in read(_advance, self._run.model, [(self._tokens, 0)], self._shape, self.halfway):
      count = min(self._shape.piece, length - start)
      for kept, found in zip((self.log_gate, self.beta), gates, strict=True):
        if found is not None:
          kept[:, :, start : start + count] = found[:, :texts, :count]
      self._count(count)
      self._progress.show(f"{self._run.label}: {start + count:,} tokens")

  def _count(self, tokens: int, fresh: bool = True) -> None:
    self._progress.add(len(self._tokens) * min(tokens, self._tokens.shape[1]), fresh)


def fading(log_gate: Float[np.ndarray, "layers B T H"]) -> Float[np.ndarray, "layers B T H"]:
  """For every token, after how many more the gates have multiplied up to 1/e, between two tokens by interpolation.

  Infinite where the text ends before.
  """
  found = np.empty(log_gate.shape)
  for layer, row, head in np.ndindex(*log_gate.shape[:2], log_gate.shape[3]):
    total = np.cumsum(-log_gate[layer, row, :, head].astype(np.float64))
    after = np.searchsorted(total, total + 1)  # the first token by which as much has faded
    inside = np.minimum(after, len(total) - 1)
    step = np.maximum(total[inside] - total[inside - 1], 1e-300)
    exact = inside - 1 - np.arange(len(total)) + (total + 1 - total[inside - 1]) / step
    found[layer, row, :, head] = np.where(after < len(total), exact, np.inf)
  return found


@functools.partial(jax.jit, donate_argnums=1)
def _advance(
  model: Transformer, cache: Cache, tokens: Int[Array, "B t"]
) -> tuple[tuple[Float[Array, "layers B t H"] | None, Float[Array, "layers B t H"] | None], Cache]:
  return model.prefill_gates(tokens, cache)


def _rates(run: Run) -> Float[np.ndarray, "r"]:
  return np.asarray(rotary_rates(run.config.model.head_dim, run.config.model.max_length))


def _rows(run: Run, heads: Heads, length: int) -> list[dict[str, Any]]:
  rates, rows = _rates(run), []
  for layer, head in np.ndindex(*heads.unfaded.shape):
    row = {"run": run.label, "step": run.step, "layer": layer, "head": head}
    row |= {"memory_at_mean_gate": float(heads.at_mean_gate[layer, head])}
    row |= {f"memory_p{q}": float(heads.memory[i, layer, head]) for i, q in enumerate(_QUANTILES)}
    row |= {"unfaded_share": float(heads.unfaded[layer, head])}
    row |= {"beta_mean": float(heads.beta_mean[layer, head]), "beta_spread": float(heads.beta_spread[layer, head])}
    row |= {f"beta_p{q}": float(heads.beta[i, layer, head]) for i, q in enumerate(_QUANTILES)}
    for name, rate in (("fastest", rates.max()), ("slowest", rates.min())):
      row[f"{name}_radians_per_token_p50"] = float(heads.beta[2, layer, head] * rate)
    rows.append(row | {"state_bytes": run.state_bytes(length)})
  return rows


def _record(run: Run, heads: Heads, length: int) -> dict[str, Any]:
  speeds = heads.beta[..., None] * _rates(run)  # quantiles, layers, heads, pairs
  found = {"state_bytes": run.state_bytes(length), "rates": _rates(run).tolist()}
  return results.of_run(run) | found | _plain(heads) | {"radians_per_token": speeds.tolist()}


def _table(run: Run, heads: Heads, text: Stretches) -> str:
  header = ["layer", "head", "memory p5", "p50", "p95", "at mean gate", "unfaded", "beta p5", "p50", "p95"]
  rows = [[*header, "slowest rad/token", "fastest"]]
  slowest, fastest = _rates(run).min(), _rates(run).max()
  for layer, head in np.ndindex(*heads.unfaded.shape):
    memory = [_tokens(float(heads.memory[i, layer, head])) for i in (0, 2, 4)]
    beta = [heads.beta[i, layer, head] for i in (0, 2, 4)]
    rows.append(
      [
        str(layer),
        str(head),
        *memory,
        _tokens(float(heads.at_mean_gate[layer, head])),
        f"{heads.unfaded[layer, head]:.1%}",
      ]
      + [f"{value:.3f}" for value in beta]
      + [f"{beta[1] * slowest:.2e}", f"{beta[1] * fastest:.2f}"]
    )
  told = f"{run.label}, step {run.step:,}, {memory_of(run.model, text.length)}"
  return f"{told}: tokens until 1/e, over {text.describe()}\n{results.aligned(rows)}"


def _tokens(count: float) -> str:
  return "> text" if np.isinf(count) else f"{count:,.1f}" if count < 100 else f"{count:,.0f}"


def _figure(found: list[tuple[Run, Heads]], text: Stretches) -> Figure:
  count = max(heads.unfaded.size for _, heads in found)
  figure = results.new_figure(max(7.0, min(24.0, 1.5 + 0.16 * count)) * len(found), 9.5)
  panels = figure.subplots(3, len(found), squeeze=False, sharey="row", sharex="col")
  for (run, heads), column in zip(found, panels.T, strict=True):
    _draw_run(column, run, heads, text.length)
  labels = ("tokens until faded to 1/e", "beta, speed of rotation", "beta theta (radians per token)")
  for axes, label in zip(panels[:, 0], labels, strict=True):
    axes.set_ylabel(label)
  told = {
    label: handle for axes in panels[:, 0] for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
  }
  figure.legend(told.values(), told.keys(), loc="outside upper center", fontsize=9, ncols=2)
  note = f"over the tokens of {text.describe()}; thick bars: half of them, thin bars: 5 to 95 percent"
  figure.supxlabel(note, fontsize=8)
  return figure


def _draw_run(panels: Any, run: Run, heads: Heads, length: int) -> None:
  memory, beta, speed = panels
  x = np.arange(heads.unfaded.size)
  _draw(memory, np.minimum(heads.memory, length))
  memory.plot(
    x, heads.at_mean_gate.ravel(), "D", color="C1", markersize=4, label="at the mean gate, as in training's log"
  )
  memory.axhline(run.config.context, color="red", linestyle="--", linewidth=1, label="training context")
  memory.axhline(length, color="gray", linestyle="-.", linewidth=1, label="end of the text")
  memory.set_yscale("log")
  memory.set_title(f"{run.label}: {memory_of(run.model, length)}", fontsize=10)
  _draw(beta, heads.beta)
  beta.axhline(1, color="gray", linestyle=":", linewidth=1, label="fixed rotary, beta = 1")
  for rate in _rates(run):
    speed.axhline(rate, color="gray", linestyle=":", linewidth=0.5)
    low, middle, high = (heads.beta[i].ravel() * rate for i in (0, 2, 4))
    speed.vlines(x, low, high, color="C0", linewidth=1, alpha=0.4)
    speed.plot(x, middle, ".", color="C0", markersize=3)
  speed.set_yscale("log")
  layers, per_layer = heads.unfaded.shape
  for axes in panels:
    axes.grid(axis="y", alpha=0.3)
    axes.tick_params(labelleft=True)
    for border in range(1, layers):
      axes.axvline(per_layer * border - 0.5, color="gray", linewidth=0.5)
  # A tick for every head, or where there are many for every layer.
  if heads.unfaded.size <= 24:
    speed.set_xticks(x, [f"{i // per_layer}.{i % per_layer}" for i in x])
    speed.set_xlabel("layer.head")
  else:
    speed.set_xticks([per_layer * (i + 0.5) - 0.5 for i in range(layers)], [str(i) for i in range(layers)])
    speed.set_xlabel("layer, its heads side by side")


def _draw(axes: Any, quantiles: Float[np.ndarray, "quantiles layers H"]) -> None:
  low, quarter, middle, three_quarters, high = quantiles.reshape(len(_QUANTILES), -1)
  x = np.arange(len(middle))
  axes.vlines(x, low, high, color="C0", linewidth=1)
  axes.vlines(x, quarter, three_quarters, color="C0", linewidth=5, alpha=0.5)
  axes.plot(x, middle, "_", color="black", markersize=8, label="median")
