# make demo     install into .venv, train a tiny chat model and ask it three questions: Python 3.11+ and make will do
# make test     lint, types, import contract, tests (what CI runs; under 10 minutes on 2 cores)
# make torture  the long sets; their figures go to bench/RESULTS.md

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: demo test lint types contract pytest torture install clean

demo: $(VENV)/.runtime
	$(BIN)/brimful demo

test: lint types contract pytest

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

contract: $(STAMP)
	$(BIN)/lint-imports

pytest: $(STAMP)
	$(BIN)/python -m pytest -m "not torture"

torture: $(STAMP)
	$(BIN)/python -m pytest -m torture -s

install: $(STAMP)

# The demo needs the package alone; the tests need the tools as well.
$(VENV)/.runtime: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Brimful needs Python 3.11 or newer; this is %s. Try: make PYTHON=python3.11 ..." % sys.version.split()[0])'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[eval]'
	@touch $@

$(STAMP): $(VENV)/.runtime
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
