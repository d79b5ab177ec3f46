"""Tiny configurations of models of every family, including mixtures of experts and hybrids."""

from typing import Any

from transformers import AutoConfig

_BASE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LINEAR = {
    "full_attention_interval": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
_MIXER = {
    "mamba_d_ssm": 48,
    "mamba_n_heads": 6,
    "mamba_n_groups": 2,
    "mamba_d_state": 12,
    "mamba_chunk_size": 16,
    "lm_head_multiplier": 0.7,
    "embedding_multiplier": 1.7,
    "mlp_multipliers": [0.8, 0.6],
    "key_multiplier": 0.6,
    "attention_in_multiplier": 1.3,
    "attention_out_multiplier": 0.9,
    "ssm_multipliers": [0.7, 0.9, 0.8, 1.2, 0.6],
    "ssm_in_multiplier": 1.2,
    "ssm_out_multiplier": 0.8,
}
_EXPERTS = {"num_experts_per_tok": 3, "moe_intermediate_size": 24}
_SHAPES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": _LINEAR,
    "falcon_h1": _MIXER,
    "qwen3_next": {
        "num_experts": 8,
        "shared_expert_intermediate_size": 40,
        "norm_topk_prob": True,
        **_LINEAR,
        **_EXPERTS,
    },
    "qwen3_5_moe_text": {
        "num_experts": 8,
        "shared_expert_intermediate_size": 40,
        **_LINEAR,
        **_EXPERTS,
    },
    "qwen2_moe": {"num_experts": 8, "shared_expert_intermediate_size": 40, **_EXPERTS},
    "qwen3_moe": {"num_experts": 8, **_EXPERTS},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 3},
    "glm4_moe": {"n_routed_experts": 8, "first_k_dense_replace": 1, **_EXPERTS},
    "deepseek_v3": {
        "n_routed_experts": 8,
        "first_k_dense_replace": 1,
        "n_group": 4,
        "topk_group": 2,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "v_head_dim": 14,
        "head_dim": 8,
        "num_key_value_heads": 4,
        **_EXPERTS,
    },
    "gpt_oss": {
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
}


def mixture_shape(family: str) -> dict[str, Any]:
    """Returns the keys that a family needs besides those of a dense model; empty if it is dense."""
    return _SHAPES.get(family, {})


def tiny_config(family: str, **shape: Any) -> Any:
    """Returns the configuration of a tiny model of a family."""
    return AutoConfig.for_model(family, **{**_BASE, **mixture_shape(family), **shape})
