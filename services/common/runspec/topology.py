"""Which tasks of a run have GPUs of their own, and how many; or that they take turns on the same ones."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, field_validator

from services.common.runspec.base import SpecPart
from services.common.runspec.task_groups import ALIASES, TaskGroupPlacement, place_groups


class TopologySpec(SpecPart):
    """Task groups: which tasks share GPUs, and how many they get.

    Without them a run has ``trainer.world_size`` trainer processes, which also compute proximal and
    reference logprobs, and ``rollout.replicas`` rollouts; with them both numbers follow from the split.
    Where there are no GPUs, a GPU stands for a process.
    """

    placement: Literal["disaggregated", "colocated", "mixed"] = "disaggregated"
    """Where trainer and rollouts are. ``disaggregated``: each has GPUs of its own, and they work at the
    same time. ``colocated``: all are on the trainer's GPUs, and take turns: while one side works, the other
    keeps there what fits beside it, at most. The GPUs of all rollouts must be a multiple of
    ``trainer.world_size``, and ``algorithm.max_staleness`` 0 or 1. ``mixed``: the first rollouts fill the
    trainer's GPUs and take turns with it; the others, one if ``rollout.replicas`` is left out, have GPUs of
    their own and never stop: what is unfinished when training begins goes on there."""
    task_groups: tuple[tuple[str, ...], ...] = ()
    """Tasks of each group: a name, or a list of names that share GPUs, among ``train``, ``generate``,
    ``logp``, ``ref_logp``, ``critic`` and ``reward``. What is not listed belongs to ``train``, and
    ``reward`` to ``generate``, which it cannot leave."""
    ratios: tuple[float, ...] = ()
    """Share of each group in the GPUs; a sum below 1 leaves the rest unused."""
    gpus: int = Field(0, ge=0)
    """GPUs of the run."""
    gpus_per_node: int = Field(8, ge=1)
    """GPUs of one node."""
    scoring_ranks: int = Field(1, ge=1)
    """Processes of one worker of ``logp`` or ``ref_logp``, over which its model is sharded: more than 1 for a
    model that is too large for one GPU. The GPUs of their groups must be a multiple of it. A sharded ``logp``
    needs ``weight_sync.mode`` ``cpu_async``: weights arrive whole in the memory of its first host."""
    granularity: Literal["gpu", "node"] = "gpu"
    """Whether single GPUs or whole nodes are split."""

    @field_validator("task_groups", mode="before")
    @classmethod
    def _task_or_tasks(cls, value: Any) -> Any:
        if not isinstance(value, list | tuple):
            return value
        groups = [[group] if isinstance(group, str) else group for group in value]
        return [
            [ALIASES.get(name, name) if isinstance(name, str) else name for name in group]
            if isinstance(group, list | tuple)
            else group
            for group in groups
        ]

    @property
    def is_colocated(self) -> bool:
        """Whether there are GPUs that the trainer and rollouts have one after the other."""
        return self.placement != "disaggregated"

    def place(self, parallelism: Mapping[str, int] | None = None) -> TaskGroupPlacement:
        """The groups with their GPUs.

        Args:
            parallelism: GPUs that one instance of a task takes.

        Raises:
            TaskGroupError: If they cannot be placed.
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
        """GPUs of a task's group; 0 if no group lists it."""
        group = self.place().group_of(task) if self.task_groups else None
        return group.gpus if group is not None else 0

    def own_gpus(self, task: str) -> int:
        """GPUs of a task that does not run inside the trainer; 0 if it does."""
        group = self.place().group_of(task) if self.task_groups else None
        return group.gpus if group is not None and "train" not in group.tasks else 0
