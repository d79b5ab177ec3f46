"""Runs the micro-batches of an update, or of a scoring pass, through the pipeline stages.

``torch.distributed.pipelining`` has the schedules: 1F1B, in which a stage holds the activations of at most as
many micro-batches as there are stages from it on; all forward passes first if there are fewer micro-batches
than stages. Its stages exchange tensors of one shape, known beforehand, so no pass is spent on inferring it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from services.extras.stages.layout import hidden_size
from services.extras.stages.modules import StagedCritic, StagedPolicy
from services.trainer.batch.packing import PackedTokens
from services.trainer.engines.fsdp.oom import catch_oom

Columns = tuple[Tensor, ...]
"""What the last stage computes for a micro-batch: ``[R, ...]`` each."""


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
            place = int(number)
            columns[place] = tuple(column.detach().clone() for column in output)
            return loss_of(place, output)

        stage = self._begin(packs, trains=True)
        is_filled = len(packs) >= self._module.stage.count
        schedule = (Schedule1F1B if is_filled else ScheduleGPipe)(
            stage, len(packs), loss_fn=loss, scale_grads=False
        )
        self._run(schedule, len(packs))
        return self._shared(columns)

    @torch.no_grad()
    def score(self, packs: Sequence[PackedTokens], **options: Any) -> list[Columns]:
        """Computes micro-batches without gradients; returns the last stage's columns on all stages.

        Args:
            options: Arguments of the last stage's forward pass.
        """
        stage = self._begin(packs, trains=False, **options)
        self._run(ScheduleGPipe(stage, len(packs)), len(packs))
        return self._shared([_as_columns(output) for output in stage.output_chunks])

    def _begin(
        self, packs: Sequence[PackedTokens], *, trains: bool, **options: Any
    ) -> PipelineStage:
        self._module.begin(packs, **options)
        stage = self._module.stage
        states = torch.empty(
            (1, self._module.width, hidden_size(self._module.model.config)),
            dtype=self._dtype,
            device="meta",
            requires_grad=trains,
        )
        return PipelineStage(
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

    def _run(self, schedule: Any, count: int) -> None:
        numbers = torch.arange(count)
        arguments = (numbers,) if self._module.stage.is_first else ()
        try:
            with self._first_causes():
                schedule.step(*arguments, number=numbers, target=numbers)
        finally:
            self._module.packs = ()

    @contextmanager
    def _first_causes(self) -> Iterator[None]:
        """Raises the error of a forward pass as it was; one of too little memory with its micro-batch."""
        with catch_oom(self._module.number):
            try:
                yield
            except RuntimeError as error:
                # The schedule wraps an error of a forward pass in a description of its tensors.
                if error.__cause__ is not None:
                    raise error.__cause__ from None
                raise

    def _shared(self, columns: Sequence[Columns]) -> list[Columns]:
        """Returns the columns of the last stage on all stages."""
        stage = self._module.stage
        shapes = [[tuple(column.shape) for column in each] for each in columns]
        held: list[Any] = [shapes]
        last = stage.count - 1
        distributed.broadcast_object_list(held, group=stage.group, group_src=last)
        (shapes,) = held
        sizes = [int(torch.Size(shape).numel()) for each in shapes for shape in each]
        if stage.is_last:
            flat = torch.cat([column.float().flatten() for each in columns for column in each])
        else:
            flat = torch.empty(sum(sizes), device=self._device)
        distributed.broadcast(flat, group=stage.group, group_src=last)
        parts = iter(flat.split(sizes))
        return [tuple(next(parts).view(shape) for shape in each) for each in shapes]


def _as_columns(output: Tensor | Columns) -> Columns:
    return (output,) if isinstance(output, Tensor) else tuple(output)
