"""Time of a switch by part, for a run whose trainer and rollouts take turns."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

_BAR_S = 1.0
# Log lines of rollouts on each adoption (level DEBUG), and of vLLM on its own part of a switch.
_LOGGED = {
    **{
        f"adopt: {phase}": re.compile(rf"weights adopted.* {phase}_ms=([0-9.]+)")
        for phase in ("share", "gate", "freeze", "copy", "thaw")
    },
    "first token after": re.compile(r"first token .*after_ms=([0-9.]+)"),
}
_VLLM = {
    "vLLM's sleep": re.compile(r"took ([0-9.]+) seconds to fall asleep"),
    "vLLM's wake": re.compile(r"took ([0-9.]+) seconds to wake up"),
}


def switches(steps: Sequence[Mapping[str, Any]], folder: Path) -> dict[str, Any]:
    """Returns the milliseconds of the switches between steps, by part and in total.

    Args:
        steps: The steps' reports.
        folder: Folder of the only run, with its workers' logs.
    """
    switch_parts = [parts for step in steps if (parts := _parts(step))]
    logs = "\n".join(
        path.read_text(errors="replace") for path in folder.glob("run_*/logs/rollout*")
    )
    logged = {name: list(map(float, pattern.findall(logs))) for name, pattern in _LOGGED.items()}
    logged |= {
        name: [1e3 * float(s) for s in pattern.findall(logs)] for name, pattern in _VLLM.items()
    }
    return {
        "bar_ms": 1e3 * _BAR_S,
        "ms": {
            name: _spread([parts[name] for parts in switch_parts])
            for name in (switch_parts[0] if switch_parts else ())
        },
        # Over the whole run except its first switch. All but the first token's time are parts of the times
        # in ``ms``.
        "logged_ms": {name: _spread(values[1:]) for name, values in logged.items() if values[1:]},
    }


def _parts(step: Mapping[str, Any]) -> dict[str, float]:
    """Returns milliseconds by part: of a step's switch to the trainer, and of the previous switch back."""
    if not {"sync_ms", "rollouts_sleep_s", "rollouts_wake_s"} <= step.keys():
        return {}
    handed = {
        "rollouts sleep": step["rollouts_sleep_s"],
        "trainer wakes": step["trainer_wake_s"],
        "trainer sleeps": step["trainer_sleep_s"],
        "rollouts wake": step["rollouts_wake_s"],
    }
    parts = {name: 1e3 * seconds for name, seconds in handed.items()}
    # The preparation consists of the trainer's copy, the switch back, and the rollouts' buffers.
    ready = step["prepare_ms"] - step["copy_ms"] - parts["trainer sleeps"] - parts["rollouts wake"]
    parts |= {
        "trainer copies weights": step["copy_ms"],
        "rollouts prepare": max(0.0, ready),
        "weights travel": step["transfer_ms"],
        "rollouts adopt": step["adopt_ms"],
    }
    return {**parts, "all": sum(parts.values())}


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"p50": round(median(values), 1), "longest": round(max(values), 1)} if values else {}
