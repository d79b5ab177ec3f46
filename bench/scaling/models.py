"""The models whose scaling is measured, and how their sides use several GPUs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bench.e2e.shapes import QWEN3_8B, QWEN3_MOE_16B, SHAPES, Shape, smoke


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledModel:
    """A model and the settings of its runs."""

    shape: Shape
    gpu_counts: tuple[int, ...]
    """Numbers of GPUs on which it fits."""
    engine_sizes: tuple[int, ...] = (1,)
    """GPUs of an engine, by tensor parallelism; the first one is the default."""
    trainer_settings: Mapping[int, tuple[str, ...]] | None = None
    """Further settings by the trainer's number of GPUs; those of the largest number that is not greater
    apply."""

    def settings_of(self, trainer_gpus: int) -> tuple[str, ...]:
        """Returns the trainer's settings for a number of GPUs."""
        sizes = [size for size in self.trainer_settings or () if size <= trainer_gpus]
        return (self.trainer_settings or {})[max(sizes)] if sizes else ()

    def lengths(self) -> dict[str, Any]:
        """Returns the distribution of response lengths, as ``slipstream plan --rates`` reads it."""
        arguments = self.shape.workflow_arguments
        if "median" in arguments:
            median, most = float(arguments["median"]), int(arguments["most"])
            return {
                "lognormal": {
                    "median_tokens": median,
                    "sigma": arguments["sigma"],
                    "max_tokens": most,
                }
            }
        mean, most = float(self.shape.vocabulary), self.shape.max_response_tokens
        return {"geometric": {"mean_tokens": mean, "max_tokens": most}}


_OFFLOADED = "trainer.cpu_offload=optimizer"
_ON_GPUS = "trainer.cpu_offload=null"
_MIXTURE = replace(
    QWEN3_MOE_16B,
    layers=48,
    prompts_per_step=16,
    further={**QWEN3_MOE_16B.further, "num_experts_per_tok": 8},
)
"""Qwen3-30B-A3B's shape: 30.5 B parameters, of which a token uses 3.3 B."""

MODELS = {
    "1.3b": ScaledModel(shape=SHAPES["geometric"], gpu_counts=(1, 2, 4, 8)),
    "8b": ScaledModel(
        shape=QWEN3_8B,
        gpu_counts=(2, 4, 8),
        engine_sizes=(1, 2),
        trainer_settings={1: (_OFFLOADED,), 2: (_ON_GPUS,)},
    ),
    "30b-a3b": ScaledModel(
        shape=_MIXTURE,
        gpu_counts=(8,),
        engine_sizes=(2,),
        trainer_settings={4: ("trainer.expert_parallel=4",)},
    ),
}


def smoke_models(names: Sequence[str]) -> dict[str, ScaledModel]:
    """Returns tiny variants, whose GPUs are processes of a CPU."""
    models = {}
    for name in names:
        model = MODELS[name]
        models[name] = replace(
            model,
            shape=smoke(model.shape),
            # The engine of smoke runs has one process.
            engine_sizes=(1,),
            trainer_settings={
                size: tuple(s for s in settings if "cpu_offload" not in s)
                for size, settings in (model.trainer_settings or {}).items()
            },
        )
    return models
