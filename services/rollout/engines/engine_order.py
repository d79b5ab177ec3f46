"""Engine configuration and the model shape that engine adapters need."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

import torch
from transformers import PretrainedConfig

from services.common.models.loading import build_model, stored_tensors
from services.rollout.engines.stop_texts import Decode
from services.weightsync.plan import TensorSpec


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
        config: Configuration of the model.
        dtype: Dtype of the weights.
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
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments by the engine's own names."""
    decode: Decode | None = None
    """Converts token ids to text; needed for stop texts."""
    returns_experts: bool = False
    """True if results include the chosen experts."""
    is_written_in_place: bool = False
    """True if weights are received directly into the engine's parameters."""
    sleeps: bool = False
    """True if the engine must release its GPU memory from time to time."""
    vocab_size: int = 256
    """Number of tokens in the tokenizer's vocabulary."""
    stop_token: int = 1
    """The tokenizer's end-of-text token."""

    @property
    def dtype_name(self) -> str:
        """Name of the dtype as engines spell it, for example ``bfloat16``."""
        return str(self.dtype).removeprefix("torch.")

    def check_arguments(self, known: Collection[str], *, engine: str) -> None:
        """Refuses arguments that the engine does not have.

        Raises:
            ValueError: With the unknown name and similar known ones.
        """
        for name in sorted(set(self.arguments) - set(known)):
            similar = get_close_matches(name, known)
            meant = f"did you mean {' or '.join(similar)}?" if similar else "remove it"
            raise ValueError(
                f"rollout.engine_arguments has {name!r}, which {engine} does not accept; {meant}"
            )
