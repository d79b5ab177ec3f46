"""A pod as the launcher knows it."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

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
