"""Shapes of the tiny preset models, which are generated without files; without torch."""

from typing import Any

from services.common.runspec.run import TINY_PREFIX

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
            f"model.path {path!r} is no preset; choose one of {', '.join(preset_names())}"
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
