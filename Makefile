# One environment, made from constraints.txt on the first call and left alone after it.
# Any Python >= 3.11 will do: PYTHON=/path/to/python chooses one.

VENV ?= .venv
BIN := $(VENV)/bin
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)
PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
# Five even on two cores, because tests wait for processes. Each takes 1 GB.
WORKERS ?= 5
ARGS ?=
TOOLS := build twine uv
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --durations=20

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help run test test-slow coverage lint docs bench dist constraints clean

help: ## this list
	@sed -n 's/^\([a-z0-9-]*\):.*## /make \1\t/p' Makefile

run: $(VENV)/.installed-run ## train the main job; ARGS='experiment=digits_fast seed=1' changes it
	$(BIN)/python -m runner $(ARGS)

test: $(VENV)/.installed-test ## run the first tier in WORKERS processes, within eight minutes; ARGS='-k time' chooses tests
	$(PYTEST) -m 'not slow' $(ARGS)

test-slow: $(VENV)/.installed-test ## run the second tier: long kills, fuzzes, all pairs, commands in many variants
	$(PYTEST) -m slow $(ARGS)

# Twice the time of `make test`, so it is no part of .ci/run.
coverage: $(VENV)/.installed-test $(VENV)/.installed-dev ## run the first tier, and print the share of statements of each room that it ran
	$(PYTEST) -m 'not slow' --cov --cov-report= $(ARGS)
	$(BIN)/coverage combine --quiet --append || true # processes that ended after pytest
	rm -f .coverage.* # of killed ones
	mkdir -p build && $(BIN)/coverage json --quiet -o build/coverage.json
	$(BIN)/python tests/rooms.py build/coverage.json

lint: $(VENV)/.installed-dev ## run ruff and pyright
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

docs: $(VENV)/.installed-docs ## build the site of docs/ into build/site; a wrong link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

# Continues when one misses its limit, and fails at the end. Exit code 2: it cannot be measured on this machine.
bench: $(VENV)/.installed-run ## measure what we claim; hours, most of them for algorithms.py
	@missed=; for benchmark in benchmarks/[a-z]*.py; do \
		echo "== $$benchmark"; $(BIN)/python "$$benchmark" || [ $$? = 2 ] || missed="$$missed $$benchmark"; done; \
		test -z "$$missed" || { echo "missed:$$missed"; exit 1; }

dist: $(VENV)/.installed-tools ## build the sdist, and from it the wheel, into dist/, and check what PyPI would refuse
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/twine check --strict dist/*

# Versions stay as they are where pyproject.toml allows them. 3.11.5 is the oldest Python that all of them have. A torch for
# CUDA pins what it needs of $(CUDA) exactly, and others need none of it.
UV = $(BIN)/uv pip compile --quiet --python-version 3.11.5 --no-annotate --custom-compile-command 'make constraints' \
	--excludes build/excludes.txt --overrides build/overrides.txt $(ARGS) pyproject.toml
CUDA := $(addprefix nvidia-,cublas cuda-cupti cuda-nvrtc cuda-runtime cudnn-cu13 cufft cufile curand cusolver cusparse \
	cusparselt-cu13 nccl-cu13 nvjitlink nvshmem-cu13 nvtx) cuda-bindings cuda-pathfinder cuda-toolkit triton

constraints: $(VENV)/.installed-tools ## pin the versions of all extras; ARGS=--upgrade for new ones, ARGS='-P mlflow' for one
	@mkdir -p build && printf '%s\n' $(CUDA) >build/excludes.txt && echo 'optuna>=3.6' >build/overrides.txt
	printf '%s\n' hydra-optuna-sweeper $(TOOLS) | $(UV) - --all-extras --python-platform linux --output-file constraints.txt
	$(UV) --constraints constraints.txt --universal --generate-hashes --no-emit-package torch --output-file requirements.lock

clean: ## remove the environment and caches, keep outputs/
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.installed-run: EXTRAS :=
$(VENV)/.installed-test: EXTRAS := [test]
$(VENV)/.installed-dev: EXTRAS := [dev]
$(VENV)/.installed-docs: EXTRAS := [docs]
# Installed without dependencies: the sweeper asks for an old optuna (see pyproject.toml), and the others would replace
# a torch for CPUs with gigabytes of CUDA.
$(VENV)/.installed-test: $(VENV)/.installed-alone
$(VENV)/.installed-alone: constraints.txt | $(BIN)/python
	$(PIP) --no-deps hydra-optuna-sweeper torchvision timm
	@touch $@

# Needs neither the project nor torch.
$(VENV)/.installed-tools: constraints.txt | $(BIN)/python
	$(PIP) $(TOOLS)
	@touch $@

$(VENV)/.installed-%: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) --editable '.$(EXTRAS)'
	@touch $@

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "no Python >= 3.11 found: install one, or say which with make PYTHON=/path/to/python"; exit 1; }
	$(PYTHON) -m venv $(VENV)
