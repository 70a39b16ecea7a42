# On a machine with nothing but Python >= 3.12, each command makes .venv and installs the project first.
SHELL := bash
VENV := .venv
TRAIN_STAMP := $(VENV)/.installed
TEST_STAMP := $(VENV)/.installed-test

TRAIN_ARGS ?=
PYTEST_ARGS ?= -n 2 --dist loadfile
BENCH_ARGS ?=

.PHONY: train test lint bench clean
train: $(TRAIN_STAMP)
	$(VENV)/bin/python train.py --config=configs/quickstart.py $(TRAIN_ARGS)

test: lint
	$(VENV)/bin/python -m pytest $(PYTEST_ARGS)

bench: $(TRAIN_STAMP)
	$(VENV)/bin/python benchmarks/forms.py $(BENCH_ARGS)
	$(VENV)/bin/python benchmarks/training.py

lint: $(TEST_STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

$(TRAIN_STAMP): EXTRAS := .
$(TEST_STAMP): EXTRAS := .[test]
$(TRAIN_STAMP) $(TEST_STAMP): pyproject.toml
	@python=$$(for candidate in python3.14 python3.13 python3.12 python3 "$$HOME"/.pyenv/versions/*/bin/python3; do \
	  path=$$(command -v "$$candidate") || continue; \
	  "$$path" -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null && { echo "$$path"; break; }; \
	done); \
	test -n "$$python" || { echo "csympow needs Python >= 3.12; looked for python3.14 .. python3.12, python3 and ~/.pyenv/versions/*/bin" >&2; exit 1; }; \
	echo "installing into $(VENV) with $$python"; \
	test -x $(VENV)/bin/python || "$$python" -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -e "$(EXTRAS)"
	@touch $@

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
