"""The policy's weights as the rollouts receive them: Hugging Face names, one dtype, in one order."""

from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import PreTrainedModel

from services.common.weightsync.plan import TensorSpec
from services.trainer.model.lora import merged_parameters, merged_shapes


class WeightExport:
    """Describes and gathers the weights of a model.

    Args:
        model: The policy's Hugging Face model, sharded or not.
        dtype: Element type on the wire.
    """

    def __init__(self, model: PreTrainedModel, *, dtype: torch.dtype) -> None:
        self._model = model
        self._dtype = dtype

    def weight_specs(self) -> list[TensorSpec]:
        """What :meth:`weight_tensors` yields, in its order."""
        dtype = str(self._dtype).removeprefix("torch.")
        return [TensorSpec(name, tuple(shape), dtype) for name, shape in merged_shapes(self._model)]

    @torch.no_grad()
    def weight_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Gather the weights one by one, adapters merged; tied weights come once, without buffers.

        Where they are sharded, every rank must iterate.
        """
        for name, value in merged_parameters(self._model):
            yield name, value.to(self._dtype)
