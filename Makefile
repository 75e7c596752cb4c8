# The ways in: `make quickstart` trains a small model, `make test` runs every check.
# An activated virtual environment is used; without one, .venv is made.

VENV := $(if $(VIRTUAL_ENV),$(VIRTUAL_ENV),.venv)
PYTHON ?= python3
RUN := $(VENV)/bin
INSTALLED := $(VENV)/.parallel3d-installed
INSTALLED_DEV := $(VENV)/.parallel3d-installed-dev
CORE := parallel3d -path '*/models' -prune -o -path '*/recipes' -prune -o -path '*/tools' -prune -o

.DEFAULT_GOAL := help
.PHONY: help quickstart test lint bench

help: ## print these lines
	@grep -E '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

quickstart: $(INSTALLED) ## train a small model on eight local processes: tensor x pipeline x data parallel
	@echo "==> parallel3d-train quickstart"
	@$(RUN)/parallel3d-train quickstart

test: lint ## lint, then every test
	@echo "==> pytest"
	@$(RUN)/python -m pytest -n 2 --dist loadscope

lint: $(INSTALLED_DEV) ## ruff, mypy, and the size of the core
	@echo "==> ruff check, ruff format --check, mypy"
	@$(RUN)/ruff check .
	@$(RUN)/ruff format --check .
	@$(RUN)/mypy
	@printf 'lines of the core: '; find $(CORE) -name '*.py' -print0 | xargs -0 cat | wc -l

bench: $(INSTALLED) ## the benchmarks, each beside its peer; `make bench NAME=step` for one
	@echo "==> python -m parallel3d.tools.bench $(NAME)"
	@$(RUN)/python -m parallel3d.tools.bench $(NAME)

$(RUN)/python:
	@echo "==> making the virtual environment $(VENV)"
	@$(PYTHON) -m venv $(VENV)

$(INSTALLED): pyproject.toml | $(RUN)/python
	@echo "==> installing parallel3d into $(VENV)"
	@$(RUN)/python -m pip install --quiet --editable .
	@touch $@

$(INSTALLED_DEV): pyproject.toml | $(RUN)/python
	@echo "==> installing parallel3d and its development tools into $(VENV)"
	@$(RUN)/python -m pip install --quiet --editable '.[dev]'
	@touch $@ $(INSTALLED)
