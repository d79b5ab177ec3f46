"""Interrupts a thousand requests of one replica and resumes them on another one.

Usage: python -m bench.rollout.interruption [--groups 140] [--out FILE.json]

Real: two replicas with the torch engine on a tiny model, group samplers, and a transferqueue in a
separate process. Simulated: the controller, which dispatches the interrupted groups again as soon
as they are reported. On a machine with other load, use the CPU time: ``resumed_cpu_s``.
"""

import argparse
import asyncio
import os
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bench.report import report_to
from bench.rollout.parts import (
    CountedEngine,
    group_assignment,
    no_reward,
    number_prompts,
    queue_process,
    tiny_engine,
    tokenizer,
)
from services.common.runspec.rollout import RolloutSpec
from services.rollout.calls.pool import CallPool
from services.rollout.data.prompts import Prompt
from services.rollout.sampling.group import GroupServices
from services.rollout.sampling.progress_cache import TransferQueueCache
from services.rollout.sampling.sampler import Failure, GroupSampler
from services.rollout.sampling.samples import Sample
from services.rollout.workflows.base import SingleTurn
from services.wire.data.client import DataClient
from services.wire.transferqueue.client import TransferQueueClient
from services.wire.workers import GroupAssignment

GROUP_SIZE = 8
MAX_TOKENS = 400
PARTIAL = "run/partial"
ABORTED = 3
"""Finish code of an aborted turn; see ``services.rollout.sampling.progress_cache``."""


class Outcome:
    """Results of the groups of one replica."""

    def __init__(self) -> None:
        self.published: dict[str, list[Sample]] = {}
        self.interrupted: list[str] = []
        self.changed = asyncio.Event()

    async def publish(self, assignment: GroupAssignment, _: Prompt, samples: list[Sample]) -> None:
        self.published[assignment.group_id] = samples
        self.changed.set()

    async def report(self, failures: Sequence[Failure]) -> None:
        assert all(error.reason == "interrupted" for _, error in failures), failures
        self.interrupted += [assignment.group_id for assignment, _ in failures]


@asynccontextmanager
async def replica(address: str) -> AsyncIterator[tuple[GroupSampler, CountedEngine, Outcome]]:
    """Yields a replica as ``services.rollout`` builds it."""
    outcome, engine = Outcome(), tiny_engine(max_running=GROUP_SIZE * 1024)
    spec = RolloutSpec(
        group_size=GROUP_SIZE,
        max_response_tokens=MAX_TOKENS,
        max_running_samples=GROUP_SIZE * 1024,
        partial_rollout=True,
        rewards=[{"name": "none"}],  # type: ignore[arg-type]
    )
    async with (
        CallPool(1) as calls,
        DataClient.connect(address) as client,
        TransferQueueClient.connect(address) as metadata,
        asyncio.TaskGroup() as tasks,
    ):
        tools = GroupServices(
            engine=engine,
            tokenizer=tokenizer(),
            workflow=SingleTurn(),
            reward=no_reward(),
            calls=calls,
        )
        cache = TransferQueueCache(PARTIAL, data=client, metadata=metadata)
        decoding = tasks.create_task(engine.run())
        async with GroupSampler(
            number_prompts(),
            tools,
            spec,
            publisher=outcome,
            cache=cache,
            report_failures=outcome.report,
        ) as sampler:
            yield sampler, engine, outcome
        decoding.cancel()


async def measure(address: str, num_groups: int, num_decoded: int) -> dict[str, Any]:
    """Measures one interruption."""
    groups = [group_assignment(index, size=GROUP_SIZE) for index in range(num_groups)]
    num_requests = num_groups * GROUP_SIZE
    async with TransferQueueClient.connect(address) as metadata:
        await metadata.create_partition(PARTIAL, required_fields=())
        async with (
            replica(address) as (first, one, before),
            replica(address) as (second, two, _),
        ):
            first.start(groups)
            while one.stats().tokens_total < num_decoded * num_requests:
                await asyncio.sleep(0.01)
            step_s = await step_seconds(one)
            began, began_cpu = time.monotonic(), time.process_time()
            await first.interrupt()
            cached_s = time.monotonic() - began
            cpu_s = time.process_time() - began_cpu
            sampled = one.stats().tokens_total
            kept, num_cut = await tokens_kept(address)
            handed, handed_cpu = time.monotonic(), time.process_time()
            second.start(
                [replace(g, attempt=2) for g in groups if g.group_id in before.interrupted]
            )
            while two.num_requests < num_cut:
                await asyncio.sleep(0.002)
            accepted_s = time.monotonic() - handed
            cpu_s += time.process_time() - handed_cpu
            while two.stats().tokens_total < 1:
                await asyncio.sleep(0.002)
            first_token_s = time.monotonic() - handed
        await metadata.drop_partition(PARTIAL)
    return {
        "requests_interrupted": num_cut,
        "tokens_sampled": sampled,
        "tokens_kept": kept + finished_tokens(before),
        "decode_step_s": round(step_s, 3),
        "cached_s": round(cached_s, 3),
        "accepted_by_other_replica_s": round(accepted_s, 3),
        "resumed_s": round(cached_s + accepted_s, 3),
        "resumed_cpu_s": round(cpu_s, 3),
        "decoding_again_s": round(cached_s + first_token_s, 3),
    }


async def step_seconds(engine: CountedEngine) -> float:
    """Returns the time of a decode step with all requests running."""
    before, began = engine.stats().tokens_total, time.monotonic()
    while engine.stats().tokens_total == before:
        await asyncio.sleep(0.001)
    return time.monotonic() - began


def finished_tokens(outcome: Outcome) -> int:
    """Returns the tokens of the groups that ended before the interruption."""
    samples = [sample for samples in outcome.published.values() for sample in samples]
    return sum(len(sample.response_ids) for sample in samples)


async def tokens_kept(address: str) -> tuple[int, int]:
    """Returns the tokens in the partial partition, and the number of aborted responses."""
    async with (
        DataClient.connect(address) as data,
        TransferQueueClient.connect(address) as metadata,
    ):
        meta = await metadata.get_batch(PARTIAL)
        rows = await data.get(meta, ["response_ids", "turns"])
        finish_codes = rows["turns"].values[:, 3]
        return int(rows["response_ids"].lengths.sum()), int((finish_codes == ABORTED).sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--groups", type=int, default=140, help="of eight requests")
    parser.add_argument(
        "--tokens", type=int, default=20, help="per request before the interruption"
    )
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("bench/results/rollout-interruption.json"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with queue_process() as address:
        runs = [
            asyncio.run(measure(address, arguments.groups, arguments.tokens))
            for _ in range(arguments.repetitions)
        ]
    result = {
        "resumed_s_median": statistics.median(run["resumed_s"] for run in runs),
        "resumed_s_max": max(run["resumed_s"] for run in runs),
        "resumed_cpu_s_median": statistics.median(run["resumed_cpu_s"] for run in runs),
        "cores_wanted_by_others": round(os.getloadavg()[0], 1),
        "all_tokens_kept": all(run["tokens_kept"] == run["tokens_sampled"] for run in runs),
        "runs": runs,
    }
    report_to(arguments.out, result)


if __name__ == "__main__":
    main()
