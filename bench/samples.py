"""Measures the cost of keeping samples and of reading them: ``python -m bench.samples [--smoke]``.

Both sides are measured in CPU time, alternating, so that other load on the machine disturbs them
equally:

rollout     10,000 groups of 8 responses of 2,048 tokens are put as rollouts put them, with and
            without keeping; with the default ``samples`` and 64 prompts per step, one in eight is
            kept. The additional time per token is compared with the time per token of a rollout
            process with vLLM on an H200 (``bench/results/rollout-vllm-h200.json``), the lowest
            that was measured.
controller  the runs of ``bench.controller throughput``, with and without keeping.

Bars: neither adds more than 2 %. The transferqueue's own share is reported next to them.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import torch

from bench.controller.stage import Stage, stage
from bench.dataplane.sides import service
from bench.report import report_to
from services.common.fields import ROLLOUT_FIELDS
from services.common.models.tokenizer import load_tokenizer
from services.common.runspec.loader import parse_spec
from services.common.runspec.run import ModelSpec
from services.rollout.data.prompts import Prompt
from services.rollout.rewards.base import Score
from services.rollout.sampling.publisher import GroupPublisher
from services.rollout.sampling.sample import Sample
from services.rollout.sampling.sample_recorder import SampleRecorder
from services.rollout.workflows.turns import Turn
from services.wire.data.client import DataClient
from services.wire.transferqueue.client import TransferQueueClient
from services.wire.transferqueue.types import SampleRecordQuery
from services.wire.workers import GroupAssignment

RESULTS = Path(__file__).parent / "results"
BAR = 0.02
MEMBERS, TOKENS, PROMPTS_PER_STEP = 8, 2048, 64
SPEC = {
    "name": "bench",
    "model": {"path": "tiny:qwen2-0.4m"},
    "data": {"train": {"source": "jsonl", "path": "prompts.jsonl"}},
    "rollout": {"group_size": MEMBERS, "rewards": [{"name": "exact_match"}]},
    "trainer": {"steps": 1, "prompts_per_step": PROMPTS_PER_STEP},
}
OFF = {"groups_per_step": 0, "heldout_prompts": 0}


def samples_of(number: int) -> list[Sample]:
    draw = random.Random(number)
    turn = [
        Turn(
            token_ids=tuple(draw.choices(range(2, 258), k=TOKENS)),
            logprobs=tuple(-draw.random() for _ in range(TOKENS)),
            version_runs=((number, TOKENS),),
            finish_reason="stop",
        )
        for _ in range(MEMBERS)
    ]
    return [
        Sample(
            member=member,
            prompt_ids=tuple(range(2, 130)),
            turns=(turn[member],),
            score=Score(draw.random(), {"right": 1.0}),
            finish_reason="stop",
            is_greedy=False,
        )
        for member in range(MEMBERS)
    ]


class Putting:
    """Puts groups, and measures the CPU time of this process and of the transferqueue."""

    def __init__(self, queue: TransferQueueClient, child: psutil.Process) -> None:
        self._queue = queue
        self._child = child
        self._templates = [samples_of(number) for number in range(4)]
        self._number = 0

    async def put(self, publisher: GroupPublisher, num_groups: int) -> tuple[float, float]:
        """Returns the CPU seconds of puts, here and in the transferqueue, until all data is written."""
        prompt = Prompt(token_ids=(2,), text="p", answer="42", row={}, data_source="bench")
        rollout_s, child_s = time.process_time(), _cpu_s(self._child)
        for _ in range(num_groups):
            self._number += 1
            group_id = f"g{self._number:08d}"
            assignment = GroupAssignment(
                group_id=group_id,
                attempt=1,
                split="train",
                row=self._number,
                partition_id="run_1/train",
                members=tuple(range(MEMBERS)),
                seeds=(0,) * MEMBERS,
                temperatures=(1.0,) * MEMBERS,
            )
            await publisher.publish(assignment, prompt, self._templates[self._number % 4])
            keys = [f"{group_id}.{member}" for member in range(MEMBERS)]
            await self._queue.release("run_1/train", keys)
        async for _ in self._queue.read_sample_records(
            "run_1", SampleRecordQuery(limit=1, excerpt=0)
        ):
            pass  # what is kept is written before it is read
        return time.process_time() - rollout_s, _cpu_s(self._child) - child_s


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


async def pages(queue: TransferQueueClient) -> dict[str, float]:
    """Returns milliseconds of the first page in each order, of a search, and of one whole sample."""
    queries = {
        "newest": SampleRecordQuery(limit=50, excerpt=300),
        "worst": SampleRecordQuery(limit=50, excerpt=300, order_by="worst"),
        "search": SampleRecordQuery(limit=50, excerpt=300, text="not to be found"),
        "whole": SampleRecordQuery(limit=1, with_turns=True, with_tokens=True),
    }
    result: dict[str, float] = {}
    for name, query in queries.items():
        begin = time.perf_counter()
        async for _ in queue.read_sample_records("run_1", query):
            pass
        result[name] = round((time.perf_counter() - begin) * 1000, 1)
    return result


async def rollout(num_groups: int, rounds: int) -> dict[str, object]:
    """Measures the cost of keeping per token, and the time of pages."""
    tokenizer = load_tokenizer(ModelSpec(path="tiny:qwen2-0.4m"))
    with (
        tempfile.TemporaryDirectory() as folder,
        service(capacity_bytes=256 << 20, sample_folder=folder) as address,
    ):
        child = _child("services.transferqueue")
        async with (
            TransferQueueClient.connect(address) as queue,
            DataClient.connect(address) as data,
        ):
            await queue.create_partition("run_1/train", required_fields=ROLLOUT_FIELDS)
            await queue.record_samples("run_1", max_bytes=4 << 30, max_steps=0)
            sample_recorder = SampleRecorder(data, parse_spec(SPEC), tokenizer, lambda split: 1)
            without, keeping = (
                GroupPublisher(data),
                GroupPublisher(data, sample_recorder=sample_recorder),
            )
            putting = Putting(queue, child)
            for publisher in (without, keeping):  # warms up
                await putting.put(publisher, 16)
            size = num_groups // rounds
            pairs = []
            for number in range(rounds):
                sides = {}
                for publisher in (without, keeping) if number % 2 else (keeping, without):
                    sides[publisher is keeping] = await putting.put(publisher, size)
                pairs.append((sides[False], sides[True]))
            times = await pages(queue)
        sample_bytes = sum(path.stat().st_size for path in Path(folder).iterdir())
    a_token = 1e6 / (size * MEMBERS * TOKENS)
    extra = [a_token * (after[0] - before[0]) for before, after in pairs]
    put_us = a_token * statistics.median(before[0] for before, _ in pairs)
    there = [a_token * (after[1] - before[1]) for before, after in pairs]
    content = json.loads((RESULTS / "rollout-vllm-h200.json").read_text(encoding="utf-8"))
    sampled = content["adapter_cpu_us_per_token"]
    return {
        "groups": size * rounds,
        "rounds": rounds,
        "extra_us_per_token": _spread(extra),
        "put_us_per_token": round(put_us, 4),
        "sampled_us_per_token": sampled,
        "ratio": round(statistics.median(extra) / (sampled + put_us), 5),
        "transferqueue_extra_us_per_token": _spread(there),
        "sample_bytes": sample_bytes,
        "page_ms": times,
    }


async def controller(steps: int, batch: int, rounds: int) -> dict[str, object]:
    """Measures the controller's CPU time per group, with and without keeping."""
    pairs = []
    async with stage() as system:
        await _a_group(system, steps, batch, is_kept=False)  # warms up
        for number in range(rounds):
            sides = {}
            for is_kept in (False, True) if number % 2 else (True, False):
                sides[is_kept] = await _a_group(system, steps, batch, is_kept=is_kept)
            pairs.append((sides[False], sides[True]))
    without = statistics.median(before for before, _ in pairs)
    extra = [after - before for before, after in pairs]
    return {
        "groups": (steps - 1) * batch * rounds,
        "rounds": rounds,
        "us_per_group": round(without, 2),
        "extra_us_per_group": _spread(extra),
        "ratio": round(statistics.median(extra) / without, 5),
    }


async def _a_group(system: Stage, steps: int, batch: int, *, is_kept: bool) -> float:
    """Returns the microseconds per group."""
    samples = {} if is_kept else OFF
    run_id = await system.submit(steps=steps, prompts_per_step=batch, rollouts=8, samples=samples)
    await system.until_step(run_id, 1)
    begin = system.cpu_s()
    await system.until_step(run_id, steps)
    return 1e6 * (system.cpu_s() - begin) / ((steps - 1) * batch)


def _child(module: str) -> psutil.Process:
    """Returns the child process that runs a module."""
    (result,) = (child for child in psutil.Process().children() if module in child.cmdline())
    return result


def _spread(values: Sequence[float]) -> dict[str, float]:
    """Returns the median of the rounds and their quartiles."""
    low, middle, high = statistics.quantiles(values, n=4)
    return {"median": round(middle, 4), "from": round(low, 4), "to": round(high, 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, default=10_000)
    parser.add_argument("--smoke", action="store_true", help="200 groups; writes nothing")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    is_smoke = arguments.smoke
    report = {
        "bar": BAR,
        "members": MEMBERS,
        "tokens": TOKENS,
        "cores": os.cpu_count(),
        "load_average_before": round(os.getloadavg()[0], 2),
        "rollout": asyncio.run(
            rollout(200 if is_smoke else arguments.groups, 4 if is_smoke else 20)
        ),
        "controller": asyncio.run(controller(*((4, 128, 2) if is_smoke else (12, 1024, 9)))),
    }
    report_to(None if is_smoke else RESULTS / "samples.json", report)


if __name__ == "__main__":
    main()
