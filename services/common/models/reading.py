"""Reads the weights of a model's folder into existing tensors, whole or sharded."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load as load_shards
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from services.common.models.expert_names import checkpoint_names, is_fused


def read_weights(
    tensors: Mapping[str, torch.Tensor], folder: Path, config: Mapping[str, Any]
) -> None:
    """Fills tensors from safetensors, in place; values are cast to the tensors' dtypes.

    Args:
        tensors: Tensors by their names in the model. Of a DTensor, this rank's shard is read.
        folder: Folder with safetensors and config.json.
        config: The model's ``config.json``.

    Raises:
        ValueError: If the folder lacks one of the tensors or cannot be read.
    """
    try:
        stored = as_stored(tensors, config)
        load_shards(stored, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
    except (CheckpointException, OSError, RuntimeError) as error:
        raise ValueError(
            f"model.path: weights in {folder} do not match its config.json: {error}"
        ) from error


def as_stored(
    tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    """Returns tensors by their checkpoint names; fused experts are divided into those of this rank."""
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
