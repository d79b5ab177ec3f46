"""Starts and stops the workers of runs: the protocol that each platform implements."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from services.common.spec.run import RunSpec
from services.controller.client import WorkerRole


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerExit:
    """A worker that ended by itself."""

    run_id: str
    worker_id: str
    code: int
    """Exit status; negative for a signal."""
    last_lines: str
    """End of its log."""


class Launcher(Protocol):
    """Starts and stops workers."""

    async def start(self, run_id: str, spec: RunSpec) -> None:
        """Start all workers of a run."""

    async def stop(self, run_id: str) -> None:
        """Stop all workers of a run; returns when they are gone."""


ExitHandler = Callable[[WorkerExit], None]


def worker_names(spec: RunSpec) -> list[tuple[WorkerRole, str]]:
    """Roles and names of a run's workers."""
    return [
        ("trainer", "trainer-0"),
        *(("rollout", f"rollout-{index}") for index in range(spec.rollout.replicas)),
    ]


class ExternalLauncher:
    """For workers that somebody else starts: it only waits for them."""

    async def start(self, run_id: str, spec: RunSpec) -> None:
        """Do nothing; the workers register by themselves."""

    async def stop(self, run_id: str) -> None:
        """Do nothing; the workers are told to stop when their run closes."""
