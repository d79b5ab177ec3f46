"""Grafana panels and dashboards as plain dictionaries."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from deploy.observability.queries import RUN, Query

_COLUMNS = 24
_HEIGHT = 8


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel."""

    title: str
    meaning: str
    """Explanation of the panel for its reader."""
    queries: Sequence[Query]
    """Expression and legend of each line."""
    unit: str = "short"
    kind: str = "timeseries"
    width: int = 12
    is_stacked: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """A row; the panels after it belong together and can be collapsed."""

    title: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Dashboard:
    """One dashboard."""

    uid: str
    title: str
    content: Sequence[Row | Panel]

    @property
    def panels(self) -> list[Panel]:
        """Returns its panels in order."""
        return [part for part in self.content if isinstance(part, Panel)]

    def to_json(self) -> dict[str, Any]:
        """Returns Grafana's classic dashboard model."""
        return {
            "uid": self.uid,
            "title": self.title,
            "tags": ["slipstream"],
            "schemaVersion": 39,
            "editable": True,
            "refresh": "10s",
            # All panels share one cross hair.
            "graphTooltip": 1,
            "annotations": {"list": [_annotation(*each) for each in ANNOTATIONS]},
            "links": [_OTHERS],
            "time": {"from": "now-1h", "to": "now"},
            "templating": {"list": [_DATASOURCE, _RUN]},
            "panels": _place(self.content),
        }


# Events of runs, shown as vertical lines in all panels: name, colour, expression that has a value at the
# time of the event, text.
ANNOTATIONS = (
    (
        "States of runs",
        "blue",
        f"max by (run, state) (slipstream_run_state{{{RUN}}} == 1) "
        f"unless max by (run, state) (slipstream_run_state{{{RUN}}} offset 1m == 1)",
        "{{run}} is {{state}}",
    ),
    (
        "Losses",
        "red",
        f"max by (run) (changes(slipstream_weight_sync_group_epoch{{{RUN}}}[1m])) > 0",
        "{{run}}: members of the weight group changed, or were lost",
    ),
    (
        "Failed weight syncs",
        "orange",
        f'sum by (run, outcome) (increase(slipstream_weight_syncs_total{{{RUN},outcome!="ok"}}[1m])) > 0',
        "{{run}}: {{outcome}}",
    ),
    (
        "Checkpoints",
        "green",
        f"sum by (run, outcome) (increase(slipstream_checkpoints_total{{{RUN}}}[1m])) > 0",
        "{{run}}: checkpoint {{outcome}}",
    ),
)

_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_DATASOURCE = {
    "name": "datasource",
    "label": "Data source",
    "type": "datasource",
    "query": "prometheus",
}
_OTHERS = {
    "title": "Slipstream",
    "type": "dashboards",
    "icon": "external link",
    "tooltip": "The same runs and time on another dashboard",
    "tags": ["slipstream"],
    "asDropdown": True,
    "targetBlank": False,
    "includeVars": True,
    "keepTime": True,
}
# Prometheus provides the buckets; a darker colour means more samples at that time.
_HEATMAP = {
    "calculate": False,
    "cellGap": 1,
    "color": {"mode": "scheme", "scheme": "Blues", "steps": 64, "exponent": 0.5, "fill": "blue"},
    "showValue": "never",
    "yAxis": {"axisPlacement": "left"},
    "legend": {"show": True},
    "tooltip": {"mode": "single", "yHistogram": True},
    "exemplars": {"color": "rgba(255,0,255,0.7)"},
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


def _annotation(name: str, color: str, expression: str, text: str) -> dict[str, Any]:
    return {
        "name": name,
        "datasource": _SOURCE,
        "enable": True,
        "hide": False,
        "iconColor": color,
        "expr": expression,
        "step": "60s",
        "titleFormat": name,
        "textFormat": text,
    }


def _place(content: Sequence[Row | Panel]) -> list[dict[str, Any]]:
    """Places panels from left to right and top to bottom; each row begins a new line."""
    placed: list[dict[str, Any]] = []
    x = y = height = 0
    for number, part in enumerate(content, start=1):
        width = _COLUMNS if isinstance(part, Row) else part.width
        if x + width > _COLUMNS or isinstance(part, Row):
            x, y = 0, y + height
        height = 1 if isinstance(part, Row) else _HEIGHT
        position = {"x": x, "y": y, "w": width, "h": height}
        placed.append(
            _row(part, number, position)
            if isinstance(part, Row)
            else _panel(part, number, position)
        )
        x += width
    return placed


def _row(row: Row, number: int, position: dict[str, int]) -> dict[str, Any]:
    return {
        "id": number,
        "title": row.title,
        "type": "row",
        "collapsed": False,
        "gridPos": position,
        "panels": [],
    }


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
        "options": _HEATMAP if panel.kind == "heatmap" else {},
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
