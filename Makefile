# make demo   environment, install, build the sample for this CPU, generate text, print the speed
# make test   the tests
# make test-all  also the tests that are marked `exhaustive`
# make lint   ruff and mypy
# make docs   the documentation with the API reference, as web pages in out/site
# make wheel-check  source distribution and wheel, complete and usable without this checkout
# make compat  tests with clients and libraries of others, in an environment of their own
# make bench  this machine's numbers for the sample models, into benchmarks/results/

PYTHON ?= python3
PIP_ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
COMPAT := .venv-compat
DEMO := out/demo
PYTEST = $(BIN)/python -m pytest -q -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder --durations 10

# Tests start many processes, each of which would compile the sources again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-all lint docs wheel-check compat bench clean

demo: $(VENV)/.installed
	$(BIN)/qcompile build samples/pycode-26m -o $(DEMO) --target cpu --recipe w4a8
	printf 'import os\nimport json\n\ndef load_config(path):\n    """Read a JSON file."""\n' | \
	  $(BIN)/qcompile run $(DEMO) --prompt - --max-tokens 96

test: $(VENV)/.installed
	$(PYTEST)

test-all: $(VENV)/.installed
	$(PYTEST) -m "exhaustive or not exhaustive"

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet --site-dir out/site

wheel-check: $(VENV)/.installed
	$(BIN)/python .ci/check_wheel.py

# Some of these packages need other versions of packages than the development environment has.
compat: $(COMPAT)/.installed
	HF_HOME=$(CURDIR)/out/huggingface HF_HUB_OFFLINE=1 $(COMPAT)/bin/python -m pytest -q tests/compat

bench: $(VENV)/.installed
	$(BIN)/python benchmarks/cpu_speed.py

# Installed once; again when what to install changes. PIP_ARGS may name an index with CPU-only torch wheels.
$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "qcompile needs Python 3.11 or newer: make PYTHON=python3.12 ..." >&2; exit 5; }
	@echo "Installing into $(VENV) (once, a minute or two; torch is the largest part)" >&2
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(PIP_ARGS) -c constraints.txt -e '.[dev]'
	@touch $@

$(COMPAT)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(COMPAT)
	$(COMPAT)/bin/python -m pip install $(PIP_ARGS) -c constraints.txt -e '.[compat,dev]'
	@touch $@

$(VENV)/.docs: $(VENV)/.installed
	$(BIN)/python -m pip install $(PIP_ARGS) -c constraints.txt -e '.[docs]'
	@touch $@

clean:
	rm -rf $(VENV) $(COMPAT) out build dist *.egg-info
