"""Bars of the scaling measurement, from its results."""

from collections.abc import Iterable, Mapping
from typing import Any

GROWTH, NEIGHBOURS, STEP_ERROR, ONE_STEP_OFF, MORE_REPLICAS, MFU_8B = 3.4, 0.9, 0.15, 1.3, 1.3, 0.42
Entry = Mapping[str, Any]


def bars(results: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the figure of each bar and whether it is met; None where a run is missing."""
    cells: Mapping[str, Entry] = results.get("cells", {})
    return {
        "samples/s at lag 4, 8 GPUs over 2": _bar(_growth(cells), GROWTH),
        "planned split over the best neighbour": _bar(_least(_choices(cells)), NEIGHBOURS),
        "largest error of a predicted step": _bar(
            _largest(_errors(cells)), STEP_ERROR, is_most=True
        ),
        "one step off over colocated synchronous": _bar(
            _ratio(results.get("arms", {}), "one step off", "colocated synchronous"), ONE_STEP_OFF
        ),
        "weight sync to 7 replicas over 1": _bar(
            _replicas(results.get("weights", {})), MORE_REPLICAS, is_most=True
        ),
        "MFU of 8B on 4 trainer GPUs": _bar(
            _largest(
                entry["mfu"]
                for entry in cells.values()
                if entry["model"] == "8b" and entry["trainer_gpus"] == 4 and entry["mfu"]
            ),
            MFU_8B,
        ),
    }


def _bar(figure: float | None, bar: float, *, is_most: bool = False) -> dict[str, Any]:
    if figure is None:
        return {"figure": None, "bar": bar, "meets_bar": None}
    meets = figure <= bar if is_most else figure >= bar
    return {"figure": round(figure, 3), "bar": bar, "meets_bar": meets}


def _planned(cells: Mapping[str, Entry]) -> list[Entry]:
    return [entry for entry in cells.values() if entry["role"] == "planned"]


def _growth(cells: Mapping[str, Entry]) -> float | None:
    rates = {
        entry["gpus"]: entry["samples_per_s"]
        for entry in _planned(cells)
        if entry["model"] == "1.3b" and entry["lag"] == 4
    }
    return rates[8] / rates[2] if {2, 8} <= rates.keys() else None


def _choices(cells: Mapping[str, Entry]) -> Iterable[float]:
    """Yields the rate of each planned split over the best one of it and its measured neighbours."""
    for planned in _planned(cells):
        key = ("model", "gpus", "lag", "engine_gpus")
        alike = [
            entry["samples_per_s"]
            for entry in cells.values()
            if all(entry[name] == planned[name] for name in key)
        ]
        if len(alike) > 1:
            yield planned["samples_per_s"] / max(alike)


def _errors(cells: Mapping[str, Entry]) -> Iterable[float]:
    for entry in _planned(cells):
        if entry["predicted_step_s"]:
            yield abs(entry["predicted_step_s"] / entry["step_s"] - 1)


def _ratio(entries: Mapping[str, Entry], name: str, other: str) -> float | None:
    if not {name, other} <= entries.keys():
        return None
    return float(entries[name]["samples_per_s"] / entries[other]["samples_per_s"])


def _replicas(weights: Mapping[str, Entry]) -> float | None:
    """Returns the largest ratio over the numbers of trainer ranks."""
    return _largest(
        weights[f"{sources}+7"]["p50_ms"] / weights[f"{sources}+1"]["p50_ms"]
        for sources in (1, 2, 4)
        if {f"{sources}+7", f"{sources}+1"} <= weights.keys()
    )


def _least(figures: Iterable[float]) -> float | None:
    return min(figures, default=None)


def _largest(figures: Iterable[float]) -> float | None:
    return max(figures, default=None)
