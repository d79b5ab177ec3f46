"""Runs copies in a few threads, and work of this thread while a coroutine waits."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, TypeVar

from services.common.host import usable_processors
from services.common.task_group import TaskGroup, unwrapped

NUM_THREADS = min(4, usable_processors())
"""A few threads saturate the memory bandwidth."""
_HELPERS = ThreadPoolExecutor(max(NUM_THREADS - 1, 1), "helper")
_TURN_ITEMS = 64
"""Copying this many items of 1 MiB takes a few milliseconds."""
T = TypeVar("T")
R = TypeVar("R")


async def map_in_threads(function: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """Applies ``function`` to each item in the calling thread and a few helpers; the first error ends it.

    The event loop takes part: small work is done before the loop could be woken for its results.
    Between batches of items other tasks run.
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
            for _ in left:  # after an error the other threads find nothing to do
                pass

    helping = [_HELPERS.submit(work) for _ in range(NUM_THREADS - 1)]
    try:
        work()
    finally:
        # Do not wait for helpers that have not started because other work has the processors.
        helping = [helper for helper in helping if not helper.cancel()]
        wait(helping)
    for helper in helping:
        helper.result()
    return [results[number] for number in range(len(items))]


async def run_while_waiting(work: Coroutine[Any, Any, T], other: Callable[[], R]) -> tuple[T, R]:
    """Starts ``work`` and calls ``other`` as soon as ``work`` waits for something."""
    with unwrapped():
        async with TaskGroup() as tasks:
            working = tasks.create_task(work)
            await asyncio.sleep(0)
            result = other()
    return working.result(), result
