"""What trainer and rollouts keep on GPUs that they have in turns: pure arithmetic.

Whatever moves at a handover takes time in proportion to its bytes: the trainer's state on its way through
host memory, and KV cache that an engine maps anew. So neither moves more than it must.
"""

from typing import Final, Literal

import torch
from transformers import PretrainedConfig

from services.common.models.training_memory import (
    SLEEPING,
    SPARE,
    resting_memory,
    state_memory,
    trainer_memory,
    weight_bytes,
)
from services.common.spec.engines import engine_kind
from services.common.spec.run import RunSpec

Stays = Literal["all", "state", "nothing"]
"""Of a trainer: whatever it holds, its state between two steps, or what is on its way to rollouts alone."""

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


def what_stays(spec: RunSpec, config: PretrainedConfig, *, gpu_bytes: int) -> Stays:
    """What a trainer in turns leaves on the GPU while rollouts decode: as much as fits beside them.

    Where all of it does, engines give up nothing either. Both sides reckon it, from the same numbers.

    Args:
        spec: The run.
        config: Shape of its model.
        gpu_bytes: Memory of one GPU.
    """
    if not spec.rollouts_in_turns:
        return "nothing"
    dtype = getattr(torch, spec.trainer.dtype)
    weights, size = weight_bytes(config, dtype), spec.engine_gpus
    # Keys and values of few heads are on all GPUs of an engine.
    engine = 2 * weights / size + _kv_bytes(spec, config, dtype) + _ENGINE
    engines = spec.rollouts_in_turns * size / spec.trainer.world_size
    for stays in ("all", "state"):
        kept = _kept(stays, spec, config, gpu_bytes=gpu_bytes)
        if kept + engines * engine <= _LARGEST_SHARE * gpu_bytes:
            return stays
    return "nothing"


def kept_memory(spec: RunSpec, config: PretrainedConfig, *, gpu_bytes: int) -> float:
    """Bytes that a trainer in turns keeps on each of its GPUs while rollouts decode."""
    stays = what_stays(spec, config, gpu_bytes=gpu_bytes)
    return _kept(stays, spec, config, gpu_bytes=gpu_bytes)


def _kept(stays: Stays, spec: RunSpec, config: PretrainedConfig, *, gpu_bytes: int) -> float:
    if stays == "all":
        parts = trainer_memory(spec, config, gpu_bytes=gpu_bytes).parts
        return SPARE * sum(size for name, size in parts.items() if name != SLEEPING)
    kept = resting_memory(spec, config)
    if stays == "state":
        kept += state_memory(spec, config, gpu_bytes=gpu_bytes)
    return SPARE * kept


def _kv_bytes(spec: RunSpec, config: PretrainedConfig, dtype: torch.dtype) -> float:
    kind, arguments = engine_kind(spec.rollout.engine), spec.rollout.engine_arguments
    given = arguments.get(kind.cache_argument or "")
    if given is not None and kind.cache_in_bytes:
        return float(given)
    tokens = most_kv_tokens(spec, config) if given is None else int(given)
    return float(tokens * kv_bytes_per_token(config, dtype))
