# The ways in: `make quickstart` trains a small model, `make test` runs every check.
# An activated virtual environment is used; without one, .venv is made.

VENV := $(if $(VIRTUAL_ENV),$(VIRTUAL_ENV),.venv)
PYTHON ?= python3
RUN := $(VENV)/bin
CONSTRAINTS := $(if $(shell command -v nvidia-smi 2>/dev/null),,--constraint constraints-cpu.txt)
# the longest modules first, as tests/conftest.py orders them
IN_TWO := -n 2 --dist loadscope --no-loadscope-reorder
OLDEST_TORCH := 2.11.0
NEWEST_TORCH := 2.15.0
INSTALLED := $(VENV)/.parallel3d-installed
INSTALLED_DEV := $(VENV)/.parallel3d-installed-dev
INSTALLED_DOCS := $(VENV)/.parallel3d-installed-docs

.DEFAULT_GOAL := help
.PHONY: help quickstart test test-long test-gpu lint bench docs

help: ## print these lines
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

quickstart: $(INSTALLED) ## train a small model on eight local processes: tensor x pipeline x data parallel
	@echo "==> parallel3d-train quickstart"
	@$(RUN)/parallel3d-train quickstart

test: lint ## lint, then every test
	@echo "==> pytest"
	@$(RUN)/python -m pytest $(IN_TWO) --durations=10

test-long: test ## the tests, then what takes long: tests marked so, properties with ten times the examples, the oldest and newest torch
	@echo "==> pytest -m long"
	@$(RUN)/python -m pytest $(IN_TWO) -m long
	@echo "==> pytest -m hypothesis, 1000 examples a property"
	@HYPOTHESIS_PROFILE=long $(RUN)/python -m pytest $(IN_TWO) -m hypothesis
	@$(MAKE) test-torch-$(OLDEST_TORCH) test-torch-$(NEWEST_TORCH)

test-gpu: $(INSTALLED_DEV) ## the acceptance on one GPU; its report goes into docs/status.md
	@echo "==> pytest tests/gpu"
	@$(RUN)/python -m pytest tests/gpu -m gpu -rs --gpu-report docs/status.md -o faulthandler_timeout=300

test-torch-%: # every test on another torch, such as test-torch-2.12.1, in an environment of its own (gigabytes)
	@echo "==> pytest on torch $* in .venv-torch-$*"
	@$(PYTHON) -m venv .venv-torch-$*
	@.venv-torch-$*/bin/python -m pip install --quiet --editable '.[dev]' torch==$*
	@.venv-torch-$*/bin/python -m pytest $(IN_TWO)

docs: $(INSTALLED_DOCS) ## the pages of docs/ as a site with search, in build/docs
	@echo "==> sphinx"
	@$(RUN)/python -m sphinx --quiet --fail-on-warning --keep-going docs build/docs
	@echo "build/docs/index.html"

lint: $(INSTALLED_DEV) ## ruff, mypy, the levels of packages, and the budgets of their size
	@echo "==> ruff check, ruff format --check, mypy, lint-imports, tests/size.py"
	@$(RUN)/ruff check .
	@$(RUN)/ruff format --check .
	@$(RUN)/mypy
	@$(RUN)/lint-imports --no-logo
	@$(RUN)/python tests/size.py

bench: $(INSTALLED) ## the benchmarks, each beside its peer; `make bench NAME=step` for one
	@echo "==> python -m parallel3d.tools.bench $(NAME)"
	@$(RUN)/python -m parallel3d.tools.bench $(NAME)

$(RUN)/python:
	@echo "==> making the virtual environment $(VENV)"
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
	@echo "==> installing parallel3d and what makes its site into $(VENV)"
	@$(RUN)/python -m pip install --quiet $(CONSTRAINTS) --editable '.[docs]'
	@touch $@ $(INSTALLED)
