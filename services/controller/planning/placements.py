"""Placements of trainer and rollouts: disaggregated, colocated or mixed."""

from collections.abc import Iterator
from dataclasses import replace
from math import lcm

from services.common.runspec.placement_rules import placement
from services.common.runspec.run import RunSpec
from services.common.runspec.topology import TopologySpec
from services.common.runspec.workers import apart
from services.controller.planning.measured import setting_of
from services.controller.planning.rates import Setting


def on_gpus(setting: Setting, gpus: int, *, trainer_gpus: int, is_colocated: bool) -> Setting:
    """Returns the setting on a number of GPUs with a given trainer; if colocated, rollouts use all GPUs."""
    left = gpus if is_colocated else gpus - trainer_gpus
    return replace(
        setting,
        trainer_gpus=trainer_gpus,
        rollouts=left // setting.engine_gpus,
        in_turns=trainer_gpus // setting.engine_gpus if is_colocated else 0,
    )


def placed(spec: RunSpec, setting: Setting) -> RunSpec:
    """Returns the specification with the values of a setting."""
    topology = spec.topology.model_copy(update={"placement": "disaggregated"})
    if setting.is_colocated:
        topology = TopologySpec(placement=setting.placement)
    changes = {
        "trainer": {"world_size": setting.trainer_gpus},
        "rollout": {"replicas": setting.rollouts},
        "algorithm": {"max_staleness": setting.max_staleness},
    }
    parts = {name: getattr(spec, name).model_copy(update=these) for name, these in changes.items()}
    return spec.model_copy(update={"topology": topology, **parts})


def may_take_turns(spec: RunSpec, setting: Setting) -> bool:
    """Returns True if rollouts may share the trainer's GPUs, and no other task group has its own."""
    return not apart(spec.topology) and not [*placement(placed(spec, setting))]


def trainer_unit(spec: RunSpec) -> int:
    """Returns the number of which the trainer's GPUs are a multiple."""
    trainer = spec.trainer
    return trainer.tensor_parallel * lcm(trainer.expert_parallel, trainer.context_parallel)


def otherwise(spec: RunSpec) -> Iterator[Setting]:
    """Yields the settings of a run in the other possible placements on the same GPUs."""
    now, unit = setting_of(spec), trainer_unit(spec)
    gpus, engine_gpus = now.gpus, now.engine_gpus
    half = gpus // 2 // unit * unit
    apart = half if now.placement == "colocated" else now.trainer_gpus
    for trainer_gpus, is_colocated in ((apart, False), (apart, True), (gpus, True)):
        if not 0 < trainer_gpus <= gpus - (not is_colocated) * engine_gpus or trainer_gpus % unit:
            continue
        found = on_gpus(now, gpus, trainer_gpus=trainer_gpus, is_colocated=is_colocated)
        if found.placement == "colocated":
            found = replace(found, max_staleness=min(1, found.max_staleness))
        if found.placement == now.placement or found.gpus != gpus:
            continue
        if not is_colocated or may_take_turns(spec, found):
            yield found
