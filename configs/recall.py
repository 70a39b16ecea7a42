"""Multi-query associative recall: 21 two-layer models at four learning rates each, as the literature sets the task.

    python eval.py --task=recall --config=configs/recall.py --out=results/recall

Hardware: one GPU. Time and score: not yet measured. With keys that return with a new value: --forgetting=0.25.
"""

from csympow.evaluate.recall_config import RecallConfig


def get_config() -> RecallConfig:
  return RecallConfig()
