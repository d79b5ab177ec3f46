"""Loads models by specification: a folder, a Hugging Face id, or a generated preset."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from services.common.models.configs import full_config, load_problem, read_config
from services.common.models.tokenizer import Tokenizer
from services.common.models.weight_files import named
from services.common.runspec.run import ModelSpec


def load_config(model: ModelSpec, tokenizer: Tokenizer) -> PretrainedConfig:
    """Returns the Hugging Face configuration of a model.

    Raises:
        ValueError: If ``model.path`` names no model.
    """
    if model.is_tiny:
        return AutoConfig.for_model(**read_config(model, tokenizer))
    return cast("PretrainedConfig", full_config(model))


def build_model(
    config: PretrainedConfig,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    seed: int = 0,
) -> PreTrainedModel:
    """Builds a causal language model with random weights, the same for the same seed.

    Rollouts start with it: their weights arrive later through weight synchronization.

    Args:
        config: Shape of the model.
        dtype: Dtype of the weights.
        device: Device on which the weights are created.
        seed: Seed of the weights; the global random state does not change.
    """
    devices = [torch.device(device)] if torch.device(device).type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.device(device):
        torch.manual_seed(seed)
        model: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=dtype
        )
    if devices:
        compute_frequencies(model, device=device)
    for buffer in stored_buffers(model).values():
        # As in models that are loaded from a folder.
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
    """Returns all tensors of a checkpoint by name, tied weights once: the live ones, not copies."""
    return {**dict(model.named_parameters()), **stored_buffers(model)}


def compute_frequencies(model: PreTrainedModel, *, device: torch.device | str) -> None:
    """Sets the rotary frequencies of a model in place: float32, computed and never stored.

    A CPU computes them, as for a model that is loaded from a folder. Powers on a GPU differ in the
    last bit, and so would the logprobs of trainer and rollout under the same weights.
    """
    decoder: Any = model.get_decoder()  # type: ignore[no-untyped-call]
    if hasattr(decoder, "rotary_emb"):
        decoder.rotary_emb = type(decoder.rotary_emb)(config=model.config).to(device)


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
    """Returns the folder of a model's files; fetches those of a Hugging Face id unless they are cached.

    Raises:
        ValueError: If ``model.path`` names no model.
    """
    if Path(model.path).is_dir():
        return Path(model.path)
    patterns = ["*.json", "*.safetensors"]
    try:
        found = snapshot_download(model.path, revision=model.revision, allow_patterns=patterns)
    except (OSError, ValueError) as error:
        raise ValueError(load_problem(model, error)) from error
    return Path(found)


def load_folder(folder: Path, *, dtype: torch.dtype, device: torch.device | str) -> PreTrainedModel:
    """Loads a model that :meth:`PreTrainedModel.save_pretrained` wrote."""
    return _from_pretrained(ModelSpec(path=str(folder)), {}, dtype, device)


def _from_pretrained(
    model: ModelSpec,
    arguments: dict[str, Any],
    dtype: torch.dtype,
    device: torch.device | str,
) -> PreTrainedModel:
    full_config(model)
    # The loading info is needed to report missing weights; otherwise they are initialized at
    # random.
    arguments = {**arguments, "ignore_mismatched_sizes": True, "output_loading_info": True}
    try:
        read: Any = AutoModelForCausalLM.from_pretrained(
            model.path, dtype=dtype, use_safetensors=True, **arguments
        )
        loaded, found = read
        _check_found(found)
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(load_problem(model, error)) from error
    return cast("PreTrainedModel", loaded.to(device).eval())


def _check_found(found: Mapping[str, Any]) -> None:
    """Raises ValueError for weights that are missing or have another shape."""
    lacking = sorted(found["missing_keys"])
    if lacking:
        raise ValueError(f"the weight files lack {named(lacking)}, which config.json requires")
    for name, held, expected in found["mismatched_keys"]:
        raise ValueError(
            f"{name} has shape {list(held)} in the weight files, but {list(expected)} according to "
            "config.json"
        )
