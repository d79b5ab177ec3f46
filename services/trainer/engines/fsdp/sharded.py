"""Loads weights into a model that is already sharded: each rank reads only its own rows.

meta device -> adapters -> distribute -> memory for this rank's shards -> their rows from the safetensors
"""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from services.common.models.loading import compute_frequencies, stored_tensors
from services.common.models.reading import read_weights
from services.trainer.engines.fsdp.lora import is_adapter, plain_name


def fill(module: nn.Module, folder: Path, *, device: torch.device) -> None:
    """Allocates and loads the weights of a distributed policy or critic on the meta device, in place.

    Args:
        module: Holds a Hugging Face model as ``model``; its other parameters become 0; adapters stay unset.
        folder: Folder of the model, with safetensors.
        device: Device of the shards.

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
    """Allocates memory for the weights of a distributed policy or critic, in place.

    Args:
        module: Holds a Hugging Face model as ``model``, on the meta device.
        device: Device of the shards.
    """
    module.to_empty(device=device)
    model: Any = module.get_submodule("model")
    model.tie_weights()
    compute_frequencies(model, device=device)
