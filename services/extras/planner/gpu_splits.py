"""Splits GPUs between a trainer and rollouts, predicts each split and recommends one."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import lcm

from services.common.runspec.rules import placement, problems
from services.common.runspec.run import RunSpec
from services.common.runspec.topology import TopologySpec
from services.common.runspec.workers import kinds_with_own_gpus
from services.extras.kubernetes.pod_rules import pod_problems
from services.extras.planner.inputs import Rates, Setting, setting_of
from services.extras.planner.simulation import Prediction, predict

_MAX_SPLITS = 8
_SWEEP_SAMPLES = 4_000
_NEARLY = 0.97
"""Fraction of the best throughput at which a less demanding split is preferred."""
SlotsOf = Callable[[int, int], int]
"""Returns the slots of a rollout, from the staleness bound and the number of rollouts."""


def on_gpus(setting: Setting, gpus: int, *, trainer_gpus: int, is_colocated: bool) -> Setting:
    """Returns the setting on ``gpus`` GPUs, of which the trainer has ``trainer_gpus``.

    Rollouts have the other GPUs or, if ``is_colocated``, all GPUs.
    """
    rollout_gpus = gpus if is_colocated else gpus - trainer_gpus
    return replace(
        setting,
        trainer_gpus=trainer_gpus,
        rollouts=rollout_gpus // setting.engine_gpus,
        colocated_rollouts=trainer_gpus // setting.engine_gpus if is_colocated else 0,
        shares_gpu=False,
    )


def on_one_gpu(setting: Setting) -> Setting | None:
    """Returns the setting with trainer and one rollout on the same GPU at the same time.

    ``run`` starts a disaggregated run so on a machine with one GPU. None if one side needs several.
    """
    if setting.engine_gpus > 1:
        return None
    return replace(setting, trainer_gpus=1, rollouts=1, colocated_rollouts=0, shares_gpu=True)


def with_setting(spec: RunSpec, setting: Setting) -> RunSpec:
    topology = spec.topology.model_copy(update={"placement": "disaggregated"})
    if setting.is_colocated:
        topology = TopologySpec(placement=setting.placement)
    changes = {
        "trainer": {"world_size": setting.trainer_gpus},
        "rollout": {"replicas": setting.rollouts, "max_running_samples": setting.slots},
        "algorithm": {"max_staleness": setting.max_staleness},
    }
    sections = {
        name: getattr(spec, name).model_copy(update=values) for name, values in changes.items()
    }
    return spec.model_copy(update={"topology": topology, **sections})


def may_colocate(spec: RunSpec, setting: Setting) -> bool:
    """Returns True if rollouts may share the trainer's GPUs and no other task group has its own GPUs."""
    return not kinds_with_own_gpus(spec.topology) and not [*placement(with_setting(spec, setting))]


def allows(spec: RunSpec, setting: Setting) -> bool:
    """Returns False if a run with another setting would break a rule that it keeps now."""
    # Task groups follow from the numbers of GPUs; a user who changes these changes the groups, too.
    plain = spec.model_copy(update={"topology": TopologySpec(placement=spec.topology.placement)})
    now, then = with_setting(plain, setting_of(spec)), with_setting(plain, setting)
    remaining = {*problems(now), *pod_problems(now)}
    return remaining.issuperset((*problems(then), *pod_problems(then)))


def trainer_unit(spec: RunSpec) -> int:
    """Returns the number that divides the trainer's GPUs."""
    trainer = spec.trainer
    sharing = lcm(trainer.expert_parallel, trainer.context_parallel)
    return trainer.pipeline_parallel * trainer.tensor_parallel * sharing


def other_placements(spec: RunSpec, now: Setting) -> Iterator[Setting]:
    """Yields the settings of a run in the other possible placements on the same GPUs.

    Args:
        now: Current setting. On one GPU, the other placement of a colocated run is that of a
            disaggregated one, whose sides share the GPU.
    """
    unit = trainer_unit(spec)
    if now.gpus == 1 and now.is_colocated and (shared := on_one_gpu(now)) is not None:
        yield shared
        return
    gpus, engine_gpus = now.gpus, now.engine_gpus
    half = gpus // 2 // unit * unit
    apart = half if now.placement == "colocated" else now.trainer_gpus
    for trainer_gpus, is_colocated in ((apart, False), (apart, True), (gpus, True)):
        if not 0 < trainer_gpus <= gpus - (not is_colocated) * engine_gpus or trainer_gpus % unit:
            continue
        setting = on_gpus(now, gpus, trainer_gpus=trainer_gpus, is_colocated=is_colocated)
        if setting.placement == "colocated":
            setting = replace(setting, max_staleness=min(1, setting.max_staleness))
        if setting.placement == now.placement or setting.gpus != gpus:
            continue
        if not is_colocated or may_colocate(spec, setting):
            yield setting


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuCapacity:
    """GPUs to be split."""

    gpus: int
    engine_gpus: int
    """GPUs of one rollout."""
    trainer_unit: int = 1
    """The trainer's number of GPUs is a multiple of this."""
    gpus_per_node: int
    """GPUs of a node; the trainer has at most one node, or fills whole nodes."""

    def trainer_sizes(self) -> Sequence[int]:
        """Returns numbers of trainer GPUs, at most ``_MAX_SPLITS``, that leave no GPU unused.

        If each possible number leaves some unused, all are candidates.
        """
        max_size = self.gpus - self.engine_gpus
        sizes = [
            size
            for size in range(self.trainer_unit, max_size + 1, self.trainer_unit)
            if size <= self.gpus_per_node or size % self.gpus_per_node == 0
        ]
        without_rest = [size for size in sizes if (self.gpus - size) % self.engine_gpus == 0]
        candidates = without_rest or [*sizes]
        return candidates[:: max(1, -(-len(candidates) // _MAX_SPLITS))]

    def shared_sizes(self) -> Sequence[int]:
        """Returns the numbers of trainer GPUs if rollouts use all GPUs, the trainer's included.

        All ranks of a trainer that takes turns with rollouts are on one node.
        """
        candidates = [
            *self.trainer_sizes(),
            *([] if self.gpus % self.trainer_unit else [self.gpus]),
        ]
        if self.gpus % self.engine_gpus:
            return []
        return [
            size
            for size in candidates
            if size % self.engine_gpus == 0 and size <= self.gpus_per_node
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """One split with its prediction."""

    setting: Setting
    prediction: Prediction


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitPlan:
    """All splits that were tried."""

    splits: tuple[Split, ...]
    """Disaggregated splits, then those that share one GPU, then colocated ones; by the trainer's GPUs,
    then by staleness bound."""
    best: Split
    """Recommended split: among those with nearly the best throughput, the one with the least
    staleness."""
    now: Split | None
    """Split of the specification, if it uses no more GPUs."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Reasons for which splits are impossible, by number of trainer GPUs, followed by ``colocated``
    or ``shared``."""


def plan_splits(
    rates: Rates,
    base: Setting,
    *,
    room: GpuCapacity,
    bounds: Collection[int],
    slots: SlotsOf,
    max_slots: int,
    refused: Callable[[Setting], str] = lambda setting: "",
    may_colocate: Callable[[Setting], bool] = lambda setting: False,
) -> SplitPlan:
    """Tries the ways to split a number of GPUs.

    Args:
        base: Setting whose other parts stay unchanged.
        bounds: Allowed values of ``algorithm.max_staleness``.
        refused: Returns the reason for which a setting does not fit, or an empty text.
        may_colocate: Returns True if the specification allows a setting in which rollouts share
            the trainer's GPUs.

    Raises:
        ValueError: If the GPUs are too few, or no split of them is possible; with the figures.
    """
    least = room.trainer_unit + room.engine_gpus
    too_few = (
        f"at least {least} GPUs are needed (trainer {room.trainer_unit}, rollout {room.engine_gpus}), "
        f"got {room.gpus}; set --gpus"
    )
    base = replace(base, engine_gpus=room.engine_gpus)

    def ways(sizes: Collection[int], *, is_colocated: bool) -> list[Setting]:
        return [
            replace(
                on_gpus(base, room.gpus, trainer_gpus=size, is_colocated=is_colocated),
                max_staleness=bound,
            )
            for size in sizes
            for bound in sorted(bounds)
        ]

    turns = [way for way in ways(room.shared_sizes(), is_colocated=True) if may_colocate(way)]
    shared_setting = on_one_gpu(base) if room.gpus == room.trainer_unit == 1 else None
    at_once = (
        []
        if shared_setting is None
        else [replace(shared_setting, max_staleness=bound) for bound in sorted(bounds)]
    )
    reasons: dict[str, str] = {}
    splits = []
    for way in (*ways(room.trainer_sizes(), is_colocated=False), *at_once, *turns):
        kind = " colocated" if way.is_colocated else " shared" if way.shares_gpu else ""
        name = f"{way.trainer_gpus}{kind}"
        # Memory does not depend on the staleness bound.
        if name not in reasons:
            reasons[name] = refused(way)
        if not reasons[name]:
            splits.append(_tried(rates, way, slots))
    if not splits and reasons:
        # Names the split that is closest to fitting: the one with the largest trainer, preferably
        # disaggregated, because engines also occupy the GPUs of a colocated trainer.
        apart = [name for name in reasons if name.isdigit()]
        name = max(apart or reasons, key=lambda name: int(name.split()[0]))
        raise ValueError(
            f"no split of {room.gpus} GPUs is possible; with {name} for the trainer: {reasons[name]}"
        )
    if not splits:
        raise ValueError(too_few)
    best = _recommended(splits)
    doubled = replace(best.setting, slots=2 * best.setting.slots)
    if doubled.slots <= max_slots:
        splits.append(Split(setting=doubled, prediction=_predict(rates, doubled)))
        best = _recommended(splits)
    now = base if base.gpus <= room.gpus else shared_setting if base.rollouts == 1 else None
    return SplitPlan(
        splits=tuple(splits),
        best=Split(setting=best.setting, prediction=predict(rates, best.setting)),
        now=None if now is None else Split(setting=now, prediction=predict(rates, now)),
        refused={name: reason for name, reason in reasons.items() if reason},
    )


def _tried(rates: Rates, setting: Setting, slots: SlotsOf) -> Split:
    is_asynchronous = setting.max_staleness > 0
    setting = replace(
        setting,
        slots=slots(setting.max_staleness, setting.rollouts),
        partial_rollout=is_asynchronous,
        accumulate_early=setting.accumulate_early and not is_asynchronous,
    )
    return Split(setting=setting, prediction=_predict(rates, setting))


def _predict(rates: Rates, setting: Setting) -> Prediction:
    """Predicts with fewer steps, because many splits are tried."""
    num_steps = max(4, min(16, _SWEEP_SAMPLES // setting.samples_per_step))
    return predict(rates, setting, num_steps=num_steps)


def _recommended(splits: Sequence[Split]) -> Split:
    maximum = max(split.prediction.samples_per_s for split in splits)
    near = [split for split in splits if split.prediction.samples_per_s >= _NEARLY * maximum]
    return min(
        near, key=lambda s: (s.setting.max_staleness, s.setting.slots, -s.prediction.samples_per_s)
    )
