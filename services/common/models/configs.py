"""Reads the ``config.json`` of a model without torch."""

import atexit
import functools
import os.path
import re
from pathlib import Path
from typing import Any, Final

from services.common.models.evaluator import Evaluator, parse_config
from services.common.models.families import MULTIMODAL, image_kind, language_config
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
    "qwen3_5-0.4m": ("qwen3_5_text", 128, 2, 4, 2, 352),
    "falcon_h1-0.5m": ("falcon_h1", 128, 2, 4, 2, 352),
    "qwen2_5_vl-0.6m": ("qwen2_5_vl_text", 128, 2, 4, 4, 336),
}
PRESET_PATCH = 4
"""Pixels of a side of a patch of presets that see images."""
_FURTHER: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 96,
        "norm_topk_prob": True,
        "router_aux_loss_coef": 0.001,
    },
    "qwen3_5_text": {
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
    },
    "falcon_h1": {
        "mamba_d_ssm": 128,
        "mamba_n_heads": 4,
        "mamba_d_state": 32,
    },
    "qwen2_5_vl_text": {
        # With a larger base, the positions of neighboring image columns would differ by too little.
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 3.0,
            "mrope_section": [4, 6, 6],
        },
        "vision_config": {
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 4,
            "out_hidden_size": 128,
            "patch_size": PRESET_PATCH,
            "window_size": 16 * PRESET_PATCH,
            "fullatt_block_indexes": [1],
            "initializer_range": 0.1,
        },
    },
}
"""Additional keys of mixtures of experts, of hybrids, and of models that see images."""
_CLASSES = {
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "falcon_h1": "FalconH1ForCausalLM",
    "qwen2_5_vl_text": "Qwen2_5_VLForConditionalGeneration",
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

    Raises:
        ValueError: If there is no such preset.
    """
    shape = _SHAPES.get(path.removeprefix(TINY_PREFIX)) if path.startswith(TINY_PREFIX) else None
    if shape is None:
        raise ValueError(
            f"model.path {path!r} is not a known preset; use one of {', '.join(preset_names())}"
        )
    model_type, hidden, layers, heads, kv_heads, intermediate = shape
    # Built-in tokenizers have the placeholder of images as their last token.
    image_keys = {"image_token_id": vocab_size - 1} if model_type.endswith("_vl_text") else {}
    return {
        **image_keys,
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
        **_FURTHER.get(model_type, {}),
    }


def is_folder(path: str) -> bool:
    """Returns True if a text is the path of a folder; unlike ``Path.is_dir``, it never raises."""
    return os.path.isdir(path)  # noqa: PTH112


def missing_folder(path: str) -> str:
    """Returns why a path names no model, and the fix; empty if it is a folder, or the id of a model."""
    if not path.startswith(("/", ".", "~")) or is_folder(path):
        return ""
    return (
        f"folder {path!r} does not exist, or cannot be read; use a folder with a model, a Hugging Face id "
        "such as 'Qwen/Qwen2.5-0.5B', or a preset such as 'tiny:qwen2-0.4m'"
    )


def find_file(model: ModelSpec, name: str) -> Path | None:
    """Returns the path of a file of ``model.path``, fetched if necessary; None if the model has no such file.

    Raises:
        OSError: If the file cannot be fetched.
    """
    if problem := missing_folder(model.path):
        raise FileNotFoundError(f"model.path: {problem}")
    if is_folder(model.path):
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


# Upper bounds that no model reaches: one for counts such as layers and heads, from which families
# build lists, and one for all other numbers.
_COUNT = re.compile(
    r"(^|_)(layers?|heads|experts|blocks|groups|labels|stages)($|_)|^n_(layer|head)$|depth"
)
_MAX_COUNT = 1 << 16
_MAX_NUMBER = 1 << 40
_MAX_CONFIG_BYTES = 4 << 20
_SIZES = ("vocab_size", "max_position_embeddings", "num_attention_heads", "sliding_window")


def read_config(model: ModelSpec, tokenizer: Vocabulary | None) -> dict[str, Any]:
    """Returns the ``config.json`` of a model: a preset, a folder, or a Hugging Face id.

    The configuration of a multimodal checkpoint is reduced to that of its language model, unless
    ``model.images`` is true.

    Args:
        tokenizer: Tokenizer of a preset, which sets the size of its vocabulary.

    Raises:
        ValueError: If ``model.path`` names no model.
    """
    if model.is_tiny:
        assert tokenizer is not None
        preset = preset_config(
            model.path,
            vocab_size=tokenizer.vocab_size,
            eos_id=tokenizer.eos_id,
            pad_id=tokenizer.pad_id,
        )
        if (image_kind(preset) is not None) != model.images:
            raise ValueError(
                f"model.images is {str(model.images).lower()}, but the preset model.path {model.path!r} "
                f"{'sees no' if model.images else 'sees'} images; change one of them"
            )
        return preset
    try:
        path = find_file(model, "config.json")
        if path is None:
            raise FileNotFoundError("the folder has no config.json")
        config: dict[str, Any] = _read(path)
        _check(config)
        config = language_config(config, images=model.images)
    except (OSError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(load_problem(model, error)) from error
    return config


def is_multimodal(model: ModelSpec) -> bool:
    """Returns True if the model is the language model of a multimodal checkpoint.

    Raises:
        OSError: If its ``config.json`` cannot be fetched.
    """
    path = None if model.is_tiny else find_file(model, "config.json")
    return path is not None and _read(path).get("model_type") in MULTIMODAL


def full_config(model: ModelSpec) -> Any:
    """Returns the Hugging Face configuration of a folder or an id, with its own checks; needs transformers.

    The configuration of a multimodal checkpoint is reduced as in :func:`read_config`.

    Raises:
        ValueError: If ``model.path`` names no model, or its configuration is inconsistent or too
            large.
    """
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    try:
        check_evaluates(model)
        config: Any = AutoConfig.from_pretrained(
            model.path, revision=model.revision, trust_remote_code=model.trust_remote_code
        )
        if config.model_type not in MULTIMODAL and not model.images:
            return config
        text = language_config(config.to_dict(), images=model.images)
        if model.images:
            return AutoConfig.for_model(**text)
        names = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[text["model_type"]]]
        return AutoConfig.for_model(**text, architectures=names)
    except Exception as error:
        raise ValueError(load_problem(model, error)) from error


def check_evaluates(model: ModelSpec) -> None:
    """Evaluates a model's ``config.json``, if it has one, in a process with limits on time and memory.

    A model with ``model.trust_remote_code`` is not checked: an admin has reviewed its code.

    Raises:
        ValueError: If the file cannot be evaluated within the limits.
        OSError: If the file cannot be fetched.
    """
    path = None if model.trust_remote_code else find_file(model, "config.json")
    if path is not None:
        _check(_read(path))
        _try_text(path.read_text(encoding="utf-8"))


def begin_check(model: ModelSpec) -> None:
    """Starts the process of :func:`check_evaluates`, whose imports take a second or more."""
    if not (model.is_tiny or model.trust_remote_code):
        _CONFIGS.begin()


@functools.lru_cache(16)
def _try_text(text: str) -> None:
    try:
        _CONFIGS.evaluate(text)
    except ValueError as error:
        raise ValueError(f"its config.json cannot be evaluated: {error}") from error
    finally:
        _CONFIGS.close()


_CONFIGS: Final = Evaluator("config")
"""Ends after each evaluation: a process needs few of them."""
atexit.register(_CONFIGS.close)


def _read(path: Path) -> Any:
    if (size := path.stat().st_size) > _MAX_CONFIG_BYTES:
        raise ValueError(
            f"its config.json has {size} bytes, more than the limit of {_MAX_CONFIG_BYTES}"
        )
    return parse_config(path.read_text(encoding="utf-8"))


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
        limit = _MAX_COUNT if _COUNT.search(leaf) else _MAX_NUMBER
        if abs(value) > limit:
            raise ValueError(f"{key} in its config.json is {value}, more than the limit of {limit}")
    elif isinstance(value, dict):
        for name, inner in value.items():
            _check_numbers(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for inner in value:
            _check_numbers(inner, key)


def load_problem(model: ModelSpec, error: Exception) -> str:
    """Returns why a model does not load, and the fix."""
    if problem := missing_folder(model.path):
        return f"model.path: {problem}"
    text = str(error).strip()
    # Hugging Face reports the broken rule in one line, and the details in the next.
    reason = " ".join(text.split("\n")[:2]) if text else type(error).__name__
    return (
        f"model.path {model.path!r} cannot be loaded ({reason}); use a folder with config.json and "
        f"safetensors weights, a Hugging Face id, or one of {', '.join(preset_names())}"
    )
