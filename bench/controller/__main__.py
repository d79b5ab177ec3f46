"""Measures one controller process: ``python -m bench.controller [--smoke] [NAME ...]``, some minutes each.

throughput   groups per second that are admitted, generated and trained by fakes, and committed
ledger       the same after a million prompts: the increase of a step's time
workers      a thousand rollouts that register, send heartbeats and get groups as they finish others
memory       an hour's worth of steps (one per second), run at full speed
api          fifty clients and five hundred event streams during three active runs
first-token  from a submission to the first generated token, with the torch engine and a tiny model

Adds to ``bench/results/controller.json``, with the time of a fixed piece of Python before and after
each, because the speed of a machine on a shared host changes.
"""

import argparse
import asyncio
import itertools
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

from bench.controller.clients import measure_api
from bench.controller.first_token import measure_first_token
from bench.controller.stage import stage
from bench.report import read_json, write_json

Figures = dict[str, Any]

RESULTS = Path(__file__).parents[1] / "results" / "controller.json"


async def throughput(is_smoke: bool) -> Figures:
    """Measures the groups per second that pass through all states."""
    steps, batch = (6, 256) if is_smoke else (60, 1024)
    async with stage() as system:
        run_id = await system.submit(steps=steps, prompts_per_step=batch, rollouts=8)
        await system.until_step(run_id, 1)
        begin = system.cpu_s()
        await system.until_step(run_id, steps)
        cpu_s = system.cpu_s() - begin
        seconds = _median_gap(await system.step_times(run_id))
    return {
        "groups_per_s": batch / seconds,
        "batch": batch,
        # The rate of a processor without other load.
        "groups_per_controller_cpu_s": (steps - 1) * batch / cpu_s,
    }


async def ledger(is_smoke: bool) -> Figures:
    """Compares the steps of a run that has issued a million prompts with its first ones."""
    steps, batch = (20, 256) if is_smoke else (490, 2048)
    tenth = steps // 10
    async with stage() as system:
        run_id = await system.submit(steps=steps, prompts_per_step=batch, rollouts=8)
        cpu_s: list[float] = []
        for step in (1, 1 + tenth, steps - tenth, steps):
            await system.until_step(run_id, step)
            cpu_s.append(system.cpu_s())
        times = await system.step_times(run_id)
    first_s, last_s = _median_gap(times[: tenth + 1]), _median_gap(times[-tenth - 1 :])
    return {
        "prompts": steps * batch,
        "first_step_ms": first_s * 1000,
        "last_step_ms": last_s * 1000,
        "slower": last_s / first_s - 1,
        # The same in CPU time, which other work on the machine disturbs less.
        "slower_by_cpu": (cpu_s[3] - cpu_s[2]) / (cpu_s[1] - cpu_s[0]) - 1,
        "groups_per_s": batch / _median_gap(times),
    }


def _median_gap(times: list[float]) -> float:
    """Returns the median seconds between two steps."""
    return statistics.median(after - before for before, after in itertools.pairwise(times))


async def workers(is_smoke: bool) -> Figures:
    """Measures the time to dispatch a group to one of many rollouts."""
    count, seconds = (50, 4.0) if is_smoke else (1000, 30.0)
    async with stage() as system:
        # Each rollout has two groups at a time and gets another one when it has finished one.
        await system.submit(
            steps=2,
            prompts_per_step=50_000,
            rollouts=count,
            running=8,
            group_s=(4.0, 16.0),
            heartbeat_s=1.0,
        )
        name = "slipstream_dispatch_duration_seconds"
        while not (await system.histogram(name)).get(float("inf"), 0):
            await asyncio.sleep(0.5)
        # The first groups all start at once; this waits until their ends are spread out.
        await asyncio.sleep(20.0 if not is_smoke else 1.0)
        before, cpu_s = await system.histogram(name), system.cpu_s()
        await asyncio.sleep(seconds)
        after, cpu_s = await system.histogram(name), system.cpu_s() - cpu_s
    counts = {bound: after[bound] - before.get(bound, 0.0) for bound in sorted(after)}
    total = counts[float("inf")]
    return {
        "workers": count,
        "groups_dispatched_per_s": total / seconds,
        "p99_ms_at_most": _quantile(counts, total, 0.99) * 1000,
        "p50_ms_at_most": _quantile(counts, total, 0.5) * 1000,
        "share_within_100_ms": counts[0.1] / total,
        "controller_cores": cpu_s / seconds,
    }


def _quantile(counts: dict[float, float], total: float, share: float) -> float:
    """Returns the min bound below which a share of the observations lies."""
    return next(bound for bound, count in counts.items() if count >= share * total)


async def memory(is_smoke: bool) -> Figures:
    """Measures memory during an hour's worth of steps."""
    steps = 60 if is_smoke else 3600
    async with stage() as system:
        run_id = await system.submit(steps=steps, prompts_per_step=32, rollouts=4, group_size=8)
        sizes: list[float] = []
        for tenth in range(1, 11):
            await system.until_step(run_id, steps * tenth // 10)
            sizes.append(round(system.rss_mib(), 1))
    return {"steps": steps, "rss_mib": sizes, "growth_mib": sizes[-1] - sizes[2]}


async def api(is_smoke: bool) -> Figures:
    """Measures the latency of the API during three active runs."""
    async with stage() as system:
        return await measure_api(system, is_smoke=is_smoke)


async def first_token(is_smoke: bool) -> Figures:
    """Measures the seconds from a submission to the first token."""
    return await measure_first_token(rounds=1 if is_smoke else 3)


MEASUREMENTS = {
    "throughput": throughput,
    "workers": workers,
    "memory": memory,
    "api": api,
    "first-token": first_token,
    "ledger": ledger,
}

# Bars of the measurements: (name of the value, at least or at most, bound).
BARS = {
    "throughput": ("groups_per_s", ">=", 5000.0),
    "workers": ("p99_ms_at_most", "<=", 100.0),
    "memory": ("growth_mib", "<=", 8.0),
    "api": ("p99_ms", "<=", 100.0),
    "first-token": ("worst_s", "<=", 10.0),
    "ledger": ("slower", "<=", 0.2),
}


def python_ms() -> float:
    """Returns the CPU time of a fixed piece of Python: the current speed of a machine on a shared host."""
    times: list[float] = []
    for _ in range(5):
        begin = time.process_time()
        rows: dict[int, tuple[int, str, list[int]]] = {}
        for number in range(300_000):
            rows[number % 1000] = (number, str(number), [number, number + 1])
        times.append(1000 * (time.process_time() - begin))
    return round(statistics.median(times), 1)


def table(figures_by_name: dict[str, Figures]) -> str:
    """Returns all measurements so far and their bars as text."""
    lines = [f"{'measurement':12} {'figure':16} {'value':>10} {'bar':>10}       {'load':>5}"]
    for name, (figure, order, bound) in BARS.items():
        if name in figures_by_name:
            value = figures_by_name[name][figure]
            is_met = value >= bound if order == ">=" else value <= bound
            verdict = "met" if is_met else "NOT met"
            load = figures_by_name[name]["load_average_before"]
            bar = f"{order} {bound:g}"
            lines.append(f"{name:12} {figure:16} {value:10.2f} {bar:>10} {verdict:>8} {load:4.1f}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(MEASUREMENTS))
    parser.add_argument("--smoke", action="store_true", help="seconds; writes no results")
    arguments = parser.parse_args()
    results: dict[str, Figures] = read_json(RESULTS)
    for name in arguments.names or MEASUREMENTS:
        load, before_ms = os.getloadavg()[0], python_ms()
        result = asyncio.run(MEASUREMENTS[name](arguments.smoke))
        results[name] = result | {
            "load_average_before": round(load, 2),
            "python_ms": [before_ms, python_ms()],
        }
        print(name, json.dumps(results[name], indent=1), flush=True)
        if not arguments.smoke:
            results["machine"] = {"cores": os.cpu_count()}
            write_json(RESULTS, results)
    print(table(results))


if __name__ == "__main__":
    main()
