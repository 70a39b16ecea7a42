"""The recall task: small models of all variants, trained here on multi-query associative recall.

It looks at no run. Every model of the grid is trained at every learning rate, the best rate counts, and its result is
kept when it is there: a grid that was stopped goes on with the next model.
"""

import argparse
import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from matplotlib.figure import Figure

from csympow import overrides
from csympow.data.progress import Progress
from csympow.evaluate import results
from csympow.evaluate.caches import cache_bytes
from csympow.evaluate.flags import numbers, positive, positives, seed, share, words
from csympow.evaluate.kept import Kept, digest
from csympow.evaluate.mqar import examples, position_rule
from csympow.evaluate.recall_config import RecallConfig, of_one_model
from csympow.evaluate.recall_training import TEST, Learner, tokens_of
from csympow.evaluate.runs import describe
from csympow.model import ModelConfig, Transformer
from csympow.nn import VARIANTS
from csympow.train.metrics import size

_COLOURS = dict(zip(VARIANTS, ("black", "tab:red", "tab:blue", "tab:green"), strict=True))
_MARKERS = {2: "o", 4: "s"}


READS_RUNS = False


def add_options(parser: argparse.ArgumentParser) -> None:
  """The task's own flags; each replaces a field of the config."""
  group = parser.add_argument_group("recall")
  group.add_argument(
    "--config", metavar="FILE", help="a Python file with get_config(); by default the whole grid, for a GPU"
  )
  group.add_argument("--variants", type=words, metavar="V,V,...", help=f"of {', '.join(VARIANTS)}")
  group.add_argument("--powers", type=positives, metavar="P,P,...", help="of all variants but softmax")
  group.add_argument("--widths", type=positives, metavar="N,N,...", help="of the models")
  group.add_argument("--rates", type=numbers, metavar="X,X,...", help="learning rates; the best counts")
  group.add_argument("--epochs", type=positive, metavar="N", help="passes over the training examples")
  group.add_argument("--examples", type=share, metavar="X", help="share of the training and test examples, up to 1")
  group.add_argument("--forgetting", type=float, metavar="X", help="share of pairs that are keys with a new value")
  group.add_argument("--seed", type=seed, default=0, help="of parameters and examples (%(default)s)")


def run(args: argparse.Namespace) -> None:
  """Trains what is not trained yet, asks it; writes recall.csv, .json and .png and prints a table."""
  config = _config(args)
  shapes = config.models()
  kept = Kept(args.out, "recall")
  keys = [digest("recall", args.seed, sorted(of_one_model(config).items()), shape) for shape in shapes]
  each = [_parameters(shape) for shape in shapes]  # of the work of a token
  progress = Progress(tokens_of(config) * sum(each))
  models = f"{len(shapes)} models at {len(config.rates)} learning rates, {tokens_of(config):,} tokens each"
  print(f"recall: {models}, on {jax.devices()[0].device_kind}", flush=True)
  records: list[dict[str, Any]] = []
  for i, (shape, key) in enumerate(zip(shapes, keys, strict=True)):

    def check(tokens: int, i: int = i) -> None:
      args.stop.check()
      progress.add(tokens * each[i])
      progress.show(f"recall, model {i + 1} of {len(shapes)}, {describe(shapes[i])}")

    trained = functools.partial(_result, shape, config, args.seed, check)
    records += kept.once(key, trained, progress, tokens_of(config) * each[i])
  progress.end(f"recall: {len(shapes)} models")
  rule = _position_rules(config, args.seed)
  print(table(records, config, rule))
  described = {"seed": args.seed, "config": dataclasses.asdict(config), "position_rule": rule, "results": records}
  print(results.write(args.out, "recall", _rows(records), described, draw(records, config, rule)))


def _position_rules(config: RecallConfig, seed: int) -> list[float]:
  """What reading no key is worth, in each setting of the test list."""
  settings = config.settings(config.test)
  return [
    position_rule(examples(setting, config.vocab_size, (seed, TEST, i)), setting) for i, setting in enumerate(settings)
  ]


def _config(args: argparse.Namespace) -> RecallConfig:
  config = RecallConfig() if args.config is None else overrides.load(args.config, schema=RecallConfig)
  given = {name: getattr(args, name) for name in ("variants", "powers", "widths", "rates", "epochs", "forgetting")}
  changes: dict[str, Any] = {
    name: tuple(value) if isinstance(value, list) else value for name, value in given.items() if value is not None
  }
  if args.examples is not None:
    for name in ("train", "test"):
      changes[name] = tuple((t, n, max(1, round(args.examples * count))) for t, n, count in getattr(config, name))
  return dataclasses.replace(config, **changes)


def _result(shape: ModelConfig, config: RecallConfig, seed: int, check: Any) -> list[dict[str, Any]]:
  """What is known of a model: one record for each setting of the test list."""
  learner = Learner(shape, config, seed, check)
  losses = learner.train()
  answers = learner.test()
  best = int(np.argmax(np.mean([found.accuracy for found in answers], axis=0)))
  records = []
  asked = list(zip(config.test, answers, strict=True))
  for (length, pairs, count), found in asked:
    records.append(
      {
        "model": describe(shape),
        "variant": shape.variant,
        "power": None if shape.variant == "softmax" else shape.power,
        "width": shape.d_model,
        "parameters": _parameters(shape),
        "state_bytes": state_bytes(shape, length),
        "length": length,
        "pairs": pairs,
        "examples": count,
        "accuracy": float(found.accuracy[best]),
        "standard_error": _or_none(found.error[best]),
        "returned_accuracy": _or_none(found.returned[best]),
        "rate": config.rates[best],
        "train_loss": _or_none(losses[best]),
        "accuracy_by_rate": [round(float(x), 5) for x in found.accuracy],
      }
    )
  told = ", ".join(f"{100 * found.accuracy[best]:.1f} % of {pairs} pairs" for (_, pairs, _), found in asked)
  print(f"{describe(shape)}, width {shape.d_model}: {told}", flush=True)
  return records


def state_bytes(shape: ModelConfig, length: int) -> int:
  """What a model remembers of a sequence, over all layers: its state, or the keys and values of so many tokens."""
  return cache_bytes(nnx.eval_shape(lambda: Transformer(shape, rngs=nnx.Rngs(0))), length)


def table(records: Sequence[dict[str, Any]], config: RecallConfig, rule: Sequence[float]) -> str:
  """For a terminal: a row for each model, a column for each number of pairs."""
  forgetting = config.forgetting > 0
  header = ["model", "width", "state", "rate", *(f"{pairs} in {length:,}" for length, pairs, _ in config.test)]
  rows = [header]
  for group in _by_model(records):
    first = group[0]
    states = sorted({record["state_bytes"] for record in group})
    state = size(states[0]) if len(states) == 1 else f"{size(states[0])} to {size(states[-1])}"
    cells = [_percent(record["accuracy"]) for record in group]
    if forgetting:
      cells = [f"{cell} ({_percent(record['returned_accuracy'])})" for cell, record in zip(cells, group, strict=True)]
    rows.append([first["model"], str(first["width"]), state, f"{first['rate']:.1e}", *cells])
  rows.append(["by the query's place alone", "", "", "", *map(_percent, rule)])
  what = "accuracy in %, by pairs in so many tokens" + ("; of keys with a new value" if forgetting else "")
  return f"{what}\n{results.aligned(rows)}"


def draw(records: Sequence[dict[str, Any]], config: RecallConfig, rule: Sequence[float]) -> Figure:
  """Accuracy against the number of pairs, a panel for each width, and against the bytes of the state."""
  alone = {"color": "grey", "linestyle": ":", "linewidth": 1.5, "label": "by the query's place alone"}
  widths = sorted({record["width"] for record in records})
  columns = min(2, len(widths) + 1)
  lines = math.ceil((len(widths) + 1) / columns)
  figure = results.new_figure(4.3 * columns, 3.4 * lines)
  panels = figure.subplots(lines, columns, squeeze=False).ravel()
  pairs = sorted({record["pairs"] for record in records})
  for axes, width in zip(panels, widths, strict=False):
    for group in _by_model(records):
      if group[0]["width"] == width:
        points = sorted((record["pairs"], record["accuracy"], record["standard_error"] or 0) for record in group)
        axes.errorbar(
          *zip(*[point[:2] for point in points], strict=True), yerr=[p[2] for p in points], **_style(group[0])
        )
    guessed = sorted((n, share) for (_, n, _), share in zip(config.test, rule, strict=True))
    axes.plot(*zip(*guessed, strict=True), **alone)
    axes.set_xscale("log", base=2)
    axes.set_xticks(pairs, [str(n) for n in pairs])
    axes.minorticks_off()
    axes.set_xlabel("pairs in the context")
    axes.set_title(f"width {width}", fontsize=10)
  last = panels[len(widths)]
  for name in dict.fromkeys(group[0]["model"] for group in _by_model(records)):
    groups = [group for group in _by_model(records) if group[0]["model"] == name]
    places = sorted((max(r["state_bytes"] for r in g), float(np.mean([r["accuracy"] for r in g]))) for g in groups)
    last.errorbar(*zip(*places, strict=True), **_style(groups[0][0]))
  last.axhline(float(np.mean(rule)), **alone)
  last.set_xscale("log")
  last.set_xlabel("bytes of state (softmax: of keys and values\nat the longest test length)")
  last.set_title("mean over the test list", fontsize=10)
  for axes in panels[: len(widths) + 1]:
    axes.set_ylim(-0.03, 1.03)
    axes.set_ylabel("accuracy")
    axes.grid(alpha=0.3)
  for axes in panels[len(widths) + 1 :]:
    axes.set_visible(False)
  figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8)
  return figure


def _style(record: dict[str, Any]) -> dict[str, Any]:
  power = record["power"]
  return {
    "color": _COLOURS[record["variant"]],
    "marker": "x" if power is None else _MARKERS.get(power, "^"),
    "linestyle": "-" if power in (None, 2) else "--",
    "markersize": 5,
    "linewidth": 1.2,
    "capsize": 2,
    "label": record["model"],
  }


def _by_model(records: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
  groups: dict[Any, list[dict[str, Any]]] = {}
  for record in records:
    groups.setdefault((record["variant"], record["power"], record["width"]), []).append(record)
  return list(groups.values())


def _rows(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
  """For the CSV: single values only."""
  return [{name: value for name, value in record.items() if name != "accuracy_by_rate"} for record in records]


def _percent(share: float | None) -> str:
  return "-" if share is None else f"{100 * share:.1f}"


def _or_none(x: float) -> float | None:
  return float(x) if math.isfinite(x) else None


def _parameters(shape: ModelConfig) -> int:
  tree = nnx.split(nnx.eval_shape(lambda: Transformer(shape, rngs=nnx.Rngs(0))))[1]
  return sum(x.size for x in jax.tree.leaves(tree))
