"""Tests of the storage of a shard's blobs."""

import asyncio
import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from services.common.errors import DataLossError, InvalidArgumentError, NotFoundError
from services.transferqueue.storage.blobs import Arena, BlobStore
from services.wire.batch import BlobRef
from services.wire.data.encoding.codec import checksum


def storage(capacity: int = 4096, spill: Arena | None = None) -> BlobStore:
    return BlobStore(Arena(capacity), first_blob_id=7, spill=spill)


async def store(target: BlobStore, data: bytes) -> int:
    grant = target.reserve([len(data)])
    assert grant is not None
    (blob_id,) = grant.blob_ids
    target.write(blob_id, 0, memoryview(data))
    await target.seal([ref(blob_id, data)])
    return blob_id


async def read(target: BlobStore, blob_id: int, offset: int, size: int) -> bytes:
    (view,) = await target.views([(blob_id, offset, size)])
    return bytes(view)


def ref(blob_id: int, data: bytes) -> BlobRef:
    return BlobRef(shard_id="s", blob_id=blob_id, size_bytes=len(data), checksum=checksum(data))


@pytest.mark.parametrize(("is_populated", "allocated"), [(True, 1 << 20), (False, 4096)])
def test_memory_is_allocated_at_once_or_as_it_is_used(is_populated: bool, allocated: int) -> None:
    arena = Arena(1 << 20, is_populated=is_populated)
    arena.memory[:3] = b"abc"
    assert os.fstat(arena.fd).st_blocks * 512 == allocated
    arena.close()


async def test_sealed_bytes_can_be_read() -> None:
    target = storage()
    blob_id = await store(target, b"hello")
    assert (await read(target, blob_id, 1, 3)) == b"ell"
    with pytest.raises(InvalidArgumentError, match="outside"):
        await read(target, blob_id, 3, 3)


async def test_ids_are_never_used_again() -> None:
    target = storage()
    first = await store(target, b"a")
    target.free([first])
    assert await store(target, b"b") > first
    with pytest.raises(NotFoundError, match="released"):
        await read(target, first, 0, 1)


async def test_bytes_that_changed_on_the_way_are_rejected() -> None:
    target = storage()
    grant = target.reserve([5])
    assert grant is not None
    target.write(grant.blob_ids[0], 0, memoryview(b"hellO"))
    with pytest.raises(DataLossError, match="checksum"):
        await target.seal([ref(grant.blob_ids[0], b"hello")])
    with pytest.raises(NotFoundError):
        await read(target, grant.blob_ids[0], 0, 1)


@pytest.mark.parametrize(("offset", "size"), [(1, 2), (0, 9), (4, 1)])
async def test_frames_that_do_not_continue_a_blob_are_rejected(offset: int, size: int) -> None:
    target = storage()
    grant = target.reserve([8])
    assert grant is not None
    with pytest.raises(InvalidArgumentError, match=f"offset {offset}"):
        target.write(grant.blob_ids[0], offset, memoryview(bytes(size)))


async def test_a_sealed_blob_cannot_be_written() -> None:
    target = storage()
    with pytest.raises(InvalidArgumentError, match="not being written"):
        target.write(await store(target, b"a"), 0, memoryview(b"b"))


async def test_a_put_that_can_never_fit_is_rejected_and_a_full_shard_is_not_an_error() -> None:
    target = storage(4096)
    with pytest.raises(InvalidArgumentError, match="capacity_bytes"):
        target.reserve([5000])
    assert target.reserve([3000]) is not None
    used = target.used_bytes
    assert target.reserve([64, 3000]) is None
    assert target.used_bytes == used


async def test_a_blob_that_is_being_read_goes_when_its_reader_is_done() -> None:
    target = storage()
    blob_id = await store(target, b"hello")
    pin = target.pin([(blob_id, 0, 5)])
    target.free([blob_id])
    assert target.used_bytes == 64
    with pytest.raises(NotFoundError):
        await read(target, blob_id, 0, 1)
    target.unpin(pin)
    target.unpin(pin)
    assert target.used_bytes == 0


async def test_the_oldest_blobs_move_to_disk_when_the_memory_is_full(tmp_path: Path) -> None:
    target = storage(spill=Arena(8192, tmp_path / "spill"))
    first = await store(target, b"1" * 3000)
    assert target.reserve([3000]) is None
    assert await target.spill(3000)
    second = await store(target, b"2" * 3000)
    assert (await read(target, first, 0, 3000)) == b"1" * 3000
    assert (await read(target, second, 0, 3000)) == b"2" * 3000
    assert target.positions([(first, 0, 1)]) is None
    assert target.positions([(second, 0, 1)]) is not None
    target.free([first])
    assert target.used_bytes == 3008


async def test_blobs_in_use_are_not_moved(tmp_path: Path) -> None:
    target = storage(spill=Arena(8192, tmp_path / "spill"))
    assert target.reserve([1000]) is not None
    pin = target.pin([(await store(target, b"1" * 3000), 0, 1)])
    assert not await target.spill(1)
    target.unpin(pin)
    assert await target.spill(1)


async def test_a_blob_that_is_released_while_it_moves_leaves_nothing(tmp_path: Path) -> None:
    target = storage(spill=Arena(8192, tmp_path / "spill"))
    first = await store(target, b"1" * 3000)
    moving = asyncio.ensure_future(target.spill(3000))
    await asyncio.sleep(0)
    target.free([first])
    assert await moving
    assert target.used_bytes == 0


async def test_a_blob_that_gets_a_reader_while_it_moves_stays_where_the_reader_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copying, may_end = threading.Event(), threading.Event()
    write = os.pwrite

    def slowly(*arguments: Any) -> int:
        copying.set()
        may_end.wait(10)
        return write(*arguments)

    monkeypatch.setattr(os, "pwrite", slowly)
    target = storage(spill=Arena(8192, tmp_path / "spill"))
    first = await store(target, b"1" * 3000)
    moving = asyncio.ensure_future(target.spill(3000))
    await asyncio.to_thread(copying.wait, 10)
    positions, pin = target.positions([(first, 0, 3000)]), target.pin([(first, 0, 3000)])
    may_end.set()
    assert not await moving
    assert target.reserve([3000]) is None
    assert target.positions([(first, 0, 3000)]) == positions
    target.unpin(pin)
    assert await target.spill(3000)
    target.free([first])
    assert target.used_bytes == 0


async def test_a_full_disk_leaves_blobs_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: int, data: memoryview, position: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    target = storage(spill=Arena(8192, tmp_path / "spill"))
    first = await store(target, b"1" * 3000)
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        assert not await target.spill(3000)
    assert await read(target, first, 0, 3000) == b"1" * 3000
    assert await target.spill(3000)
    assert await read(target, first, 0, 3000) == b"1" * 3000
    target.free([first])
    assert target.used_bytes == 0
