"""Measures sandboxes of episodes with bubblewrap: starts, losses, and what a killed rollout leaves.

Usage: python -m bench.rollout.sandboxes [--smoke] [--episodes 1000] [--real-time] [--out FILE.json]

Each episode starts a sandbox, whose command sleeps 1 to 10 s. A start takes about 15 ms of a processor: half
in bubblewrap's namespaces and mounts, half in the start of the interpreter of ``init.py``. On a busy machine
it is mostly waiting for that processor, so ``--real-time`` plays the episodes again, with all their processes
before all other programs (``SCHED_RR``, needs root). Then a process with ``max_running`` sandboxes is killed
with SIGKILL.

Bars on 2 cores: no episode is lost, p99 of a start <= 300 ms, no process and no folder is left.
"""

import argparse
import asyncio
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import quantiles
from typing import Any

import psutil

from bench.report import report_to
from bench.rollout.parts import machine_state, run_before_others
from services.common.runspec.rollout import SandboxSpec
from services.extras.bubblewrap.bubblewrap import Bubblewrap, BubblewrapSandbox
from services.rollout.sandbox.pool import SandboxPool

_END_S = 30.0
_READY = "ready"


class _Measured(Bubblewrap):
    """Records the seconds of each start."""

    def __init__(self, spec: SandboxSpec) -> None:
        super().__init__(spec)
        self.seconds: list[float] = []

    async def start(self, image: str) -> BubblewrapSandbox:
        begin = time.perf_counter()
        started = await super().start(image)
        self.seconds.append(time.perf_counter() - begin)
        return started


async def play(episodes: int, max_running: int, sleep_s: tuple[float, float]) -> dict[str, Any]:
    """Runs episodes, all of which are asked for at once."""
    spec = SandboxSpec(max_running=max_running)
    kind = _Measured(spec)
    pool, rng = SandboxPool(spec, kind), random.Random(0)
    await pool.prepare()
    num_done = 0

    async def episode(seconds: float) -> None:
        nonlocal num_done
        async with pool.open({}) as sandbox:
            result = await sandbox.run(f"sleep {seconds:.3f}; echo done")
            num_done += result.text == "done\n"

    state, begin = machine_state(), time.monotonic()
    await asyncio.gather(*[episode(rng.uniform(*sleep_s)) for _ in range(episodes)])
    cuts = quantiles(kind.seconds, n=100)
    return {
        **state,
        "load_average_after": machine_state()["load_average"],
        "episodes": episodes,
        "max_running": max_running,
        "lost": episodes - num_done,
        "seconds": round(time.monotonic() - begin, 1),
        "start_ms": {
            name: round(1e3 * value, 1)
            for name, value in (("p50", cuts[49]), ("p99", cuts[98]), ("max", max(kind.seconds)))
        },
    }


async def hold(num_sandboxes: int) -> None:
    """Runs sandboxes with background processes until this process is killed."""
    pool = SandboxPool(SandboxSpec(max_running=num_sandboxes))
    ready = asyncio.Barrier(num_sandboxes)

    async def episode(number: int) -> None:
        async with pool.open({}) as sandbox:
            await sandbox.run(
                "(setsid sleep 3600 &) ; (trap '' TERM HUP; sleep 3600 &) ; touch file"
            )
            await ready.wait()
            if number == 0:
                print(_READY, flush=True)
            await sandbox.run("sleep 3600", timeout_s=3600)

    await asyncio.gather(*[episode(number) for number in range(num_sandboxes)])


def kill(num_sandboxes: int) -> dict[str, Any]:
    """Kills a process with running sandboxes; returns the processes and folders that remain."""
    with tempfile.TemporaryDirectory() as folder:
        return _kill(num_sandboxes, folder)


def _kill(num_sandboxes: int, folder: str) -> dict[str, Any]:
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.rollout.sandboxes", "--hold", str(num_sandboxes)],
        stdout=subprocess.PIPE,
        text=True,
        env={"PATH": os.defpath, "PYTHONPATH": ":".join(sys.path), "TMPDIR": folder},
    )
    assert process.stdout is not None
    if process.stdout.readline().strip() != _READY:
        raise SystemExit("the process with sandboxes failed")
    inside = psutil.Process(process.pid).children(recursive=True)
    begin = time.monotonic()
    process.kill()
    process.wait(_END_S)
    _, alive = psutil.wait_procs(inside, timeout=_END_S)
    return {
        "processes": len(inside),
        "processes_left": len(alive),
        "seconds_until_all_ended": round(time.monotonic() - begin, 2),
        # The import of torch leaves a folder, too.
        "files_left": sorted(
            path.name for path in Path(folder).iterdir() if "torchinductor" not in path.name
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="fewer and shorter episodes")
    parser.add_argument("--episodes", type=int, default=1000)
    parser.add_argument("--max-running", type=int, default=64)
    parser.add_argument(
        "--real-time",
        action="store_true",
        help="play them again before all other programs (needs root)",
    )
    parser.add_argument("--hold", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    if arguments.hold:
        asyncio.run(hold(arguments.hold))
        return
    out, is_smoke = arguments.out, arguments.smoke
    if out is None and not is_smoke:
        out = Path("bench/results/rollout-sandboxes.json")
    number, sleep_s = (20, (0.1, 0.5)) if is_smoke else (arguments.episodes, (1.0, 10.0))
    played = [asyncio.run(play(number, arguments.max_running, sleep_s))]
    killed = kill(4 if is_smoke else arguments.max_running)
    if arguments.real_time:
        run_before_others()
        played.append(asyncio.run(play(number, arguments.max_running, sleep_s)))
    report_to(out, {"smoke": is_smoke, "played": played, "killed": killed})


if __name__ == "__main__":
    main()
