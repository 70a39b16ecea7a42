"""The README's python examples run, in order, as a reader would paste them into one session."""

import pathlib
import re
import subprocess
import sys

import pytest

from tests import running

README = pathlib.Path(__file__).parents[1] / "README.md"


def examples():
  """(line number, source) of each block marked python."""
  text = README.read_text() if README.exists() else ""
  return [(text[: m.start(1)].count("\n"), m[1]) for m in re.finditer(r"^```python\n(.*?)^```", text, re.M | re.S)]


def test_the_readme_shows_the_function_and_the_layer():
  source = "".join(source for _, source in examples())
  for name in ("csympow.attention(", "ConformalAttention("):
    assert name in source, f"no python example of README.md calls {name}...)"


def test_the_examples_run(tmp_path):
  """In a process of their own, with little of the compiler's effort; a traceback names the README's own line."""
  if not examples():
    pytest.fail("README.md has no python example")
  lines = [""] * len(README.read_text().splitlines())
  for first, source in examples():
    lines[first : first + source.count("\n")] = source.splitlines()
  script = tmp_path / "README.py"
  script.write_text("\n".join(lines))
  environment = running.as_a_user() | {"XLA_FLAGS": "--xla_backend_optimization_level=0"}
  how = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True}
  ran = subprocess.run([sys.executable, script], **how, check=False)
  assert ran.returncode == 0, ran.stderr
