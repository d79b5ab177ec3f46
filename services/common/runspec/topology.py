"""Assignment of a run's GPUs to its tasks: task groups and their split, or colocation by turns."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal

from pydantic import Field, field_validator

from services.common.runspec.base import SpecPart
from services.common.runspec.workers import WORKERS, task_aliases, tasks

_NOISE = 1e-9
"""Max floating-point error of shares such as ``0.7 * 10``."""


class TaskGroupFault(StrEnum):
    """Faults of task groups."""

    LENGTH_MISMATCH = "LENGTH_MISMATCH"
    EMPTY_GROUP = "EMPTY_GROUP"
    UNKNOWN_TASK = "UNKNOWN_TASK"
    DUPLICATE_TASK = "DUPLICATE_TASK"
    MISSING_TASK = "MISSING_TASK"
    BAD_RATIO = "BAD_RATIO"
    RATIO_SUM_GT_1 = "RATIO_SUM_GT_1"
    TOTAL_NOT_MULTIPLE_OF_NODE = "TOTAL_NOT_MULTIPLE_OF_NODE"
    GROUP_GETS_ZERO = "GROUP_GETS_ZERO"
    NOT_DIVISIBLE_BY_PARALLELISM = "NOT_DIVISIBLE_BY_PARALLELISM"


class TaskGroupError(ValueError):
    """Reports task groups that cannot be placed."""

    def __init__(self, fault: TaskGroupFault, message: str) -> None:
        self.fault = fault
        super().__init__(f"{fault}: {message}")


@dataclass(frozen=True, slots=True)
class PlacedGroup:
    """A task group with its GPUs."""

    tasks: tuple[str, ...]
    gpus: int
    pods: tuple[int, ...]
    """GPUs of each pod: whole nodes first, then the remainder."""


@dataclass(frozen=True, slots=True)
class TaskGroupPlacement:
    """All task groups with their GPUs."""

    groups: tuple[PlacedGroup, ...]
    unused_gpus: int
    """GPUs that no ratio covers."""

    def group_of(self, task: str) -> PlacedGroup | None:
        """Returns the group of a task; None if no group lists it."""
        return next((group for group in self.groups if task in group.tasks), None)


def place_groups(
    task_groups: Sequence[str | Sequence[str]],
    ratios: Sequence[float],
    *,
    total_gpus: int,
    gpus_per_node: int,
    granularity: Literal["gpu", "node"] = "gpu",
    parallelism: Mapping[str, int] | None = None,
) -> TaskGroupPlacement:
    """Splits GPUs among task groups.

    Args:
        task_groups: For each group a task, or several that share GPUs; aliases are accepted.
        granularity: Unit of the split: single GPUs or whole nodes.
        parallelism: GPUs that one instance of a task needs; 1 for tasks that are not named.

    Raises:
        TaskGroupError: With one of :class:`TaskGroupFault`.
    """
    groups = _named(task_groups, num_ratios=len(ratios))
    _check_ratios(ratios)
    unit = gpus_per_node if granularity == "node" else 1
    if total_gpus % unit:
        raise TaskGroupError(
            TaskGroupFault.TOTAL_NOT_MULTIPLE_OF_NODE,
            f"{total_gpus} GPUs are not a multiple of the {gpus_per_node} GPUs per node; use whole nodes, or "
            "split by gpu",
        )
    counts = [count * unit for count in _largest_remainder(ratios, total_gpus // unit)]
    for group, count, ratio in zip(groups, counts, ratios, strict=True):
        if count == 0:
            raise TaskGroupError(
                TaskGroupFault.GROUP_GETS_ZERO,
                f"group {'+'.join(group)} gets no GPU: its ratio is {ratio:g} of {total_gpus}; raise the "
                "ratio, or merge it with another group",
            )
        _check_parallelism(group, count, parallelism or {})
    return TaskGroupPlacement(
        groups=tuple(
            PlacedGroup(group, count, _pods(count, gpus_per_node))
            for group, count in zip(groups, counts, strict=True)
        ),
        unused_gpus=total_gpus - sum(counts),
    )


def _named(
    task_groups: Sequence[str | Sequence[str]], *, num_ratios: int
) -> tuple[tuple[str, ...], ...]:
    if len(task_groups) != num_ratios:
        raise TaskGroupError(
            TaskGroupFault.LENGTH_MISMATCH,
            f"expected one ratio for each of the {len(task_groups)} task groups, got {num_ratios}",
        )
    task_names, aliases, groups = tasks(), task_aliases(), []
    for number, group in enumerate(task_groups):
        names = (group,) if isinstance(group, str) else tuple(group)
        if not names:
            raise TaskGroupError(
                TaskGroupFault.EMPTY_GROUP,
                f"group {number} has no task; add one or remove the group",
            )
        groups.append(tuple(aliases.get(name, name) for name in names))
    everything = [task for group in groups for task in group]
    if unknown := [task for task in everything if task not in task_names]:
        if unknown[0] in WORKERS:
            WORKERS[unknown[0]]  # raises DoorError, which names the package
        raise TaskGroupError(
            TaskGroupFault.UNKNOWN_TASK,
            f"unknown task {unknown[0]!r}; use {', '.join(task_names)}",
        )
    if twice := [task for task in task_names if everything.count(task) > 1]:
        raise TaskGroupError(
            TaskGroupFault.DUPLICATE_TASK, f"task {twice[0]} is listed twice; remove one"
        )
    required = [kind.task for kind in WORKERS.values() if kind.is_required]
    if missing_tasks := [task for task in required if task not in everything]:
        raise TaskGroupError(
            TaskGroupFault.MISSING_TASK,
            f"no group has the task {missing_tasks[0]}, which every run needs; add it",
        )
    return tuple(groups)


def _check_ratios(ratios: Sequence[float]) -> None:
    for ratio in ratios:
        if not (math.isfinite(ratio) and ratio > 0):
            raise TaskGroupError(TaskGroupFault.BAD_RATIO, f"a ratio must be > 0, got {ratio}")
    if sum(ratios) > 1 + _NOISE:
        raise TaskGroupError(
            TaskGroupFault.RATIO_SUM_GT_1,
            f"the ratios must add up to at most 1, got {sum(ratios):g}",
        )


def _largest_remainder(ratios: Sequence[float], units: int) -> list[int]:
    shares = [ratio * units for ratio in ratios]
    counts = [math.floor(want + _NOISE) for want in shares]
    num_remaining = math.floor(sum(shares) + _NOISE) - sum(counts)
    remainders = [round(want - count, 9) for want, count in zip(shares, counts, strict=True)]
    for index in sorted(range(len(ratios)), key=lambda i: (-remainders[i], i))[:num_remaining]:
        counts[index] += 1
    return counts


def _check_parallelism(group: Sequence[str], count: int, parallelism: Mapping[str, int]) -> None:
    step = math.lcm(*(parallelism.get(task, 1) for task in group))
    if count % step:
        raise TaskGroupError(
            TaskGroupFault.NOT_DIVISIBLE_BY_PARALLELISM,
            f"group {'+'.join(group)} gets {count} GPUs, but its tasks need a multiple of {step}; change "
            "its ratio or the parallelism",
        )


def _pods(count: int, gpus_per_node: int) -> tuple[int, ...]:
    full_pods, rest = divmod(count, gpus_per_node)
    return (gpus_per_node,) * full_pods + ((rest,) if rest else ())


class ScoringSpec(SpecPart):
    """Parallelism of a worker that only scores, apart from the trainer's."""

    tensor_parallel: int = Field(1, ge=1)
    """Number of a worker's processes over which each layer is sharded."""
    expert_parallel: int = Field(1, ge=1)
    """Number of a worker's data-parallel processes over which the experts of each layer are
    distributed, as ``trainer.expert_parallel`` does."""
    cpu_offload: bool = False
    """If true, the weights are in host memory, and each layer's are copied to the GPU for its
    pass."""


class TopologySpec(SpecPart):
    """Assignment of GPUs to the tasks of a run.

    Without task groups a run has ``trainer.world_size`` trainer processes, which also compute
    proximal and reference logprobs, and ``rollout.replicas`` rollouts. With task groups, both
    numbers follow from the split. On a machine without GPUs, each GPU stands for one process.
    """

    placement: Literal["disaggregated", "colocated", "mixed"] = "disaggregated"
    """Placement of trainer and rollouts. ``disaggregated``: each has its own GPUs, and both run at
    the same time. ``colocated``: all are on the trainer's GPUs and take turns; the side that
    sleeps keeps at most the data that fits into memory in addition to the other side. The total
    GPUs of all rollouts must be a multiple of ``trainer.world_size``, and
    ``algorithm.max_staleness`` must be 0 or 1. ``mixed``: the first rollouts fill the trainer's
    GPUs and take turns with it; the other rollouts (one by default) have their own GPUs and
    always run. Responses that are unfinished when the trainer's turn begins continue on them."""
    task_groups: tuple[tuple[str, ...], ...] = ()
    """Tasks of each group: one name, or a list of names that share GPUs. Tasks are ``train``,
    ``generate``, ``logp``, ``ref_logp``, ``critic`` and ``reward``. An unlisted task belongs to
    the group of ``train``; ``reward`` always belongs to the group of ``generate``."""
    ratios: tuple[float, ...] = ()
    """Share of each group in the GPUs. If the sum is below 1, the other GPUs stay unused."""
    gpus: int = Field(0, ge=0, le=1 << 20)
    """Total number of GPUs of the run."""
    gpus_per_node: int = Field(8, ge=1, le=1 << 20)
    """Number of GPUs per node."""
    scoring_ranks: int = Field(1, ge=1)
    """Number of processes over which the model of one ``logp`` or ``ref_logp`` worker is sharded;
    above 1 for a model that is too large for one GPU. The GPUs of these groups must be a
    multiple of it. A sharded ``logp`` requires ``weight_sync.mode: cpu_async``, because it
    receives whole weights in the memory of its first host."""
    scoring: ScoringSpec = ScoringSpec()
    """Parallelism within one ``logp`` or ``ref_logp`` worker; other processes of it share its
    samples and shard its weights (FSDP2)."""
    granularity: Literal["gpu", "node"] = "gpu"
    """Unit in which GPUs are split among groups."""

    @field_validator("task_groups", mode="before")
    @classmethod
    def _task_or_tasks(cls, value: Any) -> Any:
        if not isinstance(value, list | tuple):
            return value
        aliases = task_aliases() if value else {}
        groups = [[group] if isinstance(group, str) else group for group in value]
        return [
            [aliases.get(name, name) if isinstance(name, str) else name for name in group]
            if isinstance(group, list | tuple)
            else group
            for group in groups
        ]

    @property
    def is_colocated(self) -> bool:
        """True if the trainer and rollouts take turns on some or all GPUs."""
        return self.placement != "disaggregated"

    def place(self, parallelism: Mapping[str, int] | None = None) -> TaskGroupPlacement:
        """Returns the task groups with their GPUs.

        Args:
            parallelism: GPUs that one instance of a task needs.

        Raises:
            TaskGroupError: If the groups cannot be placed.
        """
        return place_groups(
            self.task_groups,
            self.ratios,
            total_gpus=self.gpus,
            gpus_per_node=self.gpus_per_node,
            granularity=self.granularity,
            parallelism=parallelism,
        )

    def gpus_of(self, task: str) -> int:
        """Returns the GPUs of a task's group; 0 if no group lists the task."""
        group = self.place().group_of(task) if self.task_groups else None
        return group.gpus if group is not None else 0

    def own_gpus(self, task: str) -> int:
        """Returns the GPUs of a task that runs outside of the trainer; 0 if it runs inside."""
        group = self.place().group_of(task) if self.task_groups else None
        return group.gpus if group is not None and "train" not in group.tasks else 0
