"""Engine configuration and the model shape that engine adapters need."""

import hashlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import PretrainedConfig

from services.common.models.loading import build_model, stored_tensors
from services.common.models.quantization import Fp8
from services.common.runspec.engines import EngineKind
from services.common.runspec.rollout import SpeculationSpec
from services.rollout.calls.outside import AddressPolicy
from services.rollout.engines.base import Decode
from services.weightsync.weight_plan import TensorSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Tensors and limits of a model."""

    specs: Sequence[TensorSpec]
    """Tensors by checkpoint name, tied ones once."""
    vocab_size: int
    """Exclusive upper bound of token ids."""
    max_tokens: int
    """Max length of a context with its response."""


def model_shape(
    config: PretrainedConfig, dtype: torch.dtype, *, max_tokens: int | None = None
) -> ModelShape:
    """Describes a model without allocating it.

    Args:
        max_tokens: Limit of the engine, if it is lower than the model's.
    """
    model = build_model(config, dtype=dtype, device="meta")
    limit = int(config.max_position_embeddings)
    return ModelShape(
        specs=[
            TensorSpec(name, tuple(value.shape), str(value.dtype).removeprefix("torch."))
            for name, value in stored_tensors(model).items()
        ],
        vocab_size=int(config.vocab_size),
        max_tokens=limit if max_tokens is None else min(max_tokens, limit),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageLimits:
    """Limits of the images of one prompt."""

    max_images: int
    """Max number of images."""
    max_tokens: int
    """Max tokens of one image."""


def _ignore(kind: str, message: str) -> None:
    """Does nothing with an event."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Configuration of an engine that starts with random weights; weight sync delivers the real ones."""

    config: PretrainedConfig
    """Configuration of the model."""
    dtype: torch.dtype
    """Dtype of the weights."""
    device: torch.device
    """Device that decodes."""
    max_running: int
    """Max number of requests decoded at once."""
    kv_policy: str = "recompute"
    """``recompute`` if an adoption recomputes the KV prefix of running requests, else ``keep``."""
    is_reproducible: bool = False
    """True if the same seed must draw the same tokens."""
    is_invariant: bool = False
    """True if a request's tokens must not depend on other requests."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments by the engine's own names."""
    decode: Decode | None = None
    """Converts token ids to text; needed for stop texts."""
    returns_experts: bool = False
    """True if results include the chosen experts."""
    returns_masks: bool = False
    """True if results include the tokens that could be drawn."""
    top_logprobs: int = 0
    """Max number of most likely tokens that a request asks for."""
    is_written_in_place: bool = False
    """True if weights are received directly into the engine's parameters."""
    adds_adapters: bool = False
    """True if only LoRA adapters arrive, which the engine adds to its own base weights."""
    sleeps: bool = False
    """True if the engine must release its GPU memory from time to time."""
    quantization: Fp8 | None = None
    """FP8 format of the weights and inputs of matrix products; None computes them in ``dtype``."""
    unquantized_layers: int = 0
    """Number of first decoder layers whose products stay in ``dtype``."""
    kv_cache_dtype: str | None = None
    """``fp8``, or None for ``dtype``."""
    images: ImageLimits | None = None
    """Limits of images; None if prompts have none."""
    vocab_size: int = 256
    """Number of tokens in the tokenizer's vocabulary."""
    stop_token: int = 1
    """The tokenizer's end-of-text token."""
    speculation: SpeculationSpec | None = None
    """Settings of proposals; None decodes one token per step."""
    reach: AddressPolicy | None = None
    """Addresses that an engine elsewhere may have; None for public ones."""
    worker: str = ""
    """Run and worker, as an engine elsewhere names its user."""
    report: Callable[[str, str], None] = _ignore
    """Receives events of the engine, as type and message, for the run's record."""

    @property
    def dtype_name(self) -> str:
        """Name of the dtype as engines spell it, for example ``bfloat16``."""
        return str(self.dtype).removeprefix("torch.")

    def precision_arguments(self, kind: EngineKind) -> dict[str, str]:
        """Returns the engine's arguments for the precision of products and KV cache."""
        arguments = {
            "quantization": kind.quantizations[self.quantization] if self.quantization else None,
            "kv_cache_dtype": kind.cache_dtypes[self.kv_cache_dtype]
            if self.kv_cache_dtype
            else None,
        }
        return {name: value for name, value in arguments.items() if value is not None}

    def check_arguments(self, argument_names: Collection[str], *, engine: str) -> None:
        """Refuses arguments that the engine does not have.

        Raises:
            ValueError: With the unknown name and similar known ones.
        """
        for name in sorted(set(self.arguments) - set(argument_names)):
            similar = get_close_matches(name, argument_names)
            meant = f"did you mean {' or '.join(similar)}?" if similar else "remove it"
            raise ValueError(
                f"rollout.engine_arguments has {name!r}, which {engine} does not accept; {meant}"
            )


def engine_config(config: PretrainedConfig) -> PretrainedConfig:
    """Returns the configuration with which external engines compute the same as the model.

    Engines do not count the current token in a sliding window of Cohere 2. They interleave the rotary
    dimensions of Qwen3-VL only if the configuration says so.
    """
    if config.model_type == "cohere2":
        config = deepcopy(config)
        config.sliding_window -= 1
    elif config.model_type == "qwen3_vl":
        config = deepcopy(config)
        config.text_config.rope_parameters["mrope_interleaved"] = True
    return config


def cached_config_folder(config: PretrainedConfig, root: Path) -> Path:
    """Writes a configuration for vLLM into a folder of ``root`` that is named by its content.

    vLLM keeps compiled graphs and kernels under a key that includes the path of the model, so a new
    path for each start would compile everything again.
    """
    root.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=root) as temporary:
        engine_config(config).save_pretrained(temporary)
        content = (Path(temporary) / "config.json").read_bytes()
        folder = root / hashlib.sha256(content).hexdigest()[:32]
        folder.mkdir(exist_ok=True)
        for file in Path(temporary).iterdir():
            # Engines that start at the same time replace files by equal ones.
            file.replace(folder / file.name)
    return folder


def write_sglang_config(config: PretrainedConfig, folder: str) -> None:
    """Writes the ``config.json`` for SGLang into a folder.

    It has no end-of-text token: each request names its stop tokens, and the model's must not apply as well.
    """
    content = json.loads(engine_config(config).to_json_string())
    content["eos_token_id"] = None
    if "text_config" in content:
        content["text_config"]["eos_token_id"] = None
    if config.model_type == "olmo3":
        content |= _rotary(content)
    Path(folder, "config.json").write_text(json.dumps(content), encoding="utf-8")


def _rotary(content: dict[str, Any]) -> dict[str, Any]:
    """Returns Olmo 3's rotary settings in the form of its checkpoints; SGLang scales only full attention.

    SGLang ignores settings given by layer type and would use another base.
    """
    by_kind = content.get("rope_parameters") or {}
    full, window = (dict(by_kind.get(f"{kind}_attention") or {}) for kind in ("full", "sliding"))
    base = full.pop("rope_theta", None)
    if window != {"rope_type": "default", "rope_theta": base}:
        return {}
    scaling = None if full == {"rope_type": "default"} else full
    return {"rope_parameters": None, "rope_theta": base, "rope_scaling": scaling}
