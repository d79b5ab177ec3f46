"""Reads the ``config.json`` of a model without torch."""

import functools
import json
import re
from pathlib import Path
from typing import Any

from services.common.models.evaluator import Evaluator
from services.common.models.made_tokenizers import Vocabulary
from services.common.runspec.run import TINY_PREFIX, ModelSpec

# name: (architecture, hidden size, layers, heads, key-value heads, intermediate size)
_SHAPES = {
    "qwen2-0.4m": ("qwen2", 128, 2, 4, 4, 336),
    "qwen2-1.2m": ("qwen2", 160, 4, 4, 4, 416),
    "qwen2-3m": ("qwen2", 256, 4, 4, 4, 672),
    "qwen3-0.4m": ("qwen3", 128, 2, 4, 2, 352),
    "llama-0.4m": ("llama", 128, 2, 4, 2, 352),
    "qwen3_moe-0.7m": ("qwen3_moe", 128, 2, 4, 2, 352),
}
_EXPERTS = {
    "qwen3_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 96,
        "norm_topk_prob": True,
        "router_aux_loss_coef": 0.001,
    },
}
"""Additional keys of mixtures of experts."""
_CLASSES = {
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
_MAX_POSITIONS = 32_768


def preset_names() -> tuple[str, ...]:
    """Returns all presets, as written in ``model.path``."""
    return tuple(TINY_PREFIX + name for name in _SHAPES)


def preset_config(path: str, *, vocab_size: int, eos_id: int, pad_id: int) -> dict[str, Any]:
    """Returns the Hugging Face configuration of a preset, as a dictionary.

    ``tiny:qwen2-3m`` has heads of 64 dimensions, which GPU engines require.

    Args:
        path: A preset such as ``tiny:qwen2-0.4m``.
        vocab_size: Number of tokens of the tokenizer.
        eos_id: Token that ends a response.
        pad_id: Padding token.

    Raises:
        ValueError: If there is no such preset.
    """
    shape = _SHAPES.get(path.removeprefix(TINY_PREFIX)) if path.startswith(TINY_PREFIX) else None
    if shape is None:
        raise ValueError(
            f"model.path {path!r} is not a known preset; use one of {', '.join(preset_names())}"
        )
    model_type, hidden, layers, heads, kv_heads, intermediate = shape
    return {
        "model_type": model_type,
        "architectures": [_CLASSES[model_type]],
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "max_position_embeddings": _MAX_POSITIONS,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": eos_id,
        "pad_token_id": pad_id,
        **_EXPERTS.get(model_type, {}),
    }


def find_file(model: ModelSpec, name: str) -> Path | None:
    """Returns the path of a file of ``model.path``, which is fetched if necessary; None if there is none.

    Raises:
        OSError: If it cannot be fetched.
    """
    if Path(model.path).is_dir():
        path = Path(model.path) / name
        return path if path.is_file() else None
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(model.path, name, revision=model.revision))
    except LocalEntryNotFoundError:
        raise  # the hub could not be reached, so the file may exist
    except EntryNotFoundError:
        return None


# Upper bounds beyond any model: of counts such as layers and heads, from which families build
# lists, and of all other numbers.
_COUNT = re.compile(
    r"(^|_)(layers?|heads|experts|blocks|groups|labels|stages)($|_)|^n_(layer|head)$|depth"
)
_MAX_COUNT = 1 << 16
_MAX_NUMBER = 1 << 40
_MAX_CONFIG_BYTES = 4 << 20
_SIZES = ("vocab_size", "max_position_embeddings", "num_attention_heads", "sliding_window")


def read_config(model: ModelSpec, tokenizer: Vocabulary | None) -> dict[str, Any]:
    """Returns the ``config.json`` of a model: a preset, a folder, or a Hugging Face id.

    Args:
        model: The model.
        tokenizer: Tokenizer of a preset, which sets the size of its vocabulary.

    Raises:
        ValueError: If ``model.path`` names no model.
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
            raise FileNotFoundError("the folder has no config.json")
        config: dict[str, Any] = _read(path)
        _check(config)
    except (OSError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(load_problem(model, error)) from error
    return config


def full_config(model: ModelSpec) -> Any:
    """Returns the Hugging Face configuration of a folder or an id, with its own checks; needs transformers.

    Raises:
        ValueError: If ``model.path`` names no model, or its configuration is inconsistent or too
            large.
    """
    from transformers import AutoConfig

    try:
        check_evaluates(model)
        return AutoConfig.from_pretrained(
            model.path, revision=model.revision, trust_remote_code=model.trust_remote_code
        )
    except Exception as error:
        raise ValueError(load_problem(model, error)) from error


def check_evaluates(model: ModelSpec) -> None:
    """Checks that a ``config.json``, if there is one, can be evaluated, in a process with limits.

    Code that comes with a model may run only after an admin has reviewed it, so then there is no
    such process.

    Raises:
        ValueError: If it cannot.
        OSError: If it cannot be fetched.
    """
    path = None if model.trust_remote_code else find_file(model, "config.json")
    if path is not None:
        _check(_read(path))
        _try_text(path.read_text(encoding="utf-8"))


@functools.lru_cache(16)
def _try_text(text: str) -> None:
    evaluator = Evaluator("config")
    try:
        evaluator.evaluate(text)
    except ValueError as error:
        raise ValueError(f"its config.json cannot be evaluated: {error}") from error
    finally:
        evaluator.close()


def _read(path: Path) -> Any:
    if (size := path.stat().st_size) > _MAX_CONFIG_BYTES:
        raise ValueError(
            f"its config.json has {size} bytes, more than the limit of {_MAX_CONFIG_BYTES}"
        )
    return json.loads(path.read_text(encoding="utf-8"))


def _check(config: Any) -> None:
    """Raises TypeError if the config is not a table, or its sizes are not whole numbers."""
    if not isinstance(config, dict):
        raise TypeError(f"its config.json must contain a JSON object, got {type(config).__name__}")
    for key in _SIZES:
        if not isinstance(value := config.get(key), int | None):
            raise TypeError(f"{key} in its config.json must be an integer, got {value!r}")
    _check_numbers(config, "")


def _check_numbers(value: Any, key: str) -> None:
    """Raises ValueError for a number beyond any model."""
    if isinstance(value, int) and not isinstance(value, bool):
        leaf = key.rpartition(".")[2]
        most = _MAX_COUNT if _COUNT.search(leaf) else _MAX_NUMBER
        if abs(value) > most:
            raise ValueError(f"{key} in its config.json is {value}, more than the limit of {most}")
    elif isinstance(value, dict):
        for name, inner in value.items():
            _check_numbers(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for inner in value:
            _check_numbers(inner, key)


def load_problem(model: ModelSpec, error: Exception) -> str:
    """Returns why a model does not load, and the fix."""
    text = str(error).strip()
    # Hugging Face reports the broken rule in one line, and the details in the next.
    reason = " ".join(text.split("\n")[:2]) if text else type(error).__name__
    return (
        f"model.path {model.path!r} cannot be loaded ({reason}); use a folder with config.json and "
        f"safetensors weights, a Hugging Face id, or one of {', '.join(preset_names())}"
    )
