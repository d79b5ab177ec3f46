"""Simulates the controllers of JobSets and their Indexed Jobs, for which the test's API server is too old."""

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

from kubernetes.client import ApiException, CoreV1Api, CustomObjectsApi

from services.extras.kubernetes.job_set import GROUP, PLURAL, VERSION
from tests.cluster.definitions import defined
from tests.cluster.release import eventually
from tests.helpers.job_sets import NAME_LABEL, pods_of

_PERIOD_S = 0.3


def job_set_kind(core: CoreV1Api) -> AbstractContextManager[None]:
    """Defines the kind JobSet until the block ends."""
    return defined(core, "JobSet", group=GROUP, version=VERSION, plural=PLURAL)


@contextmanager
def job_sets(core: CoreV1Api, namespace: str) -> Iterator[None]:
    """Creates the pods of JobSets until the block ends; the kind JobSet must be defined."""
    _wait_for_garbage_collector(core, namespace)
    stopped = threading.Event()
    controller = threading.Thread(target=_play, args=(core, namespace, stopped))
    controller.start()
    try:
        yield
    finally:
        stopped.set()
        controller.join()


def names(core: CoreV1Api, namespace: str) -> list[str]:
    """Returns the names of all JobSets of a namespace."""
    return [job_set["metadata"]["name"] for job_set in _list(core, namespace)]


def _wait_for_garbage_collector(core: CoreV1Api, namespace: str) -> None:
    """Waits until the garbage collector knows JobSets.

    The collector looks for new kinds every half minute. Foreground deletion of objects does not finish before
    the collector knows their kind.
    """
    custom = CustomObjectsApi(core.api_client)
    probe = {"apiVersion": f"{GROUP}/{VERSION}", "kind": "JobSet", "metadata": {"name": "probe"}}

    def is_served() -> bool:
        with suppress(ApiException):
            custom.create_namespaced_custom_object(GROUP, VERSION, namespace, PLURAL, probe)
            return True
        return False

    eventually(is_served, timeout_s=30)
    custom.delete_namespaced_custom_object(
        GROUP, VERSION, namespace, PLURAL, "probe", propagation_policy="Foreground"
    )
    eventually(lambda: names(core, namespace) == [], timeout_s=120)


def _list(core: CoreV1Api, namespace: str) -> list[dict[str, Any]]:
    listed = CustomObjectsApi(core.api_client).list_namespaced_custom_object(
        GROUP, VERSION, namespace, PLURAL
    )
    return list(listed["items"])


def _play(core: CoreV1Api, namespace: str, stopped: threading.Event) -> None:
    served: set[str] = set()
    while not stopped.wait(_PERIOD_S):
        with suppress(ApiException):  # an object may be deleted in the meantime
            for job_set in _list(core, namespace):
                uid = job_set["metadata"]["uid"]
                if uid in served:
                    _end_what_failed(core, namespace, job_set)
                elif "deletionTimestamp" not in job_set["metadata"]:
                    _make_pods(core, namespace, job_set)
                    served.add(uid)


def _make_pods(core: CoreV1Api, namespace: str, job_set: dict[str, Any]) -> None:
    owner = {key: job_set["metadata"][key] for key in ("name", "uid")} | {
        "apiVersion": job_set["apiVersion"],
        "kind": "JobSet",
        "controller": True,
        "blockOwnerDeletion": True,
    }
    for pod in pods_of(job_set):
        pod["metadata"]["ownerReferences"] = [owner]
        core.create_namespaced_pod(namespace, pod)


def _end_what_failed(core: CoreV1Api, namespace: str, job_set: dict[str, Any]) -> None:
    """Deletes a JobSet's pods after one of them failed or was deleted, as a Job without retries does."""
    (job,) = job_set["spec"]["replicatedJobs"]
    selector = f"{NAME_LABEL}={job_set['metadata']['name']}"
    pods = core.list_namespaced_pod(namespace, label_selector=selector).items
    alive = [pod for pod in pods if pod.status.phase in ("Pending", "Running")]
    is_whole = len(pods) == job["template"]["spec"]["completions"]
    if is_whole and not any(
        pod.status.phase == "Failed" or pod.metadata.deletion_timestamp for pod in pods
    ):
        return
    for pod in alive:
        core.delete_namespaced_pod(pod.metadata.name, namespace)
