"""Figures that the cluster tests measure, in ``bench/results/cluster.json``."""

import json
import os
from typing import Any

from tests.helpers.chart import ROOT

_RESULTS = ROOT / "bench" / "results" / "cluster.json"
_MAXIMA = {
    "install_s": 60.0,
    "first_step_s": 90.0,
    "apply_to_first_step_s": 60.0,
    "drain_s": 180.0,
    "drain_lost_steps": 0,
    "upgrade_failed_calls": 0,
}
_MINIMA = {"upgrade_calls": 1000}


def record(**figures: float) -> None:
    """Writes measured figures beside those of tests that did not run; asserts that they meet their bars."""
    earlier: dict[str, Any] = json.loads(_RESULTS.read_text(encoding="utf-8"))["figures"]
    report = {
        "figures": {**earlier, **figures},
        "bars": {"max": _MAXIMA, "min": _MINIMA},
        "load_1m": os.getloadavg()[0],
        "cores": os.cpu_count(),
    }
    _RESULTS.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    missed = {
        name: value
        for name, value in figures.items()
        if value > _MAXIMA.get(name, value) or value < _MINIMA.get(name, value)
    }
    assert missed == {}
