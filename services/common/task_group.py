"""Helpers for asyncio: a TaskGroup fixed for Python before 3.13, races, waits, shielded work, errors."""

import asyncio
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from types import TracebackType
from typing import Any, TypeVar

_Result = TypeVar("_Result")

if sys.version_info >= (3, 13):
    TaskGroup = asyncio.TaskGroup
else:

    class TaskGroup(asyncio.TaskGroup):
        """Task group that leaves its parent uncancelled after the group's error was caught.

        In older Python, a group whose task fails while the group waits for its end cancels its
        parent and never reverts that (https://github.com/python/cpython/issues/116720). The
        parent's next deadline that passes then raises CancelledError in place of TimeoutError (in
        3.11.2, which Debian 12 has), and ``cancelling()`` reports that the parent is ending.
        """

        _parent_task: asyncio.Task[None]
        _parent_cancel_requested: bool

        async def __aexit__(
            self,
            kind: type[BaseException] | None,
            error: BaseException | None,
            traceback: TracebackType | None,
        ) -> None:
            parent, is_settled = self._parent_task, self._parent_cancel_requested
            before = parent.cancelling()
            try:
                await super().__aexit__(kind, error, traceback)
            finally:
                was_requested = self._parent_cancel_requested and not is_settled
                if was_requested and parent.cancelling() > before:
                    parent.uncancel()


def is_cancelled() -> bool:
    """Returns True if the current task is being cancelled; user code may raise CancelledError by itself."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def until_first(*works: Coroutine[Any, Any, Any]) -> list[asyncio.Task[Any]]:
    """Runs coroutines until the first is done; cancels the others. Returns the tasks in order."""
    async with TaskGroup() as tasks:
        running = [tasks.create_task(work) for work in works]
        await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        for task in running:
            task.cancel()
    return running


async def gather_in_group(works: Iterable[Coroutine[Any, Any, _Result]]) -> list[_Result]:
    """Runs coroutines concurrently; returns their results. The first error cancels the others."""
    all_works = list(works)
    if len(all_works) == 1:
        return [await all_works[0]]  # a single one needs no task
    with unwrapped():
        async with TaskGroup() as tasks:
            running = [tasks.create_task(work) for work in all_works]
    return [task.result() for task in running]


@contextmanager
def unwrapped(kind: type[BaseException] = BaseException) -> Iterator[None]:
    """Raises the first error of a task group directly, so that callers can catch it by its class.

    The other errors are consequences or repetitions. A group whose first error is not of ``kind``
    is re-raised unchanged.
    """
    try:
        yield
    except BaseExceptionGroup as group:
        first = leaves(group)[0]
        if not isinstance(first, kind):
            raise
        raise first from None


def leaves(error: BaseException) -> list[BaseException]:
    """Returns the errors inside nested groups, or the error itself."""
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    return [leaf for inner in error.exceptions for leaf in leaves(inner)]


class Waiters:
    """Condition variables by name: tasks wait for a name until another one wakes it."""

    def __init__(self) -> None:
        self._parked: dict[str, set[asyncio.Future[None]]] = {}

    def wake(self, name: str) -> None:
        for waiter in self._parked.pop(name, ()):
            if not waiter.done():
                waiter.set_result(None)

    async def wait(self, name: str, *, timeout_s: float | None) -> None:
        """Waits for ``wake(name)`` or until the time-out; returns in both cases."""
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


async def uninterrupted(work: Awaitable[_Result]) -> _Result:
    """Awaits work; returns only after the work has ended, also on cancellation.

    Until then the caller holds its locks, and the work uses memory that nothing else may reuse.
    """
    working = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        await asyncio.wait([working])
        raise


async def in_thread(work: Callable[[], _Result], threads: Executor | None = None) -> _Result:
    """Runs ``work`` in a thread, of the event loop's or of the given ones, :func:`uninterrupted`."""
    return await uninterrupted(asyncio.get_running_loop().run_in_executor(threads, work))
