"""Multi-query associative recall in small, for a CPU: 7 two-layer models, 32 wide, trained on 2 and 4 pairs.

    python eval.py --task=recall --config=configs/recall_small.py --out=results/recall

Hardware: two CPU cores. Time: 16 minutes on two busy Neoverse-N1 cores. Score: at this size models answer by the
query's place (66 % of 2 pairs) and hardly recall; conformal p=2 begins to (75.5 %). docs/recall.md says how far to
trust that.
"""

from csympow.evaluate.recall_config import RecallConfig


def get_config() -> RecallConfig:
  return RecallConfig(
    vocab_size=64,
    train=((8, 2, 8_192), (16, 4, 8_192)),
    test=((8, 2, 500), (16, 4, 500), (24, 6, 500), (32, 8, 500)),
    widths=(32,),
    heads=2,
    rates=(1e-2,),
    epochs=14,
    batch=128,
    warmup=0.05,
    weight_decay=0.01,
  )
