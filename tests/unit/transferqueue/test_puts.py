"""Tests of puts through a shard."""

import asyncio

import pytest

from services.common.errors import (
    AbortedError,
    DataLossError,
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    ServiceError,
    UnavailableError,
)
from services.transferqueue.storage.blobs import Arena, BlobStore
from services.transferqueue.storage.dataplane import Writer
from services.wire.batch import BlobRef, FieldColumn, KVBatchMeta
from services.wire.data.encoding import codec

DATA = b"12345678"
CHECKSUMS = (codec.checksum(DATA),)


class FakeIndex:
    """Fake index that records charges and commits, and raises the error that a test sets."""

    def __init__(self) -> None:
        self.charges: dict[str, int] = {}
        self.committed: list[KVBatchMeta] = []
        self.error: ServiceError | None = None
        self.lost_answer: ServiceError | None = None

    async def reserve(
        self, put_id: str, partition_id: str, *, size_bytes: int, wait_s: float
    ) -> None:
        self.charges[put_id] = size_bytes
        if self.lost_answer is not None:
            raise self.lost_answer

    def cancel(self, put_id: str) -> None:
        self.charges.pop(put_id, None)

    async def commit(self, meta: KVBatchMeta, *, put_id: str) -> int:
        if self.error is not None:
            raise self.error
        self.committed.append(meta)
        return len(self.committed)


class Shard:
    def __init__(self) -> None:
        self.index = FakeIndex()
        self.storage = BlobStore(Arena(4096), first_blob_id=5)
        self.puts = Writer("s", self.storage, self.index)

    async def reserve(self, put_id: str = "put", size: int = len(DATA)) -> codec.Granted:
        return await self.puts.reserve(codec.Reserve(put_id, "run/train", (size,), 0.0))

    async def commit(
        self, meta: bytes | None = None, checksums: tuple[int, ...] = CHECKSUMS
    ) -> codec.Committed:
        self.puts.describe(codec.Describe("put", meta or meta_of()))
        return await self.puts.commit(codec.Commit("put", checksums))

    def is_clean(self) -> bool:
        return not self.index.charges and self.storage.used_bytes == 0


def meta_of(*, partition_id: str = "run/train", num_blobs: int = 1) -> bytes:
    column = FieldColumn(
        name="x",
        dtype="uint8",
        row_rank=1,
        tail_shape=(),
        lengths=(8,),
        blob_indexes=(0,),
        offsets=(0,),
    )
    blob = BlobRef(shard_id="s", blob_id=0, size_bytes=len(DATA), checksum=0)
    blobs = (blob,) * num_blobs
    meta = KVBatchMeta(partition_id=partition_id, keys=("k",), fields=(column,), blobs=blobs)
    return meta.to_bytes()


async def test_a_put_is_visible_after_its_commit() -> None:
    shard = Shard()
    granted = await shard.reserve()
    (blob_id,) = granted.blob_ids
    shard.storage.write(blob_id, 0, memoryview(DATA))
    assert shard.index.committed == []
    answer = await shard.commit()
    assert answer.revision == 1
    assert shard.index.charges == {"put": len(DATA)}


async def test_a_small_put_goes_in_one_message() -> None:
    shard = Shard()
    store = codec.Store("put", "run/train", (8,), 0.0, meta_of(), CHECKSUMS)
    stored = await shard.puts.store(store, memoryview(DATA))
    (view,) = await shard.storage.views([(stored.blob_ids[0], 0, 8)])
    assert bytes(view) == DATA
    assert shard.index.committed[0].blobs[0].blob_id == stored.blob_ids[0]


@pytest.mark.parametrize(
    ("meta", "checksums", "error"),
    [
        (b"\xff", CHECKSUMS, InvalidArgumentError),
        (meta_of(num_blobs=2), CHECKSUMS, InvalidArgumentError),
        (meta_of(partition_id="other/train"), CHECKSUMS, InvalidArgumentError),
        (meta_of(), (), InvalidArgumentError),
        (meta_of(), (1,), DataLossError),
    ],
    ids=["junk", "other blobs", "other partition", "no checksum", "other bytes"],
)
async def test_a_put_that_is_rejected_leaves_nothing(
    meta: bytes, checksums: tuple[int, ...], error: type[ServiceError]
) -> None:
    shard = Shard()
    await shard.reserve()
    shard.storage.write(5, 0, memoryview(DATA))
    with pytest.raises(error):
        await shard.commit(meta, checksums)
    await shard.puts.abort(codec.Abort("put"))
    assert shard.is_clean()
    with pytest.raises(NotFoundError):
        await shard.storage.views([(5, 0, 8)])


async def test_a_put_that_the_index_refuses_leaves_nothing() -> None:
    shard = Shard()
    shard.index.error = InvalidArgumentError("no")
    (blob_id,) = (await shard.reserve()).blob_ids
    shard.storage.write(blob_id, 0, memoryview(DATA))
    with pytest.raises(InvalidArgumentError):
        await shard.commit()
    assert shard.is_clean()


async def test_bytes_stay_when_the_index_may_have_made_them_visible() -> None:
    shard = Shard()
    shard.index.error = UnavailableError("gone")
    (blob_id,) = (await shard.reserve()).blob_ids
    shard.storage.write(blob_id, 0, memoryview(DATA))
    with pytest.raises(UnavailableError):
        await shard.commit()
    (view,) = await shard.storage.views([(blob_id, 0, 8)])
    assert bytes(view) == DATA


async def test_a_put_that_was_given_up_cannot_be_committed() -> None:
    shard = Shard()
    await shard.reserve()
    await shard.puts.abort(codec.Abort("put"))
    await shard.puts.abort(codec.Abort("put"))
    assert shard.is_clean()
    with pytest.raises(FailedPreconditionError, match="reserve"):
        await shard.commit()


async def test_a_full_shard_gives_the_charge_back() -> None:
    shard = Shard()
    await shard.reserve("first", 4096)
    with pytest.raises(ResourceExhaustedError, match="shard s: 4096 of 4096"):
        await shard.reserve("second")
    await shard.puts.abort(codec.Abort("first"))
    assert shard.is_clean()
    with pytest.raises(InvalidArgumentError, match="capacity_bytes"):
        await shard.reserve("third", 5000)
    assert shard.is_clean()


async def test_a_charge_whose_answer_is_lost_is_given_back() -> None:
    shard = Shard()
    shard.index.lost_answer = DeadlineExceededError("no answer")
    with pytest.raises(DeadlineExceededError):
        await shard.reserve()
    assert shard.is_clean()


async def test_a_put_that_is_cancelled_while_it_waits_takes_no_memory() -> None:
    shard = Shard()
    await shard.reserve("first", 4096)
    waiting = asyncio.ensure_future(
        shard.puts.reserve(codec.Reserve("second", "run/train", (64,), 60.0))
    )
    await asyncio.sleep(0)
    await shard.puts.abort(codec.Abort("second"))
    with pytest.raises(AbortedError):
        await waiting
    await shard.puts.abort(codec.Abort("first"))
    assert shard.is_clean()
