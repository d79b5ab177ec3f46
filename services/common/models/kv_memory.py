"""Memory of a rollout's keys and values: pure arithmetic."""

from typing import Final

import torch
from transformers import PretrainedConfig

from services.common.runspec.engines import engine_kind
from services.common.runspec.run import RunSpec

_BLOCK_TOKENS: Final = 16
_BLOCKS_SPARE: Final = 1.05


def kv_bytes_per_token(config: PretrainedConfig, dtype: torch.dtype) -> int:
    """Returns the bytes of the keys and values of one token, in all layers."""
    text = config.get_text_config()
    heads = int(getattr(text, "num_key_value_heads", None) or text.num_attention_heads)
    width = int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)
    return 2 * dtype.itemsize * heads * width * int(text.num_hidden_layers)


def required_kv_tokens(spec: RunSpec, config: PretrainedConfig) -> int:
    """Returns the max. tokens in a rollout's KV cache: every slot with the longest response.

    At least the longest context of the engine, without which it does not start.
    """
    rollout, kind = spec.rollout, engine_kind(spec.rollout.engine)
    limit = int(config.max_position_embeddings)
    longest = min(spec.data.max_prompt_tokens + rollout.max_response_tokens, limit)
    blocks = -(-longest // _BLOCK_TOKENS) + 1
    given = rollout.engine_arguments.get(kind.length_argument or "")
    most = max(rollout.max_running_samples * blocks * _BLOCK_TOKENS, int(given or limit))
    return int(_BLOCKS_SPARE * most)


def kv_bytes(spec: RunSpec, config: PretrainedConfig, dtype: torch.dtype) -> float:
    """Returns the bytes of a rollout's KV cache: the configured size, or the size that it can use."""
    kind, arguments = engine_kind(spec.rollout.engine), spec.rollout.engine_arguments
    given = arguments.get(kind.cache_argument or "")
    if given is not None and kind.cache_in_bytes:
        return float(given)
    tokens = required_kv_tokens(spec, config) if given is None else int(given)
    return float(tokens * kv_bytes_per_token(config, dtype))
