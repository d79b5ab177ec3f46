"""Plans the memory of the GPUs of workers that only score, and of a critic with its own GPUs.

The sizes are those that ``bench/trainer/counted.py`` counts in passes without gradients.
"""

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Any, Final

from transformers import PretrainedConfig

from services.common.memory.rollout import WeightPlane
from services.common.memory.sizes import Shapes, config_dict, num_weights, shapes_of, wire_dtype
from services.common.memory.trainer import CHUNK_BYTES, CONTEXT, TrainerMemory, trainer_memory
from services.common.models.configs import full_config
from services.common.models.families import num_experts
from services.common.models.quantization import base_bytes, largest_quantized
from services.common.runspec.run import RunSpec
from services.common.runspec.trainer import OF_EXPERTS, TrainerSpec
from services.common.runspec.weight_modes import MODES

_FLOAT32: Final = 4
_GATHERED: Final = "weights gathered for a forward pass"
_IN_TRANSFER: Final = "weights in transfer"
_LOSS_WITHOUT_LOGITS: Final = "reward_model"
_STATES: Final = 4
"""Hidden states that exist beside a layer's feed-forward part."""


def scoring_spec(spec: RunSpec) -> RunSpec:
    """Returns the run with a trainer of a scoring worker's size, without what only training needs."""
    scoring = spec.topology.scoring
    changes = {
        "world_size": spec.topology.scoring_ranks,
        "tensor_parallel": scoring.tensor_parallel,
        "expert_parallel": scoring.expert_parallel,
        "context_parallel": 1,
        "pipeline_parallel": 1,
        "zero_stage": 3,
        "activation_checkpointing": False,
        "cpu_offload": scoring.cpu_offload,
        "compile": False,
    }
    return spec.model_copy(update={"trainer": spec.trainer.model_copy(update=changes)})


def reference_memory(spec: RunSpec, config: PretrainedConfig, *, gpu_bytes: int) -> TrainerMemory:
    """Predicts the memory of a GPU of a ``ref_logp`` worker.

    Args:
        config: Configuration of the policy, which the reference has without a teacher.
    """
    if spec.teacher is not None and not spec.teacher.is_tiny:
        config = full_config(spec.teacher)
    return _scorer(spec, config, gpu_bytes=gpu_bytes, worker="ref_logp")


def policy_memory(spec: RunSpec, config: PretrainedConfig, *, gpu_bytes: int) -> TrainerMemory:
    """Predicts the memory of a GPU of a ``logp`` worker, with the weights that it receives."""
    memory = _scorer(spec, config, gpu_bytes=gpu_bytes, worker="logp")
    shapes, item = shapes_of(config), wire_dtype(spec).itemsize
    whole = item * num_weights(shapes)
    if MODES[spec.weight_sync.mode].through_host:
        # Each process holds one whole tensor at a time.
        here = item * max(map(prod, shapes.values())) if spec.topology.scoring_ranks > 1 else 0.0
        host = {**memory.host, _IN_TRANSFER: whole}
        return replace(memory, parts=_with_transfer(memory.parts, here), host=host)
    plane = WeightPlane.of(spec, config)
    here = plane.num_copies * whole + 2 * plane.bucket_bytes
    return replace(memory, parts=_with_transfer(memory.parts, here))


def critic_memory(spec: RunSpec, config: PretrainedConfig, *, gpu_bytes: int) -> TrainerMemory:
    """Predicts the memory of a GPU of a critic with its own GPUs, which sends no weights."""
    apart = spec.of_critic
    kl = apart.algorithm.kl.model_copy(update={"coefficient": 0.0})
    changes = {
        "trainer": apart.trainer.model_copy(update={"lora": None}),
        "algorithm": apart.algorithm.model_copy(update={"kl": kl, "loss": _LOSS_WITHOUT_LOGITS}),
        "teacher": None,
    }
    memory = trainer_memory(apart.model_copy(update=changes), config, gpu_bytes=gpu_bytes)
    return replace(
        memory,
        parts={name: size for name, size in memory.parts.items() if name != _IN_TRANSFER},
        host={name: size for name, size in memory.host.items() if name != _IN_TRANSFER},
        worker="critic",
        remedy="give critic more GPUs in topology, or set critic.cpu_offload to true",
    )


def _scorer(
    spec: RunSpec, config: PretrainedConfig, *, gpu_bytes: int, worker: str
) -> TrainerMemory:
    trainer, shapes = scoring_spec(spec).trainer, shapes_of(config)
    item, ranks = wire_dtype(spec).itemsize, trainer.world_size
    outside = sum(prod(shape) for name, shape in shapes.items() if ".layers." not in name)
    layers = _by_layer(shapes, trainer)
    is_gathered = ranks > trainer.tensor_parallel or trainer.offloads_weights
    weights = (outside * trainer.tensor_parallel + num_weights(shapes) - outside) / ranks
    if not is_gathered:
        weights = outside + sum(layers)
    text: Any = config.get_text_config()
    longest = spec.data.max_prompt_tokens + spec.rollout.max_response_tokens
    tokens = max(trainer.tokens_per_micro_batch, longest)
    hidden, vocabulary = int(text.hidden_size), int(text.vocab_size)
    chunk = min(tokens, CHUNK_BYTES // (_FLOAT32 * vocabulary))
    # The weights of the next layer are gathered while one is computed.
    gathered = item * (outside + max(layers)) * is_gathered
    # FSDP2 gathers what is outside of the layers at once, and copies it into its parameters.
    outside_at_once = item * outside * (2 + 1 / ranks) * is_gathered
    moments = (
        {_GATHERED: outside_at_once, "activations": tokens * item * float(hidden)},
        {
            _GATHERED: gathered + item * max(layers) * is_gathered,
            "activations": tokens * item * (_STATES * hidden + _feed_forward(text, trainer)),
        },
        {
            _GATHERED: gathered,
            "activations": tokens * item * 2.0 * hidden,
            "logits": float(_FLOAT32 * chunk * vocabulary),
        },
    )
    peak = max(moments, key=lambda sizes: sum(sizes.values()))
    lora = trainer.lora if worker == "ref_logp" and spec.teacher is None else None
    state = {"weights, frozen": item * weights}
    if lora is not None and lora.base_dtype is not None:
        # Every process holds all rounded weights, and dequantizes one at a time.
        rounded = base_bytes(shapes, lora.base_dtype, item=item)
        state = {
            "weights, frozen": rounded,
            "a weight, dequantized": float(item * largest_quantized(shapes)),
        }
    here, host = ({}, state) if trainer.offloads_weights else (state, {})
    parts = {**here, **peak, "context": CONTEXT}
    return TrainerMemory(
        total=gpu_bytes,
        parts={name: size for name, size in parts.items() if size},
        host=host,
        worker=worker,
        work="scoring",
        remedy=f"raise topology.scoring_ranks for {worker}, or set topology.scoring.cpu_offload to true",
    )


def _by_layer(shapes: Shapes, trainer: TrainerSpec) -> list[float]:
    """Returns the numbers of weights of each layer with which a process computes."""
    sizes: dict[str, float] = {}
    for name, shape in shapes.items():
        if ".layers." in name:
            layer = name.split(".layers.")[1].partition(".")[0]
            divisor = trainer.tensor_parallel
            if f".{OF_EXPERTS}" in name:
                divisor *= trainer.expert_parallel
            sizes[layer] = sizes.get(layer, 0.0) + prod(shape) / divisor
    return [*sizes.values()]


def _feed_forward(text: Any, trainer: TrainerSpec) -> float:
    """Returns the values of a token in the feed-forward part of the largest layer."""
    if not num_experts(config_dict(text)):
        return float(3 * int(text.intermediate_size) / trainer.tensor_parallel)
    width = int(getattr(text, "moe_intermediate_size", None) or text.intermediate_size)
    copies = 2 + (trainer.expert_parallel > 1)
    rows = copies * int(text.hidden_size) + 3 * width
    return float(int(text.num_experts_per_tok) * rows / trainer.tensor_parallel)


def _with_transfer(parts: Mapping[str, float], size: float) -> dict[str, float]:
    return {**parts, **({_IN_TRANSFER: size} if size else {})}
