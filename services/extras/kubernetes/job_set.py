"""Builds JobSets (https://jobset.sigs.k8s.io) for workers that span several nodes.

They are for clusters that schedule or display JobSets. The JobSet controller creates the pods of a set as
one Indexed Job: their names have random suffixes, and their index identifies them. Neither the JobSet nor
the Job restarts a pod: the run decides when a worker restarts.
"""

import copy
from collections.abc import Mapping
from typing import Any, Final

GROUP: Final = "jobset.x-k8s.io"
VERSION: Final = "v1alpha2"
PLURAL: Final = "jobsets"

NODE_RANK: Final = "$(JOB_COMPLETION_INDEX)"
"""Placeholder in a pod's command for its index in the set."""

_NAME_LABEL = "jobset.sigs.k8s.io/jobset-name"
_NUMBER_ANNOTATION = "batch.kubernetes.io/job-completion-index"
# Uid of the set's owner: the owner references of the pods name their Job instead.
_OWNER_ANNOTATION = "slipstream.dev/owner"

Json = Mapping[str, Any]


def join_job_set(pod: dict[str, Any], *, name: str, node: int) -> None:
    """Changes a pod's manifest to that of a member of a set: adds set and index, removes what is not shared.

    Args:
        name: Name of the set, which is the place name of its first pod.
    """
    pod["metadata"]["labels"][_NAME_LABEL] = name
    pod["metadata"]["annotations"][_NUMBER_ANNOTATION] = str(node)
    # All pods of a set have the same spec, and only the first one has a ready file.
    pod["spec"]["containers"][0].pop("readinessProbe", None)
    del pod["spec"]["hostname"]


def build_job_set(template: Json, pods: list[dict[str, Any]]) -> dict[str, Any]:
    """Builds the JobSet from which the JobSet controller creates the given pods.

    Args:
        template: The chart's JobSet, with one replicated job.
        pods: All pods of the set, equal except for their indices.
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
    """Returns the hostname, inside the cluster, of the pod with index ``node`` in the set ``name``."""
    (job,) = template["spec"]["replicatedJobs"]
    return f"{name}-{job['name']}-0-{node}"


def name_of(pod: Json) -> str:
    return str(pod["metadata"]["labels"].get(_NAME_LABEL, ""))


def place_of(pod: Json) -> str:
    """Returns the place name of a pod, which is unique in its run and survives restarts.

    It does not depend on whether the launcher or a JobSet created the pod.
    """
    if name := name_of(pod):
        return place_name(name, int(pod["metadata"]["annotations"][_NUMBER_ANNOTATION]))
    return str(pod["metadata"]["name"])


def place_name(first: str, node: int) -> str:
    """Returns the place name of the pod on a node of a worker.

    Args:
        first: Place name of the worker's pod on the first node.
    """
    return f"{first}-node-{node}" if node else first


def owner_of(pod: Json) -> str:
    """Returns the uid of the owner of a pod's set; empty if the pod is in no set."""
    return str(pod["metadata"].get("annotations", {}).get(_OWNER_ANNOTATION, ""))
