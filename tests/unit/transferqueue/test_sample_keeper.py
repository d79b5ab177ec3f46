"""Tests of the keeper of sample records: recording, reads, and deletion of old files."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from unittest.mock import Mock

import pytest
from prometheus_client import REGISTRY

from services.transferqueue.index.index import Index
from services.transferqueue.records import keeper
from services.transferqueue.records.keeper import SampleRecordKeeper
from services.transferqueue.records.store import SampleStore
from services.wire.batch import BlobRef
from services.wire.transferqueue.types import SampleRecordQuery
from tests.helpers.puts import put_of

_PARTITION = "run_1/records"


class Blobs:
    """Fake shards whose blobs all contain the same text."""

    def __init__(self, text: bytes, is_reading: asyncio.Event, may_read: asyncio.Event) -> None:
        self._text, self._is_reading, self._may_read = text, is_reading, may_read

    @asynccontextmanager
    async def connect(self, shards: object) -> AsyncIterator["Blobs"]:
        yield self

    async def read_all(self, blobs: Sequence[BlobRef]) -> list[bytes]:
        self._is_reading.set()
        await self._may_read.wait()
        return [self._text for _ in blobs]


@pytest.mark.parametrize("field", ["sample_record", "training_record", "unknown"])
@pytest.mark.parametrize("text", [b"{}", b"[]", b"7", b"x"])
async def test_records_that_a_worker_makes_up_end_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: str, text: bytes
):
    may_read = asyncio.Event()
    may_read.set()
    monkeypatch.setattr(
        keeper.BlobClient, "connect", Blobs(text, asyncio.Event(), may_read).connect
    )
    index = Index(lambda blobs: None, time)
    async with SampleRecordKeeper(tmp_path, 1 << 20, index=index, shards=Mock()) as record_keeper:
        await record_keeper.start_recording("run_1", max_bytes=1, max_steps=0)
        for number in range(2):
            await index.commit(put_of(_PARTITION, [f"g{number}.0"], field), put_id=str(number))
            async with asyncio.timeout(10):
                while index.num_samples():  # noqa: ASYNC110 -- the keeper deletes them
                    await asyncio.sleep(0.01)


async def test_a_reader_that_waits_for_the_last_samples_of_a_run_finds_its_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    is_reading, may_read = asyncio.Event(), asyncio.Event()
    blobs = Blobs(b"{}", is_reading, may_read)
    monkeypatch.setattr(keeper.BlobClient, "connect", blobs.connect)
    index = Index(lambda blobs: None, time)
    async with SampleRecordKeeper(tmp_path, 1 << 20, index=index, shards=Mock()) as record_keeper:
        await record_keeper.start_recording("run_1", max_bytes=1, max_steps=0)
        await index.commit(put_of(_PARTITION, ["g.0"], "sample_record"), put_id="put")

        async def stop() -> None:
            await record_keeper.stop_recording("run_1")
            index.drop_partition("run_1/records")

        async def search() -> list[bytes]:
            return [chunk async for chunk in record_keeper.read("run_1", SampleRecordQuery())]

        stopping = asyncio.create_task(stop())
        await is_reading.wait()
        searching = asyncio.create_task(search())
        await asyncio.sleep(0)
        may_read.set()
        await stopping
        assert await searching == []


async def test_a_file_that_goes_while_old_files_are_deleted_fails_no_run(tmp_path: Path):
    (tmp_path / "gone.db").symlink_to(
        tmp_path / "nothing"
    )  # like a file that is deleted after it was listed
    (tmp_path / "old.db").write_bytes(b"x" * 100)
    index = Index(lambda blobs: None, time)
    async with SampleRecordKeeper(tmp_path, 150, index=index, shards=Mock()) as record_keeper:
        await record_keeper.start_recording("run_1", max_bytes=100, max_steps=0)
    assert not (tmp_path / "old.db").exists()


async def test_a_partition_that_is_dropped_ends_its_recording_only(tmp_path: Path):
    index = Index(lambda blobs: None, time)
    async with SampleRecordKeeper(tmp_path, 1 << 20, index=index, shards=Mock()) as record_keeper:
        await record_keeper.start_recording("run_1", max_bytes=1, max_steps=0)
        await asyncio.sleep(0)
        index.drop_partition("run_1/records")
        await asyncio.sleep(0.01)
        assert "run_1" not in record_keeper._runs
        await record_keeper.start_recording("run_1", max_bytes=1, max_steps=0)
        assert "run_1" in record_keeper._runs


async def test_long_searches_delay_neither_snapshots_nor_the_recording(tmp_path: Path, monkeypatch):
    released = threading.Event()
    running = []

    def lines(self, query):
        running.append(query)
        released.wait(30)
        yield [b"{}\n"]

    monkeypatch.setattr(SampleStore, "lines", lines)

    async def search() -> bytes:
        return b"".join(
            [chunk async for chunk in record_keeper.read("run_1", SampleRecordQuery(text="x"))]
        )

    async with SampleRecordKeeper(tmp_path, 1 << 20, index=Mock(), shards=Mock()) as record_keeper:
        searches = [asyncio.create_task(search()) for _ in range(64)]
        try:
            async with asyncio.timeout(20):
                while not running:  # noqa: ASYNC110 -- a thread appends to the list
                    await asyncio.sleep(0.01)
                await asyncio.to_thread(int)  # snapshots and the recording use the same thread pool
            assert len(running) <= keeper._MAX_READS
        finally:
            released.set()
        assert await asyncio.gather(*searches) == [b"{}\n"] * 64


async def test_a_run_whose_controller_dies_while_old_files_are_deleted_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    deleting, released, flushed = threading.Event(), threading.Event(), asyncio.Event()

    def delete(self, *arguments):
        deleting.set()
        released.wait(30)

    async def flush(self, run_id):
        flushed.set()

    monkeypatch.setattr(SampleRecordKeeper, "_delete_ended_runs", delete)
    monkeypatch.setattr(SampleRecordKeeper, "flush", flush)
    index = Index(lambda blobs: None, time)
    async with SampleRecordKeeper(tmp_path, 1 << 20, index=index, shards=Mock()) as record_keeper:
        starting = asyncio.create_task(
            record_keeper.start_recording("run_1", max_bytes=1, max_steps=0)
        )
        await asyncio.to_thread(deleting.wait, 30)
        starting.cancel()
        await asyncio.wait([starting])
        released.set()
        # the call of the next controller
        await record_keeper.start_recording("run_1", max_bytes=1, max_steps=0)
        await index.commit(put_of(_PARTITION, ["run_1-0.0"], "sample_record"), put_id="put")
        async with asyncio.timeout(10):
            await flushed.wait()


def failing_s(run_id: str) -> float | None:
    return REGISTRY.get_sample_value("slipstream_sample_upload_failing_seconds", {"run": run_id})


async def test_samples_are_followed_by_the_store_that_a_run_names_until_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    stores: dict[str, Mock] = {}
    monkeypatch.setattr(keeper, "open_samples", lambda url: stores.setdefault(url, Mock()))
    index, url = Index(lambda blobs: None, time), "s3://bucket/samples"
    async with SampleRecordKeeper(tmp_path, 1 << 20, index=index, shards=Mock()) as record_keeper:
        await record_keeper.start_recording("run_0", max_bytes=1, max_steps=0)
        assert not stores
        for max_steps in (3, 5):  # a change of the limits
            await record_keeper.start_recording(
                "run_1", max_bytes=7, max_steps=max_steps, directory=url
            )
        store = stores[f"{url}/run_1"]  # a folder of the run: other runs may name the same one
        assert [call.kwargs["max_steps"] for call in store.follow.call_args_list] == [3, 5]
        assert {call.args for call in store.follow.call_args_list} == {(tmp_path / "run_1.db",)}
        store.failing_s, store.cause = 3.0, "no such bucket"
        assert failing_s("run_1") == 3
        assert record_keeper.upload_failure("run_1") == (3.0, "no such bucket")
        assert record_keeper.upload_failure("run_0") == (0.0, ""), (
            "its samples are on the disk only"
        )
        await record_keeper.stop_recording("run_1")
        store.finish.assert_called_once_with()
        store.wait.return_value = False
        assert await record_keeper.wait_uploaded("run_1", 0.0), "nobody waits"
        assert not await record_keeper.wait_uploaded("run_1", 3.0)
        store.wait.assert_called_once_with(3.0)
        assert await record_keeper.wait_uploaded("run_0", 3.0)
        store.wait.reset_mock()
        await record_keeper.start_recording("run_1", max_bytes=7, max_steps=3, directory=url)
        await record_keeper.delete("run_1", url)
        await record_keeper.delete("run_2", "s3://bucket/other")
        for deleted in (store, stores["s3://bucket/other/run_2"]):
            deleted.delete.assert_called_once_with()
        assert failing_s("run_1") is None
    store.wait.assert_not_called()


async def test_samples_that_nobody_uploads_since_a_restart_are_not_in_the_store(tmp_path: Path):
    index = Index(lambda blobs: None, time)
    async with SampleRecordKeeper(tmp_path, 1 << 20, index=index, shards=Mock()) as record_keeper:
        assert await record_keeper.wait_uploaded("run_1", 3.0), "it has no samples"
        (tmp_path / "run_1.db").touch()
        assert not await record_keeper.wait_uploaded("run_1", 3.0)


async def test_the_process_waits_a_while_for_the_last_uploads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    store = Mock()
    monkeypatch.setattr(keeper, "open_samples", lambda url: store)
    index = Index(lambda blobs: None, time)
    async with SampleRecordKeeper(tmp_path, 1 << 20, index=index, shards=Mock()) as record_keeper:
        await record_keeper.start_recording(
            "run_1", max_bytes=7, max_steps=0, directory="s3://bucket/run"
        )
    store.finish.assert_called_once_with()
    (timeout_s,) = store.wait.call_args.args
    assert 0 < timeout_s <= 5
