"""Slots for running requests, for engines whose own queue cannot be reordered."""

import asyncio
import heapq
import math
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from services.rollout.engines.base import GenerationRequest


@dataclass(slots=True, order=True)
class _Waiting:
    priority: float
    arrival: int
    request_id: str = field(compare=False)
    admitted: asyncio.Future[bool] = field(compare=False)


class Slots:
    """Bounds the number of running requests; admits requests with the oldest weight version first."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._is_open = True
        self._num_arrived = 0
        self._waiting: list[_Waiting] = []
        self._running: set[str] = set()
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def running(self) -> Collection[str]:
        """Ids of requests that hold a slot."""
        return frozenset(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @asynccontextmanager
    async def acquire(self, request: GenerationRequest) -> AsyncIterator[bool]:
        """Waits for a slot and holds it while the block runs.

        Yields:
            True if the request was admitted, False if it was turned away while it waited.

        Raises:
            ValueError: If a request with this id already runs or waits.
        """
        request_id = request.request_id
        if request_id in self._running or any(w.request_id == request_id for w in self._waiting):
            raise ValueError(f"request {request_id!r} is already being decoded")
        oldest = request.oldest_version
        self._num_arrived += 1
        waiting = _Waiting(
            math.inf if oldest is None else oldest,
            self._num_arrived,
            request_id,
            asyncio.get_running_loop().create_future(),
        )
        heapq.heappush(self._waiting, waiting)
        self._admit()
        try:
            yield await waiting.admitted
        finally:
            self._running.discard(request_id)
            self.reject_waiting({request_id})
            if not self._running:
                self._empty.set()
            self._admit()

    def reject_waiting(self, request_ids: Collection[str] | None) -> None:
        """Ends the wait of requests (None: all) without giving them a slot."""
        left: list[_Waiting] = []
        for waiting in self._waiting:
            if request_ids is not None and waiting.request_id not in request_ids:
                left.append(waiting)
            elif not waiting.admitted.done():
                waiting.admitted.set_result(False)
        self._waiting = left
        heapq.heapify(left)

    def close(self) -> None:
        self._is_open = False

    def open(self) -> None:
        self._is_open = True
        self._admit()

    async def wait_until_empty(self) -> None:
        await self._empty.wait()

    def _admit(self) -> None:
        while self._is_open and self._waiting and len(self._running) < self._size:
            waiting = heapq.heappop(self._waiting)
            if waiting.admitted.done():
                continue  # Its caller was cancelled and has not run since.
            self._running.add(waiting.request_id)
            self._empty.clear()
            waiting.admitted.set_result(True)
