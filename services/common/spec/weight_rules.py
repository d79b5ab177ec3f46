"""What a run may say of how its weights reach the rollouts."""

from collections.abc import Iterator

from services.common.spec.run import RunSpec
from services.common.spec.trainer import LoraSpec
from services.common.spec.weight_modes import HANDLE, MODES, transport_of


def weight_sync(spec: RunSpec) -> Iterator[str]:
    """What is wrong with the weight plane."""
    sync, lora = spec.weight_sync, spec.trainer.lora
    mode = MODES[sync.mode]
    if mode.through_host and sync.backend not in ("auto", HANDLE, transport_of("cpu")):
        yield (
            f"weight_sync.mode {sync.mode} goes through host memory, which {sync.backend} does not "
            "reach; set weight_sync.backend to auto"
        )
    if lora is not None and lora.sync == "adapter":
        yield from _alone(spec, lora)
    ahead = spec.algorithm.max_staleness + 1
    if sync.publish_every > ahead and not spec.algorithm.num_demonstrations:
        yield (
            f"weight_sync.publish_every is {sync.publish_every}, but with algorithm.max_staleness "
            f"{ahead - 1} rollouts generate for {ahead} steps under the same weights, then wait for others; "
            "lower the first or raise the second"
        )


def _alone(spec: RunSpec, lora: LoraSpec) -> Iterator[str]:
    """Say why adapters cannot travel without the weights that they belong to."""
    if MODES[spec.weight_sync.mode].is_in_place:
        yield (
            "trainer.lora.sync adapter receives adapters beside the live weights, but weight_sync.mode is "
            "inplace; choose mode shadow, which takes no more memory here, or sync merged"
        )
    if lora.adapts_experts:
        yield (
            "trainer.lora.sync adapter has rollouts merge adapters of linear modules, but "
            "trainer.lora.target_modules names experts; choose sync merged"
        )
    if spec.model.is_tiny:
        yield (
            f"trainer.lora.sync adapter has rollouts read frozen weights from model.path, but "
            f"{spec.model.path!r} is a preset, which has no folder; choose sync merged"
        )
    if spec.topology.own_gpus("logp"):
        yield (
            "trainer.lora.sync adapter has rollouts merge adapters, which workers of the task logp cannot; "
            "choose sync merged"
        )
