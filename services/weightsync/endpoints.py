"""Interfaces of both ends of a transfer in a member's process: weight source and weight sink."""

import asyncio
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from queue import SimpleQueue
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from services.weightsync.canary import Canary
from services.weightsync.weight_plan import TensorSpec, WeightPlan

T = TypeVar("T")
Place = Callable[[int, int, Tensor], None]
"""Copies a received bucket (source, index, bytes) to its target. Blocks."""


class WeightSource(Protocol):
    """Weights of one trainer rank."""

    def weight_specs(self) -> Sequence[TensorSpec]:
        """Returns all tensors of the model, in sending order."""

    def weight_tensors(self) -> Iterable[tuple[str, Tensor]]:
        """Yields the current rows of this source by name; the caller casts them to the wire dtype."""

    def score_canary(self) -> Canary:
        """Scores a short text under the current weights. Blocks; called only on the first source."""


class WeightSink(Protocol):
    """Weights of an engine."""

    async def adopt_weights(self, version: int, tensors: Mapping[str, Tensor]) -> float:
        """Puts whole, verified weights into service between decode steps; returns seconds without a token."""

    async def score(self, token_ids: Sequence[int]) -> Sequence[float]:
        """Returns the logprob of each token but the first under the live weights; empty without a model."""

    async def refuse_weights(self, reason: str) -> None:
        """Stops serving until other weights are adopted: the live weights are not the trainer's."""

    async def open_weights(self, plan: WeightPlan, slots: Sequence[Sequence[Tensor]]) -> Place:
        """Pauses the engine so that its live weights can be written in place until adopted or closed.

        Args:
            slots: Buffers of each source; its buckets rotate through them.

        Raises:
            ValueError: If the live weights cannot be written in place.
        """

    async def adopt_placed(self, version: int) -> float:
        """Puts a version into service whose buckets are all in place; returns the seconds without a token."""

    async def close_weights(self) -> None:
        """Resumes with the live weights, to which nothing was written."""


def on_device(device: torch.device) -> AbstractContextManager[None]:
    """Makes ``device`` the current CUDA device of this thread within the block."""
    if device.type != "cuda":
        return nullcontext()
    context: AbstractContextManager[None] = torch.cuda.device(device)
    return context


class OwnThread:
    """Runs blocking collectives in a dedicated daemon thread.

    A collective whose peers are gone may hang for its whole deadline. In a shared pool it would
    occupy a worker, and in a thread that is not a daemon it would keep the process from ending. The
    owner abandons a thread that hangs and creates another one.
    """

    def __init__(self) -> None:
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threading.Thread(target=self._run_tasks, name="weights", daemon=True).start()

    async def run(self, work: Callable[[], T]) -> T:
        """Runs ``work`` after all earlier work; returns its result."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def settle(result: list[T], error: BaseException | None) -> None:
            if future.done():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result[0])

        def attempt() -> None:
            result: list[T] = []
            failure: BaseException | None = None
            try:
                result.append(work())
            except BaseException as error:  # noqa: BLE001  it is raised where the result is awaited
                failure = error
            if not loop.is_closed():
                loop.call_soon_threadsafe(settle, result, failure)

        self._work.put(attempt)
        return await future

    def close(self) -> None:
        """Ends the thread after the work given so far."""
        self._work.put(None)

    def _run_tasks(self) -> None:
        while (work := self._work.get()) is not None:
            work()
            # The variable would keep the member and its group alive until the next work.
            del work
