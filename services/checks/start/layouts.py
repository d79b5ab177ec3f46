"""Layouts of a trainer on its GPUs: which fit, and the bubble of those with pipeline stages."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

from transformers import PretrainedConfig

from services.common.memory.trainer import SPARE, trainer_memory
from services.common.models.families import check_trainer
from services.common.models.stages import bubble, most_packs
from services.common.runspec.engines import untrainable
from services.common.runspec.rules import problems
from services.common.runspec.run import RunSpec

AXES = ("pipeline_parallel", "tensor_parallel", "expert_parallel", "context_parallel")
"""Keys of ``trainer`` that divide a model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A layout of the trainer, with its memory and its bubble."""

    engine: str
    pipeline_parallel: int
    tensor_parallel: int
    expert_parallel: int
    context_parallel: int
    memory: float
    """Bytes of the fullest GPU, with what its allocator reserves."""
    micro_batches: int
    """Most micro-batches of an update on one pipeline."""
    bubble: float
    """Least share of an update's passes in which a stage is idle; 0 without stages."""
    fits: bool

    @property
    def keys(self) -> Mapping[str, Any]:
        """The keys of section ``trainer`` that a run sets for it."""
        values = asdict(self)
        return {name: values[name] for name in ("engine", *AXES)}

    @property
    def cost(self) -> tuple[float, ...]:
        """Cost of the layout, by which layouts are ordered.

        Bubbles idle GPUs. Tensor-parallel processes communicate twice in each layer and pass, those that
        share tokens or experts once for attention or experts.
        """
        sizes = (self.tensor_parallel, self.context_parallel, self.expert_parallel)
        return (round(self.bubble, 2), *sizes, self.pipeline_parallel)


def layouts(spec: RunSpec, config: PretrainedConfig, *, gpu_bytes: int) -> Sequence[Layout]:
    """Returns the layouts of the trainer's GPUs that the run and its model allow, the cheapest first.

    A layout whose tensor-parallel processes would be on several nodes is omitted.
    """
    candidates = [
        _planned(changed_spec, config, gpu_bytes=gpu_bytes)
        for changed_spec in _allowed(spec, config.to_dict())
    ]
    return sorted(candidates, key=lambda layout: layout.cost)


def fitting_layout(
    spec: RunSpec, config: PretrainedConfig, *, gpu_bytes: int
) -> Mapping[str, Any] | None:
    """Returns the keys of the cheapest layout that fits and differs from the run's; None if there is none."""
    for layout in layouts(spec, config, gpu_bytes=gpu_bytes):
        changes = {
            f"trainer.{name}": value
            for name, value in layout.keys.items()
            if value != getattr(spec.trainer, name)
        }
        if layout.fits and changes:
            return changes
    return None


def _allowed(spec: RunSpec, config: Mapping[str, Any]) -> Iterator[RunSpec]:
    now = {*problems(spec)}
    for sizes in _sizes(spec.trainer.world_size, node_gpus=spec.topology.gpus_per_node):
        stages, tensor, experts, context = sizes
        sharing = {
            "tensor_parallel": tensor,
            "expert_parallel": experts,
            "context_parallel": context,
        }
        if check_trainer(config, **sharing):
            continue
        engine = "stages" if stages > 1 else spec.trainer.engine
        if stages == 1 and engine == "stages":
            engine = "fsdp"
        update = {"engine": engine, "pipeline_parallel": stages, **sharing}
        changed_spec = spec.model_copy(update={"trainer": spec.trainer.model_copy(update=update)})
        if now.issuperset(problems(changed_spec)) and not [*untrainable(changed_spec, config)]:
            yield changed_spec


def _sizes(world_size: int, *, node_gpus: int) -> Iterator[tuple[int, int, int, int]]:
    """Yields the numbers of stages, and of tensor-, expert- and context-parallel processes in a stage."""
    divisors = [number for number in range(1, world_size + 1) if world_size % number == 0]
    for stages, tensor in product(divisors, divisors):
        if world_size % (stages * tensor) or node_gpus % tensor:
            continue
        num_data = world_size // (stages * tensor)
        sharing = [number for number in divisors if num_data % number == 0]
        for experts, context in product(sharing, sharing):
            yield stages, tensor, experts, context


def _planned(spec: RunSpec, config: PretrainedConfig, *, gpu_bytes: int) -> Layout:
    trainer, packs = spec.trainer, most_packs(spec)
    memory = trainer_memory(spec, config, gpu_bytes=gpu_bytes)
    needed_bytes = SPARE * memory.used
    return Layout(
        engine=trainer.engine,
        **{name: getattr(trainer, name) for name in AXES},
        memory=needed_bytes,
        micro_batches=packs,
        bubble=bubble(trainer.pipeline_parallel, packs),
        fits=needed_bytes <= gpu_bytes,
    )
