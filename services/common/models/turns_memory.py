"""What trainer and rollouts keep on GPUs that they have in turns: pure arithmetic.

Whatever moves at a handover takes time in proportion to its bytes: the trainer's state on its way through
host memory, and KV cache that an engine maps anew. So neither moves more than it must.
"""

from typing import Final

import torch
from transformers import PretrainedConfig

from services.common.models.training_memory import (
    SPARE,
    resting_memory,
    shapes_of,
    state_memory,
    weight_bytes,
)
from services.common.spec.engines import engine_kind
from services.common.spec.run import RunSpec

# What an engine has beside weights, their shadow and its KV cache: activations, graphs, contexts, buckets.
_ENGINE: Final = 8.0e9
# The rest is for allocators' remainders.
_LARGEST_SHARE: Final = 0.9
_BLOCK_TOKENS: Final = 16
_BLOCKS_SPARE: Final = 1.05


def kv_bytes_per_token(config: PretrainedConfig, dtype: torch.dtype) -> int:
    """Bytes of the keys and values of one token, in all layers."""
    text = config.get_text_config()
    heads = int(getattr(text, "num_key_value_heads", None) or text.num_attention_heads)
    width = int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)
    return 2 * dtype.itemsize * heads * width * int(text.num_hidden_layers)


def most_kv_tokens(spec: RunSpec, config: PretrainedConfig) -> int:
    """Tokens of which a rollout can use keys and values at once: every place with the longest response.

    At least the longest context of the engine, without which it does not start.
    """
    rollout, kind = spec.rollout, engine_kind(spec.rollout.engine)
    limit = int(config.max_position_embeddings)
    longest = min(spec.data.max_prompt_tokens + rollout.max_response_tokens, limit)
    blocks = -(-longest // _BLOCK_TOKENS) + 1
    given = rollout.engine_arguments.get(kind.length_argument or "")
    most = max(rollout.max_running_samples * blocks * _BLOCK_TOKENS, int(given or limit))
    return int(_BLOCKS_SPARE * most)


def keeps_state(spec: RunSpec, config: PretrainedConfig, *, gpu_bytes: int) -> bool:
    """Whether the trainer's state stays on the GPU while rollouts decode: where it fits beside them.

    Both sides reckon it, from the same numbers.

    Args:
        spec: The run.
        config: Shape of its model.
        gpu_bytes: Memory of one GPU.
    """
    if not spec.rollouts_in_turns:
        return False
    dtype = getattr(torch, spec.trainer.dtype)
    weights, size = weight_bytes(shapes_of(config), dtype), spec.engine_gpus
    kv_cache = most_kv_tokens(spec, config) * kv_bytes_per_token(config, dtype)
    # Keys and values of few heads are on all GPUs of an engine.
    engine = 2 * weights / size + kv_cache + _ENGINE
    engines = spec.rollouts_in_turns * size / spec.trainer.world_size
    trainer = state_memory(spec, config, gpu_bytes=gpu_bytes) + resting_memory(spec, config)
    return SPARE * trainer + engines * engine <= _LARGEST_SHARE * gpu_bytes


def kept_memory(spec: RunSpec, config: PretrainedConfig, *, gpu_bytes: int) -> float:
    """Bytes that a trainer in turns keeps on each of its GPUs while rollouts decode."""
    kept = resting_memory(spec, config)
    if keeps_state(spec, config, gpu_bytes=gpu_bytes):
        kept += state_memory(spec, config, gpu_bytes=gpu_bytes)
    return SPARE * kept
