"""Rank 0 tells the other ranks what all of them do next.

Every order is broadcast as a small header and its bytes, so that no rank enters a collective alone.
"""

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from traceback import walk_tb

import torch
from torch import distributed

from services.common.errors import UnavailableError

_HEADER = struct.Struct("<qqqqq")
_LONGEST_TEXT = 512


class Kind(IntEnum):
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
class Order:
    """One order to all ranks."""

    kind: Kind
    """What to do."""
    step: int = 0
    """Step that it is about."""
    weight_version: int = 0
    """Version of the weights that a step starts from (TRAIN, ACCUMULATE), or that score (ADD_FIELD)."""
    payload: bytes = b""
    """A serialized ``KVBatchMeta`` (TRAIN, ACCUMULATE, ADD_FIELD), or JSON (START, SCORE)."""
    num_steps: int = 0
    """Steps of the whole run (TRAIN); 0 if that is not told."""


class Crew:
    """All processes of a worker; one process has nobody to tell.

    Args:
        size: Processes.
    """

    def __init__(self, size: int) -> None:
        self._size = size

    def tell(self, order: Order) -> None:
        """Send an order from rank 0 to the others."""
        if self._size == 1:
            return
        numbers = (order.kind, order.step, order.weight_version, order.num_steps)
        header = _HEADER.pack(*numbers, len(order.payload))
        _broadcast(bytearray(header))
        if order.payload:
            _broadcast(bytearray(order.payload))

    @contextmanager
    def together(self) -> Iterator[None]:
        """Around what all ranks do: the loss of one is an outage, which the run waits out.

        Raises:
            UnavailableError: If the ranks' connection broke. They are started again together.
        """
        try:
            yield
        except RuntimeError as error:
            if self._size == 1 or not _is_of_a_collective(error):
                raise
            raise UnavailableError(
                f"a rank is gone, and all of them start again: {error}"
            ) from error

    def gather(self, text: str) -> list[str]:
        """Texts of all ranks, in their order. Every rank calls it."""
        if self._size == 1:
            return [text]
        mine = torch.zeros(_LONGEST_TEXT, dtype=torch.uint8)
        mine[: len(text)] = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        found = [torch.zeros_like(mine) for _ in range(self._size)]
        distributed.all_gather(found, mine)
        return [bytes(each.tolist()).rstrip(b"\0").decode() for each in found]

    def hear(self) -> Order:
        """Wait for rank 0's next order."""
        header = _broadcast(bytearray(_HEADER.size))
        kind, step, weight_version, num_steps, size = _HEADER.unpack(header)
        payload = bytes(_broadcast(bytearray(size))) if size else b""
        return Order(Kind(kind), step, weight_version, payload, num_steps)


def _is_of_a_collective(error: RuntimeError) -> bool:
    # NCCL's failures have a class. Gloo's do not, and FSDP calls it: they are known by who made the call.
    callers = [frame.f_globals["__name__"] for frame, _ in walk_tb(error.__traceback__)]
    caller = next(name for name in reversed(callers) if name != "torch._ops")
    return isinstance(error, distributed.DistError) or (
        caller.startswith("torch.distributed.") and not isinstance(error, torch.OutOfMemoryError)
    )


def _broadcast(data: bytearray) -> bytearray:
    distributed.broadcast(torch.frombuffer(data, dtype=torch.uint8), src=0)
    return data
