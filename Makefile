# Slipstream. `make help` lists the targets.
SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Exactly this build: a range would let pip replace the CPU build with gigabytes of CUDA libraries.
TORCH ?= torch==2.13.0
# Of `make run`; one more is, for example, EXTRAS=local,reasoning-gym.
EXTRAS ?= local
# Python compiles what is imported, once; compiling all that is there takes longer. Where it may not keep what it
# compiled, each of a run's processes does so again, which is more than half of its start.
unexport PYTHONDONTWRITEBYTECODE
INSTALL := deploy/told.sh "installing" $(BIN)/pip install --quiet --no-compile --constraint constraints.txt
# These exist once the environment has what running needs, and once it has the developers' tools as well.
RUNS := $(VENV)/.runs-$(EXTRAS)
READY := $(VENV)/.ready
SPEC ?= examples/sort4.yaml
EVERY_COMMIT := not nightly and not gpu and not multi_gpu and not cluster
PROTOS := $(shell find proto/slipstream -name '*.proto')

.PHONY: help setup constraints run unit test test-system test-api test-nightly test-faults check lint types imports dist proto proto-check docs docs-check site format clean
.DEFAULT_GOAL := help

help: ## List the targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sort -u | awk -F ':.*## ' '{printf "  %-18s %s\n", $$1, $$2}'

setup: $(READY) ## Make the virtual environment, with the developers' tools

$(RUNS): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, this is " + sys.version)'
	test -x $(BIN)/python || deploy/told.sh "making $(VENV)" $(PYTHON) -m venv $(VENV)
	$(INSTALL) --upgrade pip
	$(INSTALL) --editable '.[$(EXTRAS)]' '$(TORCH)'
	touch $@

$(READY): $(RUNS)
	$(INSTALL) --editable '.[dev]' '$(TORCH)'
	touch $@

constraints: $(READY) ## Write the newest versions that fit together into constraints.txt
	report=$$(mktemp) && $(BIN)/pip install --quiet --dry-run --ignore-installed --report $$report pip '.[dev,flash-attention]' '$(TORCH)' \
		&& $(BIN)/python -m deploy.constraints < $$report > constraints.txt && rm $$report

run: $(RUNS) ## Train the example end to end (SPEC=examples/sort4.yaml)
	$(BIN)/slipstream run $(SPEC)

unit: $(READY) deploy-tools ## The fast tests: one part at a time, in this process
	$(BIN)/python -m pytest -n 2 --dist worksteal -m '$(EVERY_COMMIT)' tests/unit

test: test-system check ## Everything that every commit must pass: check, then contracts, the API, running systems, a few kills
	$(BIN)/python -m pytest -n 2 --dist worksteal -m '$(EVERY_COMMIT) and not learning and not faults' --ignore tests/unit
	$(BIN)/python -m pytest -n 2 --dist worksteal -m '$(EVERY_COMMIT)' tests/faults tests/learning

test-system: # A browser, a sandbox, and what Mooncake Store links against: without them their tests are skipped
	tests/system.sh --or-skip chromium bwrap=bubblewrap libibverbs.so.1=libibverbs1 libnuma.so.1=libnuma1 libcurl.so.4=libcurl4

test-nightly: $(READY) ## Every algorithm over three seeds and its controls, the whole matrix of faults, long fuzzing
	$(BIN)/python -m pytest -m nightly -o addopts='--import-mode=importlib --strict-markers -ra'

test-faults: $(READY) ## Every kind of fault, then three hundred random kills over every kind of run; hours (OPTIONS="table --minutes 4" for a piece)
	$(BIN)/python -m tests.faults $(OPTIONS)

test-api: $(READY) ## The REST API against a live server, as two tenants, at length
	SLIPSTREAM_API_EXAMPLES=50 $(BIN)/python -m pytest tests/api

check: lint types imports proto-check docs-check unit ## The fast part: style, types, imports, stubs, docs, unit tests

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

dist: $(READY) ## Build wheels and source distributions of Slipstream and its client, in dist/
	for folder in . services/client; do $(BIN)/python -m build --no-isolation --outdir dist $$folder || exit 1; done

proto: $(READY) ## Regenerate the gRPC stubs under proto/gen
	rm -rf proto/gen && mkdir -p proto/gen
	PATH="$(BIN):$$PATH" $(BIN)/python -m grpc_tools.protoc -I proto --python_out=proto/gen --grpc_python_out=proto/gen --mypy_out=quiet:proto/gen --mypy_grpc_out=quiet:proto/gen $(PROTOS)

proto-check: $(READY) ## The protos are well formed and the committed stubs are theirs
	cd proto && ../$(BIN)/buf lint
	out=$$(mktemp -d) && PATH="$(BIN):$$PATH" $(BIN)/python -m grpc_tools.protoc -I proto --python_out=$$out --grpc_python_out=$$out --mypy_out=quiet:$$out --mypy_grpc_out=quiet:$$out $(PROTOS) && diff -r -x __pycache__ $$out proto/gen && rm -rf $$out

docs: $(READY) ## Regenerate docs/runspec.md and its schema, docs/models.md, docs/fits.md, docs/openapi.json and the Python client
	$(BIN)/python -m deploy.reference

site: $(READY) ## The documentation as a site that is read without a network, in site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

docs-check: $(READY) ## The documentation has no dead link
	out=$$(mktemp -d) && NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet --site-dir $$out && rm -rf $$out

clean: ## Remove what make made
	rm -rf $(VENV) build dist site .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis

-include bench/bench.mk deploy/deploy.mk tests/engines/engines.mk
