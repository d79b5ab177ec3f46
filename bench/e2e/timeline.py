"""Work and wait times of each step, and the min time of a step."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import mean, median
from typing import Any

from bench.whole_run import WholeRun

FIRST_STEP = 5
"""First measured step; before it, the run fills up."""
_BAR = 40
_WORK, _WAIT = "seconds_", "idle_seconds_"
_SUM = "seconds_total"
_DECODE = ("decode_fixed_s", "decode_sample_s", "decode_max_samples")


def _parts(step: Mapping[str, Any], prefix: str) -> dict[str, float]:
    return {
        name.removeprefix(prefix): float(value)
        for name, value in step.items()
        if name.startswith(prefix) and name != _SUM and value > 0
    }


def _values(steps: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    return [float(step[name]) for step in steps if step.get(name) is not None]


def time_line(run: WholeRun, *, max_rate: float) -> list[str]:
    """Returns a line for each step, with bars for the trainer's time and the engines' rate.

    Args:
        run: The run.
        max_rate: Tokens per second of a full bar.
    """
    ends = run.committed()
    lines = [
        "step  wall s  trainer: # works, . waits"
        + " " * (_BAR - 24)
        + "  engines: # of their full rate   sync ms  why the trainer waits"
    ]
    for number, (step, begin, end) in enumerate(
        zip(run.steps, [0.0, *ends], ends, strict=False), start=1
    ):
        wall = max(end - begin, 1e-9)
        works = min(round(_BAR * step.get(_SUM, 0.0) / wall), _BAR)
        num_marks = min(round(20 * step.get("generated_tokens_per_s", 0.0) / max_rate), 20)
        waits = sorted(_parts(step, _WAIT).items(), key=lambda item: -item[1])
        why = ", ".join(f"{name} {spent:.2f}" for name, spent in waits[:3] if spent >= 0.005)
        lines.append(
            f"{number:4}  {wall:6.2f}  {'#' * works:.<{_BAR}}  {'#' * num_marks:.<20}"
            f"  {step.get('sync_ms', 0.0):14.0f}  {why}"
        )
    return lines


def facts(run: WholeRun, *, first: int) -> dict[str, Any]:
    """Returns results from step ``first`` on: rates, the trainer's time by part, and weight transfer."""
    ends = run.committed()
    steps = run.steps[first - 1 :]
    walls = [end - begin for begin, end in pairwise(ends)][first - 2 :]
    wall = sum(walls)

    def total(name: str) -> float:
        return sum(float(step.get(name, 0.0)) for step in steps)

    def shares(prefix: str) -> dict[str, float]:
        names = sorted({name for step in steps for name in _parts(step, prefix)})
        return {
            name: round(mean(_parts(step, prefix).get(name, 0.0) for step in steps), 4)
            for name in names
        }

    syncs = [step["sync_ms"] for step in steps if "sync_ms" in step]
    phases = [name for name in ("prepare_ms", "transfer_ms", "adopt_ms", "stall_ms") if syncs]
    return {
        "steps": len(steps),
        "step_s": round(wall / len(steps), 4),
        "step_s_longest": round(max(walls), 4),
        "samples_per_s": round(total("samples") / wall, 2),
        "trained_tokens_per_s": round(total("tokens") / wall, 1),
        "response_tokens_per_step": round(total("response_tokens") / len(steps), 1),
        "engine_tokens_per_s": round(mean(step["generated_tokens_per_s"] for step in steps), 1),
        "engine_idle_s": round(total("rollout_idle_s") / len(steps), 4),
        "trainer_works_s": round(total(_SUM) / len(steps), 4),
        "trainer_works_share": round(total(_SUM) / wall, 4),
        "works": shares(_WORK),
        "waits": shares(_WAIT),
        "waits_for_weights_share": round(total(_WAIT + "weight_sync") / wall, 4),
        "sync_ms": {
            "p50": round(median(syncs), 1) if syncs else None,
            "longest": round(max(syncs), 1) if syncs else None,
            **{
                name.removesuffix("_ms"): round(median(step.get(name, 0.0) for step in steps), 1)
                for name in phases
            },
        },
        "staleness_mean": round(total("staleness_mean") / len(steps), 3),
        "stale_token_fraction": round(total("stale_token_fraction") / len(steps), 4),
        "decode": {name: median(values) for name in _DECODE if (values := _values(steps, name))},
        "first_step_s": round(ends[0], 1),
    }


def least_step_s(*, trainer_s: float, response_tokens: float, engine_rate: float) -> float:
    """Returns the min time of a step: the longer one of the trainer's and the engine's work."""
    return max(trainer_s, response_tokens / engine_rate)
