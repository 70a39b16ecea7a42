"""What the documents state is what the code says."""

import pathlib

from benchmarks import crossovers

DOCS = pathlib.Path(__file__).parents[1] / "docs"


def test_the_crossover_lengths_in_the_docs_are_those_of_the_cost_model():
  assert crossovers.table() in (DOCS / "forms.md").read_text()
