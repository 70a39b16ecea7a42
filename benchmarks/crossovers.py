"""Prints the table of docs/forms.md: from which length on `form="auto"` takes the chunked form.

python benchmarks/crossovers.py
"""

from csympow import cost

POWERS, HEAD_DIMS = (2, 4), (32, 64, 128)


def crossover(head_dim: int, power: int, device: str) -> int:
  """The shortest length, one sequence of 12 heads, that the chunked form is estimated to finish first."""

  def chunked(length: int) -> bool:
    shape = cost.Shape(1, length, 12, 12, head_dim, head_dim, power, needs_state=False)
    return cost.choose(shape, "auto", None, device).form == "chunked"

  low, high = 1, 2**40
  while high - low > max(1, low // 100):
    middle = (low + high) // 2
    low, high = (low, middle) if chunked(middle) else (middle, high)
  return high


def table() -> str:
  """The crossovers as a Markdown table, to two digits."""
  lines = ["| p | d | D | CPU | GPU | TPU |", "|---|---|---|---|---|---|"]
  for power in POWERS:
    for head_dim in HEAD_DIMS:
      features = cost.feature_dim(head_dim, power)
      lengths = (f"{float(f'{crossover(head_dim, power, device):.2g}'):,.0f}" for device in ("cpu", "gpu", "tpu"))
      lines.append(f"| {power} | {head_dim} | {features:,} | {' | '.join(lengths)} |")
  return "\n".join(lines)


if __name__ == "__main__":
  print(table())
