"""Assignment of GPUs to the tasks of a run: task groups, or colocation by turns."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, field_validator

from services.common.runspec.base import SpecPart
from services.common.runspec.task_groups import TaskGroupPlacement, place_groups
from services.common.runspec.workers import task_aliases


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
    gpus: int = Field(0, ge=0)
    """Total number of GPUs of the run."""
    gpus_per_node: int = Field(8, ge=1)
    """Number of GPUs per node."""
    scoring_ranks: int = Field(1, ge=1)
    """Number of processes over which the model of one ``logp`` or ``ref_logp`` worker is sharded;
    above 1 for a model that is too large for one GPU. The GPUs of these groups must be a
    multiple of it. A sharded ``logp`` requires ``weight_sync.mode: cpu_async``, because it
    receives whole weights in the memory of its first host."""
    granularity: Literal["gpu", "node"] = "gpu"
    """Unit in which GPUs are split among groups."""

    @field_validator("task_groups", mode="before")
    @classmethod
    def _task_or_tasks(cls, value: Any) -> Any:
        if not isinstance(value, list | tuple):
            return value
        aliases = task_aliases()
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
