"""Runs the micro-batches of an update, or of a scoring pass, through the pipeline stages.

``torch.distributed.pipelining`` has the schedules: 1F1B, in which a stage holds the activations of at most as
many micro-batches as there are stages from it on; all forward passes first if there are fewer micro-batches
than stages. Its stages exchange tensors of one shape, known beforehand, so no pass is spent on inferring it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, distributed
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from services.extras.stages.layout import hidden_size
from services.extras.stages.modules import StagedCritic, StagedPolicy
from services.trainer.batch.packing import PackedTokens
from services.trainer.engines.fsdp.oom import catch_oom

_ROUND: Final = 4
"""Micro-batches of one scoring schedule, for each stage: it keeps the states of all of them until it ends."""
Columns = tuple[Tensor, ...]
"""Outputs of the last stage for a micro-batch: ``[R, ...]`` each."""


class BoundedStage(PipelineStage):
    """A stage whose buffers exist from the reception of a micro-batch until its backward pass has ended.

    Torch's stage allocates them for all micro-batches at the begin of a schedule, which would be most of
    the memory of a large model. Here they have no memory at first, so that a stage never has more of them
    than the micro-batches that it has begun.
    """

    def _setup_forward_recv_info(self, *arguments: Any, **options: Any) -> None:
        with self._without_memory():
            super()._setup_forward_recv_info(*arguments, **options)

    def _setup_backward_recv_info(self, *arguments: Any, **options: Any) -> None:
        with self._without_memory():
            super()._setup_backward_recv_info(*arguments, **options)

    if not hasattr(PipelineStage, "_setup_forward_recv_info"):  # torch before 2.12

        def _prepare_forward_infra(self, *arguments: Any, **options: Any) -> Any:
            with self._without_memory():
                return super()._prepare_forward_infra(*arguments, **options)

        def _prepare_backward_infra(self, *arguments: Any, **options: Any) -> Any:
            with self._without_memory():
                return super()._prepare_backward_infra(*arguments, **options)

        def _validate_fwd_outputs(self, outputs: tuple[Tensor, ...]) -> None:
            # What the last stage returns is sent nowhere; its shapes differ between micro-batches.
            if not self.is_last:
                super()._validate_fwd_outputs(outputs)  # type: ignore[misc]

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[distributed.P2POp]:
        """Returns the receptions of a micro-batch's states."""
        self._allocate(self.args_recv_info[fwd_chunk_id])
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[distributed.P2POp]:
        """Returns the receptions of the gradients of a micro-batch's states."""
        if self.has_backward and not self.is_last:
            self._allocate(self.grad_recv_info[bwd_chunk_id])
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[distributed.P2POp]:
        """Returns the sending of a micro-batch's gradients, after its backward pass."""
        for infos in (self.args_recv_info, self.grad_recv_info):
            for info in _received(infos.get(bwd_chunk_id, ())):
                info.buffer = None
        return super().get_bwd_send_ops(bwd_chunk_id)

    @contextmanager
    def _without_memory(self) -> Iterator[None]:
        device, self.device = self.device, torch.device("meta")
        try:
            yield
        finally:
            self.device = device

    def _allocate(self, infos: Sequence[Any]) -> None:
        for info in _received(infos):
            buffer = info.buffer
            if buffer is not None and buffer.is_meta:
                memory = torch.empty_like(buffer, device=self.device)
                info.buffer = memory.requires_grad_(buffer.requires_grad)


def _received(infos: Sequence[Any]) -> Iterator[Any]:
    """Yields the tensors of another stage; the first stage's inputs have no buffer before torch 2.12."""
    return (info for info in infos if hasattr(info, "buffer"))


class StagePasses:
    """Runs schedules over a module that is divided into stages. All ranks must make the same calls.

    Args:
        dtype: Dtype of the states that stages exchange.
    """

    def __init__(
        self, module: StagedPolicy | StagedCritic, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._module = module
        self._device = device
        self._dtype = dtype
        self.newest = 0
        """Micro-batch of the newest forward pass, in the order of the pass."""

    def train(
        self, packs: Sequence[PackedTokens], loss_of: Callable[[int, Columns], Tensor]
    ) -> list[Columns]:
        """Adds the gradients of micro-batches; returns the last stage's columns on all stages.

        Args:
            loss_of: Called on the last stage with the number of a micro-batch and its columns; returns the
                scalar whose gradients are added.
        """
        columns: list[Columns] = [()] * len(packs)

        def loss(output: Columns, number: Tensor) -> Tensor:
            index = int(number)
            columns[index] = tuple(column.detach().clone() for column in output)
            return loss_of(index, output)

        stage = self._begin(packs, trains=True)
        is_filled = len(packs) >= self._module.stage.count
        schedule = (Schedule1F1B if is_filled else ScheduleGPipe)(
            stage, len(packs), loss_fn=loss, scale_grads=False
        )
        try:
            self._run(schedule, len(packs))
        except torch.OutOfMemoryError:
            with catch_oom(self.newest):
                raise
        return self._shared(columns)

    @torch.no_grad()
    def score(self, packs: Sequence[PackedTokens], **options: Any) -> list[Columns]:
        """Computes micro-batches without gradients; returns the last stage's columns on all stages.

        Args:
            options: Arguments of the last stage's forward pass.
        """
        count = _ROUND * self._module.stage.count
        columns: list[Columns] = []
        for start in range(0, len(packs), count):
            group = packs[start : start + count]
            stage = self._begin(group, trains=False, **options)
            self._run(ScheduleGPipe(stage, len(group)), len(group), first=start)
            columns += self._shared([_as_columns(output) for output in stage.output_chunks])
        return columns

    def _begin(
        self, packs: Sequence[PackedTokens], *, trains: bool, **options: Any
    ) -> BoundedStage:
        self._module.begin(packs, **options)
        stage = self._module.stage
        states = torch.empty(
            (1, self._module.width, hidden_size(self._module.model.config)),
            dtype=self._dtype,
            device="meta",
            requires_grad=trains,
        )
        return BoundedStage(
            self._module,
            stage.index,
            stage.count,
            self._device,
            input_args=(torch.empty(1, dtype=torch.int64, device="meta"),)
            if stage.is_first
            else (states,),
            # What the last stage returns is sent nowhere, so only the number of its columns counts.
            output_args=(states,) * (self._module.num_columns if stage.is_last else 1),
            group=stage.group,
        )

    def _run(self, schedule: Any, count: int, *, first: int = 0) -> None:
        """Runs a schedule.

        Args:
            first: Number of its first micro-batch in the pass.
        """
        numbers = torch.arange(count)
        arguments = (numbers,) if self._module.stage.is_first else ()
        try:
            schedule.step(*arguments, number=numbers, target=numbers)
        except RuntimeError as error:
            # The schedule wraps an error of a forward pass in a description of its tensors.
            raise (error.__cause__ or error) from None
        finally:
            self.newest = first + self._module.number
            self._module.packs = ()

    def _shared(self, columns: Sequence[Columns]) -> list[Columns]:
        """Returns the columns of the last stage on all stages."""
        stage = self._module.stage
        shapes = [[tuple(column.shape) for column in stage_columns] for stage_columns in columns]
        broadcast_list: list[Any] = [shapes]
        last = stage.count - 1
        distributed.broadcast_object_list(broadcast_list, group=stage.group, group_src=last)
        (shapes,) = broadcast_list
        sizes = [
            int(torch.Size(shape).numel()) for stage_columns in shapes for shape in stage_columns
        ]
        if stage.is_last:
            flat = torch.cat(
                [column.float().flatten() for stage_columns in columns for column in stage_columns]
            )
        else:
            flat = torch.empty(sum(sizes), device=self._device)
        distributed.broadcast(flat, group=stage.group, group_src=last)
        pieces = iter(flat.split(sizes))
        return [
            tuple(next(pieces).view(shape) for shape in stage_columns) for stage_columns in shapes
        ]


def _as_columns(output: Tensor | Columns) -> Columns:
    return (output,) if isinstance(output, Tensor) else tuple(output)
