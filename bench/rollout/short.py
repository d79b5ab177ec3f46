"""CPU time of a rollout process per short response: ``python -m bench.rollout.short``.

Real: sampler, group, workflow, tokenizer and the pool of reward processes. The engine has no model
and takes no time. The rest is the cost of a request, independent of its length: with 512 responses
of 29 tokens per step it bounds the samples per second.
"""

import argparse
import asyncio
import cProfile
import pstats
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.real_model.setting import ADDITION
from bench.report import report_to
from bench.rollout.parts import NoCache, group_assignment, number_prompts, tokenizer
from services.common.runspec.rollout import RolloutSpec
from services.rollout.calls.outside import AddressPolicy
from services.rollout.calls.pool import CallPool
from services.rollout.data.prompts import Prompt
from services.rollout.engines.fake import FakeEngine
from services.rollout.rewards.scorer import Scorer
from services.rollout.sampling.group import GroupServices
from services.rollout.sampling.sampler import Failure, GroupSampler
from services.rollout.sampling.samples import Sample
from services.rollout.workflows.base import SingleTurn
from services.wire.workers import GroupAssignment

GROUP_SIZE = 16


class _Length:
    def __init__(self, tokens: int) -> None:
        self._tokens = tokens

    def length(self, seed: int) -> int:
        return self._tokens


class _Outcome:
    def __init__(self) -> None:
        self.count = 0
        self.changed = asyncio.Event()

    async def publish(
        self, assignment: GroupAssignment, prompt: Prompt, samples: list[Sample]
    ) -> None:
        self.count += len(samples)
        self.changed.set()

    async def report(self, failures: Sequence[Failure]) -> None:
        raise RuntimeError(failures[0][1].message)


async def measure(groups: int, tokens: int, profile: cProfile.Profile | None) -> dict[str, float]:
    """Returns the CPU seconds of this process and the elapsed seconds per response."""
    spec = RolloutSpec(
        group_size=GROUP_SIZE,
        max_response_tokens=tokens,
        max_running_samples=4096,
        rewards=[{"name": f"{ADDITION}:reward"}],
    )
    prompts = number_prompts({"answer": "7"})
    engine = FakeEngine(
        max_running=4096,
        step_seconds=lambda _: 1e-4,
        lengths=_Length(tokens),
        vocab_size=258,
    )
    outcome = _Outcome()
    async with (
        CallPool(spec.reward_concurrency) as pool,
        Scorer.open(
            spec.rewards, pool, AddressPolicy(), concurrency=spec.reward_concurrency
        ) as scorer,
        asyncio.TaskGroup() as tasks,
    ):
        await asyncio.gather(*[scorer.check() for _ in range(spec.reward_concurrency)])
        tools = GroupServices(
            engine=engine, tokenizer=tokenizer(), workflow=SingleTurn(), reward=scorer, calls=pool
        )
        decoding = tasks.create_task(engine.run())
        async with GroupSampler(
            prompts, tools, spec, publisher=outcome, cache=NoCache(), report_failures=outcome.report
        ) as sampler:
            wall, cpu = time.perf_counter(), time.process_time()
            if profile is not None:
                profile.enable()
            sampler.start([group_assignment(index, size=GROUP_SIZE) for index in range(groups)])
            while outcome.count < groups * GROUP_SIZE:
                await outcome.changed.wait()
                outcome.changed.clear()
            if profile is not None:
                profile.disable()
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        decoding.cancel()
    count = groups * GROUP_SIZE
    return {
        "responses": count,
        "cpu_us_per_response": round(1e6 * cpu / count, 1),
        "wall_us_per_response": round(1e6 * wall / count, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--groups", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=29)
    parser.add_argument("--profile", action="store_true", help="also print where the time goes")
    parser.add_argument("--out", type=Path, default=Path("bench/results/rollout-short.json"))
    arguments = parser.parse_args()
    profile = cProfile.Profile(time.process_time) if arguments.profile else None
    found: dict[str, Any] = asyncio.run(measure(arguments.groups, arguments.tokens, profile))
    if profile is not None:
        stats = pstats.Stats(profile)
        stats.sort_stats("tottime").print_stats(45)
        stats.sort_stats("cumtime").print_stats(60)
        return
    report_to(arguments.out, found)


if __name__ == "__main__":
    main()
