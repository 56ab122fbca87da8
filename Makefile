# Two commands do all the set-up on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed

# Every process of a test imports our packages: they are compiled once, also where the machine's settings forbid it.
export PYTHONDONTWRITEBYTECODE :=

SLOW :=
BESIDE := first second third
TESTS_first := $(wildcard tests/fitting/test_*.py tests/plan/test_*.py tests/real/test_real_[a-q]*.py)
TESTS_second := $(wildcard tests/test_*.py tests/real/test_real_[r-z]*.py)
TESTS_third := $(filter-out $(TESTS_first) $(TESTS_second),$(shell find tests -name 'test_*.py' | sort))
ALONE := $(shell grep -rl --include='test_*.py' 'pytest\.mark\.alone' tests)

.PHONY: demo test test-all lint reports clean $(BESIDE)

demo: $(STAMP)
	$(BIN)/fleetbench tune

# Three parts of about as many seconds run side by side, each in a process that collects no other's tests, and lint beside them:
# tests wait at times. What measures time runs alone, after all else.
test: $(STAMP)
	$(MAKE) --no-print-directory --jobs=4 $(BESIDE) lint
	$(BIN)/python -m pytest -q $(SLOW) -m alone $(ALONE)

# A fixed sample of each campaign; `make test SLOW=--whole` runs them whole, in hours.
test-all:
	$(MAKE) --no-print-directory SLOW=--slow test

$(BESIDE): $(STAMP)
	$(BIN)/python -m pytest -q $(SLOW) -m "not alone" $(TESTS_$@)

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
