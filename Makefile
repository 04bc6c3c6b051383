# Every target makes its own environment in .venv, through constraints.txt, and makes it again when
# pyproject.toml or constraints.txt changes. `make` alone lists the targets.

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-builtin-rules

PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2
ARGS ?=

BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal
RUNTIME := $(VENV)/.stamp-runtime
DEVELOP := $(VENV)/.stamp-develop

.PHONY: help demo test check lint format bench clean distclean

help: ## list the targets
	@echo "usage: make TARGET [PYTHON=python3] [WORKERS=2] [ARGS='...' for demo, test, check and bench]"
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(RUNTIME) ## plan an 8B model for 8 GPUs, then train a small one on 2 processes
	$(BIN)/python examples/demo.py $(ARGS)

test: $(DEVELOP) ## run every test (under 15 minutes on 2 cores)
	$(PYTEST) $(ARGS)

check: lint ## lint, then the quick tests (under two minutes)
	$(PYTEST) -m "not slow and not gloo" $(ARGS)

lint: $(DEVELOP) ## format, lint, types and the layers of imports
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/lint-imports --no-logo

format: $(DEVELOP) ## rewrite the files as lint wants them
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(DEVELOP) ## time a step beside torch's own tensor parallelism, and planning beside capture
	$(BIN)/python benchmarks/run.py $(ARGS)

clean: ## remove caches and build products
	rm -rf build dist out .hypothesis .import_linter_cache .pytest_cache .ruff_cache
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -exec rm -rf {} +

distclean: clean ## remove .venv too
	rm -rf $(VENV)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("autoshard needs Python 3.11 or later: make PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv $(VENV)

$(RUNTIME): pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing autoshard into $(VENV); the first time takes some minutes"
	$(INSTALL) -e '.[examples]'
	touch $@

$(DEVELOP): pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing autoshard and its tools into $(VENV); the first time takes some minutes"
	$(INSTALL) -e '.[test,dev]'
	touch $(RUNTIME) $@
