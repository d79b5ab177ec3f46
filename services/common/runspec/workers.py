"""Properties of the kinds of workers that are needed before a worker starts. Imports no service.

Launchers, placement, membership, the planner, the chart and the trainer read them. A new kind
is an entry point of the group ``slipstream.worker_roles`` (docs/adding.md).
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

from services.common.doors import Door

if TYPE_CHECKING:
    from services.common.runspec.algorithm import AlgorithmSpec
    from services.common.runspec.data import DataSpec
    from services.common.runspec.rollout import RolloutSpec
    from services.common.runspec.trainer import TrainerSpec


class TopologyView(Protocol):
    """The part of ``TopologySpec`` that the kinds of workers read."""

    @property
    def task_groups(self) -> Sequence[Sequence[str]]:
        """Groups of tasks with separate GPUs."""

    @property
    def scoring_ranks(self) -> int:
        """Number of processes of one worker that only scores."""

    def own_gpus(self, task: str) -> int:
        """Returns the GPUs of a task that runs outside of the trainer; 0 if it runs inside."""


class SpecView(Protocol):
    """The part of ``RunSpec`` that the kinds of workers read; that module imports this one."""

    @property
    def algorithm(self) -> "AlgorithmSpec":
        """Advantage, loss, off-policy correction and staleness."""

    @property
    def data(self) -> "DataSpec":
        """Training and held-out prompts."""

    @property
    def rollout(self) -> "RolloutSpec":
        """Generation and rewards."""

    @property
    def trainer(self) -> "TrainerSpec":
        """Batch, optimizer, precision, parallelism and checkpoints."""

    @property
    def weight_sync(self) -> Any:
        """Transfer of weights."""

    @property
    def teacher(self) -> Any:
        """Teacher of a distillation; None without one."""

    @property
    def topology(self) -> TopologyView:
        """Assignment of GPUs to tasks."""

    @property
    def distillation(self) -> Any:
        """The divergence from the teacher's distributions; None unless the loss is one."""

    @property
    def engine_gpus(self) -> int:
        """GPUs of one rollout."""

    @property
    def runs_engines(self) -> bool:
        """True if rollouts have an engine that runs where they do."""

    @property
    def needs_proximal(self) -> bool:
        """True if training needs logprobs of the weights at the start of the step."""

    @property
    def needs_reference(self) -> bool:
        """True if the trainer computes logprobs of a reference."""

    def is_colocated(self, worker_id: str) -> bool:
        """Returns True if a worker is a rollout on the trainer's GPUs."""


def _one(spec: SpecView) -> int:
    return 1


def _nothing(spec: SpecView) -> tuple[str, ...]:
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerKind:
    """A kind of worker.

    A kind that is not required has workers if its task has its own group in
    ``topology.task_groups``; otherwise the trainer does its work, if it is done at all.
    """

    tasks: tuple[str, ...]
    """Tasks of ``topology.task_groups`` that it does. It has the GPUs of the first one; the others
    must be in the same group."""
    aliases: tuple[str, ...] = ()
    """Other names of the first task."""
    is_required: bool = False
    """True for the trainer and the rollouts, which every run has."""
    is_alone: bool = False
    """True if its workers share their GPUs with no other task."""
    program: str = "trainer"
    """Service whose program it runs, ``python -m services.<program>``. The chart has the image, the
    resources and the environment of this name; settings are ``SLIPSTREAM_<PROGRAM>_*``."""
    serve: str = ""
    """Reference ``module:function`` of the coroutine that serves the role in the trainer's program (rank 0),
    with the process's settings as its argument."""
    follow: str = ""
    """Reference of the coroutine of the other ranks, with a ``FollowerStart`` as its argument."""
    count: Callable[[SpecView], int] | None = None
    """Number of workers; None if its task's own GPUs determine it."""
    ranks: Callable[[SpecView], int] = _one
    """Number of processes of one worker."""
    gpus: Callable[[SpecView], int] | None = None
    """Number of GPUs of one worker on hosts that have GPUs; None for one per process."""
    unit: Callable[[SpecView], int] = _one
    """The number of GPUs of its task is a multiple of this number."""
    problems: Callable[[SpecView], Iterable[str]] = _nothing
    """Problems of a run in which its task has its own GPUs."""
    trains: bool = False
    """True if it has an optimizer."""
    receives_weights: bool = False
    """True if it is a member of weight sessions."""
    merges_adapters: bool = False
    """True if it can receive adapters only, and merge them into frozen weights."""
    scores: Literal["", "groups", "batches"] = ""
    """``groups``: it leases finished groups and adds fields to their samples, which the controller sees
    only then. ``batches``: it serves ``ScoringService``, which the controller calls with each batch
    before the step."""
    adds: tuple[str, ...] = ()
    """Fields of samples without which the trainer refuses a batch if the kind has workers."""
    gauges: Callable[[SpecView], Collection[str]] = _nothing
    """Gauges that its heartbeats have once it has loaded."""

    @property
    def task(self) -> str:
        return self.tasks[0]

    @property
    def module(self) -> str:
        return f"services.{self.program}"

    @property
    def settings_prefix(self) -> str:
        return f"SLIPSTREAM_{self.program.upper()}_"

    def num_workers(self, spec: SpecView) -> int:
        if self.count is not None:
            return self.count(spec)
        return spec.topology.own_gpus(self.task) // max(1, self.ranks(spec))

    def num_gpus(self, spec: SpecView) -> int:
        """Returns the number of GPUs of one worker, on hosts that have GPUs."""
        return (self.gpus or self.ranks)(spec)


def rows_gauge(split: str) -> str:
    """Returns the name of the gauge in which a rollout reports the number of rows of a set."""
    return f"prompts_{split}"


def programs() -> list[str]:
    """Returns the services that run workers."""
    return list(dict.fromkeys(kind.program for kind in WORKERS.values()))


def tasks() -> list[str]:
    """Returns the tasks that ``topology.task_groups`` may list."""
    return [task for kind in WORKERS.values() for task in kind.tasks]


def task_aliases() -> dict[str, str]:
    return {alias: kind.task for kind in WORKERS.values() for alias in kind.aliases}


def kinds_with_own_gpus(topology: TopologyView) -> dict[str, WorkerKind]:
    """Returns the optional kinds with their own GPUs, by role; their tasks run outside of the trainer."""
    return {
        role: kind
        for role, kind in possible_kinds(topology).items()
        if not kind.is_required and topology.own_gpus(kind.task)
    }


def needs_whole_weights(topology: TopologyView) -> bool:
    """Returns True if a kind with its own GPUs receives weights and cannot merge adapters."""
    return any(
        kind.receives_weights and not kind.merges_adapters
        for kind in kinds_with_own_gpus(topology).values()
    )


def _policy_unit(spec: SpecView) -> int:
    trainer = spec.trainer
    return trainer.tensor_parallel * trainer.context_parallel * trainer.pipeline_parallel


def scoring_ranks(spec: SpecView) -> int:
    """Returns the number of processes of one worker that only scores (``topology.scoring_ranks``)."""
    return spec.topology.scoring_ranks


def _critic_problems(spec: SpecView) -> Iterator[str]:
    """Yields problems of a critic that computes returns from stored samples only."""
    if not spec.algorithm.advantage_kind.needs_critic:
        yield (
            "topology.task_groups gives critic its own GPUs, but algorithm.advantage "
            f"{spec.algorithm.advantage!r} has no critic; set it to 'gae', or remove critic"
        )
    if spec.needs_reference and spec.algorithm.kl.placement == "reward":
        yield (
            "topology.task_groups gives critic its own GPUs, but algorithm.kl.placement 'reward' changes "
            "rewards in the trainer, and the critic would not receive them; set it to 'loss', or put critic "
            "into the group of train"
        )


TRAINER: Final = WorkerKind(
    tasks=("train",),
    aliases=("actor-train", "actor_train", "actor"),
    is_required=True,
    serve="services.trainer.worker:serve_trainer",
    follow="services.trainer.worker:follow_trainer",
    count=_one,
    ranks=lambda spec: spec.trainer.world_size,
    unit=_policy_unit,
    trains=True,
)
ROLLOUT: Final = WorkerKind(
    tasks=("generate", "reward"),
    aliases=("rollout",),
    is_required=True,
    is_alone=True,
    program="rollout",
    count=lambda spec: spec.rollout.replicas,
    gpus=lambda spec: spec.engine_gpus if spec.runs_engines else 0,
    unit=lambda spec: spec.engine_gpus,
    receives_weights=True,
    merges_adapters=True,
    gauges=lambda spec: [rows_gauge(split) for split in spec.data.sets],
)
CRITIC: Final = WorkerKind(
    tasks=("critic",),
    is_alone=True,
    serve="services.trainer.worker:serve_critic",
    follow="services.trainer.worker:follow_critic",
    ranks=lambda spec: spec.topology.own_gpus("critic"),
    problems=_critic_problems,
    trains=True,
    scores="batches",
    adds=("values",),
)
WORKERS: Final = Door("worker_roles", WorkerKind)
"""Kinds of workers by role; an installed package has them in alphabetical order."""
_REQUIRED: Final = ("trainer", "rollout")


def possible_kinds(topology: TopologyView) -> Mapping[str, WorkerKind]:
    """Returns the kinds that a run may have, as they are placed: the trainer, the rollouts, the others.

    The others are only imported with task groups.
    """
    further_roles = (
        [role for role in WORKERS if role not in _REQUIRED] if topology.task_groups else ()
    )
    return {role: WORKERS[role] for role in (*_REQUIRED, *further_roles)}


def worker_names(spec: SpecView) -> list[tuple[str, str]]:
    return [
        (role, f"{role.replace('_', '-')}-{index}")
        for role, kind in possible_kinds(spec.topology).items()
        for index in range(kind.num_workers(spec))
    ]


def gpu_needs(spec: SpecView) -> dict[str, int]:
    """Returns the number of GPUs of each worker of a run, by name."""
    return {worker_id: WORKERS[role].num_gpus(spec) for role, worker_id in worker_names(spec)}


def gpu_hosts(spec: SpecView) -> dict[str, str]:
    """Maps each colocated worker to the worker whose GPUs it uses."""
    names = [worker_id for _, worker_id in worker_names(spec)]
    return {worker_id: "trainer-0" for worker_id in names if spec.is_colocated(worker_id)}


def total_gpus(spec: SpecView) -> int:
    """Returns the number of GPUs of all workers of a run; shared ones count once."""
    hosts = gpu_hosts(spec)
    return sum(count for name, count in gpu_needs(spec).items() if name not in hosts)
