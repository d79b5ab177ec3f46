"""Rank 0 tells the other ranks what all of them do next, and each rank tells the others if it fails.

Every order is broadcast as a small header and its bytes, so that no rank enters a collective alone. A rank
that fails writes the cause into the store in which the ranks met; the others read it there, wherever they
are, and abort their process groups. Then all processes end, which closes what cannot be aborted. So no rank
waits in a collective for one that will not come.
"""

import asyncio
import logging
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from traceback import walk_tb
from typing import Never

import torch
from torch import distributed

from services.common.errors import UnavailableError
from services.trainer.model.parallel import abort_processes
from services.trainer.steps.oom import OomLimitError

logger = logging.getLogger(__name__)

_HEADER = struct.Struct("<qqqqq")
_LONGEST_TEXT = 512
_END = "worker/end"
"""Key of the store: :data:`_WELL`, or why the first rank that failed did so."""
_WELL = "ended"
_LISTEN = timedelta(days=365)
# Time for the other ranks to read how rank 0 ended, before the store ends with its process.
_JOIN_S = 5.0


class CommandKind(IntEnum):
    """What is ordered."""

    START = 1
    """Load the run whose specification follows."""
    TRAIN = 2
    """Train the step whose batch follows."""
    GATHER = 3
    """Gather the weights for rank 0."""
    SAVE = 4
    """Save a checkpoint of a step."""
    STOP = 5
    """End."""
    SCORE = 6
    """Score a text together: the canary, or the tokens that follow."""
    ADD_FIELD = 7
    """Add this worker's field to the batch that follows."""
    ADOPT = 8
    """Take the weights that rank 0 received."""
    ACCUMULATE = 9
    """Add the gradients of the groups that follow to those of the next step."""
    SLEEP = 10
    """Move the training state to host memory."""
    WAKE = 11
    """Move the training state back."""


@dataclass(frozen=True, slots=True)
class Command:
    """One order to all ranks."""

    kind: CommandKind
    """What to do."""
    step: int = 0
    """Step that it is about."""
    weight_version: int = 0
    """Version of the weights that a step starts from (TRAIN, ACCUMULATE), or that score (ADD_FIELD)."""
    payload: bytes = b""
    """A serialized ``KVBatchMeta`` (TRAIN, ACCUMULATE, ADD_FIELD), or JSON (START, SCORE)."""
    num_steps: int = 0
    """Steps of the whole run (TRAIN); 0 if that is not told."""


class RankFailedError(UnavailableError):
    """A rank of this worker failed: all of its ranks end, and are started again together."""

    def __init__(self, cause: str) -> None:
        super().__init__(f"a rank is gone, and all of them start again: {cause}")


class CommandGroup:
    """All processes of a worker; one process has nobody to tell.

    Args:
        size: Processes.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._lock = threading.Lock()
        self._cause: Future[str] = Future()

    @property
    def has_failed(self) -> bool:
        """Whether a rank has failed."""
        return self._cause.done()

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Hear of failures of other ranks, until the worker ends. Each rank enters it once all have met."""
        if self._size == 1:
            yield
            return
        # A store of its own connection: one that waits keeps others waiting.
        store = _meeting().clone()
        listener = threading.Thread(target=self._listen, args=(store,), name="crew", daemon=True)
        listener.start()
        try:
            yield
        finally:
            if distributed.is_initialized() and distributed.get_rank() == 0:
                _meeting().compare_set(_END, "", _WELL)
            listener.join(_JOIN_S)

    def _listen(self, store: distributed.Store) -> None:  # type: ignore[name-defined]
        # The store of a process that is gone tells nothing: its launcher ends the others.
        with suppress(RuntimeError):
            store.wait([_END], _LISTEN)
            if (end := store.get(_END).decode()) != _WELL:
                self._abort(end)

    def fail(self, cause: str) -> "RankFailedError":
        """End this worker: abort the process groups of all ranks. Returns the error that says why.

        Args:
            cause: Why this rank cannot go on; if another one failed before, its cause counts.
        """
        if distributed.is_initialized():
            mine = f"rank {distributed.get_rank()}: {cause}"
            with suppress(RuntimeError):  # the store is gone with rank 0
                mine = _meeting().compare_set(_END, "", mine).decode()
            cause = mine
        self._abort(cause)
        return RankFailedError(self._cause.result())

    async def failed(self) -> Never:
        """Return when a rank fails.

        Raises:
            RankFailedError: Always.
        """
        # The result is shared with threads, and must not be cancelled with who waits for it.
        raise RankFailedError(await asyncio.shield(asyncio.wrap_future(self._cause)))

    def _abort(self, cause: str) -> None:
        with self._lock:
            if self._cause.done():
                return
            self._cause.set_result(cause)
            logger.error("a rank failed, and this one ends with it", extra={"cause": cause})
            abort_processes()

    def tell(self, order: Command) -> None:
        """Send an order from rank 0 to the others, if none of them has failed."""
        if self._size == 1 or self.has_failed:
            return
        numbers = (order.kind, order.step, order.weight_version, order.num_steps)
        header = _HEADER.pack(*numbers, len(order.payload))
        _broadcast(bytearray(header))
        if order.payload:
            _broadcast(bytearray(order.payload))

    @contextmanager
    def guard(self, *, ends: bool = False) -> Iterator[None]:
        """Around what all ranks do: the loss of one is an outage, which the run waits out.

        Args:
            ends: Whether this rank ends with any error. Otherwise it ends if other ranks wait for it.

        Raises:
            RankFailedError: If a rank failed, this one or another. They are started again together.
        """
        if self._size == 1:
            yield
            return
        try:
            yield
        except Exception as error:
            leaves_others = isinstance(error, OomLimitError) or _is_of_a_collective(error)
            if ends and not (leaves_others or self.has_failed):
                logger.exception("this rank fails")
            if ends or leaves_others or self.has_failed:
                # After an abort everything fails somehow: what counts is the first cause.
                raise self.fail(str(error)) from error
            raise
        if self.has_failed:
            raise RankFailedError(self._cause.result())

    def gather(self, text: str) -> list[str]:
        """Texts of all ranks, in their order. Every rank calls it."""
        if self._size == 1:
            return [text]
        mine = torch.zeros(_LONGEST_TEXT, dtype=torch.uint8)
        mine[: len(text)] = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        found = [torch.zeros_like(mine) for _ in range(self._size)]
        distributed.all_gather(found, mine)
        return [bytes(each.tolist()).rstrip(b"\0").decode() for each in found]

    def receive(self) -> Command:
        """Wait for rank 0's next order."""
        header = _broadcast(bytearray(_HEADER.size))
        kind, step, weight_version, num_steps, size = _HEADER.unpack(header)
        payload = bytes(_broadcast(bytearray(size))) if size else b""
        return Command(CommandKind(kind), step, weight_version, payload, num_steps)


def _is_of_a_collective(error: Exception) -> bool:
    if not isinstance(error, RuntimeError):
        return False
    # NCCL's failures have a class. Gloo's do not, and FSDP calls it: they are known by who made the call.
    callers = [frame.f_globals["__name__"] for frame, _ in walk_tb(error.__traceback__)]
    caller = next(name for name in reversed(callers) if name != "torch._ops")
    return isinstance(error, distributed.DistError) or (
        caller.startswith("torch.distributed.") and not isinstance(error, torch.OutOfMemoryError)
    )


def _meeting() -> distributed.Store:  # type: ignore[name-defined]
    """The store in which the ranks met."""
    return distributed.distributed_c10d._get_default_store()  # noqa: SLF001 -- there is no public name


def _broadcast(data: bytearray) -> bytearray:
    distributed.broadcast(torch.frombuffer(data, dtype=torch.uint8), src=0)
    return data
