"""Prometheus that discovers the release's pods, and plots of the dashboards' panels from its data."""

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml
from matplotlib.figure import Figure

from deploy.observability.panels import Dashboard
from tests.cluster.node import Cluster
from tests.cluster.release import NAMESPACE, WORKERS
from tests.helpers.chart import one, render
from tests.helpers.tools import require

_ADDRESS = "127.0.0.1:19090"
_SCRAPE_S = 2
_COLUMNS = 3


@dataclass(frozen=True, slots=True)
class Prometheus:
    """Client of a running Prometheus."""

    api: httpx.Client

    def targets(self) -> dict[str, str]:
        """Returns the health of each pod that is being scraped."""
        active = self._get("targets", state="active")["activeTargets"]
        return {target["labels"]["pod"]: target["health"] for target in active}

    def history(self, expression: str, *, seconds: float) -> list[dict[str, Any]]:
        """Returns the series of an expression that have values in the last ``seconds``."""
        plain = expression.replace("$__rate_interval", "20s").replace("$run", ".*")
        now = time.time()
        result = self._get("query_range", query=plain, start=now - seconds, end=now, step=_SCRAPE_S)
        series: list[dict[str, Any]] = result["result"]
        for item in series:
            item["values"] = [(at, float(value)) for at, value in item["values"] if value != "NaN"]
        return [item for item in series if item["values"]]

    def _get(self, path: str, **parameters: Any) -> dict[str, Any]:
        answer = self.api.get(f"/api/v1/{path}", params=parameters).raise_for_status().json()
        data: dict[str, Any] = answer["data"]
        return data


@contextmanager
def prometheus(cluster: Cluster) -> Iterator[Prometheus]:
    """Runs a Prometheus that scrapes the release's pods until the block ends."""
    (program,) = require("prometheus")
    config = cluster.folder / "prometheus.yaml"
    config.write_text(yaml.safe_dump(_config(cluster)), encoding="utf-8")
    cluster.processes.start(
        "prometheus", program, f"--config.file={config}", f"--web.listen-address={_ADDRESS}",
        f"--storage.tsdb.path={cluster.folder}/prometheus",
    )  # fmt: skip
    try:
        yield Prometheus(httpx.Client(base_url=f"http://{_ADDRESS}", timeout=30, trust_env=False))
    finally:
        cluster.processes.stop("prometheus")


def _config(cluster: Cluster) -> dict[str, Any]:
    """Returns a configuration that scrapes and relabels the pods as the chart's PodMonitor does."""
    monitor = one(
        render("--set", "monitoring.podMonitor.enabled=true"), "PodMonitor", "demo-slipstream"
    )
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    source = "__meta_kubernetes_pod_"
    relabel = [
        {
            "source_labels": [f"{source}container_port_name"],
            "regex": endpoint["port"],
            "action": "keep",
        },
        {"source_labels": [f"{source}name"], "target_label": "pod"},
        *(
            {_snake_case(key): value for key, value in rule.items()}
            for rule in endpoint["relabelings"]
        ),
    ]
    discovery = {
        "role": "pod",
        "kubeconfig_file": str(cluster.kubeconfig),
        "namespaces": {"names": [NAMESPACE, WORKERS]},
    }
    job = {
        "job_name": "slipstream",
        "scrape_interval": f"{_SCRAPE_S}s",
        "kubernetes_sd_configs": [discovery],
        "relabel_configs": relabel,
    }
    return {"scrape_configs": [job]}


def _snake_case(name: str) -> str:
    return re.sub("[A-Z]", lambda letter: f"_{letter[0].lower()}", name)


def empty_panels(server: Prometheus, dashboard: Dashboard, *, seconds: float) -> list[str]:
    """Returns the titles of panels of which no query has data."""
    return [
        panel.title
        for panel in dashboard.panels
        if not any(server.history(expression, seconds=seconds) for expression, _ in panel.queries)
    ]


def plot(server: Prometheus, dashboard: Dashboard, path: Path, *, seconds: float) -> None:
    """Writes a plot of every panel's queries to a file."""
    rows = -(-len(dashboard.panels) // _COLUMNS)
    figure = Figure(figsize=(6 * _COLUMNS, 3 * rows), layout="constrained")
    figure.suptitle(f"{dashboard.title}: its queries, plotted from a run of examples/sort4.yaml")
    plots = list(figure.subplots(rows, _COLUMNS, squeeze=False).flat)
    begin = time.time() - seconds
    for panel, axes in zip(dashboard.panels, plots, strict=False):
        axes.set_title(f"{panel.title} ({panel.unit})", fontsize=9)
        for expression, legend in panel.queries:
            for series in server.history(expression, seconds=seconds):
                label = re.sub(
                    r"\{\{(\w+)\}\}", lambda m, s=series: _short(s["metric"], m[1]), legend
                )
                at, values = zip(*series["values"], strict=True)
                axes.plot([instant - begin for instant in at], values, label=label)
        axes.legend(fontsize=6, ncols=1 + len(axes.lines) // 12)
    for axes in plots[len(dashboard.panels) :]:
        axes.set_axis_off()
    figure.savefig(path, dpi=70)


def _short(labels: dict[str, str], name: str) -> str:
    """Returns a label without run ids and the packages of gRPC services."""
    return re.sub(r"run[-_][0-9a-f]{24}|/slipstream\.[\w.]+/", "", labels.get(name, ""))
