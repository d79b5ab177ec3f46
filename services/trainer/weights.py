"""The policy's weights as the rollouts receive them: Hugging Face names, one dtype, in one order."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from services.common.weightsync.plan import TensorSpec


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
        name = str(self._dtype).removeprefix("torch.")
        return [TensorSpec(key, tuple(value.shape), name) for key, value in self._state()]

    @torch.no_grad()
    def weight_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Gather the weights one by one. Where they are sharded, every rank must iterate."""
        for key, value in self._state():
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            yield key, whole.detach().to(self._dtype)

    def _state(self) -> Iterator[tuple[str, Tensor]]:
        # Named parameters leave out buffers, and yield tied weights once under their first name.
        return self._model.named_parameters()
