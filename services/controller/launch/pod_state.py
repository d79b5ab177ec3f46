"""What a pod's status says about its workers: pure reading, no calls."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from services.common.errors import FailedPreconditionError
from services.controller.launch import job_set, kueue
from services.controller.launch.kueue import QUEUE_LABEL

# No try will do better on these; the others may pass, as when a busy node did not get its secrets in time.
HOPELESS = frozenset({"InvalidImageName", "ErrImageNeverPull"})
_BLOCKED = HOPELESS | {
    "ImagePullBackOff", "ErrImagePull", "CreateContainerConfigError", "CreateContainerError"
}  # fmt: skip
# What only events tell, and how often it happens before it is more than a delay.
_TOLD_BY_EVENTS = frozenset({"FailedMount", "FailedAttachVolume", "FailedCreatePodSandBox"})
_REPEATED = 3

_SIGNAL = 128

# Kubernetes' reason for a pod that a queue, or whoever put a gate on it, holds back.
_GATED = "SchedulingGated"

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class StartFailure:
    """Why a pod does not run yet."""

    reason: str
    """Kubernetes' own word, for example ``Unschedulable`` or ``ImagePullBackOff``."""
    message: str
    """Kubernetes' explanation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A container that ended."""

    worker_id: str
    code: int | None
    """Exit status; negative for a signal; None if Kubernetes ended the pod itself."""
    message: str
    """Reason and last log lines."""


def workers(pod: Json) -> list[str]:
    """Names of the workers in a pod: its containers."""
    return [container["name"] for container in pod["spec"]["containers"]]


def is_gated(pod: Json) -> bool:
    """Whether the scheduler may not look at the pod yet."""
    found = obstacle(pod)
    return found is not None and found.reason == _GATED


def is_deleted_unplaced(pod: Json) -> bool:
    """Whether the pod was deleted before it had a node, whose kubelet would end it."""
    return "deletionTimestamp" in pod["metadata"] and "nodeName" not in pod["spec"]


def is_running(pod: Json) -> bool:
    """Whether all containers have started."""
    statuses = pod["status"].get("containerStatuses", [])
    return bool(statuses) and all("waiting" not in status["state"] for status in statuses)


def is_over(pod: Json) -> bool:
    """Whether all containers have ended."""
    statuses = pod["status"].get("containerStatuses", [])
    has_phase = pod["status"].get("phase") in ("Succeeded", "Failed")
    return has_phase or (bool(statuses) and all("terminated" in s["state"] for s in statuses))


def obstacle(pod: Json) -> StartFailure | None:
    """What keeps the pod from running, if anything is known."""
    status = pod["status"]
    for condition in status.get("conditions", []):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            reason = condition.get("reason", "Unschedulable")
            message = _wait_in_queue(pod) if reason == _GATED else ""
            return StartFailure(reason=reason, message=message or condition.get("message", ""))
    for container in status.get("containerStatuses", []):
        waiting = container["state"].get("waiting", {})
        if waiting.get("reason") in _BLOCKED:
            return StartFailure(reason=waiting["reason"], message=waiting.get("message", ""))
    return None


def warning(event: Json) -> StartFailure | None:
    """What an event says that the status of its pod does not."""
    if event["reason"] in _TOLD_BY_EVENTS and event.get("count", 1) >= _REPEATED:
        return StartFailure(reason=event["reason"], message=event["message"])
    return None


def ended(pod: Json) -> Iterator[Ended]:
    """Containers that ended; all of them if the pod failed as a whole, for example by eviction."""
    status = pod["status"]
    told = set()
    for container in status.get("containerStatuses", []):
        if terminated := container["state"].get("terminated"):
            told.add(container["name"])
            parts = (terminated.get("reason", ""), terminated.get("message", "").strip())
            yield Ended(
                worker_id=container["name"],
                code=_status(terminated["exitCode"]),
                message="\n".join(part for part in parts if part),
            )
    # One that is deleted may have failed a moment before its containers are said to have ended.
    is_told_later = "deletionTimestamp" in pod["metadata"] and "reason" not in status
    if status.get("phase") == "Failed" and not is_told_later:
        why = f"{status.get('reason', 'Failed')}: {status.get('message', 'the pod failed')}"
        for worker_id in workers(pod):
            if worker_id not in told:
                yield Ended(worker_id=worker_id, code=None, message=why)


def _wait_in_queue(pod: Json) -> str:
    queue = pod["metadata"]["labels"].get(QUEUE_LABEL)
    return f"waits until the queue {queue} admits the run" if queue is not None else ""


def _status(code: int) -> int:
    """Container runtimes add 128 to the number of a signal."""
    return _SIGNAL - code if code > _SIGNAL else code


@dataclass(slots=True)
class PodRecord:
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
    obstacle: StartFailure | None = None
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
            workers=workers(body),
            group_size=kueue.group_size(body),
            job_set=job_set.name_of(body),
            own_grace_s=body["spec"]["terminationGracePeriodSeconds"],
        )

    def see(self, body: Mapping[str, Any]) -> None:
        """Take in how it is now."""
        self.name, self.uid = body["metadata"]["name"], body["metadata"]["uid"]
        self.is_running, self.is_gated = is_running(body), is_gated(body)
        self.is_over |= is_over(body)

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
    bodies: Sequence[Mapping[str, Any]], known: Mapping[str, PodRecord], *, admitted: int
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
        if name in known and set(workers(body)) - set(known[name].workers):
            raise FailedPreconditionError(
                f"all workers of the run are in pod {name}, which cannot get more of them; install with "
                "workers.topology=separate to change their number while a run goes on"
            )
