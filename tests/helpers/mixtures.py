"""Tiny shapes of mixtures of experts."""

from typing import Any

_EXPERTS = {"num_experts_per_tok": 3, "moe_intermediate_size": 24}
_SHAPES: dict[str, dict[str, Any]] = {
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
    """What a family needs besides the shape of a dense model; nothing if it is dense."""
    return _SHAPES.get(family, {})
