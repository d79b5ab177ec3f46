"""Reasons why a model cannot be trained in pipeline stages. Imports no torch."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from services.common.models.stages import stage_layers
from services.common.runspec.run import RunSpec

FAMILIES: Final = (
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "qwen2_moe",
    "qwen3_moe",
    "mixtral",
    "glm4_moe",
    "deepseek_v3",
)
"""Families whose decoder passes hidden states from layer to layer and changes them nowhere else."""


def problems(spec: RunSpec, config: Mapping[str, Any]) -> Iterator[str]:
    """Yields the reasons why a run's model cannot be divided into its stages.

    Args:
        config: ``config.json`` of the model.
    """
    model_type, layers = config.get("model_type"), config.get("num_hidden_layers")
    if model_type not in FAMILIES:
        yield (
            f"trainer.engine 'stages' divides models of model_type {', '.join(FAMILIES)} only, but "
            f"model.path has {model_type!r}; use one of them, or set trainer.engine to 'fsdp' and "
            "trainer.pipeline_parallel to 1"
        )
    elif layers is not None:
        try:
            stage_layers(layers, spec.trainer.pipeline_parallel)
        except ValueError as error:
            yield str(error)
    recomputed = spec.trainer.activation_checkpointing
    if spec.rollout.routing_replay != "off" and recomputed is not False:
        yield (
            f"rollout.routing_replay is {spec.rollout.routing_replay!r}, but with trainer.engine 'stages' "
            f"and trainer.activation_checkpointing {recomputed!r} a layer is recomputed after later "
            "micro-batches were routed; set trainer.activation_checkpointing to false"
        )
    if spec.distillation is not None:
        yield (
            "trainer.engine 'stages' computes no distributions of a teacher, but algorithm.loss is "
            f"{spec.algorithm.loss!r}; use another loss, or set trainer.engine to 'fsdp'"
        )
