"""The README's python examples run, in order, as a reader would paste them into one session."""

import pathlib
import re

import pytest

README = pathlib.Path(__file__).parents[1] / "README.md"


def examples():
  """(line number, source) of each block marked python."""
  text = README.read_text() if README.exists() else ""
  return [(text[: m.start(1)].count("\n"), m[1]) for m in re.finditer(r"^```python\n(.*?)^```", text, re.M | re.S)]


def test_the_readme_shows_the_function_and_the_layer():
  source = "".join(source for _, source in examples())
  for name in ("csympow.attention(", "ConformalAttention("):
    assert name in source, f"no python example of README.md calls {name}...)"


def test_the_examples_run(monkeypatch, tmp_path):
  if not examples():
    pytest.fail("README.md has no python example")
  monkeypatch.chdir(tmp_path)
  session = {"__name__": "readme"}
  for line, source in examples():
    # Blank lines in front: a traceback then names the README's own line.
    exec(compile("\n" * line + source, str(README), "exec"), session)
  assert "csympow" in session
