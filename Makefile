# Set-up and checks. Each command makes .venv and installs once; after that it starts at once.
#   make demo    Bayesian logistic regression on real data, beside Pyro's SVI
#   make test    lint, types, layer contract, tests, documented examples, notebooks
#   make docs    the site, into docs/_build/html; a warning is an error
#   make bench   every script in benchmarks/, in order
#   make lint    the first three parts of make test
# PYTHON chooses the interpreter of a new .venv (3.11 or newer).

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
DOCS_INSTALLED := $(VENV)/.installed-docs
BENCH_INSTALLED := $(VENV)/.installed-bench

export MPLBACKEND ?= Agg

.PHONY: demo test bench lint docs
.DEFAULT_GOAL := test

demo: $(INSTALLED)
	@$(BIN)/python tutorials/demo_a1a.py

test: lint
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal

lint: $(INSTALLED)
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy
	@report=$$($(BIN)/lint-imports --no-logo 2>&1) && echo "Layers: imports go down only" \
	    || { echo "$$report"; exit 1; }

docs: $(DOCS_INSTALLED)
	@$(BIN)/python -m sphinx -W --keep-going -n -q docs docs/_build/html \
	    && echo "Site: docs/_build/html/index.html"

bench: $(BENCH_INSTALLED)
	@set -e; for script in benchmarks/[!_]*.py; do \
	    echo "== $$script"; $(BIN)/python "$$script"; \
	done

$(INSTALLED): setup.cfg pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install -c constraints.txt -e '.[dev]'
	@touch $@

$(DOCS_INSTALLED): $(INSTALLED)
	$(BIN)/python -m pip install -c constraints.txt -e '.[docs]'
	@touch $@

$(BENCH_INSTALLED): $(INSTALLED)
	$(BIN)/python -m pip install -c constraints.txt -e '.[bench]'
	@touch $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	    || { echo "Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
