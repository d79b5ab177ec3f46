"""The ``config.json`` of a model, read without torch."""

import json
from typing import Any

from services.common.models.files import find_file
from services.common.models.made_tokenizers import Vocabulary
from services.common.models.presets import preset_config, preset_names
from services.common.spec.model import ModelSpec

_SIZES = ("vocab_size", "max_position_embeddings", "num_attention_heads", "sliding_window")


def read_config(model: ModelSpec, tokenizer: Vocabulary | None) -> dict[str, Any]:
    """What a model says of itself: a preset's shape, a folder's file, or that of a Hugging Face id.

    Args:
        model: The model.
        tokenizer: Of a preset, which has a place for each of its tokens.

    Raises:
        ValueError: If ``model.path`` names none.
    """
    if model.is_tiny:
        assert tokenizer is not None
        return preset_config(
            model.path,
            vocab_size=tokenizer.vocab_size,
            eos_id=tokenizer.eos_id,
            pad_id=tokenizer.pad_id,
        )
    try:
        path = find_file(model, "config.json")
        if path is None:
            raise FileNotFoundError("it has no config.json")
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        _check(config)
    except (OSError, TypeError, ValueError) as error:
        raise ValueError(load_problem(model, error)) from error
    return config


def full_config(model: ModelSpec) -> Any:
    """The Hugging Face configuration of a folder or an id, its own rules checked: needs transformers.

    Raises:
        ValueError: If ``model.path`` names none, or what it says contradicts itself.
    """
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(
            model.path, revision=model.revision, trust_remote_code=model.trust_remote_code
        )
    except Exception as error:
        raise ValueError(load_problem(model, error)) from error


def _check(config: Any) -> None:
    """Raises TypeError for a table that is none, or sizes that are no numbers."""
    if not isinstance(config, dict):
        raise TypeError(f"its config.json holds a {type(config).__name__}, not a table")
    for key in _SIZES:
        if not isinstance(value := config.get(key), int | None):
            raise TypeError(f"{key} of its config.json is {value!r}, not a whole number")


def load_problem(model: ModelSpec, error: Exception) -> str:
    """Why a model does not load, and what to name instead."""
    text = str(error).strip()
    # Hugging Face tells which rule is broken in one line, and how in the next.
    reason = " ".join(text.split("\n")[:2]) if text else type(error).__name__
    return (
        f"model.path {model.path!r} does not load ({reason}); name a folder with config.json and "
        f"safetensors weights, a Hugging Face id, or one of {', '.join(preset_names())}"
    )
