# make demo    install into .venv, fetch a small model, compile it, check it, ask it a question
# make test    everything that has to pass: lint, types, warnings, sanitizers, tests
# make dev     build the native modules in place (VENV=DIR uses an environment of your own)
# make bench   side by side with llama.cpp and ik_llama.cpp, which it builds once (BENCH="options")
# make engine  the engine for other machines (ENGINE="--target BOARD");  make bundle  for offline hosts
# make bench-demo  gembench on the demo's model;  make fuzz, make soak: long runs, see below
SHELL := /bin/sh
VENV ?= .venv
PYTHON ?= python3
MODEL ?= smollm2-135m
PYTEST_ARGS ?=
FUZZ_COUNT ?= 200000
FUZZ_BOTH ?= 20000
FUZZ_SEED ?= 1
SOAK_RUNS ?= 10
BENCH ?=
ENGINE ?=
BUNDLE ?=
BIN := $(abspath $(VENV))/bin
LOCKED := mkdir -p build && flock build/.lock
export PATH := $(BIN):$(PATH)
export MODEL

.PHONY: demo test dev native setup fetch lint warnings sanitize pytest fuzz bench bench-demo soak \
  engine cross bundle clean

demo:
	@$(PYTHON) tools/demo.py --model "$$MODEL" --check
	@$(PYTHON) tools/setup.py --venv $(VENV) demo
	@$(MAKE) --no-print-directory native
	@$(BIN)/python tools/demo.py --model "$$MODEL"

test:
	@$(PYTHON) tools/setup.py --venv $(VENV) test
	@$(MAKE) --no-print-directory native fetch lint warnings sanitize pytest

# An environment of your own is used as it is.
dev: $(if $(filter .venv,$(VENV)),setup) native

setup:
	@$(PYTHON) tools/setup.py --venv $(VENV) dev

native:
	@$(LOCKED) cmake --preset dev -DPython_EXECUTABLE=$(BIN)/python --log-level=WARNING > build/configure.log
	@$(LOCKED) cmake --build build/dev -- -k 0
	@$(LOCKED) cmake --install build/dev --component cli --prefix $(BIN)/.. > build/install.log

fetch:
	@$(BIN)/python tools/fetch.py

lint:
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/mypy examples/agv/*.py examples/modbus/*.py

warnings:
	@$(LOCKED) cmake --preset ci --log-level=WARNING
	@$(LOCKED) cmake --build build/ci

sanitize:
	@$(LOCKED) cmake --preset sanitize --log-level=WARNING
	@$(LOCKED) cmake --build build/sanitize
	@ctest --test-dir build/sanitize --output-on-failure --no-tests=ignore -j 2

# Three for two cores: many tests wait. Thousands of commands are started: what was compiled of their
# modules is kept.
pytest:
	@PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 3 --dist worksteal $(PYTEST_ARGS)

# Damaged artifacts: FUZZ_COUNT of each golden file through the C reader under sanitizers, FUZZ_BOTH
# saved sessions of each, then FUZZ_BOTH through the Python reader and the engine, which have to
# agree.
fuzz: native
	@$(LOCKED) cmake --preset sanitize --log-level=WARNING > build/configure.log
	@$(LOCKED) cmake --build build/sanitize --target fuzz_open fuzz_session
	@build/sanitize/fuzz_open $(FUZZ_COUNT) $(FUZZ_SEED) tests/golden/v1.0/*.gembin
	@build/sanitize/fuzz_session $(FUZZ_BOTH) $(FUZZ_SEED) tests/golden/v1.0/*.gembin
	@cd tests && $(BIN)/python -m fuzz.run $(FUZZ_BOTH) $(FUZZ_SEED)

# On a machine that does nothing else; benchmarks/README.md says what it does and how long it takes.
bench: native
	@$(BIN)/python benchmarks/peers.py $(BENCH)

bench-demo:
	@$(BIN)/python tools/demo.py --model "$$MODEL" --bench

# Libraries, headers and the command for other machines, into build/engine.
engine:
	@$(BIN)/python -m gemmake.cli engine --output build/engine $(ENGINE)

# Tests that compile for other machines: glibc, musl (three of four here only), WebAssembly.
cross:
	@$(BIN)/python -m pytest -m cross -n 2 --dist worksteal

# Everything that a host without a network needs, into dist/.
bundle:
	@$(BIN)/python tools/bundle.py $(BUNDLE)

# The tests again and again, in a new order of workers each time, until one fails.
soak:
	@for i in $$(seq $(SOAK_RUNS)); do echo "run $$i of $(SOAK_RUNS)"; \
	  $(BIN)/python -m pytest -q -x -n 2 --dist worksteal $(PYTEST_ARGS) || exit 1; done

clean:
	rm -rf build dist gemrun/_engine*.so gemmake/_helper*.so
