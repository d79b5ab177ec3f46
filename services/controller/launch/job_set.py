"""A worker of several nodes as a JobSet (https://jobset.sigs.k8s.io), for clusters that place or show them.

Its controller makes the pods, as those of one Indexed Job: their names end at random, their numbers tell
which is which. Neither starts a pod again: whether a worker is started again is for the run to say.
"""

import copy
from collections.abc import Mapping
from typing import Any, Final

GROUP: Final = "jobset.x-k8s.io"
VERSION: Final = "v1alpha2"
PLURAL: Final = "jobsets"

NODE_RANK: Final = "$(JOB_COMPLETION_INDEX)"
"""In the command of a pod: its number in its set."""

_NAME_LABEL = "jobset.sigs.k8s.io/jobset-name"
_NUMBER_ANNOTATION = "batch.kubernetes.io/job-completion-index"
# The pods' owner is their Job.
_OWNER_ANNOTATION = "slipstream.dev/owner"

Json = Mapping[str, Any]


def join(pod: dict[str, Any], *, name: str, node: int) -> None:
    """Make a pod what it will be as one of a set.

    Args:
        pod: The pod; it has one container.
        name: Of the set: that of the first pod's place.
        node: Its number.
    """
    pod["metadata"]["labels"][_NAME_LABEL] = name
    pod["metadata"]["annotations"][_NUMBER_ANNOTATION] = str(node)
    # Only the first could tell that it is ready, and all are made alike.
    pod["spec"]["containers"][0].pop("readinessProbe", None)
    del pod["spec"]["hostname"]


def around(template: Json, pods: list[dict[str, Any]]) -> dict[str, Any]:
    """The set that makes certain pods.

    Args:
        template: The chart's, with one replicated job.
        pods: All pods of the set, alike but for their numbers.
    """
    job_set = copy.deepcopy(dict(template))
    metadata = pods[0]["metadata"]
    labels, (owner,) = metadata["labels"], metadata["ownerReferences"]
    job_set["metadata"]["name"] = name_of(pods[0])
    job_set["metadata"] |= {"labels": labels, "ownerReferences": [owner]}
    annotations = metadata["annotations"] | {_OWNER_ANNOTATION: owner["uid"]}
    del annotations[_NUMBER_ANNOTATION]
    (job,) = job_set["spec"]["replicatedJobs"]
    job["template"]["spec"] |= {
        "parallelism": len(pods),
        "completions": len(pods),
        "template": {
            "metadata": {"labels": labels, "annotations": annotations},
            "spec": pods[0]["spec"],
        },
    }
    return job_set


def hostname(template: Json, name: str, node: int) -> str:
    """What a set's pod of a number is called inside the cluster."""
    (job,) = template["spec"]["replicatedJobs"]
    return f"{name}-{job['name']}-0-{node}"


def name_of(pod: Json) -> str:
    """The set of a pod; empty if it is in none."""
    return str(pod["metadata"]["labels"].get(_NAME_LABEL, ""))


def place_of(pod: Json) -> str:
    """What a pod is called among those of its run, whoever made it and however often."""
    if name := name_of(pod):
        return place_name(name, int(pod["metadata"]["annotations"][_NUMBER_ANNOTATION]))
    return str(pod["metadata"]["name"])


def place_name(first: str, node: int) -> str:
    """Of the pod on a node of a worker.

    Args:
        first: Name of its pod on the first node.
        node: Number of the node.
    """
    return f"{first}-node-{node}" if node else first


def owner_of(pod: Json) -> str:
    """Unique id of the owner of a pod's set; empty if it is in none."""
    return str(pod["metadata"].get("annotations", {}).get(_OWNER_ANNOTATION, ""))
