"""Blocking calls of the asynchronous client, which run on an event loop in a separate thread.

The thread lets the synchronous client work where an event loop runs already, as in a notebook.
"""

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from functools import cache, wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
_END: Any = object()


class Wrapper(Protocol):
    """Object whose methods call those of an asynchronous one."""

    _wrapped: Any
    _process: int
    """Process that created it."""


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """Returns the event loop of all synchronous clients; its thread ends with the process."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="slipstream-client", daemon=True).start()
    return loop


os.register_at_fork(after_in_child=_loop.cache_clear)  # a fork lacks the thread


def wait_for(coroutine: Coroutine[Any, Any, _Result]) -> _Result:
    """Runs a coroutine to its end; an interruption such as Ctrl-C cancels it."""
    future = asyncio.run_coroutine_threadsafe(coroutine, _loop())
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


def items_of(iterator: AsyncIterator[_Result]) -> Iterator[_Result]:
    """Yields the items of an asynchronous generator, and closes it."""

    async def next_item() -> _Result:
        return await anext(iterator, _END)

    async def close() -> None:
        await iterator.aclose()  # type: ignore[attr-defined]

    try:
        while (item := wait_for(next_item())) is not _END:
            yield item
    finally:
        wait_for(close())


def blocking(
    method: Callable[Concatenate[Any, _Arguments], Coroutine[Any, Any, _Result]],
) -> Callable[Concatenate[Any, _Arguments], _Result]:
    """Returns the method of a wrapper that waits for an asynchronous method."""

    @wraps(method)
    def call(self: Wrapper, *args: _Arguments.args, **keywords: _Arguments.kwargs) -> _Result:
        return wait_for(method(wrapped(self), *args, **keywords))

    return call


def iterating(
    method: Callable[Concatenate[Any, _Arguments], AsyncIterator[_Result]],
) -> Callable[Concatenate[Any, _Arguments], Iterator[_Result]]:
    """Returns the method of a wrapper that iterates over what an asynchronous method yields."""

    @wraps(method)
    def call(
        self: Wrapper, *args: _Arguments.args, **keywords: _Arguments.kwargs
    ) -> Iterator[_Result]:
        return items_of(method(wrapped(self), *args, **keywords))

    return call


def wrapped(wrapper: Wrapper) -> Any:
    """Returns the asynchronous object of a wrapper.

    Raises:
        RuntimeError: If another process created it: connections do not survive a fork.
    """
    if wrapper._process != os.getpid():  # noqa: SLF001 -- the protocol's own attribute
        raise RuntimeError("the client was created in another process; create one in each process")
    return wrapper._wrapped  # noqa: SLF001 -- the protocol's own attribute
