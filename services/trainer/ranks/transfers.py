"""Samples to and from the transferqueue, for the threads that train."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from torch import Tensor

from services.common.batch import KVBatchMeta
from services.common.errors import AlreadyExistsError, DeadlineExceededError
from services.common.jagged import Jagged
from services.transferqueue.dataclient import DataClient

Fetch = Callable[[KVBatchMeta, Sequence[str]], dict[str, Jagged]]
"""Fetches fields of samples; blocks until they are here."""
Add = Callable[[KVBatchMeta, Mapping[str, Sequence[Tensor]]], None]
"""Adds fields to stored samples; blocks until they are there."""

_TIMEOUT_S = 300.0
_T = TypeVar("_T")


class Transfers:
    """Moves samples on the event loop. Its methods block.

    Args:
        data: The transferqueue.
        loop: Runs its calls.
    """

    def __init__(self, data: DataClient, loop: asyncio.AbstractEventLoop) -> None:
        self._data = data
        self._loop = loop

    def fetch(self, meta: KVBatchMeta, fields: Sequence[str]) -> dict[str, Jagged]:
        """Fetch fields of samples."""
        problem = f"{meta.num_keys} samples did not arrive"
        return _wait(self._data.get(meta, fields), self._loop, problem)

    def add(self, meta: KVBatchMeta, fields: Mapping[str, Sequence[Tensor]]) -> None:
        """Add fields to stored samples, which a request that is repeated finds done."""
        rows = {name: list(tensors) for name, tensors in fields.items()}
        problem = f"{meta.num_keys} samples took no {', '.join(rows)}"
        with suppress(AlreadyExistsError):
            _wait(self._data.add_fields(meta, rows), self._loop, problem)


def _wait(work: Coroutine[Any, Any, _T], loop: asyncio.AbstractEventLoop, problem: str) -> _T:
    future = asyncio.run_coroutine_threadsafe(work, loop)
    try:
        return future.result(_TIMEOUT_S)
    except TimeoutError as error:
        future.cancel()
        raise DeadlineExceededError(
            f"{problem} within {_TIMEOUT_S:.0f} s; look at the transferqueue's log"
        ) from error
