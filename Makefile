# Two commands do all the set-up on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed
TOOLS := $(VENV)/tools-installed
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

# Every process of a test imports our packages: they are compiled once, also where the machine's settings forbid it.
export PYTHONDONTWRITEBYTECODE :=

SLOW :=
PARTS := part-1 part-2 part-3
TESTS_part-1 := $(wildcard tests/fitting/test_*.py tests/plan/test_*.py tests/sim/test_*.py tests/real/test_real_[a-q]*.py tests/real/test_real_[u-z]*.py)
TESTS_part-2 := $(wildcard tests/tuner/test_*.py tests/real/test_real_[s-t]*.py)
TESTS_part-3 := $(filter-out $(TESTS_part-1) $(TESTS_part-2),$(shell find tests -name 'test_*.py' | sort))
ALONE := $(shell grep -rl --include='test_*.py' 'pytest\.mark\.alone' tests)

.PHONY: demo test test-all lint reports clean $(PARTS)

demo: $(INSTALLED)
	$(BIN)/fleetbench tune

# Three parts run side by side, each in a process that collects no other's tests, and lint beside them: tests wait at times.
# What measures time runs alone, after all else.
test: $(TOOLS)
	@echo "lint and three parts of the tests run side by side; each prints its output when it ends, in some minutes"
	$(MAKE) --no-print-directory --jobs=4 --output-sync=target $(PARTS) lint
	$(BIN)/python -m pytest -q $(SLOW) -m alone $(ALONE)

# A fixed sample of each campaign; `make test SLOW=--whole` runs them whole, in hours.
test-all:
	$(MAKE) --no-print-directory SLOW=--slow test

$(PARTS): $(TOOLS)
	$(BIN)/python -m pytest -q $(SLOW) -m "not alone" $(TESTS_$@)

lint: $(TOOLS)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Figures that any machine computes in minutes, compared with those that are committed.
reports: $(TOOLS)
	$(BIN)/python reports/again.py

# The exact versions of constraints.txt: a plain `pip install torch` would fetch gigabytes of CUDA libraries.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) --editable .
	$(BIN)/python -m compileall -q fleetbench sim real tuner
	touch $(INSTALLED)

# What checks and tests use besides.
$(TOOLS): $(INSTALLED)
	$(PIP) "pip>=25.1"
	$(PIP) --group dev
	touch $(TOOLS)

clean:
	rm -rf $(VENV) runs log
