"""A frozen policy that scores, and whose weights can be replaced by published ones."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from services.common.models.loading import stored_tensors
from services.trainer.engines.base import score_text
from services.trainer.engines.fsdp.engine import FsdpEngine


class Scorer:
    """Scores text and adopts weights. All ranks must make the same calls in the same order, one at a time.

    Args:
        engine: Engine of the frozen policy.
    """

    def __init__(self, engine: FsdpEngine) -> None:
        self._engine = engine

    def score_text(self, token_ids: Sequence[int]) -> list[float]:
        """Returns the logprob of each token except the first, at temperature 1."""
        return score_text(self._engine, token_ids)

    def live(self) -> dict[str, Tensor]:
        """Returns the live weights by name for writing in place; this rank's rows if they are sharded."""
        return {
            name: value.detach()
            for name, value in stored_tensors(self._engine.module.model).items()
        }

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Checks that tensors have the names of this model's weights.

        Raises:
            ValueError: If names are missing or unknown.
        """
        names = self.live().keys()
        if names != tensors.keys():
            raise ValueError(
                f"the weights lack {sorted(names - tensors.keys())[:3]} and have "
                f"{sorted(tensors.keys() - names)[:3]} that the model does not"
            )

    @torch.no_grad()
    def adopt(self, tensors: Mapping[str, Tensor] | None) -> None:
        """Replaces the weights. If they are sharded, each rank receives its rows, one tensor after the other.

        Args:
            tensors: Whole, checked tensors on rank 0; None on the other ranks.
        """
        for name, live in self.live().items():
            if isinstance(live, DTensor):
                whole = torch.empty(live.shape, dtype=live.dtype, device=self._engine.device)
                if tensors is not None:
                    whole.copy_(tensors[name])
                live.copy_(distribute_tensor(whole, live.device_mesh, live.placements))
            else:
                assert tensors is not None, "weights that are not sharded have one rank"
                live.copy_(tensors[name])
