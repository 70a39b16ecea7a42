# On a machine with nothing but Python >= 3.12, each command makes .venv and installs the project first.
SHELL := bash
VENV := .venv
STAMP := $(VENV)/.installed-test

PYTEST_ARGS ?=
BENCH_ARGS ?=

.PHONY: test lint bench clean
test: lint
	$(VENV)/bin/python -m pytest $(PYTEST_ARGS)

bench: $(STAMP)
	$(VENV)/bin/python benchmarks/forms.py $(BENCH_ARGS)

lint: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

$(STAMP): pyproject.toml
	@python=$$(for candidate in python3.14 python3.13 python3.12 python3 "$$HOME"/.pyenv/versions/*/bin/python3; do \
	  path=$$(command -v "$$candidate") || continue; \
	  "$$path" -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null && { echo "$$path"; break; }; \
	done); \
	test -n "$$python" || { echo "csympow needs Python >= 3.12; looked for python3.14 .. python3.12, python3 and ~/.pyenv/versions/*/bin" >&2; exit 1; }; \
	echo "installing into $(VENV) with $$python"; \
	test -x $(VENV)/bin/python || "$$python" -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -e ".[test]"
	@touch $@

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
