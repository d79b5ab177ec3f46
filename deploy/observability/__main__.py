"""Writes dashboards, alerts, runbooks and the metrics reference: ``python -m deploy.observability``."""

import json
from pathlib import Path

import yaml

from deploy.observability import alerts, dashboards
from deploy.observability.registry import MetricDoc, registered

ROOT = Path(__file__).parents[2]

_METRICS_INTRO = """# Metrics

Every process serves its metrics at `/metrics` on its metrics port, in Prometheus' text format. This page
is generated from the metrics that the services register (`make observability`).

Times are in seconds, sizes in bytes, ratios from 0 to 1. The label `run` is the run's id. Metrics of
workers that do not carry it get it from their pod's label when Prometheus discovers pods.
"""


def files() -> dict[Path, str]:
    """Returns the text of every generated file."""
    chart = ROOT / "deploy" / "helm" / "slipstream" / "files"
    written = {
        chart / "alerts.yaml": yaml.safe_dump(alerts.rules(), sort_keys=False, width=10_000),
        ROOT / "docs" / "metrics.md": metrics_page(registered()),
    }
    for dashboard in dashboards.ALL:
        path = chart / "dashboards" / f"{dashboard.uid}.json"
        written[path] = json.dumps(dashboard.to_json(), indent=2) + "\n"
    for alert in alerts.ALL:
        written[ROOT / "docs" / "runbooks" / f"{alert.name}.md"] = runbook(alert)
    return written


def metrics_page(docs: list[MetricDoc]) -> str:
    """Returns the metrics reference."""
    parts = [_METRICS_INTRO]
    for service in dict.fromkeys(doc.service for doc in docs):
        title = "Every process" if service == "all" else service.capitalize()
        parts.append(
            f"\n## {title}\n\n| metric | kind | labels | meaning |\n| --- | --- | --- | --- |\n"
        )
        parts += [
            f"| `{doc.name}` | {doc.kind} | {', '.join(doc.labels)} | {doc.text} |\n"
            for doc in docs
            if doc.service == service
        ]
    parts.append("\n## Dashboards\n\n| dashboard | panel | meaning |\n| --- | --- | --- |\n")
    parts += [
        f"| {dashboard.title.removeprefix('Slipstream / ')} | {panel.title} | {panel.meaning} |\n"
        for dashboard in dashboards.ALL
        for panel in dashboard.panels
    ]
    parts.append("\n## Alerts\n\n| alert | severity | meaning |\n| --- | --- | --- |\n")
    parts += [
        f"| [{alert.name}](runbooks/{alert.name}.md) | {alert.severity} | {alert.meaning} |\n"
        for alert in alerts.ALL
    ]
    return "".join(parts)


def runbook(alert: alerts.Alert) -> str:
    """Returns the page that an alert links to."""
    actions = "".join(f"{number}. {text}\n" for number, text in enumerate(alert.actions, start=1))
    return (
        f"# {alert.name}\n\n{alert.meaning}\n\n## What to do\n\n{actions}\n"
        f"## Condition\n\nSeverity {alert.severity}, after {alert.lasts}:\n\n"
        f"```promql\n{alert.expression}\n```\n"
    )


def main() -> None:
    """Writes all files."""
    for path, text in files().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
