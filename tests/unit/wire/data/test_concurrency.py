"""Concurrent work in threads: ordered results, the first error, and cancellation."""

import asyncio

import pytest

from services.wire.data.client import run_while_waiting
from services.wire.data.transport.arena_transport import NUM_THREADS, map_in_threads


async def test_results_come_in_the_order_of_the_items() -> None:
    assert await map_in_threads(lambda n: n * n, range(100)) == [n * n for n in range(100)]
    assert await map_in_threads(lambda n: n, []) == []


@pytest.mark.parametrize("error", [KeyError, IndexError])
async def test_the_first_error_ends_the_work_and_is_raised_as_it_is(
    error: type[Exception],
) -> None:
    numbers: list[int] = []

    def fail(number: int) -> None:
        numbers.append(number)
        raise error(number)

    with pytest.raises(error):
        await map_in_threads(fail, range(100))
    assert len(numbers) <= NUM_THREADS


async def test_cancelled_work_has_ended_when_the_caller_continues() -> None:
    done: list[int] = []
    working = asyncio.ensure_future(map_in_threads(done.append, range(1000)))
    await asyncio.sleep(0)
    working.cancel()
    await asyncio.wait([working])
    assert working.cancelled()
    finished = len(done)
    assert 0 < finished < 1000
    await asyncio.to_thread(lambda: None)
    assert sorted(done) == list(range(finished))


async def test_the_other_work_is_done_while_the_first_waits() -> None:
    waits = asyncio.Event()

    async def work() -> str:
        await waits.wait()
        return "answer"

    def other() -> str:
        waits.set()
        return "description"

    assert await run_while_waiting(work(), other) == ("answer", "description")


async def test_an_error_of_the_first_work_is_raised_as_it_is() -> None:
    async def fail() -> None:
        raise KeyError("gone")

    with pytest.raises(KeyError):
        await run_while_waiting(fail(), lambda: None)
