# Two commands do all the set-up on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed

# Every process of a test imports our packages: they are compiled once, also where the machine's settings forbid it.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-all beside lint reports clean

demo: $(STAMP)
	$(BIN)/fleetbench tune

# What measures time runs alone, after all else; to collect its files takes seconds, to collect all a quarter of a minute.
BESIDE := -n 3 --dist loadfile --no-loadscope-reorder -m "not alone"
ALONE := -m alone $(shell grep -rl --include='test_*.py' 'pytest\.mark\.alone' tests)
SLOW :=

# mypy takes one core for most of a minute where it has no cache, and the tests wait at times: they run side by side.
test: $(STAMP)
	$(MAKE) --no-print-directory --jobs=2 lint beside
	$(BIN)/python -m pytest -q $(SLOW) $(ALONE)

# A fixed sample of each campaign; `make test SLOW=--whole` runs them whole, in hours.
test-all:
	$(MAKE) --no-print-directory SLOW=--slow test

beside: $(STAMP)
	$(BIN)/python -m pytest -q $(SLOW) $(BESIDE)

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
