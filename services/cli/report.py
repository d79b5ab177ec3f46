"""What is left of a run: summary.json, metrics.jsonl and curves.png."""

import json
import math
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from statistics import fmean, pvariance
from typing import Any

from services.cli.display import duration, set_line
from services.cli.steps import StepLog

METRICS = "metrics.jsonl"
_MAX_WINDOW = 20


def write_report(
    folder: Path, run: Mapping[str, Any], log: StepLog, *, wall_seconds: float
) -> Path:
    """Write all three files; returns the path of ``summary.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    log.write(folder / METRICS)
    if log.records:
        # It loads matplotlib, which takes time that commands without a run to draw do not need.
        from services.cli import curves

        curves.draw(folder / "curves.png", run, log)
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
    """The end of a run, for a person."""
    summary = run["summary"]
    lines = [f"{run['name']} {run['state']} after {duration(wall_seconds)} ({run['state_reason']})"]
    if run["message"]:
        lines.append(run["message"])
    if not summary:
        return lines
    fell = fall_of_reward(
        {step["step"]: step["reward_mean"] for step in log.records if "reward_mean" in step}
    )
    heldout, staleness = summary["heldout"], summary["staleness"]
    prompts, sync = summary["prompts"], summary["sync_ms"]
    lines += [
        f"  steps       {summary['steps']}, weight version {summary['weight_version']}",
        *([f"  reward      {fell}"] if fell else []),
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


def fall_of_reward(rewards: Mapping[int, float]) -> str:
    """Says that the mean reward of the newest steps is below that of earlier ones; empty if it is not.

    Compares means over a tenth of the steps (2 to 20): the newest with the highest. A fall counts if it is a
    quarter of the range of all means, and four standard errors of the difference, by the variance of
    differences between successive steps (von Neumann, 1941).

    Args:
        rewards: Mean reward of each step.
    """
    steps = sorted(rewards)
    size = min(_MAX_WINDOW, max(2, len(steps) // 10))
    if len(steps) < 2 * size + 1:
        return ""
    values = [rewards[step] for step in steps]
    means = [fmean(values[index : index + size]) for index in range(len(values) - size + 1)]
    best = max(range(len(means) - size), key=means.__getitem__)
    fall = means[best] - means[-1]
    # Of one step: pvariance / 2; of a mean: that / size; of the difference of two: twice as much.
    error = math.sqrt(pvariance([after - before for before, after in pairwise(values)]) / size)
    if fall < max(0.25 * (max(means) - min(means)), 4 * error) or fall <= 0:
        return ""
    return (
        f"fell from {means[best]:.3f} (steps {steps[best]} to {steps[best + size - 1]}) to {means[-1]:.3f} "
        f"(steps {steps[-size]} to {steps[-1]})"
    )


def _number(value: float | None, digits: int = 3) -> str:
    return "not measured" if value is None else f"{value:.{digits}f}"
