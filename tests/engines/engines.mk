# Real engines; included by the Makefile.
.PHONY: test-vllm test-sglang test-clients test-fleets test-families
test-vllm: ## The contract suite and sort4 on vLLM's CPU build (its environment, 2.5 GB, is cached)
	tests/engines/run.sh vllm

test-sglang: ## The contract suite and sort4 on SGLang on a CPU (on top of the environment of test-vllm)
	tests/engines/run.sh sglang

test-clients: ## Client libraries of agents with the torch engine (in the environment of test-vllm, which runs them with vLLM)
	SUITES=tests/engines/test_clients.py tests/engines/run.sh vllm -k torch

test-fleets: ## Long tests of attached servers: a run whose servers join, drain and restart, images, SGLang over two hosts; an hour
	SUITES="tests/engines/test_fleet_elasticity.py tests/contract/test_vllm_images.py" tests/engines/run.sh vllm -m nightly
	SUITES="tests/engines/test_fleet_elasticity.py tests/contract/test_sglang_hosts.py" tests/engines/run.sh sglang -m nightly

test-families: ## Logprobs of every model family on vLLM and SGLang against the trainer's, half an hour
	SUITES="tests/engines/test_families.py tests/engines/test_engine_images.py" tests/engines/run.sh vllm -m ""
	SUITES="tests/engines/test_families.py tests/engines/test_engine_images.py" tests/engines/run.sh sglang -m ""
