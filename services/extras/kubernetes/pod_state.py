"""Interprets the status of a pod: pure functions that call no API."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from services.common.errors import FailedPreconditionError
from services.extras.kubernetes import gang, job_set
from services.extras.kubernetes.gang import QUEUE_LABEL

# Reasons that do not disappear by waiting. Others may, for example if a busy node receives its secrets
# late.
HOPELESS = frozenset({"InvalidImageName", "ErrImageNeverPull"})
_BLOCKED = HOPELESS | {
    "ImagePullBackOff", "ErrImagePull", "CreateContainerConfigError", "CreateContainerError"
}  # fmt: skip
# Reasons that only events report, and the number of events from which they count as start failures.
_REPORTED_BY_EVENTS = frozenset({"FailedMount", "FailedAttachVolume", "FailedCreatePodSandBox"})
_REPEATED = 3

_SIGNAL = 128

# Kubernetes' reason for a pod that a queue or another scheduling gate holds back.
_GATED = "SchedulingGated"

MOVED_ANNOTATION = "slipstream.dev/moved-from"
"""Annotation of a pod that replaces one on a drained node, with the node's name."""
_UNSCHEDULABLE = "Unschedulable"
NO_ROOM = "NoRoom"
"""Reason for which a pod waits that replaces one on a drained node."""

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class StartFailure:
    """Reason for which a pod does not run yet."""

    reason: str
    """Kubernetes' code, for example ``Unschedulable`` or ``ImagePullBackOff``."""
    message: str
    """Kubernetes' explanation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """Container that ended."""

    worker_id: str
    code: int | None
    """Exit status; negative for a signal; None if Kubernetes ended the pod itself."""
    message: str
    """Reason and last log lines."""


def workers(pod: Json) -> list[str]:
    return [container["name"] for container in pod["spec"]["containers"]]


def is_gated(pod: Json) -> bool:
    """Returns True if a scheduling gate holds the pod back."""
    failure = obstacle(pod)
    return failure is not None and failure.reason == _GATED


def is_deleted_unplaced(pod: Json) -> bool:
    """Returns True if the pod was deleted before it was scheduled, so that no kubelet ends it."""
    return "deletionTimestamp" in pod["metadata"] and "nodeName" not in pod["spec"]


def is_running(pod: Json) -> bool:
    """Returns True if all containers have started."""
    statuses = pod["status"].get("containerStatuses", [])
    return bool(statuses) and all("waiting" not in status["state"] for status in statuses)


def is_over(pod: Json) -> bool:
    """Returns True if all containers have ended."""
    statuses = pod["status"].get("containerStatuses", [])
    has_phase = pod["status"].get("phase") in ("Succeeded", "Failed")
    return has_phase or (bool(statuses) and all("terminated" in s["state"] for s in statuses))


def obstacle(pod: Json) -> StartFailure | None:
    """Returns the known reason for which the pod does not run, or None."""
    status = pod["status"]
    for condition in status.get("conditions", []):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            reason = condition.get("reason", "Unschedulable")
            message = _wait_in_queue(pod) if reason == _GATED else ""
            return StartFailure(reason=reason, message=message or condition.get("message", ""))
    statuses = (*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ()))
    for container in statuses:
        waiting = container["state"].get("waiting", {})
        if waiting.get("reason") in _BLOCKED:
            return StartFailure(reason=waiting["reason"], message=waiting.get("message", ""))
    return None


def warning(event: Json) -> StartFailure | None:
    """Returns the start failure that an event reports but the pod's status does not, or None."""
    if event["reason"] in _REPORTED_BY_EVENTS and event.get("count", 1) >= _REPEATED:
        return StartFailure(reason=event["reason"], message=event["message"])
    return None


def ended(pod: Json) -> Iterator[Ended]:
    """Yields containers that ended; all of them if the pod failed as a whole, for example by eviction."""
    status = pod["status"]
    reported_names = set()
    for container in status.get("containerStatuses", []):
        if terminated := container["state"].get("terminated"):
            reported_names.add(container["name"])
            causes = (terminated.get("reason", ""), terminated.get("message", "").strip())
            yield Ended(
                worker_id=container["name"],
                code=_status(terminated["exitCode"]),
                message="\n".join(cause for cause in causes if cause),
            )
    # A pod that is being deleted may be Failed a moment before its containers' status is known.
    is_reported_later = "deletionTimestamp" in pod["metadata"] and "reason" not in status
    if status.get("phase") == "Failed" and not is_reported_later:
        why = f"{status.get('reason', 'Failed')}: {status.get('message', 'the pod failed')}"
        for worker_id in workers(pod):
            if worker_id not in reported_names:
                yield Ended(worker_id=worker_id, code=None, message=why)


def _wait_in_queue(pod: Json) -> str:
    queue = pod["metadata"]["labels"].get(QUEUE_LABEL)
    return f"waiting for admission by the queue {queue}" if queue is not None else ""


def _status(code: int) -> int:
    """Converts an exit code: container runtimes add 128 to the number of a signal."""
    return _SIGNAL - code if code > _SIGNAL else code


@dataclass(slots=True)
class PodRecord:
    """Pod of a run that exists, or that its JobSet has not created yet."""

    workers: list[str]
    group_size: int
    """Number of pods that a queue admits together with it; 0 without a queue."""
    is_extra: bool
    """True if a queue admits it separately from the run's group."""
    job_set: str
    """Name of the JobSet whose controller creates it; empty if the launcher creates it."""
    own_grace_s: float
    """Seconds between the request to end and the kill."""
    moved_from: str = ""
    """Drained node on which it replaces a pod; empty if it replaces none."""
    tolerations: Sequence[Json] = ()
    node: str = ""
    """Node on which it was placed; empty before."""
    name: str = ""
    """Name of the pod; empty until it is observed."""
    uid: str = ""
    """Unique id among all pods of its name; empty until it is observed."""
    is_gated: bool = False
    """True while a queue holds it back, which has no time limit."""
    reported: set[str] = field(default_factory=set)
    """Workers whose end has been reported."""
    obstacle: StartFailure | None = None
    """Reason for which it does not run."""
    timer: asyncio.TimerHandle | None = None
    """Timer after which it fails because it does not run."""
    is_running: bool = False
    """True if its containers have started."""
    is_ending: bool = False
    """True if it was ordered to end."""
    is_over: bool = False
    """True if its containers have ended."""

    @classmethod
    def from_manifest(cls, body: Mapping[str, Any]) -> Self:
        return cls(
            workers=workers(body),
            group_size=gang.kueue_group_size(body),
            is_extra=gang.is_extra(body),
            job_set=job_set.name_of(body),
            own_grace_s=body["spec"]["terminationGracePeriodSeconds"],
            moved_from=body["metadata"].get("annotations", {}).get(MOVED_ANNOTATION, ""),
            tolerations=body["spec"].get("tolerations") or (),
        )

    @property
    def is_homeless(self) -> bool:
        """True if it left a drained node and no other node has room, for which there is no time limit."""
        return self.moved_from != "" and self.node == "" and not (self.is_ending or self.is_over)

    @property
    def has_rollout(self) -> bool:
        return any(worker_id.startswith("rollout-") for worker_id in self.workers)

    @property
    def has_only_rollouts(self) -> bool:
        return all(worker_id.startswith("rollout-") for worker_id in self.workers)

    def update(self, body: Mapping[str, Any]) -> None:
        self.name, self.uid = body["metadata"]["name"], body["metadata"]["uid"]
        self.is_running, self.is_gated = is_running(body), is_gated(body)
        self.is_over |= is_over(body)
        self.is_ending |= "deletionTimestamp" in body["metadata"]
        self.node = body["spec"].get("nodeName", "")

    def obstacle_of(self, body: Mapping[str, Any]) -> StartFailure | None:
        """Returns the known reason for which it does not run, or None."""
        failure = obstacle(body)
        if failure is None or failure.reason != _UNSCHEDULABLE or not self.is_homeless:
            return failure
        message = (
            f"{failure.message}; it left the drained node {self.moved_from}, nothing is lost, and it starts, "
            f"without a time limit, once a node has room: uncordon {self.moved_from}, or add a node. "
            "Other pods of the run keep their GPUs until then: cancel the run to release them, fork it later"
        )
        return StartFailure(reason=NO_ROOM, message=message)

    def why_not(self) -> str:
        """Returns the known reason for which it does not run."""
        if self.obstacle is not None:
            return f"{self.obstacle.reason}: {self.obstacle.message}"
        if not self.uid:
            return f"JobSet {self.job_set} has not created it; see `kubectl describe jobsets,jobs`"
        return "Kubernetes reports no reason"

    def stop_timer(self) -> None:
        """Stops the timer, so that the pod may take any time."""
        if self.timer is not None:
            self.timer.cancel()


def check_growth(bodies: Sequence[Mapping[str, Any]], records: Mapping[str, PodRecord]) -> None:
    """Checks that no existing pod lacks a worker, because a pod cannot get more containers.

    Args:
        bodies: Manifests of all pods that the run should have.
        records: Existing pods of the run, by place name.

    Raises:
        FailedPreconditionError: If a pod lacks a worker.
    """
    for body in bodies:
        name = body["metadata"]["name"]
        if name in records and set(workers(body)) - set(records[name].workers):
            raise FailedPreconditionError(
                f"all workers of the run are in pod {name}, which cannot get more; install with "
                "workers.topology=separate to change the number of workers of running runs"
            )
