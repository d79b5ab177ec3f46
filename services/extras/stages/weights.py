"""Export of weights by pipeline stages: each rank sends rows of the layers that it holds."""

from collections.abc import Iterator

import torch
from torch import Tensor, distributed
from torch.distributed.tensor import DTensor

from services.extras.stages.layout import Stage
from services.extras.stages.modules import StagedCritic, StagedPolicy
from services.trainer.engines.fsdp.parallel import RankTopology
from services.trainer.engines.fsdp.weights import WeightExport
from services.weightsync.weight_plan import TensorSpec


class StageExport(WeightExport):
    """Describes the weights of all stages, and reads those of this rank.

    Args:
        dtype: Element type of the sent parameters.
    """

    def __init__(
        self, module: StagedPolicy | StagedCritic, *, dtype: torch.dtype, topology: RankTopology
    ) -> None:
        super().__init__(module, dtype=dtype, ranks=topology.sharding)
        self._whole = module.whole
        self._stage: Stage = module.stage
        self.sends_rows = True
        # Tensor-parallel ranks have columns of some matrices; copies of experts do not follow one another.
        experts = 1 if topology.experts is None else topology.experts["experts"].size()
        self.gathers_rows = topology.tensor_parallel > 1 or 1 < experts < len(self._stage.ranks)
        self._stage_rank = topology.rank - self._stage.ranks.start

    def weight_specs(self) -> list[TensorSpec]:
        """Returns the specifications of the tensors of all stages, in the order of a checkpoint."""
        return [
            TensorSpec(
                name,
                shape,
                str(self._dtype_of(name)).removeprefix("torch."),
                holders=tuple(self._stage.ranks_of(self._sender(name))),
            )
            for name, shape in self._whole.shapes
        ]

    @torch.no_grad()
    def weight_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yields all weights on every rank, one by one: their stage gathers and shares them.

        All ranks must iterate.
        """
        device = next(iter(self._tensors.values())).device
        for name, shape in self._whole.shapes:
            stage, value = self._sender(name), self._tensors.get(name)
            if stage == self._stage.index:
                assert value is not None, "a stage has the tensors that it sends"
                gathered = value.full_tensor() if isinstance(value, DTensor) else value
                tensor = gathered.to(self._dtype_of(name)).contiguous()
            else:
                tensor = torch.empty(shape, dtype=self._dtype_of(name), device=device)
            distributed.broadcast(tensor, group=self._stage.group, group_src=stage)
            yield name, tensor

    def weight_rows(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the rows that this rank sends; a tensor that two stages hold comes from the first.

        With tensor parallelism, all ranks of a stage must iterate: they gather its tensors one by one.
        """
        names = [name for name, _ in self._whole.shapes if self._sender(name) == self._stage.index]
        for name in names:
            with torch.no_grad():
                rows = self._rows(self._tensors[name])
            if rows.numel() > 0:
                yield name, rows

    def _rows(self, value: Tensor) -> Tensor:
        if not self.gathers_rows:
            return self._own_rows(value)
        gathered = value.full_tensor() if isinstance(value, DTensor) else value
        count = -(-len(gathered) // len(self._stage.ranks))
        return gathered[self._stage_rank * count :][:count]

    def _sender(self, name: str) -> int:
        return self._whole.sender(name, self._stage.count)

    def _dtype_of(self, name: str) -> torch.dtype:
        return torch.float32 if name in self._whole.buffers else self._dtype
