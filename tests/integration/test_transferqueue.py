"""A transferqueue over real sockets."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import torch

from services.common.errors import (
    AlreadyExistsError,
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
)
from services.transferqueue.__main__ import transferqueue
from services.transferqueue.settings import TransferQueueSettings
from services.wire.data.client import DataClient
from services.wire.data.jagged import Jagged
from services.wire.transferqueue.client import TransferQueueClient
from services.wire.transferqueue.types import AcquireRequest

TRAIN = "run_1/train"
MIB = 1 << 20


@pytest.fixture
async def address() -> AsyncIterator[str]:
    async with transferqueue(TransferQueueSettings(capacity_bytes=16 * MIB)) as bound:
        yield bound


@pytest.fixture
async def metadata(address: str) -> AsyncIterator[TransferQueueClient]:
    async with TransferQueueClient.connect(address) as client:
        await client.create_partition(TRAIN, required_fields=["tokens"])
        yield client


@pytest.fixture(params=[True, False], ids=["shared memory", "network"])
async def data(
    request: pytest.FixtureRequest, address: str, metadata: TransferQueueClient
) -> AsyncIterator[DataClient]:
    async with DataClient.connect(
        address, put_timeout_s=0.1, use_shared_memory=request.param
    ) as client:
        yield client


def rows(*lengths: int) -> list[torch.Tensor]:
    return [torch.arange(length, dtype=torch.int32) + 100 * length for length in lengths]


def group_tags(group_id: str, count: int, version: int = 0) -> dict[str, list[int] | list[str]]:
    return {"group_id": [group_id] * count, "v_min": [version] * count}


async def test_stored_samples_are_read_unchanged(data: DataClient) -> None:
    tokens = rows(3, 0, 5)
    rewards = torch.tensor([0.5, 1.0, -1.0])
    meta = await data.put(
        TRAIN,
        ["g.0", "g.1", "g.2"],
        {"tokens": tokens, "rewards": rewards},
        tags=group_tags("g", 3),
        shared={"prompt_ids": torch.tensor([7, 8, 9], dtype=torch.int32)},
    )
    fetched = await data.get(meta, ["tokens", "rewards", "prompt_ids"])
    assert all(map(torch.equal, fetched["tokens"].unbind(), tokens))
    assert fetched["rewards"].is_scalar
    assert torch.equal(fetched["rewards"].values, rewards)
    assert [row.tolist() for row in fetched["prompt_ids"].unbind()] == [[7, 8, 9]] * 3


async def test_a_watcher_sees_samples_when_their_required_fields_are_present(
    data: DataClient, metadata: TransferQueueClient
) -> None:
    early = await data.put(TRAIN, ["a"], {"other": rows(1)}, tags=group_tags("a", 1))
    await data.put(TRAIN, ["b"], {"tokens": rows(2)}, tags=group_tags("b", 1))
    watch = metadata.watch(TRAIN)
    meta = await anext(watch)
    assert meta.keys == ("b",)
    assert meta.tag("group_id") == ("b",)
    await data.add_fields(early, {"tokens": rows(4)})
    meta = await anext(watch)
    assert meta.keys == ("a",)
    fetched = await data.get(meta, ["other", "tokens"])
    assert torch.equal(fetched["tokens"].values, rows(4)[0])


async def test_a_leased_sample_comes_again_when_its_lease_has_expired(
    data: DataClient, metadata: TransferQueueClient
) -> None:
    request = AcquireRequest(
        partition_id=TRAIN, consumer="train", fields=("tokens",), num_keys=2, group_size=2
    )
    await data.put(TRAIN, ["a", "b"], {"tokens": rows(1, 2)}, tags=group_tags("g", 2))
    await metadata.acquire(replace(request, lease_s=60.0))
    with pytest.raises(DeadlineExceededError):
        await metadata.acquire(request)
    await data.put(TRAIN, ["c", "d"], {"tokens": rows(1, 2)}, tags=group_tags("h", 2))
    batch = await metadata.acquire(replace(request, lease_s=0.1))
    again = await metadata.acquire(replace(request, wait_s=30.0))
    assert again.keys == batch.keys == ("c", "d")
    await metadata.ack(again)
    await metadata.ack(again)
    with pytest.raises(FailedPreconditionError, match="expired"):
        await metadata.ack(batch)


async def test_reading_released_samples_names_what_is_gone(
    data: DataClient, metadata: TransferQueueClient
) -> None:
    meta = await data.put(TRAIN, ["a", "b"], {"tokens": rows(1, 2)}, tags=group_tags("g", 2))
    assert await metadata.release(TRAIN, ["a", "b"]) == 2
    with pytest.raises(NotFoundError, match="released"):
        await data.get(meta, ["tokens"])
    with pytest.raises(NotFoundError) as caught:
        await metadata.get_batch(TRAIN, ["a", "c"])
    assert caught.value.metadata["keys"] == "a,c"
    assert (await metadata.stats()).shards[0].stored_bytes == 0


async def test_a_full_shard_pushes_back_until_something_is_released(
    data: DataClient, metadata: TransferQueueClient
) -> None:
    big = [torch.zeros(10 * MIB, dtype=torch.uint8)]
    await data.put(TRAIN, ["a"], {"tokens": big}, tags=group_tags("a", 1))
    with pytest.raises(ResourceExhaustedError, match="shard-0"):
        await data.put(TRAIN, ["b"], {"tokens": big}, tags=group_tags("b", 1))
    assert (await metadata.get_batch(TRAIN)).keys == ("a",)
    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(
            data.put(TRAIN, ["b"], {"tokens": big}, tags=group_tags("b", 1))
        )
        await metadata.release(TRAIN, ["a"])
    assert waiting.result().keys == ("b",)


async def test_a_full_quota_names_the_run(data: DataClient, metadata: TransferQueueClient) -> None:
    await metadata.create_partition("run_2/train", required_fields=["x"], quota_bytes=MIB)
    values = {"x": [torch.zeros(MIB, dtype=torch.uint8)]}
    await data.put("run_2/train", ["a"], values)
    with pytest.raises(ResourceExhaustedError, match="quota of run_2"):
        await data.put("run_2/train", ["b"], values)


async def test_a_conflicting_put_is_refused_and_leaves_nothing(
    data: DataClient, metadata: TransferQueueClient
) -> None:
    await data.put(TRAIN, ["a"], {"tokens": rows(1)}, tags=group_tags("a", 1))
    used = (await metadata.stats()).shards[0].stored_bytes
    with pytest.raises(InvalidArgumentError, match="float16"):
        await data.put(
            TRAIN, ["b"], {"tokens": [torch.zeros(2, dtype=torch.float16)]}, tags=group_tags("b", 1)
        )
    with pytest.raises(AlreadyExistsError, match="tokens"):
        await data.put(TRAIN, ["a"], {"tokens": rows(1)}, tags=group_tags("a", 1))
    assert (await metadata.stats()).shards[0].stored_bytes == used
    assert (await metadata.get_batch(TRAIN)).keys == ("a",)


async def test_large_batches_arrive_whole(data: DataClient) -> None:
    values = torch.arange(2_500_000, dtype=torch.float32)
    lengths = torch.tensor([1_000_000, 250_000, 1_250_000])
    meta = await data.put(
        TRAIN, ["a", "b", "c"], {"tokens": Jagged(values, lengths)}, tags=group_tags("g", 3)
    )
    assert torch.equal((await data.get(meta, ["tokens"]))["tokens"].values, values)
    some = await data.get(meta.select(["c", "a"]), ["tokens"])
    assert torch.equal(some["tokens"].values, torch.cat([values[1_250_000:], values[:1_000_000]]))
