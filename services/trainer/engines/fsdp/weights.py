"""Export of the policy's weights for rollouts: Hugging Face names, one dtype, a fixed order."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from services.common.models.loading import stored_buffers, stored_tensors
from services.trainer.collectives import Ranks
from services.trainer.engines.fsdp.lora import (
    adapter_parameters,
    adapter_shapes,
    merged_parameters,
    merged_shapes,
)
from services.trainer.model.policy import Critic, Policy
from services.weightsync.adapters import DIGEST_SPEC, FROZEN_DIGEST, frozen_digest
from services.weightsync.weight_plan import TensorSpec

_ALONE = Ranks()


class WeightExport:
    """Describes and reads the weights of a policy, as whole tensors or as the rows of this rank.

    Args:
        policy: The policy, sharded or not; of a reward model, the language model without its value head.
        dtype: Element type of the sent parameters.
        sends_adapters: True if adapters are sent without their frozen weights. All ranks must then construct
            this object together if weights are sharded, because it computes a digest.
    """

    def __init__(
        self,
        policy: Policy | Critic,
        *,
        dtype: torch.dtype,
        ranks: Ranks = _ALONE,
        senders: str = "ranks",
        sends_adapters: bool = False,
    ) -> None:
        self._policy = policy
        self._dtype = dtype
        # Collected once, because the tensors stay the same objects, and searching all modules for them takes
        # longer than a GPU takes to copy them.
        self._tensors = stored_tensors(policy.model)
        self._buffers = stored_buffers(policy.model)
        self._ranks = ranks
        self._digest = self._frozen_digest() if sends_adapters else None
        self.sends_rows = senders == "ranks" and _is_divided_by_rows(policy)
        """True if every rank sends its own rows; otherwise rank 0 gathers and sends all."""
        self.gathers_rows = False
        """True if all ranks must iterate over the rows together."""

    def weight_specs(self) -> list[TensorSpec]:
        """Returns the specifications of all sent tensors, in sending order."""
        model = self._policy.model
        if self._digest is None:
            return [
                TensorSpec(name, tuple(shape), _dtype_name(self._dtype_of(name)))
                for name, shape in merged_shapes(model)
            ]
        return [
            *(
                TensorSpec(n, tuple(v.shape), _dtype_name(v.dtype))
                for n, v in self._buffers.items()
            ),
            *(TensorSpec(n, tuple(shape), "float32") for n, shape in adapter_shapes(model)),
            DIGEST_SPEC,
        ]

    @torch.no_grad()
    def weight_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Gathers and yields the weights one by one; tied weights come once, buffers in their stored dtype.

        All ranks must iterate if the weights are sharded.
        """
        model = self._policy.model
        if self._digest is None:
            for name, value in merged_parameters(model):
                yield name, value.to(self._dtype_of(name))
            return
        yield from self._buffers.items()
        yield from adapter_parameters(model)
        yield FROZEN_DIGEST, self._digest

    @torch.no_grad()
    def _frozen_digest(self) -> Tensor:
        """Returns the digest of the frozen weights, named without adapters, that receivers must have."""
        tensors = merged_parameters(self._policy.model, merges=False)
        return frozen_digest((name, value) for name, value in tensors if name not in self._buffers)

    def weight_rows(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the rows that this rank holds, without a gather; skips tensors without such rows."""
        with torch.no_grad():
            rows = [(name, self._own_rows(value)) for name, value in self._tensors.items()]
        return ((name, value) for name, value in rows if value.numel() > 0)

    def _own_rows(self, value: Tensor) -> Tensor:
        if isinstance(value, DTensor):
            return value.to_local()
        count = -(-len(value) // self._ranks.size)
        return value[self._ranks.rank * count :][:count]

    def _dtype_of(self, name: str) -> torch.dtype:
        """Returns the dtype in which a tensor is sent.

        Buffers keep their dtype: training changes them by less than half precision can represent.
        """
        return self._tensors[name].dtype if name in self._buffers else self._dtype


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _is_divided_by_rows(policy: Policy | Critic) -> bool:
    """Returns True if all parameters are sent as stored, whole or divided by FSDP2 alone into whole rows."""
    return not any("lora_" in name for name, _ in policy.named_parameters()) and all(
        _has_rows(parameter) for parameter in policy.parameters()
    )


def _has_rows(parameter: Tensor) -> bool:
    if not isinstance(parameter, DTensor):
        return True
    sizes = parameter.device_mesh.shape
    divided = [p for p, size in zip(parameter.placements, sizes, strict=True) if size > 1]
    return divided in ([], [Shard(0)])
