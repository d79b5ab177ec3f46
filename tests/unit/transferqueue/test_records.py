"""Tests of record files, which detect damage, and of snapshots of a run."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from services.common.errors import DataLossError
from services.transferqueue.index.index import Index
from services.transferqueue.shards import Shards
from services.transferqueue.snapshots import snapshots
from services.transferqueue.snapshots.snapshots import (
    BlobClient,
    RecordReader,
    RecordWriter,
    Snapshots,
)
from services.wire.batch import BlobRef, FieldColumn, KVBatchMeta
from services.wire.data.encoding import codec


async def write(path: Path) -> None:
    async with RecordWriter.open(path) as writer:
        await writer.write(["first", 1, b"x"])
        await writer.write_bytes(b"bytes")
        await writer.write(["end"])


def names_in(folder: Path) -> list[str]:
    return [file.name for file in folder.iterdir()]


async def read(path: Path) -> list[object]:
    async with RecordReader.open(path) as reader:
        return [await reader.read(), await reader.read_bytes(5), await reader.read()]


async def test_records_are_read_unchanged(tmp_path: Path) -> None:
    await write(tmp_path / "a")
    assert await read(tmp_path / "a") == [["first", 1, b"x"], b"bytes", ["end"]]


async def test_any_changed_or_missing_byte_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "a"
    await write(path)
    whole = path.read_bytes()
    for position in range(len(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(DataLossError):
            await read(path)
        path.write_bytes(whole[:position])
        with pytest.raises(DataLossError):
            await read(path)


async def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a"
    await write(path)
    with pytest.raises(RuntimeError):
        async with RecordWriter.open(path) as writer:
            await writer.write(["half"])
            raise RuntimeError
    assert len(await read(path)) == 3
    assert names_in(tmp_path) == ["a"]


class Blobs:
    """Fake shards whose blobs have one byte; the second put waits."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self.num_puts, self.waits, self.may_put = 0, asyncio.Event(), asyncio.Event()

    @asynccontextmanager
    async def connect(self, shards: object) -> AsyncIterator["Blobs"]:
        yield self

    async def read(self, blob: BlobRef, ranges: object) -> bytes:
        return b"x"

    async def put(self, shard_id: str, meta: KVBatchMeta, payload: object) -> None:
        self.num_puts += 1
        if self.num_puts == 2:
            self.waits.set()
            await self.may_put.wait()
        await self._index.commit(meta, put_id=f"put {self.num_puts}")


async def test_a_run_is_restored_as_a_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "place", lambda group, shards: "s")
    index = Index(lambda blobs: None, time)
    blobs = Blobs(index)
    monkeypatch.setattr(BlobClient, "connect", blobs.connect)
    saved = Snapshots(tmp_path, index, Shards(index))
    index.create_partition("run_1/train", required_fields=(), quota_bytes=0)
    for number in range(2):
        column = FieldColumn(
            name="x",
            dtype="uint8",
            row_rank=1,
            tail_shape=(),
            lengths=(1,),
            blob_indexes=(0,),
            offsets=(0,),
        )
        blob = BlobRef(shard_id="s", blob_id=number, size_bytes=1, checksum=0)
        meta = KVBatchMeta(
            partition_id="run_1/train", keys=(f"g{number}.0",), fields=(column,), blobs=(blob,)
        )
        await index.commit(meta, put_id=str(number))
    await saved.save("run_1", "slot-0")
    index.drop_partition("run_1/train")

    restoring = asyncio.create_task(saved.restore("run_1", "slot-0"))
    await blobs.waits.wait()
    restoring.cancel()  # as if the run's controller died
    await asyncio.wait([restoring])
    # Otherwise the next controller would take the restored samples for all saved samples.
    assert not index.has_run("run_1")
    assert await saved.restore("run_1", "slot-0") == 2
    assert index.get("run_1/train", ()).keys == ("g0.0", "g1.0")


async def test_a_run_is_saved_once_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[int] = []
    may_end = asyncio.Event()
    write_one = RecordWriter.write

    async def slowly(writer: RecordWriter, record: list[object]) -> None:
        begun.append(1)
        await may_end.wait()
        await write_one(writer, record)

    @asynccontextmanager
    async def connect(shards: object) -> AsyncIterator[None]:
        yield

    monkeypatch.setattr(RecordWriter, "write", slowly)
    monkeypatch.setattr(BlobClient, "connect", connect)
    index = Index(lambda blobs: None, time)
    saved = Snapshots(tmp_path, index, Shards(index))
    # The controller of the first save is dead, which the transferqueue has not detected yet.
    saves = [asyncio.create_task(saved.save("run_1", "slot-0")) for _ in range(2)]
    await asyncio.sleep(0.1)
    assert len(begun) == 1
    may_end.set()
    assert [num_keys for num_keys, _ in await asyncio.gather(*saves)] == [0, 0]
    assert names_in(tmp_path / "run_1") == ["slot-0.tq"]


class Shard:
    """Fake connection to a shard with blobs of one repeated byte; counts the requests."""

    def __init__(self) -> None:
        self.num_requests = 0

    async def request(
        self, read: codec.Read, *, timeout_s: float, take: Callable[[list[memoryview]], None]
    ) -> tuple[codec.Response, list[memoryview]]:
        self.num_requests += 1
        data = b"".join(
            bytes([blob_id]) * size
            for blob_id, size in zip(read.ranges[::3], read.ranges[2::3], strict=True)
        )
        take([memoryview(data)[:1]])
        return codec.Data(0, True, codec.checksum(data)), [memoryview(data)[1:]]

    def release_pin(self, answer: object) -> None:
        """No blob is pinned."""


async def test_small_blobs_of_a_shard_are_read_with_one_request() -> None:
    shards = {"a": Shard(), "b": Shard()}
    sizes = {"a": [3, 5, 5 << 20, 2], "b": [4, 1]}
    blobs = [
        BlobRef(shard_id=shard_id, blob_id=number, size_bytes=size, checksum=0)
        for number in range(4)
        for shard_id, of_shard in sizes.items()
        for size in of_shard[number : number + 1]
    ]
    contents = await BlobClient(shards).read_all(blobs)  # type: ignore[arg-type]
    assert contents == [bytes([blob.blob_id]) * blob.size_bytes for blob in blobs]
    # The large blob of "a" has two requests.
    assert (shards["a"].num_requests, shards["b"].num_requests) == (3, 1)
