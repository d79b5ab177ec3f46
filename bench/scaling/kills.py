"""Kills of a trainer rank, a replica and the transferqueue while a large run trains."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from bench.whole_run import output_of, running, steps_in

VICTIMS = ("trainer rank", "replica", "transferqueue")
_POLL_S = 0.2
_START_S = 500.0
_RECOVERY_S = 400.0
_STEPS_BETWEEN = 4


def kill_each(
    folder: Path, settings: list[str], *, spec: Path, environment: Mapping[str, str]
) -> dict[str, Any]:
    """Trains, kills each victim once, and returns how long the run took to commit its next step.

    Raises:
        SystemExit: If the run ends, or does not go on in time, with its output.
    """
    kills = []
    with running(folder, settings, spec=spec, environment=environment) as process:

        def until(is_done: Callable[[], bool], event: str, timeout_s: float) -> None:
            deadline = time.monotonic() + timeout_s
            while not is_done():
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"no {event} in time:\n{output_of(folder)}")
                time.sleep(_POLL_S)

        def until_step(step: int, timeout_s: float) -> None:
            until(lambda: _last_step(folder) >= step, f"step {step}", timeout_s)

        until_step(_STEPS_BETWEEN, _START_S)
        for victim in VICTIMS:
            before = _last_step(folder)
            pids = _victims(folder, process.pid, victim)
            if not pids:
                raise SystemExit(f"no process of the {victim} is below the command")
            begin = time.monotonic()
            psutil.Process(pids[-1]).kill()
            # A step that was complete before the kill may still be reported.
            until_step(before + 2, _RECOVERY_S)
            kills.append(
                {
                    "victim": victim,
                    "step": before,
                    "recovered_s": round(time.monotonic() - begin, 1),
                }
            )
            print(kills[-1], flush=True)
            until_step(before + 2 + _STEPS_BETWEEN, _RECOVERY_S)
    steps = steps_in(folder)
    return {
        "kills": kills,
        "steps": len(steps),
        "staleness_max": max(step.get("staleness_max", 0) for step in steps),
    }


def _last_step(folder: Path) -> int:
    steps = steps_in(folder)
    return int(steps[-1]["step"]) if steps else 0


def _victims(folder: Path, root: int, victim: str) -> list[int]:
    """Returns process ids: all ranks of the newest trainer or replica, or the transferqueue."""
    if victim == "transferqueue":
        return [
            process.pid
            for process in psutil.Process(root).children(recursive=True)
            if "services.transferqueue" in _arguments(process)
        ]
    worker = {"trainer rank": "trainer", "replica": "rollout"}[victim]
    # The launcher records the processes of each worker.
    records = sorted(folder.glob(f"*/logs/{worker}-*.process"))
    return [entry["pid"] for entry in json.loads(records[-1].read_text())] if records else []


def _arguments(process: psutil.Process) -> Sequence[str]:
    with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
        return process.cmdline()
    return ()
