"""Finished and unfinished groups in a real transferqueue."""

from collections.abc import AsyncIterator

import pytest

from services.common.fields import ROLLOUT_FIELDS, TAGS
from services.rollout.client import GroupAssignment
from services.rollout.failures import GroupError
from services.rollout.partial import GroupProgress, MemberProgress
from services.rollout.progress_cache import TransferQueueCache
from services.rollout.prompts import Prompt
from services.rollout.publish import GroupPublisher
from services.rollout.samples import Sample
from services.rollout.workflows.turns import Turn
from services.transferqueue.__main__ import transferqueue
from services.transferqueue.client import TransferQueueClient
from services.transferqueue.dataclient import DataClient
from services.transferqueue.settings import TransferQueueSettings

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
async def address() -> AsyncIterator[str]:
    async with transferqueue(TransferQueueSettings(capacity_bytes=16 << 20)) as bound:
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
            reward=float(member),
            finish_reason="stop",
            is_greedy=member == 1,
        )
        for member in range(2)
    ]
    publisher = GroupPublisher(data)
    await publisher.publish(assignment("g"), PROMPT, samples)
    with pytest.raises(GroupError, match="never change"):
        await publisher.publish(assignment("g"), PROMPT, samples)
    meta = await metadata.get_batch(TRAIN)
    assert meta.keys == ("g.0", "g.1")
    assert set(meta.tags) == set(TAGS) - {"answer"}
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


async def test_cached_progress_is_found_by_another_replica_until_it_is_forgotten(
    data: DataClient, metadata: TransferQueueClient
) -> None:
    one, other = (TransferQueueCache(PARTIAL, data=data, metadata=metadata) for _ in range(2))
    early: GroupProgress = {1: MemberProgress(num_failed_scores=0, turns=(CUT,))}
    late: GroupProgress = {
        0: MemberProgress(num_failed_scores=2, turns=(SAMPLED, OBSERVED, CUT)),
        1: MemberProgress(num_failed_scores=0, turns=(SAMPLED,), reward=0.1),
    }
    assert await one.load(["g"]) == {}
    for _ in range(3):
        await one.save({"g": early, "h": early}, is_last=False)
    await one.save({"g": late}, is_last=True)
    assert await other.load(["g"]) == {"g": late}
    assert await other.load(["h"]) == {"h": early}
    assert len((await metadata.get_batch(PARTIAL)).keys) == 3
    await other.save({"g": early}, is_last=False)
    assert await one.load(["g"]) == {"g": late | early}
    await other.forget("g", (0, 1))
    assert await one.load(["g"]) == {}
    assert await one.load(["h"]) == {"h": early}
