"""Workers of several nodes as JobSets (https://jobset.sigs.k8s.io), for clusters that place or show those.

The JobSet controller creates the pods of a set as one Indexed Job: their names have random
suffixes, and their index identifies them. Neither restarts a pod: restarting a worker is the run's
decision.
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
# The pods' own owner reference names their Job.
_OWNER_ANNOTATION = "slipstream.dev/owner"

Json = Mapping[str, Any]


def join_job_set(pod: dict[str, Any], *, name: str, node: int) -> None:
    """Changes a pod into what it will be as a member of a set.

    Args:
        name: Name of the set, which is the place name of its first pod.
    """
    pod["metadata"]["labels"][_NAME_LABEL] = name
    pod["metadata"]["annotations"][_NUMBER_ANNOTATION] = str(node)
    # Only the first pod has a ready file, and all pods of a set are equal.
    pod["spec"]["containers"][0].pop("readinessProbe", None)
    del pod["spec"]["hostname"]


def build_job_set(template: Json, pods: list[dict[str, Any]]) -> dict[str, Any]:
    """Builds the JobSet that creates certain pods.

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
    """Returns the hostname inside the cluster of a set's pod of an index."""
    (job,) = template["spec"]["replicatedJobs"]
    return f"{name}-{job['name']}-0-{node}"


def name_of(pod: Json) -> str:
    return str(pod["metadata"]["labels"].get(_NAME_LABEL, ""))


def place_of(pod: Json) -> str:
    """Returns the stable name of a pod among those of its run, for any creator and any restart."""
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
    """Returns the unique id of the owner of a pod's set; empty if it is in none."""
    return str(pod["metadata"].get("annotations", {}).get(_OWNER_ANNOTATION, ""))
