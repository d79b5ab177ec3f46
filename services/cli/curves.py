"""curves.png: reward, held-out accuracy, staleness and weight sync of a run."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from services.cli.steps import StepLog

mpl.use("Agg")


_STYLES = ("-", "--", ":", "-.")


def draw(path: Path, run: Mapping[str, Any], log: StepLog) -> None:
    """Draw them into a PNG file."""
    figure = Figure(figsize=(11, 7), layout="constrained")
    (reward, accuracy), (staleness, sync) = figure.subplots(2, 2)
    steps = [record["step"] for record in log.records]
    versions = [score["version"] for score in log.heldout]

    _line(reward, steps, [record.get("reward_mean") for record in log.records], "reward")
    _decorate(reward, "Training reward", "mean reward of the batch")

    for kind in ("greedy", "sampled"):
        _line(accuracy, versions, [score[kind] for score in log.heldout], kind, marker="o")
    sets = dict.fromkeys(name for score in log.heldout for name in score["sets"])
    for name in sets if len(sets) > 1 else ():
        of_set = [score["sets"].get(name, {}).get("greedy") for score in log.heldout]
        _line(accuracy, versions, of_set, f"{name}, greedy", marker=".")
    _decorate(accuracy, "Held-out accuracy", "mean reward")

    for kind in ("mean", "max"):
        _line(staleness, steps, [record.get(f"staleness_{kind}") for record in log.records], kind)
    bound = run["summary"]["staleness"]["bound"]
    staleness.axhline(bound, linestyle="--", color="grey", label=f"bound {bound}")
    _decorate(staleness, "Staleness of trained samples", "weight versions")

    _line(sync, steps, [record.get("sync_ms") for record in log.records], "total")
    _decorate(sync, "Weight sync", "milliseconds")

    figure.suptitle(f"{run['name']}  ({run['id']})")
    figure.savefig(path, dpi=110)


def _line(
    axes: Any, x: Sequence[float], y: Sequence[float | None], label: str, *, marker: str = ""
) -> None:
    known = [(step, value) for step, value in zip(x, y, strict=True) if value is not None]
    # A line under another one shows through its gaps.
    style = _STYLES[len(axes.lines) % len(_STYLES)]
    axes.plot(*zip(*known, strict=True) if known else ((), ()), style, label=label, marker=marker)


def _decorate(axes: Any, title: str, unit: str) -> None:
    axes.set_title(title)
    axes.set_xlabel("step")
    axes.set_ylabel(unit)
    if axes.dataLim.ymin >= 0:  # rewards may be negative
        axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
