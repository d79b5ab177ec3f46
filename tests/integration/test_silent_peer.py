"""The loss of a peer's host is detected, also on streams."""

import asyncio
import multiprocessing
import os
import signal
from multiprocessing.connection import Connection

import pytest

from services.common.errors import UnavailableError
from services.transferqueue.__main__ import transferqueue
from services.transferqueue.settings import TransferQueueSettings
from services.wire.transferqueue.client import TransferQueueClient

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(300)]

# Longer than the time after which gRPC, by default, pings less often.
_SILENCE_S = 45


async def _serve(addresses: Connection) -> None:
    async with transferqueue(TransferQueueSettings(capacity_bytes=1 << 20)) as address:
        addresses.send(address)
        await asyncio.Event().wait()


def _run(addresses: Connection) -> None:
    asyncio.run(_serve(addresses))


async def test_a_watched_index_that_falls_silent_is_noticed_within_a_minute() -> None:
    near_end, far_end = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=_run, args=(far_end,), daemon=True
    )
    process.start()
    try:
        address = await asyncio.to_thread(near_end.recv)
        async with TransferQueueClient.connect(address) as index:
            await index.create_partition("run_1/train", required_fields=[])
            watching = asyncio.create_task(anext(index.watch("run_1/train")))
            await asyncio.wait([watching], timeout=_SILENCE_S)
            assert process.pid is not None
            os.kill(process.pid, signal.SIGSTOP)
            with pytest.raises(UnavailableError):
                async with asyncio.timeout(40):
                    await watching
    finally:
        process.kill()
        process.join()
