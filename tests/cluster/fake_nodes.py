"""Fake nodes with GPUs, which exist only in the API server: bound pods become running, deleted pods end."""

import datetime
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from kubernetes.client import ApiException, CoreV1Api

_PERIOD_S = 0.3


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat()


@contextmanager
def fake_nodes(core: CoreV1Api, *, count: int, gpus: int) -> Iterator[list[str]]:
    """Adds nodes and simulates their kubelets until the block ends; yields the nodes' names."""
    names = [f"fake-{index}" for index in range(count)]
    resources = {
        "cpu": "96",
        "memory": "1Ti",
        "ephemeral-storage": "4Ti",
        "pods": "110",
        "nvidia.com/gpu": str(gpus),
    }
    for name in names:
        taint = {"key": "nvidia.com/gpu", "effect": "NoSchedule"}
        core.create_node(
            {
                "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name}},
                "spec": {"taints": [taint]},
            }
        )
    stopped = threading.Event()
    kubelet = threading.Thread(target=_play, args=(core, names, resources, stopped))
    kubelet.start()
    try:
        yield names
    finally:
        stopped.set()
        kubelet.join()
        for name in names:
            core.delete_node(name)


def _play(
    core: CoreV1Api, names: list[str], resources: dict[str, str], stopped: threading.Event
) -> None:
    while not stopped.wait(_PERIOD_S):
        for name in names:
            core.patch_node_status(name, {"status": _node_status(resources)})
        for pod in core.list_pod_for_all_namespaces().items:
            if pod.spec.node_name in names:
                _advance(core, pod)


def _node_status(resources: dict[str, str]) -> dict[str, object]:
    ready = {
        "type": "Ready",
        "status": "True",
        "reason": "Fake",
        "lastHeartbeatTime": _now(),
        "lastTransitionTime": _now(),
    }
    return {"capacity": resources, "allocatable": resources, "conditions": [ready]}


def _advance(core: CoreV1Api, pod: object) -> None:
    """Marks a bound pod as running, or removes a deleted one."""
    name, namespace = pod.metadata.name, pod.metadata.namespace
    try:
        if pod.metadata.deletion_timestamp:
            core.delete_namespaced_pod(name, namespace, grace_period_seconds=0)
        elif pod.status.phase == "Pending":
            core.patch_namespaced_pod_status(name, namespace, {"status": _running(pod)})
    except ApiException as error:
        if error.status != 404:
            raise


def _running(pod: object) -> dict[str, object]:
    kinds = ("Initialized", "Ready", "ContainersReady", "PodScheduled")
    return {
        "phase": "Running",
        "podIP": "10.250.0.1",
        "startTime": _now(),
        "conditions": [{"type": kind, "status": "True"} for kind in kinds],
        "containerStatuses": [
            {
                "name": container.name,
                "ready": True,
                "restartCount": 0,
                "image": container.image,
                "imageID": "",
                "state": {"running": {"startedAt": _now()}},
            }
            for container in pod.spec.containers
        ],
    }
