"""Weights for a model that is spread over ranks before it has any: each rank reads its own rows alone.

meta device -> adapters -> distribute -> memory for this rank's shards -> their rows from the safetensors
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load as load_shards
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from services.common.models.expert_names import checkpoint_names, is_fused
from services.common.models.loading import compute_frequencies, stored_tensors
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
    try:
        stored = as_stored(own, model.config.to_dict())
        load_shards(stored, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
    except (CheckpointException, OSError, RuntimeError) as error:
        raise ValueError(
            f"model.path: {folder} does not hold the weights of its config.json: {error}"
        ) from error


def as_stored(
    tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    """Tensors under the names of a checkpoint; of fused experts those that this rank holds, one by one."""
    stored: dict[str, torch.Tensor] = {}
    for name, value in tensors.items():
        first = 0
        held = value
        if is_fused(name, config) and isinstance(value, DTensor):
            place = value.shape, value.device_mesh, value.placements
            first = compute_local_shape_and_global_offset(*place)[1][0]
            held = value.to_local()
        stored.update(checkpoint_names(name, held, config, first=first))
    return stored


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
