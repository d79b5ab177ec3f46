"""Weights that are received straight into an engine's parameters, bucket by bucket.

::

    rollout process                               each worker of the engine
    open:  shapes, and slots that both see -----> finds where each tensor lies, or tells why it cannot
    place: what lies in a slot now -------------> copies its own parts of it into its parameters

Nothing but the slots is held beside the live weights.
"""

import asyncio
import json
from collections.abc import Callable, Coroutine, Mapping, Sequence
from math import prod
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from services.rollout.engines.layout import Piece, Shape, UnknownLayoutError, plan_pieces
from services.rollout.engines.shared_tensors import open_shared, shared_room
from services.weightsync.arena import copy_all
from services.weightsync.endpoints import Place
from services.weightsync.modes.placing import bucket_parts
from services.weightsync.plan import WeightPlan

_REPLY = "reply"
_REPLY_BYTES = 1024
_PLACE_TIMEOUT_S = 120.0
"""Of one bucket: a worker that takes this long hangs."""


async def place_in_workers(
    plan: WeightPlan,
    slots: Sequence[Sequence[Tensor]],
    load: Callable[[str], Coroutine[Any, Any, None]],
) -> Place:
    """Have all workers of an engine that stands still open their weights.

    Args:
        plan: The layout of what is received.
        slots: Buffers of each source, in which buckets lie in turn.
        load: Hands an order to every worker, which gives it to :func:`handle_weight_command`.

    Returns:
        What places a received bucket; called from another thread than that of this event loop.

    Raises:
        ValueError: If a tensor's place in the engine's parameters is not known.
    """
    loop = asyncio.get_running_loop()
    buffers = {
        f"{source}.{number}": buffer
        for source, turns in enumerate(slots)
        for number, buffer in enumerate(turns)
    }
    buffers[_REPLY] = torch.zeros(_REPLY_BYTES, dtype=torch.uint8, device=slots[0][0].device)
    shapes = [[spec.name, spec.shape] for spec in plan.tensors]
    with shared_room(buffers) as (description, room):
        await load(json.dumps({"slots": description, "shapes": shapes}))
    why = room[_REPLY].cpu().numpy().tobytes().rstrip(b"\0").decode(errors="replace")
    if why:
        raise ValueError(
            f"{why}; without its place it cannot be received straight into the engine's weights: choose "
            "weight_sync.mode shadow"
        )

    def place(source: int, index: int, received: Tensor) -> None:
        slot = f"{source}.{index % len(slots[source])}"
        if received.is_cuda:
            torch.cuda.current_stream(received.device).synchronize()
        else:
            room[slot][: len(received)].copy_(received)
        parts = [
            (spec.name, spec.dtype, part.first, part.begin, part.end)
            for part in bucket_parts(plan, source, index)
            for spec in [plan.tensors[part.tensor]]
        ]
        order = json.dumps({"slot": slot, "parts": parts})
        asyncio.run_coroutine_threadsafe(load(order), loop).result(_PLACE_TIMEOUT_S)

    return place


_WRITERS: "WeakKeyDictionary[nn.Module, _Writer]" = WeakKeyDictionary()


@torch.no_grad()
def handle_weight_command(
    order: str, model: nn.Module, *, rank: int, ranks: int, has_plain_experts: bool = False
) -> bool:
    """Carry out an order of :func:`place_in_workers`, in a worker; returns False if it is none.

    Args:
        order: What to do.
        model: The engine's model.
        rank: This worker's rank of tensor parallelism.
        ranks: Number of them.
        has_plain_experts: As in :func:`~services.rollout.engines.layout.plan_pieces`.
    """
    asked: Mapping[str, Any] = json.loads(order)
    if "slot" in asked:
        _WRITERS[model].write(asked["slot"], asked["parts"])
        return True
    if "slots" not in asked:
        return False
    _WRITERS.pop(model, None)
    slots = open_shared(asked["slots"])
    shapes = {name: tuple(shape) for name, shape in asked["shapes"]}
    parameters = dict(model.named_parameters())
    try:
        pieces = plan_pieces(
            shapes,
            {name: tuple(parameter.shape) for name, parameter in parameters.items()},
            rank=rank,
            ranks=ranks,
            has_plain_experts=has_plain_experts,
        )
        _WRITERS[model] = _Writer(slots, shapes, parameters, pieces)
    except UnknownLayoutError as error:
        # An error that is raised ends some engines.
        told = str(error).encode()[:_REPLY_BYTES]
        slots[_REPLY][: len(told)] = torch.frombuffer(bytearray(told), dtype=torch.uint8)
    return True


class _Writer:
    """A worker's side, between two orders to open.

    Args:
        slots: By name.
        shapes: Of the checkpoint tensors.
        parameters: Of this worker.
        pieces: How these are made of those.
    """

    def __init__(
        self,
        slots: Mapping[str, Tensor],
        shapes: Mapping[str, Shape],
        parameters: Mapping[str, Tensor],
        pieces: Sequence[Piece],
    ) -> None:
        self._slots = slots
        self._targets: dict[str, list[FlatTarget]] = {name: [] for name in shapes}
        for piece in pieces:
            target = FlatTarget(piece, shapes[piece.source], parameters[piece.target])
            self._targets[piece.source].append(target)

    def write(self, slot: str, parts: Sequence[Sequence[Any]]) -> None:
        """Copy what a slot holds: name, type, first byte in the tensor, first and last byte in the slot."""
        pairs = []
        for name, dtype, first, begin, end in parts:
            values = self._slots[slot][begin:end].view(getattr(torch, dtype))
            for target in self._targets[name]:
                pairs += target.pairs(first // values.itemsize, values)
        copy_all([place for place, _ in pairs], [values for _, values in pairs])


class FlatTarget:
    """Where a piece of a tensor lies, for ranges of the flat tensor.

    Tensor and parameter are matrices whose rows are what comes before the dimension that is cut: the piece is
    some columns of all rows.

    Args:
        piece: The piece.
        shape: Of the checkpoint tensor.
        parameter: That it is part of.

    Raises:
        UnknownLayoutError: If the parameter does not lie in one piece.
    """

    def __init__(self, piece: Piece, shape: Shape, parameter: Tensor) -> None:
        if not parameter.is_contiguous():
            raise UnknownLayoutError(f"{piece.target!r} does not lie in one piece")
        inner = prod(shape[piece.dim + 1 :])
        self._width = shape[piece.dim] * inner
        self._begin, length = piece.start * inner, piece.length * inner
        rows = parameter.detach().view(prod(shape[: piece.dim]), -1)
        self._place = rows.narrow(1, piece.target_start * inner, length)

    def pairs(self, first: int, values: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Places in the parameter and what belongs there, as blocks.

        Args:
            first: Number of the first element in the flat tensor.
            values: ``[n]`` elements from there on.
        """
        found = []
        row, column = divmod(first, self._width)
        while len(values):
            num_rows = 1 if column else max(len(values) // self._width, 1)
            width = min(self._width - column, len(values))
            block = values[: num_rows * width].view(num_rows, width)
            begin = max(self._begin, column)
            end = min(self._begin + self._place.shape[1], column + width)
            if begin < end:
                place = self._place[row : row + num_rows, begin - self._begin : end - self._begin]
                found.append((place, block[:, begin - column : end - column]))
            values = values[num_rows * width :]
            row, column = row + num_rows, 0
        return found
