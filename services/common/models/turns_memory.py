"""Memory that trainer and rollouts keep on time-shared GPUs: pure arithmetic.

The time of a switch is proportional to the bytes that move: the trainer's state to or from host
memory, and the KV cache that an engine maps again. So each side moves only as much as it must.
"""

from typing import Final, Literal

import torch
from transformers import PretrainedConfig

from services.common.models.kv_memory import kv_bytes
from services.common.models.training_memory import (
    ENGINE,
    SLEEPING,
    SPARE,
    sleeping_trainer_bytes,
    state_memory,
    trainer_memory,
    weight_bytes,
    weight_copies,
)
from services.common.runspec.run import RunSpec

Stays = Literal["all", "state", "nothing"]
"""Part of a trainer that stays on the GPU: all, its state between steps, or only the sent weights."""

# The rest is for memory that allocators cannot use.
_LARGEST_SHARE: Final = 0.9


def resident_memory(spec: RunSpec, config: PretrainedConfig, *, gpu_bytes: int) -> Stays:
    """Returns the part of a colocated trainer that stays on the GPU while rollouts decode: as much as fits.

    If everything fits, engines also keep their memory. Both sides compute the same result from the
    same numbers.

    Args:
        spec: The run.
        config: Shape of its model.
        gpu_bytes: Memory of one GPU.
    """
    if not spec.colocated_rollouts:
        return "nothing"
    dtype = getattr(torch, spec.trainer.dtype)
    weights, size = weight_bytes(config, dtype), spec.engine_gpus
    # If there are fewer KV heads than GPUs, each GPU of an engine has a copy of them.
    engine = weight_copies(spec) * weights / size + kv_bytes(spec, config, dtype) + ENGINE
    engines = spec.colocated_rollouts * size / spec.trainer.world_size
    for stays in ("all", "state"):
        kept = _kept(stays, spec, config, gpu_bytes=gpu_bytes)
        if kept + engines * engine <= _LARGEST_SHARE * gpu_bytes:
            return stays
    return "nothing"


def sleeping_memory(spec: RunSpec, config: PretrainedConfig, *, gpu_bytes: int) -> float:
    """Returns the bytes that a colocated trainer keeps on each of its GPUs while rollouts decode."""
    stays = resident_memory(spec, config, gpu_bytes=gpu_bytes)
    return _kept(stays, spec, config, gpu_bytes=gpu_bytes)


def _kept(stays: Stays, spec: RunSpec, config: PretrainedConfig, *, gpu_bytes: int) -> float:
    if stays == "all":
        parts = trainer_memory(spec, config, gpu_bytes=gpu_bytes).parts
        return SPARE * sum(size for name, size in parts.items() if name != SLEEPING)
    kept = sleeping_trainer_bytes(spec, config)
    if stays == "state":
        kept += state_memory(spec, config, gpu_bytes=gpu_bytes)
    return SPARE * kept
