"""A real Kubernetes cluster on this machine: control plane, and a node that runs containers.

etcd <- kube-apiserver <- controller-manager, scheduler
                       <- kubelet -> containerd -> runc     kube-proxy -> iptables     dns
"""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from kubernetes import config
from kubernetes.client import ApiException, CoreV1Api

from tests.cluster.dns import serve_dns
from tests.cluster.image_archives import import_images
from tests.cluster.machine import unchanged_machine, unmount_below, weigh_pods
from tests.cluster.network import NODE_IP, POD_RANGE, SERVICE_RANGE, own_network
from tests.cluster.node_config import (
    DNS_IP,
    FIRST,
    SECOND,
    NodeConfig,
    containerd_config,
    kubelet_config,
)
from tests.cluster.processes import Processes
from tests.helpers.pki import Authority, make_authority
from tests.helpers.tools import CACHE, require

NODE = FIRST.name
_SERVER = f"https://{NODE_IP}:6443"
_START_S = 120.0


@dataclass(frozen=True, slots=True)
class Cluster:
    """A running cluster."""

    folder: Path
    core: CoreV1Api
    processes: Processes
    kubeconfig: Path

    def command(self, *command: str | Path, timeout_s: float = 120.0) -> str:
        """Runs a program against the cluster; returns its output, which the error of a failure contains."""
        result = subprocess.run(
            [str(argument) for argument in command],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env={
                "PATH": self.processes.path,
                "KUBECONFIG": str(self.kubeconfig),
                "HOME": str(self.folder),
            },
            check=False,
        )
        if result.returncode != 0:
            raise RuntimeError(f"{command} failed:\n{result.stdout}\n{result.stderr}")
        return result.stdout


@contextmanager
def control_plane(folder: Path) -> Iterator[Cluster]:
    """Runs API server, scheduler and controllers until the block ends, without a node."""
    etcd, api_server, controllers, scheduler, kubectl = require(
        "etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl"
    )
    with ExitStack() as stack:
        stack.enter_context(own_network(f"slipstream-{folder.name}"))
        authority = _certificates(folder / "pki")
        root = CACHE / "root" / "usr"
        path = f"{kubectl.parent}:{root}/bin:{root}/sbin:{os.defpath}:/usr/sbin:/sbin"
        processes = Processes(folder, path)
        stack.callback(processes.stop)
        _start_etcd(processes, etcd, folder)
        processes.start("api-server", api_server, *_api_server_flags(authority.folder))
        admin = authority.kubeconfig("admin", _SERVER)
        ready = [kubectl, f"--kubeconfig={admin}", "get", "--raw=/readyz"]
        processes.wait_for(
            "a ready API server",
            lambda: subprocess.run(ready, capture_output=True, check=False).returncode == 0,
            _START_S,
        )
        core = CoreV1Api(config.new_client_from_config(str(admin)))
        for name, program in (("controllers", controllers), ("scheduler", scheduler)):
            kubeconfig = authority.kubeconfig(name, _SERVER)
            flags = [
                f"--{kind}kubeconfig={kubeconfig}"
                for kind in ("", "authentication-", "authorization-")
            ]
            processes.start(
                name, program, *flags, "--bind-address=127.0.0.1", "--leader-elect=false",
                "--kube-api-qps=200", "--kube-api-burst=400",
                *(_controller_flags(authority.folder) if name == "controllers" else ()),
            )  # fmt: skip
        processes.wait_for("service accounts", lambda: _has_account(core), _START_S)
        yield Cluster(folder, core, processes, admin)


@contextmanager
def node(cluster: Cluster) -> Iterator[Cluster]:
    """Runs a node that runs containers, and cluster DNS, until the block ends."""
    (proxy,) = require("kube-proxy")
    folder, processes = cluster.folder, cluster.processes
    with unchanged_machine(folder), serve_dns(cluster.core, NODE_IP):
        _start_node(cluster, FIRST)
        processes.start(
            "proxy", proxy, f"--kubeconfig={folder}/pki/proxy.kubeconfig", f"--hostname-override={NODE}",
            f"--cluster-cidr={POD_RANGE}", "--masquerade-all", "--conntrack-max-per-core=0",
            "--conntrack-tcp-timeout-established=0", "--conntrack-tcp-timeout-close-wait=0",
            "--healthz-bind-address=127.0.0.1:10256", "--metrics-bind-address=127.0.0.1:10249",
        )  # fmt: skip
        _create_dns_service(cluster.core)
        processes.wait_for("a ready node", lambda: _is_ready(cluster.core, NODE), _START_S)
        weigh_pods()
        try:
            yield cluster
        finally:
            try:
                _remove_pods(cluster)
            finally:
                processes.stop(f"kubelet-{NODE}", "proxy", f"containerd-{NODE}")


@contextmanager
def second_node(cluster: Cluster) -> Iterator[str]:
    """Runs another node beside that of :func:`node` until the block ends; yields its name.

    Both are in one network namespace, so one kube-proxy serves both.
    """
    name, processes = SECOND.name, cluster.processes
    _start_node(cluster, SECOND)
    try:
        processes.wait_for("a ready second node", lambda: _is_ready(cluster.core, name), _START_S)
        yield name
    finally:
        try:
            cluster.command("kubectl", "drain", name, *_FORCED, timeout_s=240)
        finally:
            cluster.core.delete_node(name)
            processes.stop(f"kubelet-{name}", f"containerd-{name}")


_FORCED = (
    "--ignore-daemonsets", "--delete-emptydir-data", "--force", "--disable-eviction", "--grace-period=5",
)  # fmt: skip
"""Options of a drain that waits for nothing."""


def _start_node(cluster: Cluster, config: NodeConfig) -> None:
    """Starts containerd with the images, and a kubelet."""
    (kubelet,) = require("kubelet")
    folder, processes = cluster.folder / config.name, cluster.processes
    folder.mkdir()
    (CACHE / config.containers / "root").mkdir(parents=True, exist_ok=True)
    socket, pki = folder / "containerd.sock", cluster.folder / "pki"
    processes.start(
        f"containerd-{config.name}", "containerd", "-c", containerd_config(folder, config, socket)
    )
    processes.wait_for("containerd", socket.exists, _START_S)
    _import_images(socket, CACHE / config.containers)
    processes.start(
        f"kubelet-{config.name}", kubelet, f"--kubeconfig={pki}/{config.name}.kubeconfig",
        f"--config={kubelet_config(folder, config, pki / 'ca.crt')}",
        f"--root-dir={folder}/kubelet", f"--cert-dir={folder}/kubelet-pki",
        f"--hostname-override={config.name}", f"--node-ip={config.ip}",
        "--container-runtime=remote", f"--container-runtime-endpoint=unix://{socket}",
    )  # fmt: skip


def _certificates(folder: Path) -> Authority:
    authority = make_authority(folder)
    authority.issue(
        "server",
        user="kube-apiserver",
        hosts=("10.96.0.1", NODE_IP, "127.0.0.1", "kubernetes.default.svc"),
    )
    authority.issue("admin", user="admin", group="system:masters")
    authority.issue("controllers", user="system:kube-controller-manager")
    authority.issue("scheduler", user="system:kube-scheduler")
    for name in (FIRST.name, SECOND.name):
        authority.issue(name, user=f"system:node:{name}", group="system:nodes")
    authority.issue("proxy", user="system:kube-proxy")
    for name in (FIRST.name, SECOND.name, "proxy"):
        authority.kubeconfig(name, _SERVER)
    return authority


def _start_etcd(processes: Processes, etcd: Path, folder: Path) -> None:
    client, peer = "http://127.0.0.1:2379", "http://127.0.0.1:2380"
    processes.start(
        "etcd", etcd, "--data-dir", folder / "etcd", "--unsafe-no-fsync", "--listen-client-urls", client,
        "--advertise-client-urls", client, "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
        "--initial-cluster", f"default={peer}",
    )  # fmt: skip


def _api_server_flags(pki: Path) -> list[str]:
    return [
        "--etcd-servers=http://127.0.0.1:2379",
        "--bind-address=0.0.0.0",
        f"--advertise-address={NODE_IP}",
        "--secure-port=6443",
        f"--tls-cert-file={pki}/server.crt",
        f"--tls-private-key-file={pki}/server.key",
        f"--client-ca-file={pki}/ca.crt",
        f"--service-account-key-file={pki}/service-accounts.key",
        f"--service-account-signing-key-file={pki}/service-accounts.key",
        "--service-account-issuer=https://kubernetes.default.svc",
        "--authorization-mode=Node,RBAC",
        f"--service-cluster-ip-range={SERVICE_RANGE}",
        "--kubelet-preferred-address-types=InternalIP",
        f"--kubelet-client-certificate={pki}/admin.crt",
        f"--kubelet-client-key={pki}/admin.key",
    ]


def _controller_flags(pki: Path) -> list[str]:
    return [
        f"--service-account-private-key-file={pki}/service-accounts.key",
        f"--root-ca-file={pki}/ca.crt",
        "--use-service-account-credentials=true",
        # By default, autoscalers act every 15 s, and so does the binder of claims after it missed an event.
        "--pvclaimbinder-sync-period=1s",
        "--horizontal-pod-autoscaler-sync-period=2s",
    ]


def _import_images(socket: Path, containers: Path) -> None:
    """Imports the images that are newer than those of earlier sessions."""
    archives = {
        containers / f"{archive.name}.{archive.stat().st_mtime_ns}": archive
        for archive in sorted((CACHE / "images").glob("*.tar"))
    }
    stamps = [stamp for stamp in archives if not stamp.exists()]
    if stamps:
        import_images(
            [archives[stamp] for stamp in stamps],
            [CACHE / "root/usr/bin/ctr", "-a", socket, "-n", "k8s.io", "image", "import", "-"],
            containers / "root/io.containerd.content.v1.content/blobs/sha256",
        )
    for stamp in stamps:
        stamp.touch()


def _create_dns_service(core: CoreV1Api) -> None:
    """Creates the service of cluster DNS with its usual name and address; this process answers it."""
    ports = [
        {"name": "dns", "port": 53, "protocol": "UDP"},
        {"name": "dns-tcp", "port": 53, "protocol": "TCP"},
    ]
    metadata = {"name": "kube-dns"}
    core.create_namespaced_service(
        "kube-system", {"metadata": metadata, "spec": {"clusterIP": DNS_IP, "ports": ports}}
    )
    subsets = [{"addresses": [{"ip": NODE_IP}], "ports": ports}]
    core.create_namespaced_endpoints("kube-system", {"metadata": metadata, "subsets": subsets})


def _remove_pods(cluster: Cluster) -> None:
    """Deletes all pods, so that the kubelet ends their containers; remaining containers end with containerd.

    A graceful deletion waits until the kubelet collects dead containers, up to a minute.
    """
    cluster.command(
        "kubectl", "delete", "deployment,statefulset,pod", "--all", "--all-namespaces",
        "--grace-period=0", "--force",
    )  # fmt: skip


def _has_account(core: CoreV1Api) -> bool:
    return bool(core.list_namespaced_service_account("default").items)


def _is_ready(core: CoreV1Api, name: str) -> bool:
    try:
        conditions = core.read_node(name).status.conditions or []
    except ApiException:
        return False
    return any(item.type == "Ready" and item.status == "True" for item in conditions)


def fresh_folder(name: str) -> Path:
    """Returns an empty folder with a short path, which unix sockets require."""
    folder = CACHE / name
    unmount_below(folder)  # mounts of a killed session keep the folder from being removed
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder
