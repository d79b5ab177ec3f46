"""Split of a run's GPUs among its task groups.

The method of the largest remainder assigns all GPUs of the ratios' sum: shares are rounded down,
and the remaining GPUs go to the groups with the largest remainders, to the earlier group of two
equal ones. Invalid groups are reported and never corrected silently.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

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
        ratios: Share of each group.
        total_gpus: GPUs of the run.
        gpus_per_node: GPUs of one node.
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
    """Returns the groups as tuples of valid task names."""
    if len(task_groups) != num_ratios:
        raise TaskGroupError(
            TaskGroupFault.LENGTH_MISMATCH,
            f"expected one ratio for each of the {len(task_groups)} task groups, got {num_ratios}",
        )
    known, aliases, groups = tasks(), task_aliases(), []
    for number, group in enumerate(task_groups):
        names = (group,) if isinstance(group, str) else tuple(group)
        if not names:
            raise TaskGroupError(
                TaskGroupFault.EMPTY_GROUP,
                f"group {number} has no task; add one or remove the group",
            )
        groups.append(tuple(aliases.get(name, name) for name in names))
    everything = [task for group in groups for task in group]
    if unknown := [task for task in everything if task not in known]:
        raise TaskGroupError(
            TaskGroupFault.UNKNOWN_TASK,
            f"unknown task {unknown[0]!r}; use {', '.join(known)}",
        )
    if twice := [task for task in known if everything.count(task) > 1]:
        raise TaskGroupError(
            TaskGroupFault.DUPLICATE_TASK, f"task {twice[0]} is listed twice; remove one"
        )
    required = [kind.task for kind in WORKERS.values() if kind.is_required]
    if missing := [task for task in required if task not in everything]:
        raise TaskGroupError(
            TaskGroupFault.MISSING_TASK,
            f"no group has the task {missing[0]}, which every run needs; add it",
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
    wanted = [ratio * units for ratio in ratios]
    counts = [math.floor(want + _NOISE) for want in wanted]
    left = math.floor(sum(wanted) + _NOISE) - sum(counts)
    remainders = [round(want - count, 9) for want, count in zip(wanted, counts, strict=True)]
    for index in sorted(range(len(ratios)), key=lambda i: (-remainders[i], i))[:left]:
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
    whole, rest = divmod(count, gpus_per_node)
    return (gpus_per_node,) * whole + ((rest,) if rest else ())
