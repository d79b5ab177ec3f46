"""Starts and stops the workers of runs: the protocol that each platform implements."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

from services.common.runspec.run import RunSpec
from services.controller.client import WorkerRole


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerExit:
    """A worker that ended by itself."""

    run_id: str
    worker_id: str
    code: int | None
    """Exit status; negative for a signal; None if it is not known."""
    last_lines: str
    """End of its log."""

    @property
    def how(self) -> str:
        """How it ended, for a person."""
        if self.code is None:
            return "for an unknown reason"
        return f"with signal {-self.code}" if self.code < 0 else f"with exit code {self.code}"


class Launcher(Protocol):
    """Starts and stops workers."""

    async def start(self, run_id: str, spec: RunSpec, *, later: Collection[str] = ()) -> None:
        """Start those workers of a run that do not run.

        Args:
            run_id: The run.
            spec: Its specification.
            later: Workers that are asked for another time. Those that are in one pod with others start with
                them, and wait there until the trainer has loaded and sleeps.
        """

    async def end(self, run_id: str, worker_id: str) -> None:
        """End one worker at once, because it does not answer; returns when it is gone."""

    async def stop(self, run_id: str) -> None:
        """Stop all workers of a run; returns when they are gone."""

    def gpus_for(self, run_id: str) -> int | None:
        """Return how many GPUs the run may have, with those that it has; None if that is not known."""


ExitHandler = Callable[[WorkerExit], None]


def worker_names(spec: RunSpec) -> list[tuple[WorkerRole, str]]:
    """Roles and names of a run's workers."""
    counts: dict[WorkerRole, int] = {
        "trainer": 1,
        "rollout": spec.rollout.replicas,
        "logp": spec.topology.own_gpus("logp") // spec.topology.scoring_ranks,
        "ref_logp": spec.topology.own_gpus("ref_logp") // spec.topology.scoring_ranks,
        "critic": min(1, spec.topology.own_gpus("critic")),
    }
    return [
        (role, f"{role.replace('_', '-')}-{index}")
        for role, count in counts.items()
        for index in range(count)
    ]


def program_of(role: WorkerRole) -> str:
    """The service whose program serves a role: the trainer's computes logprobs and values, too."""
    return "rollout" if role == "rollout" else "trainer"


def num_ranks(role: WorkerRole, spec: RunSpec) -> int:
    """Processes of one worker of a role."""
    scoring_ranks = spec.topology.scoring_ranks
    ranks = {
        "trainer": spec.trainer.world_size,
        "critic": spec.topology.own_gpus("critic"),
        "logp": scoring_ranks,
        "ref_logp": scoring_ranks,
    }
    return ranks.get(role, 1)


def num_gpus(role: WorkerRole, spec: RunSpec) -> int:
    """GPUs of one worker of a role, where there are GPUs."""
    if role == "rollout":
        return spec.engine_gpus if spec.has_engine else 0
    return num_ranks(role, spec)


def gpu_needs(spec: RunSpec) -> dict[str, int]:
    """GPUs of each worker of a run, by name."""
    return {worker_id: num_gpus(role, spec) for role, worker_id in worker_names(spec)}


def gpu_hosts(spec: RunSpec) -> dict[str, str]:
    """The workers that are on another one's GPUs, and on whose."""
    names = [worker_id for _, worker_id in worker_names(spec)]
    return {worker_id: "trainer-0" for worker_id in names if spec.is_colocated(worker_id)}


def total_gpus(spec: RunSpec) -> int:
    """GPUs of all workers of a run, those that several have counted once."""
    hosts = gpu_hosts(spec)
    return sum(count for name, count in gpu_needs(spec).items() if name not in hosts)


class ExternalLauncher:
    """For workers that somebody else starts: it only waits for them."""

    async def start(self, run_id: str, spec: RunSpec, *, later: Collection[str] = ()) -> None:
        """Do nothing; the workers register by themselves."""

    async def end(self, run_id: str, worker_id: str) -> None:
        """Do nothing; whoever started the worker replaces it."""

    async def stop(self, run_id: str) -> None:
        """Do nothing; the workers are told to stop when their run closes."""

    def gpus_for(self, run_id: str) -> None:
        """Return None: whoever starts the workers knows the GPUs."""
