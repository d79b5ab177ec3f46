"""A pod as the launcher knows it."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from services.common.errors import FailedPreconditionError
from services.controller.launch import job_set, kueue, pod_state


@dataclass(slots=True)
class KnownPod:
    """A pod that is not gone, or one that its JobSet has not made yet."""

    workers: list[str]
    group_size: int
    """Pods that a queue admits together with it; 0 without a queue."""
    job_set: str
    """The set whose controller makes it; empty if the launcher makes it itself."""
    own_grace_s: float
    """Time from its request to end to its being killed."""
    name: str = ""
    """Empty until it is seen."""
    uid: str = ""
    """This one of all pods of its name; empty until it is seen."""
    is_gated: bool = False
    """Whether a queue holds it back, for as long as that takes."""
    reported: set[str] = field(default_factory=set)
    """Workers whose end was told."""
    obstacle: pod_state.Obstacle | None = None
    """Why it does not run."""
    timer: asyncio.TimerHandle | None = None
    """When it is given up because it does not run."""
    is_running: bool = False
    """Whether its containers have started."""
    is_ending: bool = False
    """Whether it was told to end."""
    is_over: bool = False
    """Whether its containers have ended."""

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> Self:
        """A pod of which nothing is known but what was ordered."""
        return cls(
            workers=pod_state.workers(body),
            group_size=kueue.group_size(body),
            job_set=job_set.name_of(body),
            own_grace_s=body["spec"]["terminationGracePeriodSeconds"],
        )

    def see(self, body: Mapping[str, Any]) -> None:
        """Take in how it is now."""
        self.name, self.uid = body["metadata"]["name"], body["metadata"]["uid"]
        self.is_running, self.is_gated = pod_state.is_running(body), pod_state.is_gated(body)
        self.is_over |= pod_state.is_over(body)

    def why_not(self) -> str:
        """Why it does not run, as far as that is known."""
        if self.obstacle is not None:
            return f"{self.obstacle.reason}: {self.obstacle.message}"
        if not self.uid:
            return (
                f"JobSet {self.job_set} has not made it; `kubectl describe jobsets,jobs` tells why"
            )
        return "Kubernetes gave no reason"

    def stop_timer(self) -> None:
        """Give it the time that it takes."""
        if self.timer is not None:
            self.timer.cancel()


def check_growth(
    bodies: Sequence[Mapping[str, Any]], known: Mapping[str, KnownPod], *, admitted: int
) -> None:
    """See that pods which are there may be joined by those that are not.

    Args:
        bodies: All pods that a run is to have.
        known: Those that are there, by name.
        admitted: How many a queue has admitted together; 0 without a queue.

    Raises:
        FailedPreconditionError: If they may not.
    """
    if admitted and kueue.group_size(bodies[0]) > admitted:
        raise FailedPreconditionError(
            f"the queue has admitted the run's {admitted} pods as one, which cannot get more; "
            "install without workers.kueue.queueName to add rollouts while a run goes on"
        )
    for body in bodies:
        name = body["metadata"]["name"]
        if name in known and set(pod_state.workers(body)) - set(known[name].workers):
            raise FailedPreconditionError(
                f"all workers of the run are in pod {name}, which cannot get more of them; install with "
                "workers.topology=separate to change their number while a run goes on"
            )
