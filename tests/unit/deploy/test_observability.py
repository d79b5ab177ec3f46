"""Tests that dashboards, alerts and the metrics page match the metrics that the services register."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models import dashboard as models

from deploy.observability import alerts, dashboards
from deploy.observability.__main__ import ROOT, files
from deploy.observability.panels import ANNOTATIONS, Dashboard
from deploy.observability.registry import exposed_names, registered
from tests.helpers.chart import EVERYTHING, one, render
from tests.helpers.tools import require
from tests.unit.deploy.alert_cases import CASES

_QUERIES = [
    (panel.title, expression)
    for dashboard in dashboards.ALL
    for panel in dashboard.panels
    for expression, _ in panel.queries
] + [(name, expression) for name, _, expression, _ in ANNOTATIONS]


def plain(expression: str) -> str:
    """Returns an expression with values in place of Grafana's variables and the chart's placeholders."""
    return re.sub(r"@\w+@", "1", expression.replace("$__rate_interval", "1m").replace("$run", ".*"))


def metric_names(node: Any) -> set[str]:
    """Returns the names of all metrics in a parsed expression."""
    result = {node.name} if isinstance(node, promql_parser.VectorSelector) else set()
    for name in ("lhs", "rhs", "expr", "vector_selector"):
        inner = getattr(node, name, None)
        if inner is not None and not isinstance(inner, str):
            result |= metric_names(inner)
    for argument in getattr(node, "args", None) or ():
        result |= metric_names(argument)
    return result


@pytest.mark.parametrize("path", files(), ids=lambda path: path.name)
def test_generated_files_are_up_to_date(path: Path) -> None:
    assert path.read_text(encoding="utf-8") == files()[path], "run make observability"


@pytest.mark.parametrize(("title", "expression"), _QUERIES)
def test_panels_ask_for_metrics_that_exist(title: str, expression: str) -> None:
    names = metric_names(promql_parser.parse(plain(expression)))
    assert names
    assert names <= exposed_names(registered())


@pytest.mark.parametrize("alert", alerts.ALL, ids=lambda alert: alert.name)
def test_alerts_ask_for_metrics_that_exist(alert: alerts.Alert) -> None:
    names = metric_names(promql_parser.parse(plain(alert.expression)))
    assert names
    assert names <= exposed_names(registered())
    assert (ROOT / "docs" / "runbooks" / f"{alert.name}.md").exists()


def test_expressions_of_the_guide_ask_for_metrics_that_exist() -> None:
    guide = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    expressions = [*re.findall(r"```promql\n(.*?)```", guide, re.DOTALL), autoscaling_query()]
    names = set().union(*(metric_names(promql_parser.parse(text)) for text in expressions))
    own_names = {name for name in names if not name.startswith("DCGM_")}
    assert {"slipstream_trainer_idle_seconds_total", "process_resident_memory_bytes"} <= own_names
    assert own_names <= exposed_names(registered())


@pytest.mark.parametrize(
    ("idle", "ready", "asks_for"), [("0+30x10", "2x10", 1.5), ("0x10", "40x10", 0.8)]
)
def test_the_guides_autoscaler_adds_rollouts_for_a_waiting_trainer_and_takes_them_from_a_busy_one(
    tmp_path: Path, idle: str, ready: str, asks_for: float
) -> None:
    (promtool,) = require("promtool")
    run = 'run="run_0198f2c4"'
    series = {
        f'slipstream_trainer_idle_seconds_total{{{run},reason="no_data"}}': idle,
        f'slipstream_prompts{{{run},state="ready"}}': ready,
        f"slipstream_run_batch_prompts{{{run}}}": "16x10",
    }
    expression_test = {
        "expr": autoscaling_query(),
        "eval_time": "10m",
        "exp_samples": [{"value": asks_for}],
    }
    test = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [expression_test],
    }
    path = tmp_path / "tests.yaml"
    path.write_text(yaml.safe_dump({"tests": [test]}), encoding="utf-8")
    result = subprocess.run(
        [promtool, "test", "rules", path], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_metrics_have_units_labels_and_help() -> None:
    for doc in registered():
        assert doc.text, doc.name
        assert doc.name == doc.name.lower()
        assert doc.name.endswith("_total") is (doc.kind == "counter"), doc.name
        assert not {"key", "group", "group_id", "prompt"} & set(doc.labels), doc.name


def test_rendered_rules_are_those_of_the_alerts(tmp_path: Path) -> None:
    (promtool,) = require("promtool")
    rules = rendered_rules()
    assert "@" not in json.dumps(rules)
    assert len(rules["groups"][0]["rules"]) == len(alerts.ALL)
    path = tmp_path / "rules.yaml"
    path.write_text(yaml.safe_dump(rules), encoding="utf-8")
    result = subprocess.run(
        [promtool, "check", "rules", "--lint-fatal", path],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_every_alert_fires_when_provoked_and_not_before(tmp_path: Path) -> None:
    (promtool,) = require("promtool")
    assert {case["alert"] for case in CASES} == {alert.name for alert in alerts.ALL}
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(rendered_rules()), encoding="utf-8")
    path = tmp_path / "tests.yaml"
    suite = {
        "rule_files": ["rules.yaml"],
        "evaluation_interval": "1m",
        "tests": [as_promtool_test(case) for case in CASES],
    }
    path.write_text(yaml.safe_dump(suite), encoding="utf-8")
    result = subprocess.run(
        [promtool, "test", "rules", path], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("dashboard", dashboards.ALL, ids=lambda dashboard: dashboard.uid)
def test_grafana_knows_every_key_of_a_dashboard(dashboard: Dashboard) -> None:
    register_default_plugins()
    written = dashboard.to_json()
    read = json.loads(json.dumps(models.Dashboard.from_json(written), cls=JSONEncoder))
    # Only Grafana's Prometheus plugin reads these keys of an annotation.
    for annotation in written["annotations"]["list"]:
        for key in ("step", "titleFormat", "textFormat"):
            assert annotation.pop(key)
    assert lacks(written, read) == []


@pytest.mark.parametrize("dashboard", dashboards.ALL, ids=lambda dashboard: dashboard.uid)
def test_panels_of_a_dashboard_are_side_by_side_below_their_rows(dashboard: Dashboard) -> None:
    written = dashboard.to_json()["panels"]
    assert [panel["id"] for panel in written] == [*range(1, len(written) + 1)]
    assert written[0]["type"] == "row"
    used_cells = set()
    for panel in written:
        position = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(position["x"], position["x"] + position["w"])
            for y in range(position["y"], position["y"] + position["h"])
        }
        assert max(x for x, _ in cells) < 24
        assert not cells & used_cells, panel["title"]
        used_cells |= cells


def lacks(written: Any, read: Any, path: str = "") -> list[str]:
    """Returns the keys of ``written`` that are missing in ``read``."""
    if isinstance(written, dict):
        parts = [(key, value, read.get(key)) for key, value in written.items()]
        missing = [f"{path}.{key}" for key, value, _ in parts if key not in read and value != {}]
        return missing + [
            lack
            for key, value, other in parts
            if key in read
            for lack in lacks(value, other, f"{path}.{key}")
        ]
    if isinstance(written, list):
        assert len(written) == len(read), path
        return [
            lack
            for number, (item, other) in enumerate(zip(written, read, strict=True))
            for lack in lacks(item, other, f"{path}.{number}")
        ]
    return [] if written == read else [f"{path}: {written!r} became {read!r}"]


def test_dashboards_are_config_maps_that_grafana_finds() -> None:
    manifests = render(*EVERYTHING)
    for dashboard in dashboards.ALL:
        config = one(manifests, "ConfigMap", f"demo-slipstream-dashboard-{dashboard.uid}")
        assert config["metadata"]["labels"]["grafana_dashboard"] == "1"
        (text,) = config["data"].values()
        assert json.loads(text) == dashboard.to_json()
        assert len(text) < 1 << 20


def autoscaling_query() -> str:
    """Returns the query of the guide's ScaledObject for KEDA."""
    guide = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    blocks = map(yaml.safe_load, re.findall(r"```yaml\n(.*?)```", guide, re.DOTALL))
    (scaled,) = [block for block in blocks if block.get("kind") == "ScaledObject"]
    (trigger,) = scaled["spec"]["triggers"]
    query: str = trigger["metadata"]["query"]
    return query


def rendered_rules() -> dict[str, Any]:
    rules: dict[str, Any] = one(render(*EVERYTHING), "PrometheusRule", "demo-slipstream")["spec"]
    return rules


def as_promtool_test(case: dict[str, Any]) -> dict[str, Any]:
    """Returns a promtool test in which an alert is silent at first and fires later."""
    fires = [{"exp_labels": case["labels"], "exp_annotations": case["annotations"]}]
    quiet = {"alertname": case["alert"], "eval_time": case["quiet_at"], "exp_alerts": []}
    firing = {"alertname": case["alert"], "eval_time": case["fires_at"], "exp_alerts": fires}
    series = [{"series": name, "values": values} for name, values in case["series"].items()]
    return {"interval": "1m", "input_series": series, "alert_rule_test": [quiet, firing]}
