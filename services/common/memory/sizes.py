"""Bytes of a model's weights and KV cache, as trainers hold, send and receive them. Pure arithmetic."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, Final, Self

import torch
from transformers import PretrainedConfig

from services.common.models.adapters import adapter_weights
from services.common.models.evaluator import parse_config
from services.common.models.families import num_attention_layers
from services.common.models.loading import build_model, stored_tensors
from services.common.models.quantization import fp8_bytes
from services.common.runspec.engines import engine_kind
from services.common.runspec.run import RunSpec
from services.common.runspec.weight_modes import MODES

Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of weights by name."""
ADAPTER_BYTES: Final = 4
"""Bytes of a value of an adapter, which is float32 where it is trained and where it is sent."""
_BLOCK_TOKENS: Final = 16
_BLOCKS_SPARE: Final = 1.05
# Copies of a layer while it is quantized: received, loaded, and a second time to verify it.
_QUANTIZING: Final = 4


def kv_bytes_per_token(config: PretrainedConfig, dtype: torch.dtype) -> int:
    """Returns the bytes of the keys and values of one token, in all layers that attend."""
    text = config.get_text_config()
    layers = num_attention_layers(config_dict(text))
    return 2 * dtype.itemsize * kv_heads(config) * head_width(config) * layers


def kv_heads(config: PretrainedConfig) -> int:
    """Returns the number of key-value heads of a layer."""
    text = config.get_text_config()
    return int(getattr(text, "num_key_value_heads", None) or text.num_attention_heads)


def head_width(config: PretrainedConfig) -> int:
    """Returns the number of values of a head."""
    text = config.get_text_config()
    return int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)


def required_kv_tokens(spec: RunSpec, config: PretrainedConfig) -> int:
    """Returns the max. tokens in a rollout's KV cache: every slot with the longest response.

    At least the longest context of the engine, without which it does not start.
    """
    rollout, limit = spec.rollout, int(config.max_position_embeddings)
    longest = min(spec.data.max_prompt_tokens + rollout.max_response_tokens, limit)
    blocks = -(-longest // _BLOCK_TOKENS) + 1
    tokens = int(_BLOCKS_SPARE * rollout.max_running_samples * blocks * _BLOCK_TOKENS)
    return max(tokens, min_kv_tokens(spec, config))


def min_kv_tokens(spec: RunSpec, config: PretrainedConfig) -> int:
    """Returns the tokens of a KV cache with which a rollout's engine starts: one longest context."""
    kind = engine_kind(spec.rollout.engine)
    argument = spec.rollout.engine_arguments.get(kind.length_argument or "")
    return int(_BLOCKS_SPARE * int(argument or config.max_position_embeddings))


def cache_dtype(spec: RunSpec) -> torch.dtype:
    """Returns the dtype of a rollout's KV cache."""
    return wire_dtype(spec) if spec.rollout.kv_cache_dtype is None else torch.float8_e4m3fn


def kv_bytes(spec: RunSpec, config: PretrainedConfig) -> float:
    """Returns the bytes of a rollout's KV cache: the configured size, or the size that it can use."""
    kind, arguments = engine_kind(spec.rollout.engine), spec.rollout.engine_arguments
    argument = arguments.get(kind.cache_argument or "")
    if argument is not None and kind.cache_in_bytes:
        return float(argument)
    tokens = required_kv_tokens(spec, config) if argument is None else int(argument)
    return float(tokens * kv_bytes_per_token(config, cache_dtype(spec)))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """Size of a model in bytes."""

    weights: float
    """Bytes of all parameters of an engine, tied ones once."""
    kv_per_token: int
    """Bytes of one token's keys and values in all layers."""
    num_kv_heads: int
    """Key-value heads per layer; tensor parallelism cannot divide the KV cache further."""
    sent_weights: float
    """Bytes of all parameters as they are sent."""
    quantizing: float = 0.0
    """Bytes that an engine needs to quantize new weights."""

    @classmethod
    def of(cls, config: PretrainedConfig, spec: RunSpec) -> Self:
        """Returns the size of a run's model on its rollouts."""
        sent_bytes = weight_bytes(config, wire_dtype(spec))
        weights, quantizing = sent_bytes, 0.0
        rollout = spec.rollout
        quantization = rollout.quantization
        if quantization is not None and engine_kind(rollout.engine).quantizations.get(quantization):
            weights, largest = fp8_bytes(
                shapes_of(config),
                quantization,
                item=wire_dtype(spec).itemsize,
                num_exact=rollout.unquantized_layers,
            )
            quantizing = _QUANTIZING * largest
        return cls(
            weights=weights,
            kv_per_token=kv_bytes_per_token(config, cache_dtype(spec)),
            num_kv_heads=kv_heads(config),
            sent_weights=sent_bytes,
            quantizing=quantizing,
        )

    def on_each_gpu(self, spec: RunSpec) -> float:
        """Returns the bytes of live and received weights on each GPU of a rollout."""
        received_bytes = (weight_copies(spec) - 1) * self.sent_weights
        return (self.weights + received_bytes) / spec.engine_gpus + self.quantizing


def weight_copies(spec: RunSpec) -> int:
    """Returns the number of copies of all weights on a rollout's GPUs: live ones, and ones being received."""
    return 1 if spec.sends_adapters or MODES[spec.weight_sync.mode].is_in_place else 2


def wire_dtype(spec: RunSpec) -> torch.dtype:
    """Returns the dtype of weights that are sent and of a trainer's passes."""
    dtype: torch.dtype = getattr(torch, spec.trainer.dtype)
    return dtype


def num_sources(spec: RunSpec) -> int:
    """Returns the number of trainer ranks that send weights."""
    return spec.trainer.world_size if spec.sends_rows else 1


def sent_adapters(spec: RunSpec, shapes: Shapes) -> float | None:
    """Returns the bytes of the adapters that are sent in place of weights; None if weights are sent."""
    lora = spec.trainer.lora
    if lora is None or not spec.sends_adapters:
        return None
    return float(ADAPTER_BYTES * adapter_weights(shapes, lora))


def weight_bytes(config: PretrainedConfig, dtype: torch.dtype) -> float:
    """Returns the bytes of all weights in a dtype, tied ones once."""
    return dtype.itemsize * num_weights(shapes_of(config))


def shapes_of(config: PretrainedConfig) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a model's weights by name; computed once for each configuration."""
    return _shapes_of(ConfigKey(config))


class ConfigKey:
    """Key of a cache for a configuration, by identity; the configuration must not change afterwards.

    A plan of a whole run asks for one configuration thousands of times, and transformers copies it deeply
    each time.
    """

    def __init__(self, config: PretrainedConfig) -> None:
        self.config = config

    def __hash__(self) -> int:
        return id(self.config)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ConfigKey) and other.config is self.config


def config_dict(config: PretrainedConfig) -> Mapping[str, Any]:
    """Returns a configuration as a mapping, without a copy at each call."""
    return _cached_dict(ConfigKey(config))


@lru_cache(maxsize=8)
def _cached_dict(key: ConfigKey) -> Mapping[str, Any]:
    return key.config.to_dict()


@lru_cache(maxsize=8)
def _shapes_of(key: ConfigKey) -> dict[str, tuple[int, ...]]:
    return _shapes_described(type(key.config), key.config.to_json_string(use_diff=False))  # type: ignore[arg-type]


@lru_cache(maxsize=8)
def _shapes_described(kind: type[PretrainedConfig], described: str) -> dict[str, tuple[int, ...]]:
    config = kind.from_dict(parse_config(described))
    model = build_model(config, dtype=torch.float32, device="meta")
    return {name: tuple(value.shape) for name, value in stored_tensors(model).items()}


def num_weights(shapes: Shapes) -> float:
    """Returns the number of all weights."""
    return float(sum(map(prod, shapes.values())))
