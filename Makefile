# `make quickstart` trains a small model, `make test` runs every check, `make help` lists the targets.
# They use the active virtual environment, or create .venv if there is none.

VENV := $(if $(VIRTUAL_ENV),$(VIRTUAL_ENV),.venv)
PYTHON ?= python3
RUN := $(VENV)/bin
CONSTRAINTS := $(if $(shell command -v nvidia-smi 2>/dev/null),,--constraint constraints-cpu.txt)
# tests/conftest.py runs the longest modules first
IN_TWO := -n 2 --dist loadscope --no-loadscope-reorder
OLDEST_TORCH := 2.11.0
NEWEST_TORCH := 2.15.0
INSTALLED := $(VENV)/.parallel3d-installed
INSTALLED_DEV := $(VENV)/.parallel3d-installed-dev
INSTALLED_DOCS := $(VENV)/.parallel3d-installed-docs

.DEFAULT_GOAL := help
.PHONY: help quickstart test test-long test-gpu lint bench docs

help: ## list these targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

quickstart: $(INSTALLED) ## train a small model on eight local processes with tensor, pipeline and data parallelism
	@echo "==> parallel3d-train quickstart"
	@$(RUN)/parallel3d-train quickstart

test: lint ## lint and all tests
	@echo "==> pytest"
	@$(RUN)/python -m pytest $(IN_TWO) --durations=10

test-long: test ## all tests, long tests, property tests with ten times the examples, the oldest and newest torch
	@echo "==> pytest -m long"
	@$(RUN)/python -m pytest $(IN_TWO) -m long
	@echo "==> pytest -m hypothesis, 1000 examples a property"
	@HYPOTHESIS_PROFILE=long $(RUN)/python -m pytest $(IN_TWO) -m hypothesis
	@$(MAKE) test-torch-$(OLDEST_TORCH) test-torch-$(NEWEST_TORCH)

test-gpu: $(INSTALLED_DEV) ## the acceptance tests on one GPU; writes their report into docs/status.md
	@echo "==> pytest tests/gpu"
	@$(RUN)/python -m pytest tests/gpu -m gpu -rs --gpu-report docs/status.md -o faulthandler_timeout=300

test-torch-%: # all tests on another torch, such as test-torch-2.12.1, in a new environment of some gigabytes
	@echo "==> pytest on torch $* in .venv-torch-$*"
	@$(PYTHON) -m venv .venv-torch-$*
	@.venv-torch-$*/bin/python -m pip install --quiet --editable '.[dev]' torch==$*
	@.venv-torch-$*/bin/python -m pytest $(IN_TWO)

docs: $(INSTALLED_DOCS) ## build the documentation site in build/docs
	@echo "==> docs/generate.py, sphinx"
	@$(RUN)/python docs/generate.py
	@$(RUN)/python -m sphinx --quiet --fail-on-warning --keep-going docs build/docs
	@echo "build/docs/index.html"

TEXTS := README.md CONTRIBUTING.md CHANGELOG.md SECURITY.md docs parallel3d models recipes tools

lint: $(INSTALLED_DEV) ## ruff, mypy, levels of packages, budgets of size, spelling and wording
	@echo "==> ruff check, ruff format --check, mypy, lint-imports, tests/size.py, codespell, tests/prose.py"
	@$(RUN)/ruff check .
	@$(RUN)/ruff format --check .
	@$(RUN)/mypy
	@$(RUN)/lint-imports --no-logo
	@$(RUN)/python tests/size.py
	@$(RUN)/codespell $(TEXTS)
	@$(RUN)/python tests/prose.py

bench: $(INSTALLED) ## all benchmarks against other frameworks, or one: make bench NAME=step
	@echo "==> python -m parallel3d.tools.bench $(NAME)"
	@$(RUN)/python -m parallel3d.tools.bench $(NAME)

$(RUN)/python:
	@echo "==> creating the virtual environment $(VENV)"
	@$(PYTHON) -m venv $(VENV)

$(INSTALLED): pyproject.toml constraints-cpu.txt | $(RUN)/python
	@echo "==> installing parallel3d into $(VENV)"
	@$(RUN)/python -m pip install --quiet $(CONSTRAINTS) --editable .
	@touch $@

$(INSTALLED_DEV): pyproject.toml constraints-cpu.txt | $(RUN)/python
	@echo "==> installing parallel3d and its development tools into $(VENV)"
	@$(RUN)/python -m pip install --quiet $(CONSTRAINTS) --editable '.[dev]'
	@touch $@ $(INSTALLED)

$(INSTALLED_DOCS): pyproject.toml constraints-cpu.txt | $(RUN)/python
	@echo "==> installing parallel3d and the tools of its site into $(VENV)"
	@$(RUN)/python -m pip install --quiet $(CONSTRAINTS) --editable '.[docs]'
	@touch $@ $(INSTALLED)
