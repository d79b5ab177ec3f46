"""What a pod's status says about its workers: pure reading, no calls."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

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
class Obstacle:
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


def obstacle(pod: Json) -> Obstacle | None:
    """What keeps the pod from running, if anything is known."""
    status = pod["status"]
    for condition in status.get("conditions", []):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            reason = condition.get("reason", "Unschedulable")
            message = _wait_in_queue(pod) if reason == _GATED else ""
            return Obstacle(reason=reason, message=message or condition.get("message", ""))
    for container in status.get("containerStatuses", []):
        waiting = container["state"].get("waiting", {})
        if waiting.get("reason") in _BLOCKED:
            return Obstacle(reason=waiting["reason"], message=waiting.get("message", ""))
    return None


def warning(event: Json) -> Obstacle | None:
    """What an event says that the status of its pod does not."""
    if event["reason"] in _TOLD_BY_EVENTS and event.get("count", 1) >= _REPEATED:
        return Obstacle(reason=event["reason"], message=event["message"])
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
