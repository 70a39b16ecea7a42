"""The paper's numbers: GPT-2's 124M on LongCrawl64, 524,288 tokens a step, 400,000 documents whatever the context.

Ours are of smaller models, other text and another tokenizer: compare differences between variants, not losses.
"""

# Training loss by power, variant and context.
TRAINING_LOSS: dict[int, dict[str, dict[int, float]]] = {
  2: {
    "softmax": {256: 6.263, 1024: 4.885, 4096: 3.660, 8192: 3.113},
    "sympow": {256: 6.058, 1024: 4.573, 4096: 3.679, 8192: 3.535},
    "sympow+gating": {256: 6.060, 1024: 4.752, 4096: 3.549, 8192: 3.121},
    "conformal": {256: 6.058, 1024: 4.747, 4096: 3.455, 8192: 3.044},
  },
  4: {
    "softmax": {1024: 4.885, 4096: 3.660, 16_384: 2.969, 65_536: 2.540},
    "sympow": {1024: 4.794, 4096: 3.553, 16_384: 2.901, 65_536: 2.584},
    "sympow+gating": {1024: 4.724, 4096: 3.438, 16_384: 2.784, 65_536: 2.459},
    "conformal": {1024: 4.737, 4096: 3.327, 16_384: 2.727, 65_536: 2.435},
  },
}

# Loss at position 65,520 by (power, training context) and variant.
LOSS_PAST_CONTEXT: dict[tuple[int, int], dict[str, float]] = {
  (4, 16_384): {"softmax": 2.83, "sympow": 7.10, "sympow+gating": 2.31, "conformal": 2.18},
}


def training_loss(power: int, variant: str, context: int) -> float | None:
  """The paper's training loss, where it has one."""
  return TRAINING_LOSS.get(power, {}).get(variant, {}).get(context)
