# make demo   train a small language model with stock and with swapped attention, and compare
# make test   ruff, mypy, the documentation and the test suite
# make lint   ruff and mypy only
# make docs   build the documentation into build/docs; a warning is an error
# make sanitize  the emulator's tests with its engine under AddressSanitizer and UndefinedBehaviorSanitizer
# make test-serving  vLLM's and SGLang's engines with our attention, on the CPU; downloads 1 GB, keeps 0.5 GB
# make clean  remove everything that make, the tests and the demo have written
#
# make test PYTHON=python3.12 uses another interpreter (and rebuilds .venv with it).

PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2

BIN := $(VENV)/bin
# Python compiles modules when they are first imported; of all that is installed few ever are.
INSTALL := $(BIN)/pip install --no-compile --constraint constraints.txt
# Named after the interpreter, so that asking for another one is noticed.
MADE := $(VENV)/made-by-$(subst /,-,$(PYTHON))
FOR_DEMO := $(VENV)/has-all-for-demo
FOR_TEST := $(VENV)/installed-by-$(subst /,-,$(PYTHON))

# A GPU's kernels take a compiler that a CPU has no use for.
COMMA := ,
DEMO := demo$(if $(wildcard /dev/nvidia[0-9]*),$(COMMA)kernels)

# The oldest and the newest vLLM that goes with a torch that we support, and one between them.
VLLM := 0.20.0 0.26.0 0.33.0
# SGLang needs CPython 3.11 or later; SGLANG= leaves it out.
SGLANG ?= $(shell $(PYTHON) -c 'import sys; print("0.5.23" * (sys.version_info >= (3, 11)))')
SERVING := build/serving
# make test-serving ALL= runs a case of each kind.
ALL ?= 1

.PHONY: demo test lint docs sanitize test-serving engines clean

demo: $(FOR_DEMO)
	$(BIN)/python examples/train_text.py

# One thread a worker: two workers on two cores would otherwise fight over four threads. Neighbouring tests
# share compiled kernels: each worker takes its part of them in order, then what the other has left. A kernel
# compiles in six sevenths of the time if the emulator's reports need not name its lines.
test: lint docs build/cuda13
	OMP_NUM_THREADS=1 FLASH4_EMULATOR_LINES=0 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

lint: $(FOR_TEST)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

docs: $(FOR_TEST)
	$(BIN)/sphinx-build -W --keep-going -n -q docs build/docs

sanitize: $(FOR_TEST)
	PYTHON=$(BIN)/python tests/emulator/sanitize.sh

test-serving: $(VLLM:%=test-vllm-%) $(SGLANG:%=test-sglang-%)

# What test-serving downloads.
engines: $(SERVING)/common $(VLLM:%=$(SERVING)/vllm-%) $(SGLANG:%=$(SERVING)/sglang-%)

.PRECIOUS: $(SERVING)/vllm-% $(SERVING)/sglang-%

test-vllm-%: $(FOR_TEST) $(SERVING)/common $(SERVING)/vllm-%
	PYTHONPATH=$(CURDIR)/$(SERVING)/vllm-$*:$(CURDIR)/$(SERVING)/common OMP_NUM_THREADS=1 \
		FLASH4_TEST_ALL=$(ALL) $(BIN)/python -m pytest tests/serving

test-sglang-%: $(FOR_TEST) $(SERVING)/common $(SERVING)/sglang-%
	PYTHONPATH=$(CURDIR)/$(SERVING)/sglang-$*:$(CURDIR)/$(SERVING)/common OMP_NUM_THREADS=1 \
		FLASH4_TEST_ALL=$(ALL) $(BIN)/python -m pytest tests/serving/test_sglang_engine.py

$(SERVING)/common: tests/serving/requirements-vllm.txt | $(FOR_TEST)
	rm -rf $@
	$(BIN)/pip install --quiet --no-deps --target $@ --requirement $<

$(SERVING)/vllm-%: tests/serving/get_engine.py | $(FOR_TEST)
	rm -rf $@
	$(BIN)/python $< vllm==$* $@
	touch $@

$(SERVING)/sglang-%: tests/serving/get_engine.py tests/serving/requirements-sglang.txt | $(FOR_TEST)
	rm -rf $@
	$(BIN)/python $< sglang==$* $@
	$(BIN)/pip install --quiet --no-deps --target $@ --requirement $(word 2,$^)
	touch $@

# From scratch each time: nothing that is no longer pinned stays behind.
$(MADE): constraints.txt pyproject.toml setup.py
	$(PYTHON) -m venv --clear $(VENV)
	$(INSTALL) setuptools
	touch $@

$(FOR_DEMO): $(MADE)
	$(INSTALL) --no-build-isolation --editable '.[$(DEMO)]'
	touch $@

# A second compiler of kernels, which no process can have next to the first (tests/support/cuda13.py).
build/cuda13: $(FOR_TEST)
	rm -rf $@
	$(INSTALL) --quiet --no-deps --target $@ nvidia-cutlass-dsl nvidia-cutlass-dsl-libs-base \
		nvidia-cutlass-dsl-libs-core nvidia-cutlass-dsl-libs-cu13
	touch $@

$(FOR_TEST): $(MADE)
	$(INSTALL) --no-build-isolation --editable '.[test,demo,dev,docs]'
	touch $@ $(FOR_DEMO)

clean:
	rm -rf $(VENV) build dist *.egg-info examples/out .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
