"""Runs inside vLLM's workers: reloads parameters that a model fills itself, past the loaders that vLLM wraps.

While vLLM reloads, parameters have no memory, and what is copied into them is lost; only their loaders defer
it. gpt-oss copies its experts and its sinks.
"""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.model_executor.model_loader.reload.layerwise import make_online_process_loader
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

_COPIED = ("w13_weight", "w2_weight", "w13_bias", "w2_bias", "sinks")


class DeferredCopies(TorchDispatchMode):
    """Has what is copied into such parameters loaded, once their memory is there.

    Args:
        model: vLLM's, between the two halves of its reload.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._places = {
            _storage(parameter): (layer, name)
            for layer in model.modules()
            for name, parameter in layer.named_parameters(recurse=False)
            if name in _COPIED and parameter.is_meta
        }

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Take over copies, and do all else."""
        place = None
        if func is torch.ops.aten.copy_.default and args[0].is_meta:
            place = self._places.get(_storage(args[0]))
        if place is None:
            return func(*args, **(kwargs or {}))
        layer, name = place
        parameter = getattr(layer, name)
        # That of experts takes one of them at a time.
        parameter.weight_loader = default_weight_loader
        parameter.weight_loader = make_online_process_loader(layer, name)
        parameter.weight_loader(parameter, args[1])
        return args[0]


def _storage(tensor: torch.Tensor) -> int:
    """Which memory a tensor and its views share, also where there is none."""
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001 -- tensors without memory have no address
