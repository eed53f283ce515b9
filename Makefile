PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help demo test lint types contract pytest torture install clean

help:  ## show this list
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

demo: $(VENV)/.runtime  ## install, train a tiny chat model and ask it three questions
	$(BIN)/brimful demo

test: lint types contract pytest  ## everything CI runs: ruff, mypy, import layers, pytest

lint: $(STAMP)  ## ruff: mistakes and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)  ## mypy
	$(BIN)/mypy

contract: $(STAMP)  ## imports point one way
	$(BIN)/lint-imports

pytest: $(STAMP)  ## the tests alone, one process per core; then those of a GPU on an emulated one
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not torture" -n auto --dist loadfile
	OMP_NUM_THREADS=1 EMULATED_CARD=8GiB $(BIN)/python -m pytest -m gpu tests/*/test_gpu.py

torture: $(STAMP)  ## long fault and load tests; put their figures into bench/RESULTS.md
	$(BIN)/python -m pytest -m torture -s

install: $(STAMP)  ## the package and its development tools, in .venv

# The demo needs the package alone; the tests need the tools as well.
$(VENV)/.runtime: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Brimful needs Python 3.11 or newer; this is %s. Try: make PYTHON=python3.11 ..." % sys.version.split()[0])'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[eval]'
	@touch $@

$(STAMP): $(VENV)/.runtime
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

clean:  ## remove the environment and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
