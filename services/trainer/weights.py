"""The policy's weights as the rollouts receive them: Hugging Face names, one dtype, in one order."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from services.common.jagged import Jagged
from services.common.weightsync.canary import Canary, canary_text
from services.common.weightsync.plan import TensorSpec
from services.trainer.batch.packing import pack
from services.trainer.model.lora import (
    adapter_parameters,
    adapter_shapes,
    merged_parameters,
    merged_shapes,
)
from services.trainer.model.parallel import free_gathered
from services.trainer.model.policy import Policy

_CPU = torch.device("cpu")


class WeightExport:
    """Describes the weights of a policy and reads them, whole or in the rows of this rank.

    Args:
        policy: The policy, sharded or not.
        dtype: Element type on the wire.
        device: Of the policy.
        senders: Value of ``weight_sync.senders``.
        lora_sync: Value of ``trainer.lora.sync``.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        dtype: torch.dtype,
        device: torch.device = _CPU,
        senders: str = "ranks",
        lora_sync: str = "merged",
    ) -> None:
        self._policy = policy
        self._dtype = dtype
        self._device = device
        self._sends_adapters = lora_sync == "adapter"
        # They stay the same objects; a search through all modules takes longer than a GPU's copy.
        self._parameters = tuple(policy.model.named_parameters())
        self.sends_rows = senders == "ranks" and _is_divided_by_rows(policy)
        """Whether every rank sends its own rows; otherwise rank 0 gathers and sends all."""

    def weight_specs(self) -> list[TensorSpec]:
        """What is sent, in sending order."""
        dtype, model = str(self._dtype).removeprefix("torch."), self._policy.model
        shapes = merged_shapes(model)
        if self._sends_adapters:
            shapes += adapter_shapes(model)
        return [TensorSpec(name, tuple(shape), dtype) for name, shape in shapes]

    @torch.no_grad()
    def weight_tensors(self, *, only_adapters: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Gather the weights one by one; tied weights come once, without buffers.

        Where they are sharded, every rank must iterate.
        """
        model = self._policy.model
        if not only_adapters:
            for name, value in merged_parameters(model, merges=not self._sends_adapters):
                yield name, value.to(self._dtype)
        if self._sends_adapters:
            for name, value in adapter_parameters(model):
                yield name, value.to(self._dtype)

    def weight_rows(self) -> Iterator[tuple[str, Tensor]]:
        """The rows that this rank holds, without a gather; what it has no row of is left out."""
        with torch.no_grad():
            rows = [
                (name, value.to_local() if isinstance(value, DTensor) else value)
                for name, value in self._parameters
            ]
        return ((name, value) for name, value in rows if value.numel() > 0)

    @torch.no_grad()
    def score_canary(self) -> Canary:
        """Score a short text at temperature 1. Where the weights are sharded, every rank must call it."""
        config: Any = self._policy.model.config
        token_ids = canary_text(config.vocab_size)
        tokens = torch.tensor(token_ids, dtype=torch.int32)
        packed = pack(
            Jagged.from_list([tokens[:1]]), Jagged.from_list([tokens[1:]]), device=self._device
        )
        logprobs, _ = self._policy(packed, temperature=1.0)
        free_gathered(self._policy)
        return Canary(token_ids, tuple(logprobs.tolist()))


def _is_divided_by_rows(policy: Policy) -> bool:
    """Whether each parameter is whole or divided by FSDP2 alone, in whole rows, and sent as it is."""
    return not any("lora_" in name for name, _ in policy.named_parameters()) and all(
        not isinstance(parameter, DTensor) or tuple(parameter.placements) == (Shard(0),)
        for parameter in policy.parameters()
    )
