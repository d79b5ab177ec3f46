"""Pods of a run's workers, made from the templates that the Helm chart wrote."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import yaml

from services.common.errors import FailedPreconditionError
from services.common.spec.run import RunSpec
from services.controller.client import WorkerRole
from services.controller.launch.launcher import program_of, worker_names

RUN_LABEL = "slipstream.dev/run"
WORKER_LABEL = "slipstream.dev/worker"

_QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
_GROUP_LABEL = "kueue.x-k8s.io/pod-group-name"
_COUNT_ANNOTATION = "kueue.x-k8s.io/pod-group-total-count"
_GRPC_PORT = 50051
_METRICS_PORT = 9090
_RUNS = "/var/lib/slipstream"
_TOKEN_KEY = "token"  # noqa: S105 -- its name inside the secret

Pod = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerTemplates:
    """How worker pods look."""

    topology: Literal["separate", "bundled"]
    """A pod per worker, or all workers of a run in one pod."""
    pods: Mapping[str, Pod]
    """Pod of one worker, by its program."""


def token_secret(run_id: str, token: str, *, owner: Mapping[str, str]) -> Pod:
    """The secret from which the pods of a run take its token."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": secret_name(run_id),
            "labels": {RUN_LABEL: run_id},
            "ownerReferences": [dict(owner)],
        },
        "type": "Opaque",
        "stringData": {_TOKEN_KEY: token},
    }


def secret_name(run_id: str) -> str:
    """Name of the secret with a run's token."""
    return f"{run_id.replace('_', '-')}-token"


def load_templates(folder: Path) -> WorkerTemplates:
    """Read the templates from the mounted ConfigMap.

    Raises:
        FailedPreconditionError: If the folder does not hold them.
    """
    try:
        topology = (folder / "topology").read_text(encoding="utf-8").strip()
        pods: dict[str, Pod] = {
            program: yaml.safe_load((folder / f"{program}.yaml").read_text(encoding="utf-8"))
            for program in ("trainer", "rollout")
        }
    except OSError as error:
        raise FailedPreconditionError(
            f"no worker templates in {folder}: {error.strerror}; mount the chart's ConfigMap there"
        ) from error
    return WorkerTemplates(topology=cast("Literal['separate', 'bundled']", topology), pods=pods)


def build_pods(
    templates: WorkerTemplates,
    run_id: str,
    spec: RunSpec,
    *,
    controller_address: str,
    owner: Mapping[str, str],
) -> list[Pod]:
    """All pods of a run. Each container is named like its worker.

    Args:
        templates: How worker pods look.
        run_id: The run.
        spec: Its specification.
        controller_address: ``host:port`` at which workers reach the controller.
        owner: Owner reference; when the owner goes, the pods go too.
    """
    pods = []
    for index, (role, worker_id) in enumerate(worker_names(spec)):
        pod = copy.deepcopy(templates.pods[program_of(role)])
        metadata = pod["metadata"]
        metadata["name"] = f"{run_id.replace('_', '-')}-{worker_id}"
        metadata["labels"] |= {RUN_LABEL: run_id, "slipstream.dev/run-name": spec.name}
        metadata["ownerReferences"] = [dict(owner)]
        (container,) = pod["spec"]["containers"]
        container["name"] = worker_id
        _add_ports(container, role, index)
        _name_worker(container, role, run_id, worker_id, controller_address)
        _add_readiness(container, role, worker_id)
        if role == "trainer" and spec.trainer.world_size > 1:
            processes = f"--nproc-per-node={spec.trainer.world_size}"
            container["command"] = ["torchrun", "--standalone", processes, "-m", "services.trainer"]
        pods.append(pod)
    if templates.topology == "bundled":
        pods = [_bundle(run_id, pods)]
    for pod in pods:
        _join_group(pod, run_id, len(pods))
    return pods


def _join_group(pod: Pod, run_id: str, num_pods: int) -> None:
    """Let Kueue, if the chart names a queue, admit all pods of a run at once or none."""
    metadata = pod["metadata"]
    if _QUEUE_LABEL in metadata["labels"]:
        metadata["labels"][_GROUP_LABEL] = run_id.replace("_", "-")
        metadata.setdefault("annotations", {})[_COUNT_ANNOTATION] = str(num_pods)


def _add_ports(container: Pod, role: WorkerRole, index: int) -> None:
    """Ports differ between a run's workers, which may share one network."""
    grpc, metrics = _GRPC_PORT + index, _METRICS_PORT + index
    prefix = f"SLIPSTREAM_{program_of(role).upper()}"
    container["ports"] = [
        {"name": "grpc", "containerPort": grpc, "protocol": "TCP"},
        {"name": "metrics", "containerPort": metrics, "protocol": "TCP"},
    ]
    container["env"] += [
        {"name": f"{prefix}_BIND", "value": f"$(POD_IP):{grpc}"},
        {"name": f"{prefix}_METRICS_PORT", "value": str(metrics)},
    ]


def _name_worker(
    container: Pod, role: WorkerRole, run_id: str, worker_id: str, controller_address: str
) -> None:
    prefix = f"SLIPSTREAM_{program_of(role).upper()}"
    values = {"CONTROLLER_ADDRESS": controller_address, "RUN_ID": run_id, "WORKER_ID": worker_id}
    if program_of(role) == "trainer":
        values["ROLE"] = role
        values["STATE_DIRECTORY"] = f"{_RUNS}/{run_id}"
    container["env"] += [
        {"name": f"{prefix}_{name}", "value": value} for name, value in values.items()
    ]
    token = {"secretKeyRef": {"name": secret_name(run_id), "key": _TOKEN_KEY}}
    container["env"].append({"name": f"{prefix}_RUN_TOKEN", "valueFrom": token})


def _add_readiness(container: Pod, role: WorkerRole, worker_id: str) -> None:
    """A worker is ready once it has loaded, which it says with a file of its own."""
    ready_file = f"/tmp/{worker_id}.ready"  # noqa: S108 -- a volume of the pod
    name = f"SLIPSTREAM_{program_of(role).upper()}_READY_FILE"
    container["env"].append({"name": name, "value": ready_file})
    container["readinessProbe"] = {
        "exec": {"command": ["test", "-e", ready_file]},
        "periodSeconds": 5,
    }


def _bundle(run_id: str, pods: list[Pod]) -> Pod:
    """One pod with the containers and volumes of all; the first says where it runs."""
    bundle = pods[0]
    bundle["metadata"]["name"] = f"{run_id.replace('_', '-')}-bundle"
    bundle["spec"]["containers"] = [
        container for pod in pods for container in pod["spec"]["containers"]
    ]
    volumes = {volume["name"]: volume for pod in pods for volume in pod["spec"]["volumes"]}
    bundle["spec"]["volumes"] = list(volumes.values())
    return bundle
