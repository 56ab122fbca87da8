# Two commands do all the set-up on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed

# Every process of a test imports our packages: they are compiled once, also where the machine's settings forbid it.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-all tests lint reports clean

demo: $(STAMP)
	$(BIN)/fleetbench tune

SLOW :=

# mypy and the collection of the tests take a core each for half a minute: they run side by side.
test: $(STAMP)
	$(MAKE) --no-print-directory --jobs=2 lint tests

# A fixed sample of each campaign; `make test SLOW=--whole` runs them whole, in hours.
test-all:
	$(MAKE) --no-print-directory SLOW=--slow test

# Workers are forks of the process that has collected; what measures time runs after them, alone.
tests: $(STAMP)
	$(BIN)/python -m pytest -q $(SLOW) --workers 3

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Figures that any machine computes in minutes, compared with those that are committed.
reports: $(STAMP)
	$(BIN)/python reports/again.py

# The exact versions of constraints.txt: a plain `pip install torch` would fetch gigabytes of CUDA libraries.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt "pip>=25.1"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --group dev --editable .
	$(BIN)/python -m compileall -q fleetbench sim real tuner
	touch $(STAMP)

clean:
	rm -rf $(VENV) runs log
