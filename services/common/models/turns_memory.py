"""What trainer and rollouts keep on GPUs that they have in turns: pure arithmetic.

Whatever moves at a handover takes time in proportion to its bytes: the trainer's state on its way through
host memory, and KV cache that an engine maps anew. So neither moves more than it must.
"""

from typing import Final, Literal

import torch
from transformers import PretrainedConfig

from services.common.models.kv_memory import kv_bytes
from services.common.models.training_memory import (
    ENGINE,
    SLEEPING,
    SPARE,
    resting_memory,
    state_memory,
    trainer_memory,
    weight_bytes,
    weight_copies,
)
from services.common.runspec.run import RunSpec

Stays = Literal["all", "state", "nothing"]
"""Of a trainer: whatever it holds, its state between two steps, or what is on its way to rollouts alone."""

# The rest is for allocators' remainders.
_LARGEST_SHARE: Final = 0.9


def resident_memory(spec: RunSpec, config: PretrainedConfig, *, gpu_bytes: int) -> Stays:
    """What a trainer in turns leaves on the GPU while rollouts decode: as much as fits beside them.

    Where all of it does, engines give up nothing either. Both sides reckon it, from the same numbers.

    Args:
        spec: The run.
        config: Shape of its model.
        gpu_bytes: Memory of one GPU.
    """
    if not spec.colocated_rollouts:
        return "nothing"
    dtype = getattr(torch, spec.trainer.dtype)
    weights, size = weight_bytes(config, dtype), spec.engine_gpus
    # Keys and values of few heads are on all GPUs of an engine.
    engine = weight_copies(spec) * weights / size + kv_bytes(spec, config, dtype) + ENGINE
    engines = spec.colocated_rollouts * size / spec.trainer.world_size
    for stays in ("all", "state"):
        kept = _kept(stays, spec, config, gpu_bytes=gpu_bytes)
        if kept + engines * engine <= _LARGEST_SHARE * gpu_bytes:
            return stays
    return "nothing"


def sleeping_memory(spec: RunSpec, config: PretrainedConfig, *, gpu_bytes: int) -> float:
    """Bytes that a trainer in turns keeps on each of its GPUs while rollouts decode."""
    stays = resident_memory(spec, config, gpu_bytes=gpu_bytes)
    return _kept(stays, spec, config, gpu_bytes=gpu_bytes)


def _kept(stays: Stays, spec: RunSpec, config: PretrainedConfig, *, gpu_bytes: int) -> float:
    if stays == "all":
        parts = trainer_memory(spec, config, gpu_bytes=gpu_bytes).parts
        return SPARE * sum(size for name, size in parts.items() if name != SLEEPING)
    kept = resting_memory(spec, config)
    if stays == "state":
        kept += state_memory(spec, config, gpu_bytes=gpu_bytes)
    return SPARE * kept
