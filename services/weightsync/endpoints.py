"""Where weights come from and where they go: the two ends of a transfer inside a member's process."""

import asyncio
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from queue import SimpleQueue
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from services.weightsync.canary import Canary
from services.weightsync.plan import TensorSpec, WeightPlan

T = TypeVar("T")
Place = Callable[[int, int, Tensor], None]
"""Copies a received bucket (source, index, bytes) to where it belongs. Blocks."""


class WeightSource(Protocol):
    """The weights of one trainer rank."""

    def weight_specs(self) -> Sequence[TensorSpec]:
        """All tensors of the model, in sending order."""

    def weight_tensors(self) -> Iterable[tuple[str, Tensor]]:
        """The current rows that this source holds, by name; cast to the wire's dtype if they differ."""

    def score_canary(self) -> Canary:
        """Score a short text under the current weights. Blocks; only the first source is asked."""


class WeightSink(Protocol):
    """An engine's weights."""

    async def adopt_weights(self, version: int, tensors: Mapping[str, Tensor]) -> float:
        """Put complete, verified weights into service between two decode steps.

        Returns:
            Seconds in which no token was produced.
        """

    async def score(self, token_ids: Sequence[int]) -> Sequence[float]:
        """Logprob of each token but the first under the live weights; none from an engine without a model."""

    async def refuse_weights(self, reason: str) -> None:
        """The live weights are not the trainer's: serve nothing until others are adopted."""

    async def open_weights(self, plan: WeightPlan, slots: Sequence[Sequence[Tensor]]) -> Place:
        """Pause, and let the live weights be written in place until they are adopted or closed.

        Args:
            plan: The layout of what is received.
            slots: Buffers of each source, in which its buckets lie in turn.

        Raises:
            ValueError: If the live weights cannot be written in place.
        """

    async def adopt_placed(self, version: int) -> float:
        """Put a version into service whose buckets are all in place.

        Returns:
            Seconds in which no token was produced.
        """

    async def close_weights(self) -> None:
        """Go on with the live weights: nothing was written."""


def on_device(device: torch.device) -> AbstractContextManager[None]:
    """Make a device the current one: which one that is, each thread says for itself."""
    if device.type != "cuda":
        return nullcontext()
    context: AbstractContextManager[None] = torch.cuda.device(device)
    return context


class OwnThread:
    """A thread for blocking collectives.

    One whose peers are gone may hang for its whole deadline: in a shared pool it would take a place, and it
    must not keep the process from ending. So this one is left behind, and another one takes over.
    """

    def __init__(self) -> None:
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threading.Thread(target=self._obey, name="weights", daemon=True).start()

    async def run(self, work: Callable[[], T]) -> T:
        """Run ``work`` behind what was given before; returns its result."""
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

    def leave(self) -> None:
        """End after what was given so far."""
        self._work.put(None)

    def _obey(self) -> None:
        while (work := self._work.get()) is not None:
            work()
            # Or this thread would keep the member, and its group, until there is more to do.
            del work
