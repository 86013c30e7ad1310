# make train: set up and run the quickstart. make test: set up and pass all tests.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# A GPU, or a CPU with instructions for bf16, trains the quickstart in bf16. On another CPU a product in bf16 takes many
# times as long as one in fp32: it trains the same model in fp32, with steps and rates of its own.
HAS_BF16 := $(shell command -v nvidia-smi || grep -sEwo -m1 'avx512_bf16|amx_bf16|bf16' /proc/cpuinfo)
SPEC   ?= examples/$(if $(HAS_BF16),quickstart,quickstart-fp32).yaml
CONSTRAINTS ?= constraints.txt
JOBS   ?= 2
# A test that computes with two threads beside another one waits for them most of the time.
export OMP_NUM_THREADS ?= 1
# The longest files are in tests/training and tests/faults: whoever begins with them ends with short ones.
FAULTS  = $(shell grep -rl --include='test_*.py' 'mark.fault' tests | sort -r)

.PHONY: help setup train test test-deep deep-table test-faults soak test-oldest test-gpu test-layouts test-checkpoints test-third-party lint format clean

help:
	@echo "make train   install what training needs, and train $(SPEC) (ARGS='train.steps=20' overrides)"
	@echo "make setup   install what tests and lint need, too; the targets below do so themselves"
	@echo "make test    run all tests but the deep ones, JOBS=$(JOBS) files at a time"
	@echo "make test-deep  the tests that take long: all combinations where make test tries every two values, and kills"
	@echo "make deep-table  which tests those are, by file"
	@echo "make test-faults  every fault that a run must survive or name, and what came of it, as a table"
	@echo "make soak    train 2,000 steps through faults drawn from a seed, and count what they cost"
	@echo "make test-oldest  the same with the oldest PyTorch that is supported"
	@echo "make test-gpu  all that needs a GPU: kernels, layers, dispatchers, training, and goals beside their measurement"
	@echo "make test-layouts  train under every layout of tests/layouts.yaml and write docs/layouts.md"
	@echo "make test-checkpoints  let unlike layouts read each other's checkpoints, and write the table of docs/checkpoints.md"
	@echo "make test-third-party  install a plugin from a wheel into a fresh environment, certify it, train with it"
	@echo "make lint    ruff and mypy"
	@echo "make format  let ruff format the sources"
	@echo "make clean   remove the virtual environment and caches"

# What training needs. Who develops adds to it: $(BIN)/.ready-dev.
$(BIN)/.ready: pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' \
	  || { echo "error: moefw needs Python 3.11 or 3.12; try make PYTHON=python3.12"; exit 2; }
	@$(PYTHON) -m venv $(VENV)
	@$(call install,.,PyTorch and moefw into $(VENV): about a minute)
	@touch $@

# Tests start Python hundreds of times, also where PYTHONDONTWRITEBYTECODE keeps it from storing what it compiles.
$(BIN)/.ready-dev: $(BIN)/.ready
	@$(call install,.[dev],what tests and lint need)
	@echo "compiling the installed packages"
	@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true  # a few are for another Python
	@touch $@

# $(1): what pip installs; $(2): the same in words. Python compiles what it imports when it first does, which is a small
# part: that takes a third of the time that pip takes to compile all.
install = echo "installing $(2)"; begin=$$(date +%s); \
  $(BIN)/python -m pip install --quiet --no-compile --constraint $(CONSTRAINTS) --editable '$(1)' \
  && echo "installed in $$(($$(date +%s) - begin)) s"

setup: $(BIN)/.ready-dev

train: $(BIN)/.ready
	$(BIN)/moefw train $(SPEC) $(ARGS)

# moefw itself, again where a source has changed.
test: setup
	$(BIN)/python -m compileall -q -x /templates/ moefw kernels
	$(BIN)/python -m pytest -m "not deep" -n $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)

test-deep: setup
	CI=true $(BIN)/python -m pytest -m deep -n $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)

deep-table: setup
	$(BIN)/python -m pytest -m deep --collect-only --quiet --quiet --deep-table $(ARGS)

test-faults: setup
	CI=true $(BIN)/python -m pytest $(FAULTS) -m fault --fault-table -n $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)

soak: setup
	$(BIN)/python benchmarks/soak.py $(ARGS)

test-oldest:
	$(MAKE) test VENV=.venv-oldest CONSTRAINTS=constraints-oldest.txt

test-gpu: setup
	$(BIN)/python benchmarks/on_gpu.py $(ARGS)

test-layouts: setup
	PYTHONPATH=tests/support:benchmarks $(BIN)/python scripts/layout_table.py

test-checkpoints: setup
	PYTHONPATH=tests/support:benchmarks $(BIN)/python scripts/checkpoint_table.py

test-third-party: setup
	PYTHON=$(BIN)/python scripts/certify_third_party.sh

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist *.egg-info
