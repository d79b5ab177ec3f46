# Slipstream. `make help` lists the targets.
SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# An exact version: with a range, pip would replace the CPU build with gigabytes of CUDA libraries.
TORCH ?= torch==2.13.0
# Extras that `make run` installs, for example EXTRAS=local,reasoning-gym.
EXTRAS ?= local
# pip need not compile all modules, because Python compiles and caches those that it imports. Without that cache, each
# process of a run would compile them again, which is more than half of its startup time.
unexport PYTHONDONTWRITEBYTECODE
INSTALL := deploy/with_progress.sh "installing" $(BIN)/pip install --quiet --no-compile --constraint constraints.txt
# Marker files: the environment can run Slipstream; the environment also has the developers' tools.
RUNS := $(VENV)/.runs-$(EXTRAS)
READY := $(VENV)/.ready
# A server of the S3 protocol for tests, whose dependencies exclude those of the developers' tools.
S3_SERVER := .venv-s3/.ready
SPEC ?= examples/sort4.yaml
# On two cores, further processes of pytest use the time in which two wait for services and deadlines. Tests with whole
# runs wait more than unit tests.
TEST_WORKERS ?= 3
RUN_WORKERS ?= 5
EVERY_COMMIT := not nightly and not gpu and not multi_gpu and not cluster and not nodes
# The unit tests, and folders without a test of every commit.
OTHERS := unit cluster gpu nodes
ALL_MARKS := -o addopts='--import-mode=importlib --strict-markers -ra -p no:schemathesis'
PROTOS := $(shell find proto/slipstream -name '*.proto')

.PHONY: help setup s3-server constraints run unit test test-system test-api test-nightly test-faults test-slurm check static lint types imports dist proto proto-check docs site format clean
.DEFAULT_GOAL := help

help: ## List the targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sort -u | awk -F ':.*## ' '{printf "  %-18s %s\n", $$1, $$2}'

setup: $(READY) ## Create the virtual environment, with the developers' tools

$(RUNS): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, this is " + sys.version)'
	test -x $(BIN)/python || deploy/with_progress.sh "creating $(VENV)" $(PYTHON) -m venv $(VENV)
	$(INSTALL) --upgrade pip
	$(INSTALL) --editable '.[$(EXTRAS)]' '$(TORCH)'
	touch $@

$(READY): $(RUNS)
	$(INSTALL) --editable '.[dev]' '$(TORCH)'
	touch $@

s3-server: $(S3_SERVER) ## Install a server of the S3 protocol, for the tests of object stores

$(S3_SERVER): tests/helpers/s3_requirements.txt
	$(PYTHON) -m venv .venv-s3
	deploy/with_progress.sh "installing a server of the S3 protocol" .venv-s3/bin/pip install --quiet --requirement $<
	touch $@

constraints: $(READY) ## Write the newest compatible versions to constraints.txt
	report=$$(mktemp) && $(BIN)/pip install --quiet --dry-run --ignore-installed --report $$report pip '.[dev,flash-attention,linear-attention]' '$(TORCH)' \
		&& $(BIN)/python -m deploy.constraints < $$report > constraints.txt && rm $$report

run: $(RUNS) ## Train the example end to end (SPEC=examples/sort4.yaml)
	$(BIN)/slipstream run $(SPEC)

unit: $(READY) $(S3_SERVER) deploy-tools ## Run the unit tests
	$(BIN)/python -m pytest -n $(TEST_WORKERS) --dist worksteal -m '$(EVERY_COMMIT)' tests/unit

test: test-system $(S3_SERVER) check ## Run everything that a commit must pass: check, then contract, API, integration and fault tests
	$(BIN)/python -m pytest -n $(RUN_WORKERS) --dist worksteal -m '$(EVERY_COMMIT)' $(OTHERS:%=--ignore tests/%)

test-system: # Installs a browser, a sandbox, PostgreSQL and Slurm; tests that need a missing one are skipped
	tests/system.sh --or-skip chromium bwrap=bubblewrap pg_ctlcluster=postgresql slurmctld=slurm-wlm munged=munge

test-nightly: $(READY) ## Run all sweeps, every algorithm over three seeds with its controls, all faults, and long fuzzing
	$(BIN)/python -m pytest -m nightly $(ALL_MARKS)
	$(BIN)/python -m pytest -m hypothesis --hypothesis-profile nightly $(ALL_MARKS) tests/unit

test-faults: $(READY) ## Inject every kind of fault, then 300 random kills over all kinds of runs; hours (OPTIONS="table --minutes 4" for a part)
	$(BIN)/python -m tests.faults $(OPTIONS)

test-slurm: $(READY) ## Train over the nodes of a Slurm on this machine, with lost nodes and requeues; needs root, ten minutes
	tests/system.sh slurmctld=slurm-wlm munged=munge
	CI=true $(BIN)/python -m pytest $(ALL_MARKS) tests/slurm

test-api: $(READY) ## Fuzz the REST API of a live server as two tenants
	SLIPSTREAM_API_EXAMPLES=50 $(BIN)/python -m pytest tests/api

check: $(READY) ## Check style, types, imports, stubs and docs, and run the unit tests
	$(MAKE) --jobs 2 static unit

# Beside the unit tests, whose collection uses one core.
static: $(READY) ## Check style, types, imports and stubs
	$(MAKE) --jobs 2 --output-sync=target lint types imports proto-check

lint: $(READY) ## Check style
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(READY) ## Check types
	$(BIN)/mypy

imports: $(READY) ## Check the import contracts
	$(BIN)/lint-imports

format: $(READY) ## Format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

dist: $(READY) ## Build wheels and source distributions of Slipstream and its client, in dist/
	for folder in . services/client; do $(BIN)/python -m build --no-isolation --outdir dist $$folder || exit 1; done

proto: $(READY) ## Regenerate the gRPC stubs under proto/gen
	rm -rf proto/gen && mkdir -p proto/gen
	PATH="$(BIN):$$PATH" $(BIN)/python -m grpc_tools.protoc -I proto --python_out=proto/gen --grpc_python_out=proto/gen --mypy_out=quiet:proto/gen --mypy_grpc_out=quiet:proto/gen $(PROTOS)

proto-check: $(READY) ## Lint the protos and check that the committed stubs are current
	cd proto && ../$(BIN)/buf lint
	out=$$(mktemp -d) && PATH="$(BIN):$$PATH" $(BIN)/python -m grpc_tools.protoc -I proto --python_out=$$out --grpc_python_out=$$out --mypy_out=quiet:$$out --mypy_grpc_out=quiet:$$out $(PROTOS) && diff -r -x __pycache__ $$out proto/gen && rm -rf $$out

docs: $(READY) ## Regenerate docs/runspec.md and its schema, docs/models.md, docs/fits.md, docs/openapi.json and the Python client
	$(BIN)/python -m deploy.reference

site: $(READY) ## Build the documentation as an offline site in site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

clean: ## Remove the environment, builds and caches
	rm -rf $(VENV) .venv-s3 build dist site .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis

-include bench/bench.mk deploy/deploy.mk tests/engines/engines.mk
