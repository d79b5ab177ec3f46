"""Receives weights directly into an engine's parameters, bucket by bucket.

::

    rollout process                               each worker of the engine
    open:  shapes and shared slots -------------> locates each tensor, or replies why it cannot
    write: slots with received buckets ---------> copies its own parts into its parameters

Apart from the slots, no memory is needed in addition to the live weights. A bucket is written when it arrives
if a later one needs its slot. The others are written with one command, because decoding waits and a command
takes milliseconds.
"""

import asyncio
import json
from collections.abc import Callable, Coroutine, Mapping, Sequence
from math import prod
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from services.extras.external_engine.layout import Piece, Shape, UnknownLayoutError, plan_pieces
from services.extras.external_engine.shared_tensors import open_shared, shared_buffers
from services.weightsync.arena import copy_all
from services.weightsync.modes.placing import bucket_parts
from services.weightsync.weight_plan import WeightPlan

_REPLY = "reply"
_REPLY_BYTES = 1024
_PLACE_TIMEOUT_S = 120.0
"""Time-out for placing one bucket; a worker that takes longer hangs."""

Load = Callable[[str], Coroutine[Any, Any, None]]
_Write = tuple[str, Sequence[tuple[str, str, int, int, int]]]
"""Slot, and its parts: tensor, dtype, first byte in the tensor, begin and end byte in the slot."""


class Placements:
    """Writes received buckets into the weights of all workers of a stopped engine.

    Args:
        plan: Layout of the received data.
        slots: Buffers of each source; its buckets use them in rotation.
        room: The shared slots by name.
        load: Sends a command to every worker, which passes it to :func:`handle_weight_command`.
    """

    def __init__(
        self,
        plan: WeightPlan,
        slots: Sequence[Sequence[Tensor]],
        room: Mapping[str, Tensor],
        load: Load,
    ) -> None:
        self._plan = plan
        self._slots = slots
        self._room = room
        self._load = load
        self._loop = asyncio.get_running_loop()
        self._pending: list[_Write] = []

    def place(self, source: int, index: int, bucket: Tensor) -> None:
        """Writes a bucket, at the latest with :meth:`finish`; the caller may then reuse its slot.

        Call it from a thread other than the event loop's.

        Args:
            source: Sender of the bucket.
            index: Number of the bucket among those of its source.
            bucket: Its bytes, in its slot.
        """
        num_slots = len(self._slots[source])
        slot = f"{source}.{index % num_slots}"
        if bucket.is_cuda:
            torch.cuda.current_stream(bucket.device).synchronize()
        else:
            self._room[slot][: len(bucket)].copy_(bucket)
        segments = [
            (spec.name, spec.dtype, segment.first, segment.begin, segment.end)
            for segment in bucket_parts(self._plan, source, index)
            for spec in [self._plan.tensors[segment.tensor]]
        ]
        if index + num_slots >= len(self._plan.sources[source].buckets):
            self._pending.append((slot, segments))  # no later bucket needs the slot
            return
        asyncio.run_coroutine_threadsafe(
            self._load(_command([(slot, segments)])), self._loop
        ).result(_PLACE_TIMEOUT_S)

    async def finish(self) -> None:
        """Writes all buckets that are not written yet; call it before the engine decodes again."""
        writes, self._pending = self._pending, []
        if writes:
            await self._load(_command(writes))


async def place_in_workers(
    plan: WeightPlan, slots: Sequence[Sequence[Tensor]], load: Load
) -> Placements:
    """Makes all workers of a stopped engine open their weights for writing.

    Args:
        plan: As for :class:`Placements`, like the others.

    Raises:
        ValueError: If a tensor's position in the engine's parameters is unknown.
    """
    buffers = {
        f"{source}.{number}": buffer
        for source, turns in enumerate(slots)
        for number, buffer in enumerate(turns)
    }
    buffers[_REPLY] = torch.zeros(_REPLY_BYTES, dtype=torch.uint8, device=slots[0][0].device)
    shapes = [[spec.name, spec.shape] for spec in plan.tensors]
    with shared_buffers(buffers) as (description, room):
        await load(json.dumps({"slots": description, "shapes": shapes}))
    why = room[_REPLY].cpu().numpy().tobytes().rstrip(b"\0").decode(errors="replace")
    if why:
        raise ValueError(
            f"{why}; the tensor cannot be received directly into the engine's weights, use "
            "weight_sync.mode shadow"
        )
    return Placements(plan, slots, room, load)


def _command(writes: Sequence[_Write]) -> str:
    return json.dumps({"writes": writes})


class BucketWriter(Protocol):
    """Worker's state between two open commands."""

    def write(self, slot: str, segments: Sequence[Sequence[Any]]) -> None:
        """Writes a slot's parts: name, dtype, first byte in the tensor, begin and end byte in the slot."""


MakeWriter = Callable[[Mapping[str, Tensor], Mapping[str, Shape]], BucketWriter]
"""Makes a writer from the shared slots and the shapes of all tensors, by name; raises UnknownLayoutError."""
_WRITERS: "WeakKeyDictionary[nn.Module, BucketWriter]" = WeakKeyDictionary()


@torch.no_grad()
def handle_weight_command(
    text: str,
    model: nn.Module,
    *,
    rank: int,
    ranks: int,
    has_plain_experts: bool = False,
    make_writer: MakeWriter | None = None,
) -> bool:
    """Executes a command of :func:`place_in_workers` in a worker.

    Args:
        text: JSON command.
        rank: This worker's rank of tensor parallelism.
        ranks: Number of ranks of tensor parallelism.
        has_plain_experts: As in :func:`~services.extras.external_engine.layout.plan_pieces`.
        make_writer: Makes the writer of a model whose parameters are not those of the checkpoint.

    Returns:
        False if ``text`` is no such command.
    """
    command: Mapping[str, Any] = json.loads(text)
    if "writes" in command:
        for slot, segments in command["writes"]:
            _WRITERS[model].write(slot, segments)
        return True
    if "slots" not in command:
        return False
    _WRITERS.pop(model, None)
    slots = open_shared(command["slots"])
    shapes = {name: tuple(shape) for name, shape in command["shapes"]}
    parameters = dict(model.named_parameters())
    try:
        if make_writer is not None:
            _WRITERS[model] = make_writer(slots, shapes)
            return True
        pieces = plan_pieces(
            shapes,
            {name: tuple(parameter.shape) for name, parameter in parameters.items()},
            rank=rank,
            ranks=ranks,
            has_plain_experts=has_plain_experts,
        )
        _WRITERS[model] = _Writer(slots, shapes, parameters, pieces)
    except UnknownLayoutError as error:
        # Reply instead of raising: an exception terminates some engines.
        reason = str(error).encode()[:_REPLY_BYTES]
        slots[_REPLY][: len(reason)] = torch.frombuffer(bytearray(reason), dtype=torch.uint8)
    return True


class _Writer:
    """Copies parts of tensors into parameters.

    Args:
        slots: Shared buffers by name.
        pieces: Mapping of checkpoint tensors to these parameters.
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

    def write(self, slot: str, segments: Sequence[Sequence[Any]]) -> None:
        """Copies a slot's parts: name, dtype, first byte in the tensor, begin and end byte in the slot."""
        pairs = []
        for name, dtype, first, begin, end in segments:
            values = self._slots[slot][begin:end].view(getattr(torch, dtype))
            for target in self._targets[name]:
                pairs += target.pairs(first // values.itemsize, values)
        copy_all([target_view for target_view, _ in pairs], [values for _, values in pairs])


class FlatTarget:
    """Locates ranges of a flat checkpoint tensor within a parameter.

    Tensor and parameter are viewed as matrices whose rows are the dimensions before the cut one, so
    that the piece is a range of columns in all rows.

    Raises:
        UnknownLayoutError: If the parameter is not contiguous.
    """

    def __init__(self, piece: Piece, shape: Shape, parameter: Tensor) -> None:
        if not parameter.is_contiguous():
            raise UnknownLayoutError(f"{piece.target!r} is not contiguous")
        inner = prod(shape[piece.dim + 1 :])
        self._width = shape[piece.dim] * inner
        self._begin, length = piece.start * inner, piece.length * inner
        rows = parameter.detach().view(prod(shape[: piece.dim]), -1)
        self._columns = rows.narrow(1, piece.target_start * inner, length)

    def pairs(self, first: int, values: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Returns pairs of a view into the parameter and the values to copy there, as 2-D blocks.

        Args:
            first: Index of the first element in the flat tensor.
            values: ``[n]`` consecutive elements from there on.
        """
        pairs = []
        row, column = divmod(first, self._width)
        while len(values):
            num_rows = 1 if column else max(len(values) // self._width, 1)
            width = min(self._width - column, len(values))
            block = values[: num_rows * width].view(num_rows, width)
            begin = max(self._begin, column)
            end = min(self._begin + self._columns.shape[1], column + width)
            if begin < end:
                target = self._columns[
                    row : row + num_rows, begin - self._begin : end - self._begin
                ]
                pairs.append((target, block[:, begin - column : end - column]))
            values = values[num_rows * width :]
            row, column = row + num_rows, 0
        return pairs
