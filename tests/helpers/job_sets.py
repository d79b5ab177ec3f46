"""Simulates the pods that the controllers of JobSets and Indexed Jobs create."""

import copy
import random
import string
from collections.abc import Iterator, Mapping
from typing import Any

NAME_LABEL = "jobset.sigs.k8s.io/jobset-name"
_NUMBER = "batch.kubernetes.io/job-completion-index"


def pods_of(job_set: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields all pods of a JobSet with one replicated job."""
    (job,) = job_set["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    assert spec["completionMode"] == "Indexed"
    name = job_set["metadata"]["name"]
    for number in range(spec["completions"]):
        pod = copy.deepcopy(spec["template"])
        hostname = f"{name}-{job['name']}-0-{number}"
        pod["metadata"]["name"] = (
            f"{hostname}-{''.join(random.choices(string.ascii_lowercase, k=5))}"
        )
        pod["metadata"]["labels"][NAME_LABEL] = name
        pod["metadata"]["annotations"][_NUMBER] = str(number)
        pod["spec"]["hostname"] = hostname
        for container in pod["spec"]["containers"]:
            field = {"fieldRef": {"fieldPath": f"metadata.annotations['{_NUMBER}']"}}
            container["env"].append({"name": "JOB_COMPLETION_INDEX", "valueFrom": field})
        yield pod
