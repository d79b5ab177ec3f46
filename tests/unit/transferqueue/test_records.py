"""Record files detect damage."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from services.common.errors import DataLossError
from services.transferqueue.index.index import Index
from services.transferqueue.shards import Shards
from services.transferqueue.snapshots.snapshots import (
    BlobClient,
    RecordReader,
    RecordWriter,
    Snapshots,
)


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
    snapshots = Snapshots(tmp_path, index, Shards(index))
    # The controller of the first is gone, which has not been noticed yet.
    saves = [asyncio.create_task(snapshots.save("run_1", "slot-0")) for _ in range(2)]
    await asyncio.sleep(0.1)
    assert len(begun) == 1
    may_end.set()
    assert [num_keys for num_keys, _ in await asyncio.gather(*saves)] == [0, 0]
    assert names_in(tmp_path / "run_1") == ["slot-0.tq"]
