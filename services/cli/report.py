"""Report files of a run: summary.json, metrics.jsonl and curves.png."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from services.cli.display import duration, set_line
from services.cli.steps import StepLog

mpl.use("Agg")


_STYLES = ("-", "--", ":", "-.")


def draw(path: Path, run: Mapping[str, Any], log: StepLog) -> None:
    """Draws the curves of a run into a PNG file."""
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
    # Different line styles keep overlapping lines visible.
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


METRICS = "metrics.jsonl"


def write_report(
    folder: Path, run: Mapping[str, Any], log: StepLog, *, wall_seconds: float
) -> Path:
    """Writes all report files; returns the path of ``summary.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    log.write(folder / METRICS)
    if log.records:
        # This imports matplotlib, which takes time and is needed only to draw.
        from services.cli import report

        report.draw(folder / "curves.png", run, log)
    summary = {
        "run_id": run["id"],
        "name": run["name"],
        "state": run["state"],
        "state_reason": run["state_reason"],
        "message": run["message"],
        "wall_seconds": round(wall_seconds, 2),
        **run["summary"],
    }
    path = folder / "summary.json"
    path.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    return path


def summary_lines(
    run: Mapping[str, Any], folder: Path, log: StepLog, *, wall_seconds: float
) -> list[str]:
    """Returns the summary of an ended run as lines of text."""
    summary = run["summary"]
    lines = [f"{run['name']} {run['state']} after {duration(wall_seconds)} ({run['state_reason']})"]
    if run["message"]:
        lines.append(run["message"])
    if not summary:
        return lines
    if learning := summary.get("nothing_learned"):
        lines.append(learning["message"])
    heldout, staleness = summary["heldout"], summary["staleness"]
    prompts, sync = summary["prompts"], summary["sync_ms"]
    lines += [
        f"  steps       {summary['steps']}, weight version {summary['weight_version']}",
        *([f"  learning    {drop['message']}"] if (drop := summary.get("reward_drop")) else []),
        f"  held-out    greedy {_number(heldout['greedy'])}, sampled {_number(heldout['sampled'])}",
        *(f"    {name}: {set_line(scores)}" for name, scores in heldout.get("sets", {}).items()),
        f"  staleness   mean {staleness['mean']:.2f}, max {staleness['max']}, bound {staleness['bound']}",
        f"  weight sync p50 {_number(sync['p50'], 1)} ms, p95 {_number(sync['p95'], 1)} ms",
        "  prompts     "
        + ", ".join(
            f"{prompts[name]} {name}" for name in ("issued", "consumed", "dropped", "quarantined")
        )
        + f", {prompts['outstanding']} outstanding",
        f"  files       {folder}/summary.json, metrics.jsonl, curves.png",
    ]
    return lines


def _number(value: float | None, digits: int = 3) -> str:
    return "not measured" if value is None else f"{value:.{digits}f}"
