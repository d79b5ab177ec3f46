"""Running several pieces of work at once."""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


async def run_all(works: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Run all to their end; the first that fails ends the others and is raised as it is."""
    if len(works) == 1:
        return [await works[0]]
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(work) for work in works]
    except ExceptionGroup as group:
        raise _first(group) from group
    return [task.result() for task in running]


def _first(error: Exception) -> Exception:
    return _first(error.exceptions[0]) if isinstance(error, ExceptionGroup) else error
