"""Weights for a model that is spread over ranks before it has any: each rank reads its own rows alone.

meta device -> adapters -> distribute -> memory for this rank's shards -> their rows from the safetensors
"""

import math
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load as load_shards
from torch.distributed.tensor import DTensor

from services.common.models.loading import compute_frequencies
from services.trainer.model.lora import is_adapter, plain_name


def fill(module: nn.Module, folder: Path, *, device: torch.device) -> None:
    """Give a distributed policy or critic without memory its weights, in place.

    Args:
        module: Holds a Hugging Face model as ``model``; what else it holds starts at 0.
        folder: Of the model, with safetensors.
        device: Where the shards live.

    Raises:
        ValueError: If the folder does not hold the weights of the model.
    """
    materialize(module, device=device)
    model: Any = module.get_submodule("model")
    stored, loaded = {}, set()
    for name, parameter in model.named_parameters():
        loaded.add(parameter)
        if is_adapter(name):
            _begin_adapter(name, parameter)
        else:
            stored[plain_name(name)] = parameter.detach()
    for parameter in set(module.parameters()) - loaded:
        nn.init.zeros_(parameter)
    try:
        load_shards(stored, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
    except (CheckpointException, OSError, RuntimeError) as error:
        raise ValueError(
            f"model.path: {folder} does not hold the weights of its config.json: {error}"
        ) from error


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


def _begin_adapter(name: str, parameter: nn.Parameter) -> None:
    """As peft does: random rows below, 0 above, so that an adapter begins as nothing."""
    with torch.no_grad():
        rows = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if "lora_A" in name:
            bound = 1.0 / math.sqrt(parameter.shape[1])
            rows.uniform_(-bound, bound)
        else:
            rows.zero_()
