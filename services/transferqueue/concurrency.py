"""Running several pieces of work at once."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, TypeVar

from services.common.host import usable_processors
from services.common.task_group import TaskGroup, unwrapped


class Waiters:
    """Parked waits, by what they wait for."""

    def __init__(self) -> None:
        self._parked: dict[str, set[asyncio.Future[None]]] = {}

    def wake(self, name: str) -> None:
        """End the waits for ``name``."""
        for waiter in self._parked.pop(name, ()):
            if not waiter.done():
                waiter.set_result(None)

    async def wait(self, name: str, *, timeout_s: float | None) -> None:
        """Wait for ``wake(name)``; returns when the time is over, too."""
        waiter = asyncio.get_running_loop().create_future()
        self._parked.setdefault(name, set()).add(waiter)
        try:
            async with asyncio.timeout(timeout_s):
                await waiter
        except TimeoutError:
            return
        finally:
            parked = self._parked.get(name, set())
            parked.discard(waiter)
            if not parked:
                self._parked.pop(name, None)


NUM_THREADS = min(4, usable_processors())
"""A few threads use up the memory's bandwidth."""
_HELPERS = ThreadPoolExecutor(max(NUM_THREADS - 1, 1), "helper")
_TURN_ITEMS = 64
"""Items of 1 MiB are copied in a few milliseconds."""
T = TypeVar("T")
R = TypeVar("R")


async def in_thread(work: Callable[[], T]) -> T:
    """Run in a thread; ends when the work does, also when it is cancelled.

    The thread still uses the memory, which must not go to anyone else before it is done.
    """
    working = asyncio.get_running_loop().run_in_executor(None, work)
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        await asyncio.wait([working])
        raise


async def map_in_threads(function: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """Apply ``function`` to each item, here and in a few threads; the first error ends it.

    The event loop takes part in the work, which is done before waking it up for the results would be. In
    between others get their turn.
    """
    results: list[R] = []
    for begin in range(0, len(items), _TURN_ITEMS):
        results += _map(function, items[begin : begin + _TURN_ITEMS])
        await asyncio.sleep(0)
    return results


def _map(function: Callable[[T], R], items: Sequence[T]) -> list[R]:
    left = iter(list(enumerate(items)))
    results: dict[int, R] = {}

    def work() -> None:
        try:
            for number, item in left:
                results[number] = function(item)
        finally:
            for _ in left:  # after an error nobody goes on
                pass

    helping = [_HELPERS.submit(work) for _ in range(NUM_THREADS - 1)]
    try:
        work()
    finally:
        # A helper that did not begin, as others have the processors, is not waited for.
        helping = [helper for helper in helping if not helper.cancel()]
        wait(helping)
    for helper in helping:
        helper.result()
    return [results[number] for number in range(len(items))]


async def meanwhile(work: Coroutine[Any, Any, T], other: Callable[[], R]) -> tuple[T, R]:
    """Begin ``work``, and do ``other`` as soon as it waits for something."""
    with unwrapped():
        async with TaskGroup() as tasks:
            working = tasks.create_task(work)
            await asyncio.sleep(0)
            result = other()
    return working.result(), result
