"""Grafana panels and dashboards as plain dictionaries."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from deploy.observability.queries import Query

_COLUMNS = 24
_HEIGHT = 8


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel."""

    title: str
    meaning: str
    """What a person learns from it."""
    queries: Sequence[Query]
    """Expression and legend of each line."""
    unit: str = "short"
    kind: str = "timeseries"
    width: int = 12
    is_stacked: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Dashboard:
    """One dashboard."""

    uid: str
    title: str
    panels: Sequence[Panel]

    def to_json(self) -> dict[str, Any]:
        """Grafana's classic dashboard model."""
        return {
            "uid": self.uid,
            "title": self.title,
            "tags": ["slipstream"],
            "schemaVersion": 39,
            "editable": True,
            "refresh": "10s",
            "time": {"from": "now-1h", "to": "now"},
            "templating": {"list": [_DATASOURCE, _RUN]},
            "panels": _place(self.panels),
        }


_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_DATASOURCE = {
    "name": "datasource",
    "label": "Data source",
    "type": "datasource",
    "query": "prometheus",
}
_RUN = {
    "name": "run",
    "label": "Run",
    "type": "query",
    "datasource": _SOURCE,
    "query": {"query": "label_values(slipstream_run_info, run)", "refId": "run"},
    "multi": True,
    "includeAll": True,
    "allValue": ".*",
    "refresh": 2,
    "sort": 2,
}


def _place(panels: Sequence[Panel]) -> list[dict[str, Any]]:
    """Panels from left to right, top to bottom."""
    placed = []
    x = y = 0
    for number, panel in enumerate(panels, start=1):
        if x + panel.width > _COLUMNS:
            x, y = 0, y + _HEIGHT
        placed.append(_panel(panel, number, {"x": x, "y": y, "w": panel.width, "h": _HEIGHT}))
        x += panel.width
    return placed


def _panel(panel: Panel, number: int, position: dict[str, int]) -> dict[str, Any]:
    custom: dict[str, Any] = {}
    if panel.kind == "timeseries":
        custom = {"fillOpacity": 25 if panel.is_stacked else 5, "showPoints": "never"}
        custom["stacking"] = {"mode": "normal" if panel.is_stacked else "none"}
    return {
        "id": number,
        "title": panel.title,
        "description": panel.meaning,
        "type": panel.kind,
        "datasource": _SOURCE,
        "gridPos": position,
        "fieldConfig": {"defaults": {"unit": panel.unit, "custom": custom}, "overrides": []},
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": _SOURCE,
                "expr": expression,
                "legendFormat": legend,
                "format": "heatmap" if panel.kind == "heatmap" else "time_series",
            }
            for index, (expression, legend) in enumerate(panel.queries)
        ],
    }
