"""Task groups: without the cancellation that they leave behind before Python 3.13; races; errors by class."""

import asyncio
import sys
from collections.abc import Coroutine, Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, TypeVar

_Result = TypeVar("_Result")

if sys.version_info >= (3, 13):
    TaskGroup = asyncio.TaskGroup
else:

    class TaskGroup(asyncio.TaskGroup):
        """A task group whose parent is not counted as being cancelled after the group's error was caught.

        A group whose task fails while the group waits for its end cancels its parent and never takes that
        back (https://github.com/python/cpython/issues/116720). The parent's next deadline that passes then
        raises CancelledError in place of TimeoutError (in 3.11.2, which Debian 12 has), and ``cancelling()``
        says that the parent is ending.
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


async def until_first(*works: Coroutine[Any, Any, Any]) -> list[asyncio.Task[Any]]:
    """Work until one is done, which ends the others: their tasks are cancelled. Tasks are in order."""
    async with TaskGroup() as tasks:
        running = [tasks.create_task(work) for work in works]
        await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        for task in running:
            task.cancel()
    return running


async def together(works: Iterable[Coroutine[Any, Any, _Result]]) -> list[_Result]:
    """Results of works that run at once. The first that fails ends the others, and its error is raised."""
    some = list(works)
    if len(some) == 1:
        return [await some[0]]  # needs no task of its own
    with unwrapped():
        async with TaskGroup() as tasks:
            running = [tasks.create_task(work) for work in some]
    return [task.result() for task in running]


@contextmanager
def unwrapped(kind: type[BaseException] = BaseException) -> Iterator[None]:
    """Raise the first error of a task group as it is, so that callers can catch it by its class.

    The others were consequences, or say the same. A group whose first error is not of ``kind`` stays whole.
    """
    try:
        yield
    except BaseExceptionGroup as group:
        first = leaves(group)[0]
        if not isinstance(first, kind):
            raise
        raise first from None


def leaves(error: BaseException) -> list[BaseException]:
    """The errors inside nested groups, or the error itself."""
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    return [leaf for inner in error.exceptions for leaf in leaves(inner)]
