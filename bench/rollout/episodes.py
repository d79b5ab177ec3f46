r"""Measures the endpoint's overhead per turn and its memory, with thousands of episodes with slow tools.

Usage: python -m bench.rollout.episodes [--smoke] [--seconds 120] [--out FILE.json]

Real: the endpoint on loopback, agents in a separate process, sampler, workflow, recorded
conversations, tokenizer, stored progress. The engine is the fake one, with real time per token. An hour in
virtual time, without sockets, follows to measure memory.

A turn's overhead is measured twice:

- ``overhead_ms``: by the agents, from before they send until they have the answer, minus the time of the
  reply's tokens (fake engine) or the time from the engine's request to its answer (other engines).
- ``handling_ms``: in the endpoint's process, from the request's arrival until its answer is sent, minus the
  time from the engine's request to its answer.

On a busy machine both contain waiting for a processor: ``run_queue_ms_per_turn`` is how long the rollout's
and the agents' processes were runnable but did not run. ``--real-time`` measures again, with these processes
before all other programs (``SCHED_RR``, needs root), which is the machine without its other load.

In the environment of ``make test-vllm``, with ``OMP_NUM_THREADS=1``::

    python -m bench.rollout.episodes --engine vllm --episodes 64 --hour 0 \
        --out bench/results/rollout-episodes-vllm-cpu.json

Every protocol::

    python -m bench.rollout.episodes --protocols chat completions messages responses --episodes 64 \
        --real-time --sleep-s 1 10 --seconds 60 --hour 0 --out bench/results/rollout-episodes-protocols.json

The hour of 2,000 alone takes ten minutes of a processor::

    python -m bench.rollout.episodes --episodes --out bench/results/rollout-episodes-hour.json
"""

import argparse
import asyncio
import itertools
import resource
import time
from collections.abc import Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import psutil

from bench.report import GrowingReport
from bench.rollout.episodes_hour import hour
from bench.rollout.parts import machine_state, run_before_others
from bench.rollout.served_episodes import Episodes, Load, TimedEndpoint, Turn, milliseconds
from bench.rollout.tool_agent import PROTOCOLS
from services.common.http.limits import raise_descriptor_limit
from services.extras.agents import agent
from services.extras.agents.agent import Agent
from services.rollout.calls.outside import AddressPolicy
from services.rollout.calls.pool import CallPool
from services.rollout.monitor import freeze_startup_objects
from services.rollout.workflows.base import WorkflowResources


async def measure(load: Load, *, seconds: float) -> dict[str, Any]:
    """Runs episodes and examines their turns once all episodes are in progress.

    Args:
        load: The load.
        seconds: Measured seconds.
    """
    raise_descriptor_limit()
    agent.Endpoint = TimedEndpoint  # type: ignore[misc]
    TimedEndpoint.handled.clear()
    workflow = Agent(agent="bench.rollout.tool_agent:use_tools")
    episodes = Episodes(load)
    freeze_startup_objects()
    resources = WorkflowResources(calls=CallPool(1), reach=AddressPolicy(("127.0.0.1",)))
    async with workflow.serving(resources), episodes.running(workflow):
        began = time.monotonic()
        await asyncio.sleep(2 * load.sleep_s[1])
        begin, idle, cpu = time.monotonic(), episodes.engine.stats().idle_seconds, _cpu()
        counter, waited = time.perf_counter(), _run_queue_s()
        await asyncio.sleep(seconds)
        end, cpu = time.monotonic(), _cpu() - cpu
        waited = {name: now - waited[name] for name, now in _run_queue_s().items()}
        handled = [request for request in TimedEndpoint.handled if request.begin >= counter]
        idle = episodes.engine.stats().idle_seconds - idle
        # The turns of an episode are known only at its end.
        await asyncio.sleep(load.turns * load.sleep_s[1] / 2)
    turns = [turn for turn in episodes.turns if begin <= turn.sent < end]
    first_turns_s = [
        turn.received for turn in episodes.turns if turn.is_first and turn.sent < began + 1
    ]
    num_turns = sum(begin <= t[0] < end for spans in episodes.engine.spans.values() for t in spans)
    num_turns += sum(begin <= turn.begun < end for turn in episodes.turns)
    return {
        "engine": load.engine,
        "protocol": load.protocol,
        "sleep_s": load.sleep_s,
        **machine_state(),
        "episodes": load.episodes,
        "turns_per_s": round(num_turns / seconds, 1),
        "overhead_ms": milliseconds([turn.overhead_s for turn in turns]),
        "handling_ms": milliseconds([request.handling_s for request in handled]),
        "to_engine_ms": milliseconds([turn.begun - turn.sent for turn in turns]),
        "cpu_ms_per_turn": round(1e3 * cpu / num_turns, 3),
        "run_queue_ms_per_turn": {
            name: round(1e3 * wait_s / num_turns, 3) for name, wait_s in waited.items()
        },
        "engine_idle_ratio": round(idle / seconds, 4),
        "engine_idle_though_asked_ratio": round(idle_though_asked(turns) / seconds, 4),
        "all_at_once_s": round(max(first_turns_s, default=began) - began, 2),
        "failed": len(episodes.failed),
        "why": sorted(set(episodes.failed))[:3],
    }


def idle_though_asked(turns: Sequence[Turn]) -> float:
    """Returns the seconds in which the engine was idle although the endpoint had requests."""
    changes = sorted(
        change
        for turn in turns
        for change in (
            (turn.sent, 1, 0),
            (turn.begun, -1, 1),
            (turn.begun + turn.engine_s, 0, -1),
        )
    )
    seconds, since, waiting, working = 0.0, 0.0, 0, 0
    for when, more_waiting, more_working in changes:
        if waiting and not working:
            seconds += when - since
        since, waiting, working = when, waiting + more_waiting, working + more_working
    return seconds


def _run_queue_s() -> dict[str, float]:
    """Returns how long this process and its children were runnable but did not run, in seconds."""
    me = psutil.Process()
    children = {child.pid for child in me.children(recursive=True)}
    return {
        name: sum(map(_waited_s, pids))
        for name, pids in (("rollout", {me.pid}), ("agents", children))
    }


def _waited_s(pid: int) -> float:
    """Returns the time on the run queue of all threads of a process (``sched-stats.rst``)."""
    return sum(
        1e-9 * int(path.read_text().split()[1])
        for path in Path(f"/proc/{pid}/task").glob("*/schedstat")
    )


def _cpu() -> float:
    """Returns the CPU seconds of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="fewer episodes, shorter tools")
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--episodes", type=int, nargs="*", default=[64, 2000])
    parser.add_argument(
        "--sleep-s", type=float, nargs=2, default=(1.0, 30.0), help="min and max time of a tool"
    )
    parser.add_argument("--engine", default="fake")
    parser.add_argument(
        "--real-time",
        action="store_true",
        help="measure again before all other programs (needs root)",
    )
    parser.add_argument("--protocols", nargs="+", choices=PROTOCOLS, default=["chat"])
    parser.add_argument(
        "--hour", type=int, default=2000, help="episodes in virtual time; 0 for none"
    )
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    out = arguments.out
    if out is None and not arguments.smoke:
        out = Path("bench/results/rollout-episodes.json")
    report = GrowingReport(out, {"smoke": arguments.smoke})
    loads = []
    numbers = [50] if arguments.smoke else arguments.episodes
    for is_real_time in (False, True) if arguments.real_time else (False,):
        if is_real_time:
            run_before_others()
        for number, protocol in itertools.product(numbers, arguments.protocols):
            sleep_s = (0.1, 3.0) if arguments.smoke else tuple(arguments.sleep_s)
            load = Load(
                episodes=number, sleep_s=sleep_s, engine=arguments.engine, protocol=protocol
            )
            seconds = 5.0 if arguments.smoke else arguments.seconds
            loads.append(asyncio.run(measure(load, seconds=seconds)))
            report.add({"real_time": loads})
    if not arguments.hour:
        report.finish({})
        return
    load, minutes = (
        (Load(episodes=20), 5) if arguments.smoke else (Load(episodes=arguments.hour), 60)
    )
    with get_context("spawn").Pool(1) as pool:
        report.finish({"virtual_time": pool.apply(hour, (load,), {"minutes": minutes})})


if __name__ == "__main__":
    main()
