"""Groups of pods that are placed together or not at all: pod groups of gang schedulers, and Kueue.

The Helm chart supports the gang schedulers: its templates contain the pod group and the fields of a pod
that refer to it. Two placeholders in the templates are filled in for each run.

Kueue's webhook adds a scheduling gate to each pod of a queue until the pod's group is admitted, and a
finalizer to every pod of a group. The finalizer keeps a failed pod until its replacement exists. Here the
replacement has the same name and could never be created, so :data:`KUEUE_LEAVE` removes the finalizer.
Kueue does not count a serving group as finished when its pods end, so a worker may be replaced at any time.

A group of Kueue cannot grow: it keeps the number of pods with which it was admitted. A pod for which the
group has no slot is an extra: it forms a group of one pod, which Kueue admits while the run continues.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

_GROUP: Final = "$(GROUP)"
"""Placeholder for the name of the run's group."""
_NUM_PODS: Final = "$(PODS)"
"""Placeholder for the number of pods that must be placed together."""
PLURAL: Final = "podgroups"

Json = Mapping[str, Any]


def group_name(run_id: str) -> str:
    return run_id.replace("_", "-")


def build_pod_group(template: Json, run_id: str, *, num_pods: int, owner: Json) -> dict[str, Any]:
    """Builds the pod group of a run; it is deleted with the owner."""
    group: dict[str, Any] = filled(template, run_id, num_pods=num_pods)
    group["metadata"] |= {"name": group_name(run_id), "ownerReferences": [dict(owner)]}
    return group


def filled(node: Any, run_id: str, *, num_pods: int) -> Any:
    """Returns a copy of a manifest in which a run's values replace the placeholders."""
    if isinstance(node, Mapping):
        return {key: filled(value, run_id, num_pods=num_pods) for key, value in node.items()}
    if isinstance(node, list):
        return [filled(value, run_id, num_pods=num_pods) for value in node]
    values = {_GROUP: group_name(run_id), _NUM_PODS: num_pods}
    return values.get(node, node) if isinstance(node, str) else node


QUEUE_LABEL: Final = "kueue.x-k8s.io/queue-name"
_GROUP_LABEL = "kueue.x-k8s.io/pod-group-name"
_COUNT_ANNOTATION = "kueue.x-k8s.io/pod-group-total-count"
_SERVING_ANNOTATION = "kueue.x-k8s.io/pod-group-serving"
# Names a pod's role. Without it, Kueue treats pods with different ports as different roles, and it limits
# the roles of a group.
_ROLE_ANNOTATION = "kueue.x-k8s.io/role-hash"

KUEUE_LEAVE: Final = {
    "metadata": {"$deleteFromPrimitiveList/finalizers": ["kueue.x-k8s.io/managed"]}
}
"""Strategic merge patch that removes Kueue's finalizer from a pod; harmless if it has none."""


def join_kueue_group(pod: dict[str, Any], *, group: str, num_pods: int) -> None:
    """Makes a pod a member of a group, if the chart names a queue.

    Args:
        pod: The pod; its first container is named like the worker, such as ``ref-logp-1``.
        group: Name of the group, and of Kueue's Workload.
    """
    metadata = pod["metadata"]
    role, _, _ = pod["spec"]["containers"][0]["name"].rpartition("-")
    if QUEUE_LABEL in metadata["labels"]:
        metadata["labels"][_GROUP_LABEL] = group
        metadata["annotations"] |= {
            _COUNT_ANNOTATION: str(num_pods),
            _SERVING_ANNOTATION: "true",
            _ROLE_ANNOTATION: role,
        }


def join_kueue_slots(pods: Sequence[dict[str, Any]], *, size: int, num_members: int) -> int:
    """Divides missing pods among the slots of their run's group and groups of one pod.

    Kueue admits a number of pods for each role, and only the number of rollouts changes. The other
    workers therefore take their slots first.

    Args:
        pods: Pods to create, in the order in which they take slots.
        size: Number of pods of the run's group.
        num_members: Number of its pods that exist. If 0, the missing pods form the group.

    Returns:
        The number of pods of the run's group; 0 without a queue.
    """
    queued = [pod for pod in pods if kueue_group_size(pod)]
    queued.sort(key=lambda pod: pod["metadata"]["annotations"][_ROLE_ANNOTATION] == "rollout")
    num_free = max(0, size - num_members)
    members, extras = queued[:num_free], queued[num_free:]
    size = size if num_members else len(members)
    for pod in members:
        pod["metadata"]["annotations"][_COUNT_ANNOTATION] = str(size)
    for pod in extras:
        join_kueue_group(pod, group=pod["metadata"]["name"], num_pods=1)
    return size


def kueue_group_size(pod: Json) -> int:
    """Returns the number of pods that are admitted together with this one; 0 without a queue."""
    return int(pod["metadata"].get("annotations", {}).get(_COUNT_ANNOTATION, 0))


def is_extra(pod: Json) -> bool:
    """Returns True if the pod is not in the group of its run, but forms a group of one pod."""
    metadata = pod["metadata"]
    return bool(metadata["labels"].get(_GROUP_LABEL) == metadata["name"])
