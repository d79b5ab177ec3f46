"""What an adapter has to know of the model that its engine decodes."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PretrainedConfig

from services.common.models.loading import build_model, stored_tensors
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
