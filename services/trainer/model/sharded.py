"""Weights for a model that is spread over ranks before it has any: each rank reads its own rows alone.

meta device -> adapters -> distribute -> memory for this rank's shards -> their rows from the safetensors
"""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from services.common.models.loading import compute_frequencies, stored_tensors
from services.common.models.reading import read_weights
from services.trainer.model.lora import is_adapter, plain_name


def fill(module: nn.Module, folder: Path, *, device: torch.device) -> None:
    """Give a distributed policy or critic without memory its weights, in place.

    Args:
        module: Holds a Hugging Face model as ``model``; what else it holds starts at 0, but for adapters.
        folder: Of the model, with safetensors.
        device: Where the shards live.

    Raises:
        ValueError: If the folder does not hold the weights of the model.
    """
    materialize(module, device=device)
    model: Any = module.get_submodule("model")
    held = stored_tensors(model)
    for parameter in set(module.parameters()) - set(model.parameters()):
        nn.init.zeros_(parameter)
    own = {plain_name(name): each.detach() for name, each in held.items() if not is_adapter(name)}
    read_weights(own, folder, model.config.to_dict())


def materialize(module: nn.Module, *, device: torch.device) -> None:
    """Give a distributed policy or critic memory for its weights, in place.

    Args:
        module: Holds a Hugging Face model as ``model``, on the meta device.
        device: Where the shards live.
    """
    module.to_empty(device=device)
    model: Any = module.get_submodule("model")
    model.tie_weights()
    compute_frequencies(model, device=device)
