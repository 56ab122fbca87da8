# Two commands do all the set-up on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed

.PHONY: demo test test-all lint clean

demo: $(STAMP)
	$(BIN)/fleetbench tune

# What measures time runs alone, after all else.
BESIDE := -n 3 --dist loadfile --no-loadscope-reorder -m "not alone"

test: $(STAMP) lint
	$(BIN)/python -m pytest -q $(BESIDE)
	$(BIN)/python -m pytest -q -m alone

test-all: $(STAMP) lint
	$(BIN)/python -m pytest -q --slow $(BESIDE)
	$(BIN)/python -m pytest -q --slow -m alone

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The exact versions of constraints.txt: a plain `pip install torch` would fetch gigabytes of CUDA libraries.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt "pip>=25.1"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --group dev --editable .
	touch $(STAMP)

clean:
	rm -rf $(VENV) runs log
