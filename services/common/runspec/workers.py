"""Properties of the kinds of workers that are needed before a worker starts. Imports no service.

Launchers, placement, membership, the planner, the chart and the trainer read them. A new kind
is an entry point of the group ``slipstream.worker_roles`` (docs/adding.md).
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from services.common.doors import Door

_Spec = Any
"""A ``RunSpec``, whose module imports this one."""
_Topology = Any
"""A ``TopologySpec``, likewise."""


def _one(spec: _Spec) -> int:
    return 1


def _nothing(spec: _Spec) -> tuple[str, ...]:
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
    count: Callable[[_Spec], int] | None = None
    """Number of workers; None if its task's own GPUs determine it."""
    ranks: Callable[[_Spec], int] = _one
    """Number of processes of one worker."""
    gpus: Callable[[_Spec], int] | None = None
    """Number of GPUs of one worker on hosts that have GPUs; None for one per process."""
    unit: Callable[[_Spec], int] = _one
    """The number of GPUs of its task is a multiple of this number."""
    problems: Callable[[_Spec], Iterable[str]] = _nothing
    """Problems of a run in which its task has its own GPUs."""
    memory: str = ""
    """Reference of a function of a run, its model's configuration and ``gpu_bytes``: a ``TrainerMemory``."""
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
    gauges: Callable[[_Spec], Collection[str]] = _nothing
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

    def num_workers(self, spec: _Spec) -> int:
        if self.count is not None:
            return self.count(spec)
        num_gpus: int = spec.topology.own_gpus(self.task)
        return num_gpus // max(1, self.ranks(spec))

    def num_gpus(self, spec: _Spec) -> int:
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


def kinds_with_own_gpus(topology: _Topology) -> dict[str, WorkerKind]:
    """Returns the optional kinds with their own GPUs, by role; their tasks run outside of the trainer."""
    return {
        role: kind
        for role, kind in possible_kinds(topology).items()
        if not kind.is_required and topology.own_gpus(kind.task)
    }


def needs_whole_weights(topology: _Topology) -> bool:
    """Returns True if a kind with its own GPUs receives weights and cannot merge adapters."""
    return any(
        kind.receives_weights and not kind.merges_adapters
        for kind in kinds_with_own_gpus(topology).values()
    )


def scoring_ranks(spec: _Spec) -> int:
    """Returns the number of processes of one worker that only scores (``topology.scoring_ranks``)."""
    ranks: int = spec.topology.scoring_ranks
    return ranks


WORKERS: Final = Door("worker_roles", WorkerKind)
"""Kinds of workers by role; an installed package has them in alphabetical order."""
_REQUIRED: Final = ("trainer", "rollout")


def possible_kinds(topology: _Topology) -> Mapping[str, WorkerKind]:
    """Returns the kinds that a run may have, as they are placed: the trainer, the rollouts, the others.

    The others are only imported with task groups.
    """
    further_roles = (
        [role for role in WORKERS if role not in _REQUIRED] if topology.task_groups else ()
    )
    return {role: WORKERS[role] for role in (*_REQUIRED, *further_roles)}
