# Slipstream. `make help` lists the targets.
SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Exactly this build: a range would let pip replace the CPU build with gigabytes of CUDA libraries.
TORCH ?= torch==2.13.0
EXTRAS ?= dev
SPEC ?= examples/sort4.yaml
EVERY_COMMIT := not nightly and not gpu and not multi_gpu and not cluster
PROTOS := $(shell find proto/slipstream -name '*.proto')

.PHONY: help setup run test test-api test-nightly check lint types imports proto proto-check docs docs-check format clean
.DEFAULT_GOAL := help

help: ## List the targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sort -u | awk -F ':.*## ' '{printf "  %-18s %s\n", $$1, $$2}'

setup: $(READY) ## Make the virtual environment

$(READY): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, this is " + sys.version)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet '$(TORCH)'
	$(BIN)/pip install --quiet --editable '.[$(EXTRAS)]' '$(TORCH)'
	touch $@

run: $(READY) ## Train the example end to end (SPEC=examples/sort4.yaml)
	$(BIN)/slipstream run $(SPEC)

test: check ## Everything that every commit must pass: style, types, imports, stubs, docs, tests
	$(BIN)/python -m pytest -n 2 --dist worksteal -m '$(EVERY_COMMIT) and not learning and not faults'
	$(BIN)/python -m pytest -m '$(EVERY_COMMIT) and (learning or faults)'

test-nightly: $(READY) ## Learning of every algorithm over three seeds, and its controls
	$(BIN)/python -m pytest -m nightly -o addopts='--import-mode=importlib --strict-markers -ra'

test-faults: $(READY) ## Two hundred random kills over training runs; half an hour (OPTIONS="--minutes 4" for a piece)
	$(BIN)/python -m bench.faults $(OPTIONS)

test-api: $(READY) ## The REST API against a live server, as two tenants, at length
	SLIPSTREAM_API_EXAMPLES=50 $(BIN)/python -m pytest tests/api

check: $(READY) lint types imports proto-check docs-check ## Everything but the tests

lint: $(READY) ## Style
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(READY) ## Types
	$(BIN)/mypy

imports: $(READY) ## Which part may import which
	$(BIN)/lint-imports

format: $(READY) ## Bring the code into shape
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

proto: $(READY) ## Regenerate the gRPC stubs under proto/gen
	rm -rf proto/gen && mkdir -p proto/gen
	PATH="$(BIN):$$PATH" $(BIN)/python -m grpc_tools.protoc -I proto --python_out=proto/gen --grpc_python_out=proto/gen --mypy_out=quiet:proto/gen --mypy_grpc_out=quiet:proto/gen $(PROTOS)

proto-check: $(READY) ## The protos are well formed and the committed stubs are theirs
	cd proto && ../$(BIN)/buf lint
	out=$$(mktemp -d) && PATH="$(BIN):$$PATH" $(BIN)/python -m grpc_tools.protoc -I proto --python_out=$$out --grpc_python_out=$$out --mypy_out=quiet:$$out --mypy_grpc_out=quiet:$$out $(PROTOS) && diff -r -x __pycache__ $$out proto/gen && rm -rf $$out

docs: $(READY) ## Regenerate docs/runspec.md and docs/openapi.json
	$(BIN)/python -m services.controller.api.openapi > docs/openapi.json
	$(BIN)/python -m services.cli.spec_docs > docs/runspec.md

docs-check: $(READY) ## The generated documentation is current
	$(BIN)/python -m services.cli.spec_docs | diff docs/runspec.md -

clean: ## Remove what make made
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis

-include bench/bench.mk deploy/deploy.mk tests/engines/engines.mk
