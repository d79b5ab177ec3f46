"""Finished and unfinished groups in a real transferqueue."""

import json
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from services.common.fields import ROLLOUT_FIELDS
from services.common.models.tokenizer import load_tokenizer
from services.common.runspec.loader import parse_spec
from services.common.runspec.run import ModelSpec
from services.rollout.data.prompts import Prompt
from services.rollout.failures import GroupError
from services.rollout.rewards.base import Score
from services.rollout.sampling.progress_cache import (
    GroupProgress,
    MemberProgress,
    TransferQueueCache,
)
from services.rollout.sampling.publisher import GroupPublisher
from services.rollout.sampling.sample import Sample
from services.rollout.sampling.sample_recorder import SampleRecorder
from services.rollout.workflows.turns import Turn
from services.transferqueue.__main__ import transferqueue
from services.transferqueue.settings import TransferQueueSettings
from services.wire.data.client import DataClient
from services.wire.transferqueue.client import TransferQueueClient
from services.wire.transferqueue.types import SampleRecordQuery
from services.wire.workers import GroupAssignment
from tests.helpers.cli import REPOSITORY
from tests.helpers.controllers import SPEC

TRAIN, PARTIAL = "run/train", "run/partial"
SAMPLED = Turn(
    token_ids=(5, 6, 7),
    logprobs=(-0.5, -1.5, -2.0),
    version_runs=((3, 1), (4, 2)),
    finish_reason="stop",
)
OBSERVED = Turn(token_ids=(8, 9), logprobs=(0.0, 0.0), version_runs=((-1, 2),), finish_reason=None)
CUT = Turn(token_ids=(4,), logprobs=(-3.0,), version_runs=((4, 1),), finish_reason="aborted")
PROMPT = Prompt(token_ids=(1, 2), text="p", answer="a", row={}, data_source="test")


def assignment(group_id: str, attempt: int = 1) -> GroupAssignment:
    return GroupAssignment(
        group_id=group_id,
        attempt=attempt,
        split="train",
        row=0,
        partition_id=TRAIN,
        members=(0, 1),
        seeds=(1, 2),
        temperatures=(1.0, 0.0),
    )


@pytest.fixture
async def address(tmp_path: Path) -> AsyncIterator[str]:
    settings = TransferQueueSettings(capacity_bytes=16 << 20, sample_folder=tmp_path)
    async with transferqueue(settings) as bound:
        yield bound


@pytest.fixture
async def metadata(address: str) -> AsyncIterator[TransferQueueClient]:
    async with TransferQueueClient.connect(address) as client:
        await client.create_partition(TRAIN, required_fields=ROLLOUT_FIELDS)
        await client.create_partition(PARTIAL, required_fields=())
        yield client


@pytest.fixture
async def data(address: str, metadata: TransferQueueClient) -> AsyncIterator[DataClient]:
    async with DataClient.connect(address) as client:
        yield client


async def test_a_published_group_is_complete_and_comes_once(
    data: DataClient, metadata: TransferQueueClient
) -> None:
    samples = [
        Sample(
            member=member,
            prompt_ids=PROMPT.token_ids,
            turns=(SAMPLED, OBSERVED, SAMPLED)[: 1 + 2 * member],
            score=Score(float(member), {"right": float(member)}),
            finish_reason="stop",
            is_greedy=member == 1,
        )
        for member in range(2)
    ]
    publisher = GroupPublisher(data)
    await publisher.publish(assignment("g"), PROMPT, samples)
    with pytest.raises(GroupError, match="immutable"):
        await publisher.publish(assignment("g"), PROMPT, samples)
    meta = await metadata.get_batch(TRAIN)
    assert meta.keys == ("g.0", "g.1")
    text = (REPOSITORY / "docs/data-plane.md").read_text()
    documented_tags = re.findall(r"^\| `(\w+)` \| (?:text|int|float): ", text, re.MULTILINE)
    assert {*meta.tags} == {*documented_tags} - {"answer"}
    assert meta.tag("terms") == ('{"right": 0.0}', '{"right": 1.0}')
    assert meta.tag("num_segments") == (2, 4)
    assert (meta.tag("v_min"), meta.tag("v_max"), meta.tag("v_first")) == ((3, 3), (4, 4), (3, 3))
    fields = await data.get(meta, ROLLOUT_FIELDS)
    assert fields["prompt_ids"].unbind()[1].tolist() == [1, 2]
    assert fields["response_ids"].unbind()[1].tolist() == [5, 6, 7, 8, 9, 5, 6, 7]
    mask = [True] * 3 + [False] * 2 + [True] * 3
    assert fields["response_mask"].unbind()[1].tolist() == mask
    runs = [[3, 1], [4, 2], [-1, 2], [3, 1], [4, 2]]
    assert fields["version_runs"].unbind()[1].tolist() == runs
    assert fields["rewards"].values.tolist() == [0.0, 1.0]


async def test_a_group_that_never_fits_counts_as_a_failure_of_its_prompt(
    data: DataClient, metadata: TransferQueueClient
) -> None:
    await metadata.create_partition("small/train", required_fields=(), quota_bytes=100)
    sample = Sample(
        member=0,
        prompt_ids=PROMPT.token_ids,
        turns=(SAMPLED,) * 5,
        score=Score(0.0),
        finish_reason="stop",
        is_greedy=False,
    )
    large_assignment = replace(assignment("g"), partition_id="small/train")
    with pytest.raises(GroupError, match=r"exceeds the whole quota of small, 100 bytes") as caught:
        await GroupPublisher(data).publish(large_assignment, PROMPT, [sample])
    # A group that only waited too long has another reason and is generated again, any number of times.
    assert caught.value.reason == "publish_refused"


async def read(metadata: TransferQueueClient, **query: Any) -> list[dict[str, Any]]:
    sample_record_query = SampleRecordQuery(with_turns=True, with_tokens=True, **query)
    content = b"".join(
        [lines async for lines in metadata.read_sample_records("run", sample_record_query)]
    )
    return [json.loads(line) for line in content.splitlines()]


async def test_a_recorded_group_is_readable_after_its_release(
    data: DataClient, metadata: TransferQueueClient
) -> None:
    spec = parse_spec(SPEC | {"samples": {"groups_per_step": 4}})
    tokenizer = load_tokenizer(ModelSpec(path="tiny:qwen2-0.4m", tokenizer="chars:0123456789"))
    publisher = GroupPublisher(
        data, sample_recorder=SampleRecorder(data, spec, tokenizer, lambda split: 10)
    )
    await metadata.record_samples("run", max_bytes=1 << 20, max_steps=0)
    samples = [
        Sample(
            member=member,
            prompt_ids=PROMPT.token_ids,
            turns=(SAMPLED, OBSERVED),
            score=Score(float(member), {"right": float(member)}),
            finish_reason=finish_reason,
            is_greedy=False,
        )
        for member, finish_reason in enumerate(("stop", "failed"))
    ]
    await publisher.publish(assignment("g"), PROMPT, samples)
    await metadata.release(TRAIN, ["g.0", "g.1"])
    (scored,) = await read(metadata, finish_reason="stop")
    (failed,) = await read(metadata, finish_reason="failed")
    assert (scored["reward"], scored["terms"]) == (0.0, {"right": 0.0})
    assert failed["reward"] is None
    assert (scored["prompt"], scored["response"], scored["answer"]) == ("0", "34567", "a")
    assert [turn["text"] for turn in scored["turns"]] == ["345", "67"]
    assert scored["tokens"]["weight_versions"] == [3, 4, 4, -1, -1]
    assert scored["tokens"]["texts"] == ["3", "4", "5", "6", "7"]
    for key in ("g.0/trained", "g.1/trained"):
        columns = {name: [torch.ones(5)] for name in ("advantages", "trained_logprobs")}
        record = torch.frombuffer(bytearray(b'{"step": 3, "staleness": 1}'), dtype=torch.uint8)
        columns |= {"loss_mask": [torch.ones(5) > 0], "training_record": [record]}
        await data.put("run/records", [key], columns)
    assert {line["id"] for line in await read(metadata, step=3)} == {"g.0", "g.1"}
    # At the end of a run, the last puts are stored as records, and the queue keeps nothing.
    await metadata.drop_partition("run/records")
    assert "run/records" not in {
        partition.partition_id for partition in (await metadata.stats()).partitions
    }
    assert len(await read(metadata)) == 2
    await metadata.delete_sample_records("run")
    assert await read(metadata) == []


async def test_a_group_trains_if_it_cannot_be_recorded(
    data: DataClient, metadata: TransferQueueClient
) -> None:
    tokenizer = load_tokenizer(ModelSpec(path="tiny:qwen2-0.4m", tokenizer="chars:0123456789"))
    sample_recorder = SampleRecorder(data, parse_spec(SPEC), tokenizer, lambda split: 10)
    sample = Sample(
        member=0,
        prompt_ids=PROMPT.token_ids,
        turns=(SAMPLED,),
        score=Score(1.0),
        finish_reason="stop",
        is_greedy=False,
    )
    # The samples of this run are not recorded.
    await GroupPublisher(data, sample_recorder=sample_recorder).publish(
        assignment("g"), PROMPT, [sample]
    )
    assert (await metadata.get_batch(TRAIN)).keys == ("g.0",)


async def test_cached_progress_is_found_by_another_replica_until_it_is_forgotten(
    data: DataClient, metadata: TransferQueueClient
) -> None:
    first, second = (TransferQueueCache(PARTIAL, data=data, metadata=metadata) for _ in range(2))
    early: GroupProgress = {1: MemberProgress(num_failed_scores=0, turns=(CUT,))}
    late: GroupProgress = {
        0: MemberProgress(num_failed_scores=2, turns=(SAMPLED, OBSERVED, CUT)),
        1: MemberProgress(num_failed_scores=0, turns=(SAMPLED,), score=Score(0.1, {"right": 0.2})),
    }
    assert await first.load({"g": 1}) == {}
    for _ in range(3):
        await first.save({"g": early, "h": early}, {"g": 1, "h": 1}, is_last=False)
    await first.save({"g": late}, {"g": 1}, is_last=True)
    assert await second.load({"g": 1}) == {"g": late}
    assert await second.load({"h": 1}) == {"h": early}
    assert len((await metadata.get_batch(PARTIAL)).keys) == 3
    await second.save({"g": early}, {"g": 2}, is_last=False)
    assert await first.load({"g": 1}) == {"g": late | early}
    await second.delete_progress("g", (0, 1))
    assert await first.load({"g": 1}) == {}
    assert await first.load({"h": 1}) == {"h": early}


async def test_progress_of_an_attempt_before_a_new_beginning_is_never_resumed(
    data: DataClient, metadata: TransferQueueClient
) -> None:
    first, late, again = (
        TransferQueueCache(PARTIAL, data=data, metadata=metadata) for _ in range(3)
    )
    old: GroupProgress = {0: MemberProgress(num_failed_scores=0, turns=(CUT,))}
    new: GroupProgress = {0: MemberProgress(num_failed_scores=0, turns=(SAMPLED,))}
    for _ in range(3):
        await first.save({"g": old}, {"g": 1}, is_last=False)
    assert await again.load({"g": 2}) == {}
    await again.save({"g": new}, {"g": 2}, is_last=False)
    # A replica that was silent for a while still works on the first attempt.
    for _ in range(8):
        await late.save({"g": old}, {"g": 1}, is_last=False)
        assert (await again.load({"g": 2})).get("g", new) == new
    await again.delete_progress("g", (0,))
    assert (await metadata.get_batch(PARTIAL)).num_keys == 0
