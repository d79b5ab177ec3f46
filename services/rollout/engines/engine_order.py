"""What an adapter has to know of the model that its engine decodes."""

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
    """Its tensors by checkpoint name, tied ones once."""
    vocab_size: int
    """Token ids are below it."""
    max_tokens: int
    """Longest context with its response."""


def model_shape(
    config: PretrainedConfig, dtype: torch.dtype, *, max_tokens: int | None = None
) -> ModelShape:
    """Describe a model without building it.

    Args:
        config: Of the model.
        dtype: Of its weights.
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
    """An engine, not started yet, with random weights: the real ones arrive over the weight plane."""

    config: PretrainedConfig
    """Shape of the model."""
    dtype: torch.dtype
    """Of its weights."""
    device: torch.device
    """Where it decodes."""
    max_running: int
    """Most requests decoded at once."""
    kv_policy: str = "recompute"
    """Whether an adoption recomputes the KV prefix of running requests."""
    is_reproducible: bool = False
    """Whether the same seed must draw the same tokens."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Of the engine, by its own names."""
    decode: Decode | None = None
    """Token ids to text; needed for stop texts."""
    returns_experts: bool = False
    """Whether results tell which experts were chosen."""
    is_written_in_place: bool = False
    """Whether weights are received straight into its parameters."""
    sleeps: bool = False
    """Whether it has to give its GPU memory up from time to time."""
    vocab_size: int = 256
    """Tokens that the tokenizer knows."""
    stop_token: int = 1
    """The tokenizer's end of a text."""

    @property
    def dtype_name(self) -> str:
        """As engines spell it."""
        return str(self.dtype).removeprefix("torch.")

    def check_arguments(self, known: Collection[str], *, engine: str) -> None:
        """Refuse arguments that the engine does not have.

        Raises:
            ValueError: With the name, and what it may have been meant to be.
        """
        for name in sorted(set(self.arguments) - set(known)):
            similar = get_close_matches(name, known)
            meant = f"did you mean {' or '.join(similar)}?" if similar else "remove it"
            raise ValueError(
                f"rollout.engine_arguments has {name!r}, which {engine} does not know; {meant}"
            )
