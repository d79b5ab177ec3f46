"""Measures the possible speed of a run without GPUs: ``python -m bench.pace [--steps N] [NAME ...]``.

A real controller drives rollouts, a trainer and weight transfers that take, in real time, the time
that two H200s took with 1.3 billion parameters (``--pace`` changes it): geometric response lengths
with mean 280 and max 1,024 tokens, and 32 groups of 8 per step. It prints the trained samples per
second compared with synchronous training and with the limit, and the reasons for the trainer's idle
time. It takes minutes.
"""

import argparse
import asyncio
import json
from dataclasses import asdict, replace
from statistics import fmean
from typing import Any

from bench.controller.stage import Stage, stage
from bench.pace.fakes import Pace

GROUPS, GROUP_SIZE = 32, 8
STEPS = "steps"

MODES: dict[str, dict[str, Any]] = {
    "synchronous": {"max_staleness": 0},
    "periodic": {"max_staleness": 0, "trainer": {"accumulate_early": True}},
    "lag 1": {"max_staleness": 1},
    "lag 4": {"max_staleness": 4},
}
# Min samples per second, relative to synchronous training.
BARS = {"periodic": 1.2, "lag 1": 1.8, "lag 4": 3.0}
_SETTLED = 4
"""Steps before the measured ones, in addition to the staleness bound."""


async def measure(
    system: Stage, pace: Pace, *, steps: int, places: int, rollouts: int = 1, **mode: Any
) -> dict[str, Any]:
    """Trains in one mode; returns statistics of the settled steps and of all steps."""
    lag = mode["max_staleness"]
    is_partial, settled = lag > 0, _SETTLED + lag
    steps += lag
    run_id = await system.submit(
        # The last steps have the engines to themselves, because no new groups start.
        steps=steps + lag + 1,
        prompts_per_step=GROUPS,
        rollouts=rollouts,
        group_size=GROUP_SIZE,
        running=places,
        rollout={"partial_rollout": is_partial},
        fakes={"pace": asdict(replace(pace, is_partial=is_partial)), "places": places},
        **mode,
    )
    await system.until_step(run_id, steps)
    run = await system.client.run(run_id)
    committed = [event async for event in run.events("StepCommitted")]
    await run.cancel()
    times = [event.time.timestamp() for event in committed]
    step_s = (times[steps - 1] - times[settled - 1]) / (steps - settled)
    all_steps, committed = committed, committed[settled:steps]
    idle = {
        name: round(fmean(event.data.get(name, 0.0) for event in committed), 3)
        for name in sorted({n for e in committed for n in e.data if n.startswith("idle_seconds_")})
    }
    return {
        "step_s": round(step_s, 2),
        "samples_per_s": round(GROUPS * GROUP_SIZE / step_s, 1),
        "idle": idle,
        "weight_wait": round(idle.get("idle_seconds_weight_sync", 0.0) / step_s, 3),
        "staleness_max": max(event.data["staleness_max"] for event in committed),
        "staleness_mean": round(fmean(event.data["staleness_mean"] for event in committed), 2),
        STEPS: [event.data for event in all_steps],
    }


async def measure_all(names: list[str], pace: Pace, *, steps: int, places: int) -> None:
    """Trains in all modes, one after the other, and prints the results."""
    lengths = [pace.length(seed) for seed in range(10_000)]
    limit_s = max(pace.train_s, GROUPS * GROUP_SIZE * fmean(lengths) / pace.tokens_per_s)
    limit = GROUPS * GROUP_SIZE / limit_s
    print(f"limit: {limit_s:.2f} s a step, {limit:.0f} samples/s", flush=True)
    async with stage("bench.pace.fleet") as system:
        base = None
        for name in names:
            figures = await measure(system, pace, steps=steps, places=places, **MODES[name])
            base = base or figures["samples_per_s"]
            figures["of_first"] = round(figures["samples_per_s"] / base, 2)
            figures["of_limit"] = round(figures["samples_per_s"] / limit, 2)
            del figures[STEPS]
            print(f"{name:12} {json.dumps(figures)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(MODES))
    parser.add_argument("--steps", type=int, default=14, help="of each run")
    parser.add_argument("--places", type=int, default=256, help="samples decoded at once")
    parser.add_argument(
        "--pace", type=json.loads, default={}, help="JSON of what takes other times"
    )
    arguments = parser.parse_args()
    names = arguments.names or [*MODES]
    pace = Pace(**arguments.pace)
    asyncio.run(measure_all(names, pace, steps=arguments.steps, places=arguments.places))


if __name__ == "__main__":
    main()
