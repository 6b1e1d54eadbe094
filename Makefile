# make demo   train a small language model with stock and with swapped attention, and compare
# make test   ruff, mypy and the test suite
# make lint   ruff and mypy only
# make clean  remove everything that make, the tests and the demo have written
#
# make test PYTHON=python3.12 uses another interpreter (and rebuilds .venv with it).

PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2

BIN := $(VENV)/bin
# Named after the interpreter, so that asking for another one is noticed.
INSTALLED := $(VENV)/installed-by-$(subst /,-,$(PYTHON))

.PHONY: demo test lint clean

demo: $(INSTALLED)
	$(BIN)/python examples/train_text.py

# One thread a worker: two workers on two cores would otherwise fight over four threads. Neighbouring tests
# share compiled kernels: each worker takes its part of them in order, then what the other has left.
test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

lint: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

# From scratch each time: nothing that is no longer pinned stays behind.
$(INSTALLED): constraints.txt pyproject.toml setup.py
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/pip install --constraint constraints.txt setuptools
	$(BIN)/pip install --constraint constraints.txt --no-build-isolation --editable '.[test,demo,dev]'
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info examples/out .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
