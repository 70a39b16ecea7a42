"""The study's tables, in Markdown, each from the runs that are kept.

A power or context of which no run is kept has no column: one line says so. A single run that is not there is a dash.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

from csympow.config import ConfigError, differences
from csympow.study import paper, records
from csympow.study.config import GATED, Cell, StudyConfig
from csympow.study.records import Mean, Record
from csympow.train.metrics import size

_OCTAVES_SHOWN = 9  # of contexts that the same last tokens are given
_NEAR = (256, 512)  # tokens, up to which every model gains by context


def training(study: StudyConfig, kept: Sequence[Record]) -> str:
  """The final training loss by context and variant, the paper's in brackets."""

  def cell(power: int, context: int, variant: str) -> str:
    record = of_grid(kept, power, context, variant)
    told = "-" if record is None else _mean(record.final_loss)
    theirs = paper.training_loss(power, variant, context)
    return told if theirs is None else f"{told} ({theirs:.3f})"

  return _by_context(study, kept, study.variants, cell)


def over_softmax(study: StudyConfig, kept: Sequence[Record]) -> str:
  """How far each variant's loss lies above softmax's: paired by step, since all variants read the same batches."""

  def cell(power: int, context: int, variant: str) -> str:
    ours, baseline = (of_grid(kept, power, context, name) for name in (variant, "softmax"))
    told = "-" if ours is None or baseline is None else _mean(difference(ours, baseline), sign=True)
    theirs = [paper.training_loss(power, name, context) for name in (variant, "softmax")]
    return told if None in theirs else f"{told} ({_signed(_number(theirs[0]) - _number(theirs[1]))})"

  return _by_context(study, kept, [name for name in study.variants if name != "softmax"], cell)


def heldout(study: StudyConfig, kept: Sequence[Record]) -> str:
  """The held-out loss at the training context, over all held-out rows."""

  def cell(power: int, context: int, variant: str) -> str:
    record = of_grid(kept, power, context, variant)
    loss = None if record is None or record.diverged else record.heldout_loss
    return "-" if loss is None else f"{loss:.3f}"

  return _by_context(study, kept, study.variants, cell)


def past_context(study: StudyConfig, kept: Sequence[Record]) -> str:
  """Loss at the training context and at the longest one, by position and for the same last tokens."""
  shown = evaluated_cells(study, kept)
  parts = []
  for power, trained in shown:
    found = {variant: of_grid(kept, power, trained, variant) for variant in study.variants}
    longest = max(max(measured(record, "position"), default=0) for record in found.values())
    theirs = paper.LOSS_PAST_CONTEXT.get((power, trained), {})
    head = [
      *(f"p={power}, trained at {trained:,}", f"at position {trained:,}", f"at position {longest:,}"),
      *(f"last tokens given {trained:,}", f"last tokens given {longest:,}", "state"),
      *(["the paper's, at 65,520"] if theirs else []),
    ]
    rows = []
    for variant, record in found.items():
      position, window = (measured(record, name) for name in ("position", "window"))
      ends = [position.get(trained), position.get(longest), window.get(trained), window.get(longest)]
      paper_cell = [f"{theirs[variant]:.2f}" if variant in theirs else "-"] if theirs else []
      rows.append([variant, *(_mean(end) for end in ends), _state(record, longest), *paper_cell])
    parts.append(_markdown(head, rows))
  parts += [
    f"p={p}, trained at {context:,}: not evaluated yet." for p, context in study.evaluated if (p, context) not in shown
  ]
  return "\n\n".join(parts)


def window(study: StudyConfig, kept: Sequence[Record]) -> str:
  """The loss of the same last tokens given more and more context: whether a model uses it, whatever stands where."""
  parts = []
  for power, trained in evaluated_cells(study, kept):
    found = {variant: measured(of_grid(kept, power, trained, variant), "window") for variant in study.variants}
    longest = max(max(curve, default=0) for curve in found.values())
    shown = sorted(context for n in range(_OCTAVES_SHOWN) if (context := longest >> n))
    rows = [[variant, *(_mean(curve.get(context)) for context in shown)] for variant, curve in found.items()]
    parts.append(_markdown([f"p={power}, trained at {trained:,}", *(f"{context:,}" for context in shown)], rows))
  return "\n\n".join(parts) or "Not run yet."


def gain(study: StudyConfig, kept: Sequence[Record]) -> str:
  """By how much the loss of the same last tokens falls with more context: near, to that of training, and past it."""
  parts = []
  for power, trained in evaluated_cells(study, kept):
    found = {variant: of_grid(kept, power, trained, variant) for variant in study.variants}
    longest = max(max(measured(record, "window"), default=0) for record in found.values())
    spans = [(few, many) for few, many in (_NEAR, (_NEAR[1], trained)) if few < many <= longest]
    rows = []
    for variant, record in found.items():
      curve, past = measured(record, "window"), measured(record, "gain").get(trained)
      near = [
        _signed(curve[few].mean - curve[many].mean) if few in curve and many in curve else "-" for few, many in spans
      ]
      rows.append([variant, *near, _mean(past, sign=True)])
    told = [f"{many:,} tokens instead of {few:,}" for few, many in [*spans, (trained, longest)]]
    parts.append(_markdown([f"p={power}, trained at {trained:,}", *told], rows))
  return "\n\n".join(parts) or "Not run yet."


def sweep(study: StudyConfig, kept: Sequence[Record]) -> str:
  """The final training losses of the sweep; the lowest of a variant is chosen."""
  best = {
    variant: min((record.final_loss.mean for record in kept if _tried(record, variant)), default=math.inf)
    for variant in study.variants
  }

  def cell(record: Record) -> str:
    loss = record.final_loss
    return f"**{_mean(loss)}**" if loss.mean == best[record.variant] < math.inf else _mean(loss)

  return _by_rate(study, kept, study.variants, cell)


def twice(study: StudyConfig, kept: Sequence[Record]) -> str:
  """How far two runs of the same lie apart, which differ in rounding alone.

  Where the learning rate is constant, the sweep's run with the settings that were chosen is the grid's, cut short.
  """
  whole = {variant: of_grid(kept, *study.sweep, variant) for variant in study.variants}
  rows = []
  for record in kept:
    longer = whole.get(record.variant) if record.kind == "sweep" else None
    if longer is None or longer.diverged or record.diverged:
      continue
    if not differences(longer.summary["config"], record.summary["config"]):
      again = longer.losses[: len(record.losses)][-len(record.tail) :]
      apart = records.mean([a - b for a, b in zip(again, record.tail, strict=True)])
      rows.append([record.variant, _mean(record.final_loss), _mean(records.mean(again)), _mean(apart, sign=True)])
  rows.sort(key=lambda row: study.variants.index(row[0]))
  return _markdown(["", "the sweep's run", "the grid's, at the same steps", "difference"], rows)


def memory(study: StudyConfig, kept: Sequence[Record]) -> str:
  """Tokens after which a head's state has faded to 1/e at its mean gate: the median head's, and the longest."""
  gated = [variant for variant in study.variants if variant in GATED]

  def cell(record: Record | None) -> str:
    gates = record and record.summary["gates"]
    return f"{gates['memory_median']:,.1f}; {gates['memory_max']:,.0f}" if gates else "-"

  grid = _by_context(study, kept, gated, lambda *which: cell(of_grid(kept, *which)))
  return f"{grid}\n\n{_by_rate(study, kept, gated, cell)}"


def clock(study: StudyConfig, kept: Sequence[Record]) -> str:
  """The runs for loss against time."""
  rows = []
  for record in (record for record in kept if record.kind == "clock"):
    taken = sum(time for time in record.steps["step_s"] if time is not None)
    told = _number(record.heldout_loss) if record.heldout_loss is not None else math.nan
    rows.append(
      [
        *(record.variant, f"{len(record.steps['step']):,}", f"{taken:.0f}", f"{record.tokens_per_s:,.0f}"),
        *(_mean(record.final_loss), f"{told:.3f}", _memory(record)),
      ]
    )
  return _markdown(["", "steps", "seconds", "tokens/s", "training loss", "held-out loss", "memory"], rows)


def speed(study: StudyConfig, kept: Sequence[Record]) -> str:
  """The runs for their speed and memory."""
  rows = []
  for record in (record for record in kept if record.kind == "speed"):
    config = record.summary["config"]
    sequences = f"{config['batch_tokens'] // config['context']:,} x {config['context']:,}"
    step = config["batch_tokens"] / record.tokens_per_s
    told = [f"{len(record.steps['step']):,}", f"{step:.2f}", f"{record.tokens_per_s:,.0f}", _memory(record)]
    rows.append([sequences, *told, _mean(record.final_loss)])
  return _markdown(["tokens a step", "steps", "seconds a step", "tokens/s", "memory", "training loss"], rows)


def contexts_run(study: StudyConfig, kept: Sequence[Record], power: int) -> list[int]:
  """The contexts of a power, ascending, with a run of its own: softmax, which has no power, is none unless alone."""
  own = [variant for variant in study.variants if variant != "softmax"] or study.variants
  return [c for c in study.contexts(power) if any(of_grid(kept, power, c, variant) for variant in own)]


def evaluated_cells(study: StudyConfig, kept: Sequence[Record]) -> list[Cell]:
  """The evaluated cells with an evaluation of their own."""
  known = [record for record in kept if record.context]
  return [(power, context) for power, context in study.evaluated if context in contexts_run(study, known, power)]


def of_grid(kept: Sequence[Record], power: int, context: int, variant: str) -> Record | None:
  """The run of the grid at a cell."""
  for record in kept:
    fits = record.kind == "grid" and record.trained_at == context and record.variant == variant
    if fits and (variant == "softmax" or record.power == power):
      return record
  return None


def difference(ours: Record, baseline: Record) -> Mean:
  """How far the final training loss of one run lies above another's that read the same batches."""
  if ours.diverged or baseline.diverged:
    return Mean(math.inf, math.nan)
  if len(ours.steps["step"]) != len(baseline.steps["step"]):
    raise ConfigError(f"{ours.name} and {baseline.name} are of different numbers of steps and cannot be compared")
  return records.mean([a - b for a, b in zip(ours.tail, baseline.tail, strict=True)])


def measured(record: Record | None, measure: str) -> dict[int, Mean]:
  """A curve of the evaluation past the training context, by the last position or the context."""
  rows = [] if record is None else [row for row in record.context if row["measure"] == measure]
  return {int(row["context"]): Mean(float(row["loss"]), float(row["standard_error"] or math.nan)) for row in rows}


def _by_context(
  study: StudyConfig, kept: Sequence[Record], variants: Sequence[str], cell: Callable[[int, int, str], str]
) -> str:
  """For each power a table of variants by context."""
  parts = []
  for power in study.powers:
    shown = contexts_run(study, kept, power)
    missing = [f"{context:,}" for context in study.contexts(power) if context not in shown]
    if shown:
      rows = [[variant, *(cell(power, context, variant) for context in shown)] for variant in variants]
      parts.append(_markdown([f"p={power}", *(f"{context:,}" for context in shown)], rows))
    if missing:
      parts.append(f"p={power}{' at ' + _listed(missing) if shown else ''}: not run yet.")
  return "\n\n".join(parts)


def _by_rate(study: StudyConfig, kept: Sequence[Record], variants: Sequence[str], cell: Callable[[Record], str]) -> str:
  """A table of the sweep: variants and offsets by learning rate."""
  rows = []
  for variant in variants:
    of_variant = [record for record in kept if _tried(record, variant)]
    for offset in study.offsets if variant in GATED else study.offsets[:1]:
      found = {record.rate: record for record in of_variant if variant not in GATED or record.offset == offset}
      told = [cell(found[rate]) if rate in found else "-" for rate in study.rates]
      if of_variant:
        rows.append([variant + (f", offset {offset:.1f}" if variant in GATED else ""), *told])
  return _markdown(["learning rate", *(f"{rate:g}" for rate in study.rates)], rows)


def _tried(record: Record, variant: str) -> bool:
  return record.kind == "sweep" and record.variant == variant


def _listed(names: Sequence[str]) -> str:
  return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _state(record: Record | None, context: int) -> str:
  rows = [] if record is None else [row for row in record.context if int(row["context"]) == context]
  return size(int(rows[0]["state_bytes"])) if rows else "-"


def _memory(record: Record) -> str:
  told = record.summary["memory_bytes"]
  return "-" if told is None else size(told)


def _mean(value: Mean | None, sign: bool = False) -> str:
  if value is None:
    return "-"
  if not math.isfinite(value.mean):
    return "diverged"
  told = _signed(value.mean) if sign else f"{value.mean:.3f}"
  return told if math.isnan(value.error) else f"{told} ± {value.error:.3f}"


def _signed(value: float) -> str:
  return f"{value:+z.3f}".replace("-", "\N{MINUS SIGN}")


def _number(value: float | None) -> float:
  assert value is not None
  return value


def _markdown(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
  if not rows:
    return "Not run yet."
  lines = [head, ["---"] * len(head), *rows]
  return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
