# Slipstream. `make help` lists the targets.
SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PROTOS := $(shell find proto/slipstream -name '*.proto')

.PHONY: help setup run test check proto clean
.DEFAULT_GOAL := help

proto: ## Regenerate the gRPC stubs under proto/gen
	rm -rf proto/gen && mkdir -p proto/gen
	PATH="$(BIN):$$PATH" $(BIN)/python -m grpc_tools.protoc -I proto --python_out=proto/gen --grpc_python_out=proto/gen --mypy_out=quiet:proto/gen --mypy_grpc_out=quiet:proto/gen $(PROTOS)
