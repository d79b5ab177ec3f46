"""Builds the pods of a run's workers from the templates that the Helm chart wrote.

rollouts        one pod each; colocated rollouts are in the trainer's pod
other workers   one pod with all ranks of a worker, or one for each node that its ranks fill
bundled         one pod with the containers of all workers
"""

import copy
import hashlib
import json
import posixpath
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from services.common.errors import FailedPreconditionError
from services.common.launchers import PodTopology
from services.common.runspec.run import RunSpec
from services.common.runspec.worker_kinds import gpu_hosts, gpu_needs, total_gpus, worker_names
from services.common.runspec.workers import WORKERS, WorkerKind, programs
from services.common.stores import is_url
from services.controller.launch.gpus import HostGpus
from services.extras.kubernetes import gang, job_set
from services.extras.kubernetes.pod_resources import KINDS_ANNOTATION, size_pod
from services.extras.kubernetes.pod_rules import nodes_of, pod_problems, pod_topology
from services.extras.kubernetes.pod_templates import Overrides, add_part, choose_pod

RUN_LABEL = "slipstream.dev/run"
WORKER_LABEL = "slipstream.dev/worker"
PROJECT_LABEL = "slipstream.dev/project"
USER_LABEL = "slipstream.dev/user"

_GPU_ANNOTATION = "slipstream.dev/gpu-resource"
_PORTS_ANNOTATION = "slipstream.dev/node-ports"
_GPU_CLAIM_ANNOTATION = "slipstream.dev/gpu-claim-template"
_COUNTED_ANNOTATION = "slipstream.dev/counted-priority-class"
_GRPC_PORT = 50051
_METRICS_PORT = 9090
_MEETING_PORT = 29500
# Ports of pods in the network of their node. The node's services, such as 9100 and 10250, are below; node
# ports (30000) and ephemeral ports (32768) are above.
_NODE_PORTS = range(20_000, 29_500)
RUNS_FOLDER = "/var/lib/slipstream"
"""Folder of workers for the state of runs, such as checkpoints."""
TOKEN_KEY = "token"  # noqa: S105 -- its name inside the secret
TLS_FILES = ("tls.crt", "tls.key", "ca.crt")
"""File names, inside the secret, of a run's certificate, its key and the authority's certificate."""
_TLS_VOLUME = "tls"

_PROJECT = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_-]*[A-Za-z0-9])?")
"""Projects that can have their own templates, as ``values.schema.json`` says."""
_SCRATCH_VOLUMES = frozenset({"emptyDir", "ephemeral"})
"""Kinds of volumes that are deleted with their pod."""

Pod = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerTemplates:
    """Templates of worker pods."""

    topology: PodTopology
    pods: Mapping[str, Pod]
    """Pod template of one worker, by its program."""
    job_set: Mapping[str, Any] | None = None
    """JobSet template of a worker of several nodes; None for plain pods."""
    pod_group: Mapping[str, Any] | None = None
    """Template of a run's pod group; None without a gang scheduler."""
    overrides: Overrides = field(default_factory=Overrides)
    """Choices of a run for its pods."""

    @property
    def namespace(self) -> str:
        """Namespace of the pods; empty in templates that the chart did not write."""
        return str(self.pods[WORKERS["trainer"].program]["metadata"].get("namespace", ""))

    @property
    def is_on_node_network(self) -> bool:
        """True if pods share the network of their node."""
        return any(pod["spec"].get("hostNetwork") for pod in self.pods.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class _WorkerPod:
    """Pod of a worker on one of its nodes."""

    role: str
    worker_id: str
    index: int
    """Index of the worker among all of its run."""
    ranks: int
    """Number of the worker's processes on all nodes."""
    node: int
    nodes: int

    @property
    def kind(self) -> WorkerKind:
        return WORKERS[self.role]

    def pod_name(self, run_id: str) -> str:
        return job_set.place_name(self.first_name(run_id), self.node)

    def first_name(self, run_id: str) -> str:
        return f"{run_id.replace('_', '-')}-{self.worker_id}"


@dataclass(frozen=True, slots=True)
class _Ports:
    """Ports of a run's workers."""

    grpc: int
    """gRPC port of the first worker; the others have the next ones."""
    metrics: int
    """Metrics port of the first worker."""
    meeting: int
    """Port of the first worker at which the ranks of several nodes meet."""
    is_meeting_shared: bool
    """True if all workers have the same one, because each is in a separate network."""

    def meeting_of(self, index: int) -> int:
        return self.meeting if self.is_meeting_shared else self.meeting + index


_POD_PORTS = _Ports(_GRPC_PORT, _METRICS_PORT, _MEETING_PORT, is_meeting_shared=True)


def used_ports(pods: Iterable[Mapping[str, Any]]) -> set[int]:
    """Returns the ports that pods occupy in the networks of their nodes."""
    numbers = set()
    for pod in pods:
        if pod["spec"].get("hostNetwork"):
            text = pod["metadata"].get("annotations", {}).get(_PORTS_ANNOTATION, "")
            numbers |= {int(number) for number in text.split(",") if number}
    return numbers


def _node_ports(run_id: str, spec: RunSpec, ports_in_use: Collection[int]) -> _Ports:
    """Returns three ports for each worker on nodes, which no other pod uses if there are enough.

    Args:
        ports_in_use: Ports of existing pods.
    """
    ports_in_use, num_workers = frozenset(ports_in_use), len(worker_names(spec))
    size, total = 3 * num_workers, len(_NODE_PORTS)
    begin = int.from_bytes(hashlib.blake2b(run_id.encode(), digest_size=8).digest(), "big")
    starts = (_NODE_PORTS[(begin + shift) % total] for shift in range(total))
    fitting = (
        start
        for start in starts
        if start + size <= _NODE_PORTS.stop and ports_in_use.isdisjoint(range(start, start + size))
    )
    first = next(fitting, _NODE_PORTS.start)
    return _Ports(first, first + num_workers, first + 2 * num_workers, is_meeting_shared=False)


def secret_name(run_id: str) -> str:
    return f"{run_id.replace('_', '-')}-identity"


def run_metadata(run_id: str, name: str, *, owner: Mapping[str, str]) -> dict[str, Any]:
    return {"name": name, "labels": {RUN_LABEL: run_id}, "ownerReferences": [dict(owner)]}


def run_policy(run_id: str, *, owner: Mapping[str, str]) -> Pod:
    """Builds the NetworkPolicy that admits only traffic between the workers of a run."""
    selector = {"matchLabels": {WORKER_LABEL: "true", RUN_LABEL: run_id}}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": run_metadata(run_id, policy_name(run_id), owner=owner),
        "spec": {
            "podSelector": selector,
            "policyTypes": ["Ingress"],
            "ingress": [{"from": [{"podSelector": selector}]}],
        },
    }


def accounting_labels(*, project: str, user: str) -> dict[str, str]:
    """Returns the labels by which costs of pods are assigned; without characters that labels cannot have."""
    values = {PROJECT_LABEL: project, USER_LABEL: user}
    shares = {
        name: re.sub(r"[^A-Za-z0-9_.-]", "-", value)[:63].strip("-_.")
        for name, value in values.items()
    }
    return {name: value for name, value in shares.items() if value}


def policy_name(run_id: str) -> str:
    return f"{run_id.replace('_', '-')}-workers"


def load_templates(folder: Path, project: str = "") -> WorkerTemplates:
    """Reads the templates from the mounted ConfigMap.

    Args:
        project: Project of the run, which may have its own templates (``workers.projects`` of the chart).

    Raises:
        FailedPreconditionError: If the folder does not contain them.
    """
    try:
        topology = pod_topology(folder)
        pods: dict[str, Pod] = {
            program: yaml.safe_load(_file_of(folder, project, program).read_text(encoding="utf-8"))
            for program in programs()
        }
        overrides = Overrides.read(folder)
        namespace = pods[WORKERS["trainer"].program]["metadata"].get("namespace")
        sets, group = (
            _read_optional(folder / name, namespace) for name in ("job-set.yaml", "pod-group.yaml")
        )
    except OSError as error:
        raise FailedPreconditionError(
            f"cannot read worker templates in {folder}: {error.strerror}; mount the chart's ConfigMap there"
        ) from error
    return WorkerTemplates(
        topology=topology,
        pods=pods,
        job_set=sets,
        pod_group=group,
        overrides=overrides,
    )


def _file_of(folder: Path, project: str, program: str) -> Path:
    """Returns the file with the pod template of a program, for a project if it has its own."""
    if (
        _PROJECT.fullmatch(project)
        and (project_file := folder / f"{project}.{program}.yaml").exists()
    ):
        return project_file
    return folder / f"{program}.yaml"


def _read_optional(file: Path, namespace: str | None) -> Pod | None:
    """Reads the template of an object in the namespace of the pods; None without the file."""
    if not file.exists():
        return None
    template: Pod = yaml.safe_load(file.read_text(encoding="utf-8"))
    if namespace:
        template.setdefault("metadata", {})["namespace"] = namespace
    return template


def project_namespaces(folder: Path) -> set[str]:
    """Returns the namespaces that projects have besides the shared one, from the mounted ConfigMap.

    Raises:
        FailedPreconditionError: If a template cannot be read.
    """
    suffix = f".{WORKERS['trainer'].program}.yaml"
    projects = [file.name.removesuffix(suffix) for file in folder.glob(f"*{suffix}")]
    namespaces = {load_templates(folder, project).namespace for project in projects}
    return namespaces - {"", load_templates(folder).namespace}


def why_volatile(template: Pod, folder: str) -> str:
    """Returns why files in a folder are lost with the trainer's pod.

    Empty if a volume that outlives the pod holds them, such as one that the administrator adds to trainers.
    Those of an object store, whose folder is a URL, are not lost.
    """
    if is_url(folder):
        return ""
    template = copy.deepcopy(template)
    _add_part_of(template, "trainer")
    (container,) = template["spec"]["containers"]
    path = PurePosixPath(re.sub("^/+", "/", posixpath.normpath(folder)))
    mounts = [
        (PurePosixPath(mount["mountPath"]), mount["name"])
        for mount in container.get("volumeMounts", ())
    ]
    holders = [(mount_path, name) for mount_path, name in mounts if path.is_relative_to(mount_path)]
    if not holders:
        return f"{folder} is in the container's own file system"
    mount_path, name = max(holders, key=lambda holder: len(holder[0].parts))
    volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
    kinds = sorted(_SCRATCH_VOLUMES & volumes[name].keys())
    return f"{mount_path} is a volume of the pod ({kinds[0]})" if kinds else ""


def build_pods(
    templates: WorkerTemplates,
    run_id: str,
    spec: RunSpec,
    *,
    controller_address: str,
    owner: Mapping[str, str],
    ports_in_use: Collection[int] = frozenset(),
    labels: Mapping[str, str] | None = None,
) -> list[Pod]:
    """Builds all pods of a run, named by their places. Each container is named like its worker.

    No pod has more GPUs than a node.

    Args:
        controller_address: ``host:port`` at which workers reach the controller.
        owner: Owner reference; the pods are deleted with the owner.
        ports_in_use: Ports of other pods in the networks of nodes.
        labels: Further labels of the pods, such as those of :func:`accounting_labels`.

    Raises:
        FailedPreconditionError: If no node has room for a pod, or a pod has something that the installation
            does not allow; with one line per problem.
    """
    if problems_of_pods := [
        *pod_problems(spec, templates.topology),
        *templates.overrides.problems(spec),
    ]:
        raise FailedPreconditionError("\n".join(problems_of_pods))
    ports = _node_ports(run_id, spec, ports_in_use) if templates.is_on_node_network else _POD_PORTS
    pods = []
    for worker in _worker_pods(templates, spec):
        pod = copy.deepcopy(templates.pods[worker.kind.program])
        metadata = pod["metadata"]
        metadata["name"] = worker.pod_name(run_id)
        metadata["labels"] |= {
            RUN_LABEL: run_id,
            "slipstream.dev/run-name": spec.name,
            **(labels or {}),
        }
        metadata["ownerReferences"] = [dict(owner)]
        pod["spec"]["hostname"] = metadata["name"]
        (container,) = pod["spec"]["containers"]
        container["name"] = worker.worker_id
        _name_worker(container, worker, run_id, controller_address)
        _add_certificate(pod, run_id)
        _add_ports(pod, worker, ports)
        num_gpus = worker.kind.num_gpus(spec) // worker.nodes
        _complete_pod(pod, worker, spec, templates.overrides, gpus=num_gpus)
        if spec.is_colocated(worker.worker_id):
            join_trainer_pod(container, worker.worker_id, spec, ready_file=_ready_file("trainer-0"))
        else:
            _ask_for_gpus(pod, num_gpus)
        first, rank = worker.first_name(run_id), str(worker.node)
        if templates.job_set is not None and worker.nodes > 1:
            job_set.join_job_set(pod, name=first, node=worker.node)
            first, rank = job_set.hostname(templates.job_set, first, 0), job_set.NODE_RANK
        if worker.ranks > 1:
            address = f"{first}.{pod['spec']['subdomain']}"
            meeting = ports.meeting_of(worker.index)
            container["command"] = _torchrun(worker, node_rank=rank, address=address, port=meeting)
        pods.append(pod)
    if templates.topology == "bundled":
        pods = [_together(f"{run_id.replace('_', '-')}-bundle", pods)]
    elif spec.topology.is_colocated:
        count = 1 + spec.colocated_rollouts  # the trainer is the first worker
        pods = [_together(pods[0]["metadata"]["name"], pods[:count]), *pods[count:]]
    for pod in pods:
        gang.join_kueue_group(pod, group=gang.group_name(run_id), num_pods=len(pods))
    if templates.pod_group is None:
        return pods
    return [gang.filled(pod, run_id, num_pods=len(pods)) for pod in pods]


def _complete_pod(
    pod: Pod, worker: _WorkerPod, spec: RunSpec, overrides: Overrides, *, gpus: int
) -> None:
    """Sets resources other than GPUs, and adds what the administrator and the run want in the pod."""
    _add_part_of(pod, worker.role)
    size_pod(pod, role=worker.role, gpus=gpus)
    if (settings := spec.pods.get(worker.role)) is not None:
        choose_pod(pod, settings, overrides)
    counted_class = pod["metadata"]["annotations"].get(_COUNTED_ANNOTATION)
    priority = pod["spec"].get("priorityClassName")
    if counted_class is not None and priority != counted_class:
        raise FailedPreconditionError(
            f"the pods of {worker.role} have the priority class {priority}, but the quota of the project "
            f"counts those of {counted_class}; remove pods.{worker.role}.priority_class, or the template of "
            f"pods.{worker.role}.templates or workers.kinds.{worker.role}.pod that sets priorityClassName"
        )


def _add_part_of(pod: Pod, role: str) -> None:
    """Adds the administrator's part of a kind of worker."""
    kinds = json.loads(pod["metadata"].get("annotations", {}).get(KINDS_ANNOTATION, "{}"))
    template = kinds.get(role, {}).get("pod", {})
    add_part(pod, template, where=f"workers.kinds.{role}.pod")


def _worker_pods(templates: WorkerTemplates, spec: RunSpec) -> Iterator[_WorkerPod]:
    for index, (role, worker_id) in enumerate(worker_names(spec)):
        ranks = WORKERS[role].ranks(spec)
        nodes = 1 if templates.topology == "bundled" else nodes_of(ranks, spec)
        assert nodes is not None
        for node in range(nodes):
            yield _WorkerPod(
                role=role, worker_id=worker_id, index=index, ranks=ranks, node=node, nodes=nodes
            )


def _torchrun(worker: _WorkerPod, *, node_rank: str, address: str, port: int) -> list[str]:
    """Returns the command of a worker of several ranks; several nodes rendezvous at the first one."""
    where = ["--standalone"]
    if worker.nodes > 1:
        where = [
            f"--nnodes={worker.nodes}",
            f"--node-rank={node_rank}",
            f"--master-addr={address}",
            f"--master-port={port}",
        ]
    processes = f"--nproc-per-node={worker.ranks // worker.nodes}"
    return ["torchrun", *where, processes, "-m", worker.kind.module]


def _ask_for_gpus(pod: Pod, count: int) -> None:
    """Requests GPUs: the run sets their number, the chart their resource name or claim, if any."""
    annotations = pod["metadata"]["annotations"]
    (container,) = pod["spec"]["containers"]
    if (template := annotations.get(_GPU_CLAIM_ANNOTATION)) is not None:
        names = [f"{container['name']}-gpu-{number}" for number in range(count)]
        pod["spec"].setdefault("resourceClaims", []).extend(
            {"name": name, "resourceClaimTemplateName": template} for name in names
        )
        container["resources"].setdefault("claims", []).extend({"name": name} for name in names)
    elif (kind := annotations.get(_GPU_ANNOTATION)) is not None:
        for kind_of_amount in ("requests", "limits"):
            container["resources"].setdefault(kind_of_amount, {})[kind] = str(count)


def _name_worker(container: Pod, worker: _WorkerPod, run_id: str, controller_address: str) -> None:
    prefix = worker.kind.settings_prefix
    values = {
        "CONTROLLER_ADDRESS": controller_address,
        "RUN_ID": run_id,
        "WORKER_ID": worker.worker_id,
        "ROLE": worker.role,
        "STATE_DIRECTORY": f"{RUNS_FOLDER}/{run_id}",
    }
    container["env"] += [
        {"name": f"{prefix}{name}", "value": value} for name, value in values.items()
    ]
    token = {"secretKeyRef": {"name": secret_name(run_id), "key": TOKEN_KEY}}
    container["env"].append({"name": f"{prefix}RUN_TOKEN", "valueFrom": token})


def _add_certificate(pod: Pod, run_id: str) -> None:
    """Points the TLS volume, if the chart has one, to the run's secret."""
    for volume in pod["spec"]["volumes"]:
        if volume["name"] == _TLS_VOLUME:
            items = [{"key": name, "path": name} for name in TLS_FILES]
            volume["secret"] |= {"secretName": secret_name(run_id), "items": items}


def _add_ports(pod: Pod, worker: _WorkerPod, ports: _Ports) -> None:
    """Adds ports, which differ between a run's workers because they may share one network.

    Only the first rank serves them. A worker is ready after it has loaded, when it writes its ready
    file.
    """
    (container,) = pod["spec"]["containers"]
    prefix = worker.kind.settings_prefix
    grpc, metrics = ports.grpc + worker.index, ports.metrics + worker.index
    if pod["spec"].get("hostNetwork"):
        numbers = (grpc, metrics, ports.meeting_of(worker.index))
        pod["metadata"]["annotations"][_PORTS_ANNOTATION] = ",".join(map(str, numbers))
    ready_file = _ready_file(worker.worker_id)
    container["env"] += [
        {"name": f"{prefix}BIND", "value": f"$(POD_IP):{grpc}"},
        {"name": f"{prefix}METRICS_PORT", "value": str(metrics)},
        {"name": f"{prefix}READY_FILE", "value": ready_file},
    ]
    if worker.node == 0:
        container["ports"] = [
            {"name": "grpc", "containerPort": grpc, "protocol": "TCP"},
            {"name": "metrics", "containerPort": metrics, "protocol": "TCP"},
        ]
        container["readinessProbe"] = {
            "exec": {"command": ["test", "-e", ready_file]},
            "periodSeconds": 5,
        }


def _ready_file(worker_id: str) -> str:
    return f"/tmp/{worker_id}.ready"  # noqa: S108 -- a volume of the pod


def _together(name: str, pods: list[Pod]) -> Pod:
    """Merges containers and volumes of several pods into the first, which determines the placement."""
    bundle = pods[0]
    bundle["metadata"]["name"] = name
    bundle["spec"]["containers"] = [
        container for pod in pods for container in pod["spec"]["containers"]
    ]
    for kind in ("volumes", "initContainers", "resourceClaims"):
        items_by_name = {item["name"]: item for pod in pods for item in pod["spec"].get(kind, ())}
        if items_by_name:
            bundle["spec"][kind] = list(items_by_name.values())
    annotations = [pod["metadata"].get("annotations", {}) for pod in pods]
    if ports := [item[_PORTS_ANNOTATION] for item in annotations if _PORTS_ANNOTATION in item]:
        annotations[0][_PORTS_ANNOTATION] = ",".join(ports)
    first, *other_containers = bundle["spec"]["containers"]
    if claims := first.get("resources", {}).get("claims"):
        for (
            container
        ) in other_containers:  # a container without claims shares the GPUs of the trainer
            container["resources"].setdefault("claims", list(claims))
    return bundle


def join_trainer_pod(
    container: dict[str, Any], worker_id: str, spec: RunSpec, *, ready_file: str
) -> None:
    """Changes the container of a rollout so that it starts after the trainer, on the trainer's GPUs."""
    host = HostGpus([str(number) for number in range(total_gpus(spec))])
    gpus = host.assign("", gpu_needs(spec), hosts=gpu_hosts(spec))[worker_id]
    timeout_s = f"{spec.limits.start_timeout_s:.0f}"
    container["command"] = [
        *(
            "python",
            "-m",
            "services.extras.kubernetes.colocated",
            ready_file,
            ",".join(gpus),
            timeout_s,
        )
    ]
    roles: Mapping[str, str] = {name: role for role, name in worker_names(spec)}
    neighbours = [roles[name] for name in host.workers_sharing("", worker_id)]
    container["env"] += [
        {"name": "SLIPSTREAM_ROLLOUT_GPU_NEIGHBOURS", "value": json.dumps(neighbours)},
        {"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"},
    ]
