"""What keeping samples costs, and how fast they are read: ``python -m bench.samples [--smoke]``.

Groups of 8 responses of 2,048 tokens are put as rollouts put them, into a transferqueue of this process;
with the default ``samples`` and 64 prompts a step, one in eight is kept. Reports the processor
time of putting them, with and without keeping, and the time of a page of what was kept.
"""

import argparse
import asyncio
import json
import random
import tempfile
import time
from pathlib import Path

import torch

from services.common.fields import ROLLOUT_FIELDS
from services.common.models.tokenizer import load_tokenizer
from services.common.spec.loader import parse_spec
from services.common.spec.model import ModelSpec
from services.rollout.client import GroupAssignment
from services.rollout.kept import SampleTeller
from services.rollout.prompts import Prompt
from services.rollout.publish import GroupPublisher
from services.rollout.rewards.base import Score
from services.rollout.samples import Sample
from services.rollout.workflows.turns import Turn
from services.transferqueue.__main__ import transferqueue
from services.transferqueue.client import TransferQueueClient
from services.transferqueue.dataclient import DataClient
from services.transferqueue.facts import KeptSampleQuery
from services.transferqueue.settings import TransferQueueSettings

MEMBERS, TOKENS, PROMPTS_PER_STEP = 8, 2048, 64
SPEC = {
    "name": "bench",
    "model": {"path": "tiny:qwen2-0.4m"},
    "data": {"train": {"source": "jsonl", "path": "prompts.jsonl"}},
    "rollout": {"group_size": MEMBERS, "rewards": [{"name": "exact_match"}]},
    "trainer": {"steps": 1, "prompts_per_step": PROMPTS_PER_STEP},
}


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


async def put_all(
    publisher: GroupPublisher, queue: TransferQueueClient, num_groups: int
) -> tuple[float, float]:
    """Processor and wall seconds of putting groups, this process's transferqueue included."""
    prompt = Prompt(token_ids=(2,), text="p", answer="42", row={}, data_source="bench")
    templates = [samples_of(number) for number in range(4)]
    cpu, wall = time.process_time(), time.perf_counter()
    for number in range(num_groups):
        group_id = f"g{number:08d}"
        assignment = GroupAssignment(
            group_id=group_id,
            attempt=1,
            split="train",
            row=number,
            partition_id="run_1/train",
            members=tuple(range(MEMBERS)),
            seeds=(0,) * MEMBERS,
            temperatures=(1.0,) * MEMBERS,
        )
        await publisher.publish(assignment, prompt, templates[number % 4])
        await queue.release("run_1/train", [f"{group_id}.{member}" for member in range(MEMBERS)])
    return time.process_time() - cpu, time.perf_counter() - wall


async def pages(queue: TransferQueueClient) -> dict[str, float]:
    """Milliseconds of the first page in each order, of a search, and of one whole sample."""
    asked = {
        "newest": KeptSampleQuery(limit=50, excerpt=300),
        "worst": KeptSampleQuery(limit=50, excerpt=300, order_by="worst"),
        "search": KeptSampleQuery(limit=50, excerpt=300, text="not to be found"),
        "whole": KeptSampleQuery(limit=1, with_turns=True, with_tokens=True),
    }
    found: dict[str, float] = {}
    for name, query in asked.items():
        begin = time.perf_counter()
        async for _ in queue.read_samples("run_1", query):
            pass
        found[name] = round((time.perf_counter() - begin) * 1000, 1)
    return found


async def measure(num_groups: int) -> dict[str, object]:
    tokenizer = load_tokenizer(ModelSpec(path="tiny:qwen2-0.4m"))
    with tempfile.TemporaryDirectory() as folder:
        settings = TransferQueueSettings(capacity_bytes=256 << 20, kept_folder=Path(folder))
        async with (
            transferqueue(settings) as address,
            TransferQueueClient.connect(address) as queue,
            DataClient.connect(address) as data,
        ):
            await queue.create_partition("run_1/train", required_fields=ROLLOUT_FIELDS)
            await queue.keep_samples("run_1", max_bytes=4 << 30, max_steps=0)
            teller = SampleTeller(data, parse_spec(SPEC), tokenizer, lambda split: 1)
            await put_all(GroupPublisher(data), queue, 4)  # warms up
            without, _ = await put_all(GroupPublisher(data), queue, num_groups)
            cpu, wall = await put_all(GroupPublisher(data, teller=teller), queue, num_groups)
            times = await pages(queue)
            size = sum(path.stat().st_size for path in Path(folder).iterdir())
    tokens = num_groups * MEMBERS * TOKENS
    return {
        "groups": num_groups,
        "tokens": tokens,
        "cpu_s_without": round(without, 2),
        "cpu_s_with": round(cpu, 2),
        "wall_s_with": round(wall, 2),
        "extra_cpu_us_per_1000_tokens": round((cpu - without) / tokens * 1e9, 1),
        "tokens_per_s_at_2_percent": round(0.02 * tokens / max(cpu - without, 1e-9)),
        "kept_bytes": size,
        "page_ms": times,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, default=10_000)
    parser.add_argument("--smoke", action="store_true", help="200 groups; writes nothing")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = asyncio.run(measure(200 if arguments.smoke else arguments.groups))
    print(json.dumps(found, indent=2))
    if not arguments.smoke:
        path = Path(__file__).parent / "results" / "samples.json"
        path.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
