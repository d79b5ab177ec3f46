"""Tests that all processes of a worker end together."""

import asyncio
import signal

import pytest

from services.controller.launch.worker_process import ProcessGroup


class Rank:
    """Fake process that ends when a test sets its status, or at a signal."""

    def __init__(self) -> None:
        self.ended: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()

    async def wait(self) -> int | None:
        return await self.ended

    def send_signal(self, number: int) -> None:
        if not self.ended.done():
            self.ended.set_result(-number)


@pytest.mark.parametrize("code", [0, 1])
async def test_the_others_end_by_themselves_after_one_that_ended_by_itself(code: int) -> None:
    first, second = Rank(), Rank()
    waiting = asyncio.create_task(ProcessGroup([first, second]).wait())
    await asyncio.sleep(0)
    first.ended.set_result(code)
    for _ in range(10):
        await asyncio.sleep(0)
    assert not second.ended.done()
    second.ended.set_result(code)
    assert await waiting == code


async def test_the_others_are_killed_at_once_after_one_that_was_killed() -> None:
    first, second = Rank(), Rank()
    waiting = asyncio.create_task(ProcessGroup([first, second]).wait())
    await asyncio.sleep(0)
    first.ended.set_result(-signal.SIGKILL)
    assert await waiting == -signal.SIGKILL
    assert second.ended.result() == -signal.SIGKILL
