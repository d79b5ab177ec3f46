"""Loads models by specification: a folder, a Hugging Face id, or a generated preset.

Names in a folder may differ from those in the model: experts are fused or divided, and the language model
of a multimodal checkpoint has a prefix. Tensors of the folder that the model does not have are ignored: a
vision tower unless ``model.images`` is true, heads for multi-token prediction.
"""

import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, cast

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load as load_shards
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from services.common.gpus import GpuMemory, gpu_memory
from services.common.models.configs import (
    full_config,
    is_folder,
    is_multimodal,
    load_problem,
    read_config,
)
from services.common.models.experts import checkpoint_names, is_fused
from services.common.models.tokenizer import Tokenizer
from services.common.models.vision import TOWER, register_vision, vision_tower
from services.common.models.weight_files import named, stored_names
from services.common.models.weight_formats import open_other_weights
from services.common.runspec.run import ModelSpec

_DECODER, _HEAD = "model.", "lm_head."
_PREFIXES = (
    ("model.language_model.", _HEAD),
    ("language_model.model.", "language_model." + _HEAD),
    ("language_model.model.", _HEAD),
)
"""Prefixes of the decoder and of the output head in multimodal checkpoints."""
_TOWERS = (TOWER, "visual.")
"""Prefixes of vision towers in multimodal checkpoints."""

SCORES_BEFORE_END: Final = "scores_before_end"
"""Key in the ``config.json`` of a reward model that scores a response before the token that ends it.

The value is ``chat`` if its prompts are rendered with the chat template, else ``text``.
"""


def read_weights(
    tensors: Mapping[str, torch.Tensor], folder: Path, config: Mapping[str, Any]
) -> None:
    """Fills tensors from the weights of a folder, in place; values are cast to the tensors' dtypes.

    Args:
        tensors: Tensors by their names in the model. For a DTensor, this rank's shard is read.
        config: ``config.json`` of the model, which may be the language model of the folder.

    Raises:
        ValueError: If the folder lacks one of the tensors or cannot be read.
    """
    try:
        other_weights = open_other_weights(folder)
        names = stored_names(folder) if other_weights is None else other_weights.names
        reader = (
            HuggingFaceStorageReader(str(folder))
            if other_weights is None
            else other_weights.reader()
        )
        load_shards(
            as_stored(tensors, config, expected_names=names), storage_reader=reader, no_dist=True
        )
    except (CheckpointException, OSError, RuntimeError) as error:
        raise ValueError(
            f"model.path: weights in {folder} do not match its config.json: {error}"
        ) from error


def as_stored(
    tensors: Mapping[str, torch.Tensor],
    config: Mapping[str, Any],
    *,
    expected_names: Collection[str] = (),
) -> dict[str, torch.Tensor]:
    """Returns tensors by their checkpoint names; fused experts are divided into those of this rank.

    Args:
        tensors: Tensors by their names in the model.
        config: The model's ``config.json``.
        expected_names: Names in the checkpoint that is read or replaced: with its prefixes and fused experts.
    """
    prefixes: tuple[str, ...] = next(
        (
            (decoder, head)
            for decoder, head in _PREFIXES
            if f"{decoder}embed_tokens.weight" in expected_names
            and (head == _HEAD or f"{head}weight" in expected_names)
        ),
        (_DECODER, _HEAD),
    )
    towers = [
        prefix for prefix in _TOWERS if any(name.startswith(prefix) for name in expected_names)
    ]
    prefixes = (towers[0] if towers else TOWER, *prefixes)
    stored_tensors_by_name: dict[str, torch.Tensor] = {}
    for name, value in tensors.items():
        if (whole_name := _prefixed(name, prefixes)) in expected_names:
            stored_tensors_by_name[whole_name] = value
            continue
        first = 0
        local_tensor = value
        if is_fused(name, config) and isinstance(value, DTensor):
            local_layout = value.shape, value.device_mesh, value.placements
            first = compute_local_shape_and_global_offset(*local_layout)[1][0]
            local_tensor = value.to_local()
        for stored_name, tensor in checkpoint_names(name, local_tensor, config, first=first):
            stored_tensors_by_name[_prefixed(stored_name, prefixes)] = tensor
    return stored_tensors_by_name


def _prefixed(name: str, prefixes: Sequence[str]) -> str:
    for prefix, other_prefix in zip((TOWER, _DECODER, _HEAD), prefixes, strict=True):
        if name.startswith(prefix):
            return other_prefix + name.removeprefix(prefix)
    return name


def load_config(model: ModelSpec, tokenizer: Tokenizer) -> PretrainedConfig:
    """Returns the Hugging Face configuration of a model.

    Raises:
        ValueError: If ``model.path`` names no model.
    """
    if model.is_tiny:
        return AutoConfig.for_model(**read_config(model, tokenizer))
    return cast("PretrainedConfig", full_config(model))


def build_model(
    config: PretrainedConfig, *, dtype: torch.dtype, device: torch.device | str, seed: int = 0
) -> PreTrainedModel:
    """Builds a causal language model with random weights, the same for the same seed.

    Rollouts start with it: their weights arrive later through weight synchronization.

    Args:
        device: Device on which the weights are created.
        seed: Seed of the weights; the global random state does not change.
    """
    register_vision(config)
    devices = [torch.device(device)] if torch.device(device).type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.device(device):
        torch.manual_seed(seed)
        model: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=dtype
        )
    if devices:
        compute_frequencies(model, device=device)
    for buffer in stored_buffers(model).values():
        # Models that are loaded from a folder have float32 buffers too.
        buffer.data = buffer.data.float()
    return cast("PreTrainedModel", model.eval())


def stored_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Returns the buffers in a checkpoint, such as those that balance the choice of experts."""
    return {
        name: buffer
        for name, buffer in model.named_buffers()
        if name.rpartition(".")[2]
        not in model.get_submodule(name.rpartition(".")[0])._non_persistent_buffers_set  # noqa: SLF001
    }


def stored_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Returns the model's own tensors that a checkpoint stores, by name, tied weights once; no copies."""
    return {**dict(model.named_parameters()), **stored_buffers(model)}


def compute_frequencies(model: PreTrainedModel, *, device: torch.device | str) -> None:
    """Sets the rotary frequencies of a model in place: float32, computed and never stored.

    A CPU computes them, as for a model that is loaded from a folder. Powers on a GPU differ in the
    last bit, and so would the logprobs of trainer and rollout under the same weights.
    """
    decoder: Any = model.get_decoder()  # type: ignore[no-untyped-call]
    if hasattr(decoder, "rotary_emb"):
        decoder.rotary_emb = type(decoder.rotary_emb)(config=model.config).to(device)
    tower: Any = vision_tower(model)
    if tower is not None:
        tower.rotary_pos_emb = type(tower.rotary_pos_emb)(tower.config).to(device)


def load_model(
    model: ModelSpec,
    tokenizer: Tokenizer,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    seed: int = 0,
) -> PreTrainedModel:
    """Loads a causal language model with its weights.

    A preset gets random weights; the trainer turns them into a base model (``warm_start``).

    Raises:
        ValueError: If ``model.path`` names no model that loads.
    """
    if model.is_tiny:
        config = load_config(model, tokenizer)
        return build_model(config, dtype=dtype, device=device, seed=seed)
    arguments: dict[str, Any] = {
        "revision": model.revision,
        "trust_remote_code": model.trust_remote_code,
    }
    return _from_pretrained(model, arguments, dtype, device)


def find_folder(model: ModelSpec) -> Path:
    """Returns the folder of a model's files; fetches the files of a Hugging Face id unless they are cached.

    Raises:
        ValueError: If ``model.path`` names no model.
    """
    if is_folder(model.path):
        return Path(model.path)
    patterns = ["*.json", "*.safetensors"]
    try:
        snapshot = snapshot_download(model.path, revision=model.revision, allow_patterns=patterns)
    except (OSError, ValueError) as error:
        raise ValueError(load_problem(model, error)) from error
    return Path(snapshot)


def load_folder(folder: Path, *, dtype: torch.dtype, device: torch.device | str) -> PreTrainedModel:
    """Loads a model that :meth:`PreTrainedModel.save_pretrained` wrote."""
    return _from_pretrained(ModelSpec(path=str(folder)), {}, dtype, device)


def _from_pretrained(
    model: ModelSpec, arguments: dict[str, Any], dtype: torch.dtype, device: torch.device | str
) -> PreTrainedModel:
    config = full_config(model)
    register_vision(config)
    has_other_format = is_folder(model.path) and open_other_weights(Path(model.path)) is not None
    if is_multimodal(model) or has_other_format:
        # transformers would load all towers, and knows no other formats.
        model_on_cpu = build_model(config, dtype=dtype, device="cpu")
        read_weights(stored_tensors(model_on_cpu), find_folder(model), config.to_dict())
        return cast("PreTrainedModel", cast("nn.Module", model_on_cpu).to(device))
    # The loading info is needed to report missing weights; otherwise they are initialized at
    # random.
    arguments = {**arguments, "ignore_mismatched_sizes": True, "output_loading_info": True}
    try:
        model_and_findings: Any = AutoModelForCausalLM.from_pretrained(
            model.path, dtype=dtype, use_safetensors=True, **arguments
        )
        loaded, findings = model_and_findings
        _check_found(findings)
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(load_problem(model, error)) from error
    return cast("PreTrainedModel", loaded.to(device).eval())


def _check_found(findings: Mapping[str, Any]) -> None:
    """Raises ValueError for weights that are missing or have another shape."""
    lacking = sorted(findings["missing_keys"])
    if lacking:
        raise ValueError(f"the weight files lack {named(lacking)}, which config.json requires")
    for name, model_shape, config_shape in findings["mismatched_keys"]:
        raise ValueError(
            f"{name} has shape {list(model_shape)} in the weight files, but {list(config_shape)} according "
            "to config.json"
        )


# The driver takes a moment to release the memory of the process that this one replaces.
_RELEASE_S: Final = 10.0
_LOOK_EVERY_S: Final = 0.5


def check_free_memory(needed_bytes: float, device: torch.device) -> None:
    """Checks that a GPU which this process has to itself has enough free memory.

    Args:
        needed_bytes: Bytes that this process needs.

    Raises:
        ValueError: If other processes hold too much of the memory; the message names them.
    """
    deadline = time.monotonic() + _RELEASE_S
    while shortage := _memory_of(device).shortage(needed_bytes):
        if time.monotonic() > deadline:
            raise ValueError(shortage)
        time.sleep(_LOOK_EVERY_S)


def _memory_of(device: torch.device) -> GpuMemory:
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    free, total = torch.cuda.mem_get_info(device)
    queried = next((gpu for gpu in gpu_memory() if gpu.uuid == uuid), None)
    processes = queried.processes if queried is not None else ()
    return GpuMemory(queried.index if queried is not None else 0, uuid, total, free, processes)
