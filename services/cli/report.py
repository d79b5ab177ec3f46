"""What is left of a run: summary.json, metrics.jsonl and curves.png."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean, pvariance
from typing import Any

from services.cli.display import duration, set_line
from services.cli.steps import StepLog

METRICS = "metrics.jsonl"
_STRETCHES = 10
_MIN_STRETCH = 3


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
    if learning := summary.get("nothing_learned"):
        lines.append(learning["message"])
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
    """Says that the reward is below that of the best stretch, beyond its noise; empty if it is not.

    The run page has the same rule (``verdict.js``): a stretch is a tenth of the steps, at least 3; a fall
    counts from two standard errors of the difference, and from a twentieth of the best mean.

    Args:
        rewards: Mean reward of each step.
    """
    steps = sorted(rewards)
    values = [rewards[step] for step in steps]
    size = max(len(steps) // _STRETCHES, _MIN_STRETCH)
    newest = len(steps) - size
    if newest < size:
        return ""
    stretches = {
        begin: values[begin : begin + size] for begin in range(newest % size, newest + 1, size)
    }
    best = max(stretches, key=lambda begin: fmean(stretches[begin]))
    before, after = fmean(stretches[best]), fmean(stretches[newest])
    noise = math.sqrt((pvariance(stretches[best]) + pvariance(stretches[newest])) / size)
    if before - after <= max(2 * noise, abs(before) / 20):
        return ""
    return (
        f"fell from {before:.3f} (steps {steps[best]} to {steps[best + size - 1]}) to {after:.3f}"
    )


def _number(value: float | None, digits: int = 3) -> str:
    return "not measured" if value is None else f"{value:.{digits}f}"
