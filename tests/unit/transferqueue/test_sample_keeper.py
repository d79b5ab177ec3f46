"""The keeper of sample records: reads of users."""

import asyncio
import threading
from pathlib import Path
from unittest.mock import Mock

from services.transferqueue.samples import keeper
from services.transferqueue.samples.keeper import SampleRecordKeeper
from services.transferqueue.samples.store import SampleStore
from services.wire.transferqueue.types import SampleRecordQuery


async def test_long_searches_delay_neither_snapshots_nor_the_recording(tmp_path: Path, monkeypatch):
    released = threading.Event()
    running = []

    def lines(self, query):
        running.append(query)
        released.wait(30)
        yield [b"{}\n"]

    monkeypatch.setattr(SampleStore, "lines", lines)

    async def search() -> bytes:
        return b"".join([part async for part in kept.read("run_1", SampleRecordQuery(text="x"))])

    async with SampleRecordKeeper(tmp_path, 1 << 20, index=Mock(), shards=Mock()) as kept:
        searches = [asyncio.create_task(search()) for _ in range(64)]
        try:
            async with asyncio.timeout(20):
                while not running:  # noqa: ASYNC110 -- set by a thread
                    await asyncio.sleep(0.01)
                await asyncio.to_thread(int)  # as snapshots and the recording do
            assert len(running) <= keeper._MAX_READS
        finally:
            released.set()
        assert await asyncio.gather(*searches) == [b"{}\n"] * 64
