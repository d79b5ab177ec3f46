"""Pods of a release and of its runs, as processes on the nodes of a network.

Commands, settings and hosts are those that the chart and the controller's launcher give to pods. A
pod has its own host name, ``/tmp`` and process ids; its other volumes are folders of this machine.
"""

import base64
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml

from services.common.runspec.run import RunSpec
from services.common.security.credentials import issue_token, read_key
from services.common.security.issuer import Issuer
from services.common.security.tls import peer_name
from services.extras.kubernetes.worker_pods import TLS_FILES, build_pods, load_templates
from tests.helpers.chart import ROOT, Manifest, one, pods, render
from tests.nodes.network import Node

_SERVICES = ("controller", "transferqueue")
_AGAIN_S = 1.0
_VOLUMES = re.compile(r"(?<![\w/])/(etc|opt|var/lib|var/cache|var/log|var/spool)/slipstream")


@dataclass(frozen=True, slots=True)
class Folders:
    """Volumes of the pods; all pods share the volumes that are not secrets."""

    root: Path

    def located(self, text: str, *, is_worker: bool = False) -> str:
        """Returns a text with the paths of pods replaced by those of this machine."""
        if is_worker:  # at this path services have an issuer, workers the certificate of their run
            text = text.replace("/etc/slipstream/tls", "/etc/slipstream/run")
        return _VOLUMES.sub(lambda match: f"{self.root}/{match.group(1)}", text)

    def make(self, path: str) -> Path:
        """Creates and returns this machine's folder for a path in pods."""
        folder = Path(self.located(path))
        folder.mkdir(parents=True, exist_ok=True)
        return folder


@dataclass
class Pod:
    """Pod on a node, which can be started repeatedly."""

    name: str
    node: Node
    command: Sequence[str]
    environment: Mapping[str, str]
    temporary: Path
    hosts: Path
    log: Path
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        inside = (
            'hostname "$1" && mount --bind "$2" /etc/hosts && mount --bind "$3" /tmp && shift 3 && exec "$@"',
            *("pod", self.name, str(self.hosts), str(self.temporary), *self.command),
        )
        shutil.rmtree(self.temporary, ignore_errors=True)
        self.temporary.mkdir(parents=True)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [
                    *("nsenter", f"--net={self.node.namespace}", "--"),
                    *("unshare", "--mount", "--uts", "--pid", "--fork", "--mount-proc"),
                    *("--kill-child=KILL", "sh", "-c", *inside),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.temporary,
                env=dict(self.environment),
                start_new_session=True,
            )

    @property
    def has_ended(self) -> bool:
        return self.process is None or self.process.poll() is not None

    def kill(self) -> None:
        """Kills all processes of the pod; returns when they are gone."""
        if self.process is None:
            return
        with suppress(psutil.NoSuchProcess):  # the pod has ended by itself
            # All processes of the pod end with its first one, for which `unshare` waits.
            for first in psutil.Process(self.process.pid).children():
                first.kill()
                self.process.wait()
        self.process.kill()
        self.process.wait()


class Release:
    """Controller and transferqueue on their nodes, with the settings of the chart.

    Args:
        nodes: Nodes ``controller``, ``transferqueue`` and those of workers.
        settings: Environment variables that differ from the chart's.
    """

    def __init__(self, root: Path, nodes: Mapping[str, Node], settings: Mapping[str, str]) -> None:
        self._folders = Folders(root)
        self._settings = settings
        self._logs = self._folders.make("/var/log/slipstream")
        manifests = render()
        self._write_secrets(manifests)
        self._templates = self._folders.make("/etc/slipstream/workers")
        for name, text in one(manifests, "ConfigMap", "demo-slipstream-workers")["data"].items():
            (self._templates / name).write_text(text)
        self.code = self._folders.make("/opt/slipstream/code")
        self.state = self._folders.make("/var/lib/slipstream")
        self._folders.make("/var/spool/slipstream")
        self._folders.make("/var/cache/slipstream")
        self._names = {nodes[name].ip: f"demo-slipstream-{name}.train.svc" for name in _SERVICES}
        specs = pods(manifests)
        self._services = [self._pod(name, specs[name], nodes[name]) for name in _SERVICES]

    @property
    def token(self) -> str:
        """API token of the first admin."""
        return (self._folders.make("/etc/slipstream/admin") / "token").read_text().strip()

    def start(self) -> None:
        """Starts the services."""
        for pod in self._services:
            pod.start()

    def _write_secrets(self, manifests: Sequence[Manifest]) -> None:
        places = {"service-key": "service-key", "admin-token": "admin", "issuer": "tls"}
        for name, folder in places.items():
            secret = one(manifests, "Secret", f"demo-slipstream-{name}")
            for key, value in _values(secret).items():
                (self._folders.make(f"/etc/slipstream/{folder}") / key).write_bytes(value)

    def _issue_certificate(self, run_id: str) -> None:
        issuer = Issuer(self._folders.make("/etc/slipstream/tls"))
        certificate = issuer.issue(peer_name("worker", run_id))
        contents = certificate.chain, certificate.key, certificate.authority
        for name, content in zip(TLS_FILES, contents, strict=True):
            (self._folders.make("/etc/slipstream/run") / name).write_bytes(content)

    def workers(
        self,
        run_id: str,
        spec: RunSpec,
        where: Mapping[str, Node],
        *,
        has_loopback_names: bool = False,
    ) -> "Workers":
        """Starts the pods of a run; restarts all pods of a worker when one of them ends.

        Args:
            where: Node of each pod, by the pod's name without the prefix of the run.
            has_loopback_names: True if each pod resolves its own host name to 127.0.1.1, as pods in the
                network of a Debian node do.
        """
        self._issue_certificate(run_id)
        key = read_key(self._folders.make("/etc/slipstream/service-key") / "key")
        bodies = build_pods(
            load_templates(self._templates),
            run_id,
            spec,
            controller_address="demo-slipstream-controller.train.svc:50051",
            owner={"apiVersion": "v1", "kind": "Service", "name": "demo", "uid": "demo"},
        )
        prefix = f"{run_id.replace('_', '-')}-"
        for body in bodies:
            name, domain = body["metadata"]["name"], body["spec"]["subdomain"]
            self._names[where[name.removeprefix(prefix)].ip] = f"{name}.{domain} {name}"
        started: dict[str, list[Pod]] = {}
        for body in bodies:
            name = body["metadata"]["name"]
            node = where[name.removeprefix(prefix)]
            pod = self._pod(name, body, node, token=issue_token(key, run_id))
            if has_loopback_names:
                pod.hosts.write_text(f"127.0.1.1 {name}\n{pod.hosts.read_text()}")
            started.setdefault(body["spec"]["containers"][0]["name"], []).append(pod)
        return Workers(started)

    def _pod(self, name: str, body: Manifest, node: Node, *, token: str = "") -> Pod:
        (container,) = body["spec"]["containers"]
        facts = {"status.podIP": node.ip, "spec.nodeName": node.name, "metadata.name": name}
        environment: dict[str, str] = {}
        for variable in container["env"]:
            match variable:
                case {"value": value}:
                    expanded = re.sub(r"\$\((\w+)\)", lambda m: environment[m.group(1)], value)
                    text = self._folders.located(expanded, is_worker=bool(token))
                case {"valueFrom": {"fieldRef": {"fieldPath": path}}}:
                    text = facts[path]
                case _:
                    text = token
            environment[variable["name"]] = self._settings.get(variable["name"], text)
        python_path = (
            f"{ROOT}:{ROOT}/proto/gen:{ROOT}/services/client"  # as installed in the images
        )
        environment |= {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = f"{self.code}:{python_path}"
        hosts = self._logs / f"{name}.hosts"
        hosts.write_text(
            "127.0.0.1 localhost\n" + "".join(f"{ip} {at}\n" for ip, at in self._names.items())
        )
        return Pod(
            name=name if token else self._names[node.ip].partition(".")[0],
            node=node,
            command=_command(container),
            environment=environment,
            temporary=self._folders.root / "tmp" / name,
            hosts=hosts,
            log=self._logs / f"{name}.log",
        )

    def logs(self) -> str:
        """Returns the last lines of all pods."""
        files = sorted(self._logs.glob("*.log"))
        return "\n".join(
            f"--- {file.stem}\n" + "\n".join(file.read_text(errors="replace").splitlines()[-12:])
            for file in files
        )

    @property
    def has_ended(self) -> bool:
        """True if a service has ended by itself."""
        return any(pod.has_ended for pod in self._services)

    def close(self) -> None:
        """Ends the services."""
        for pod in self._services:
            pod.kill()


@dataclass
class Workers:
    """Running workers of a run; restarts all pods of a worker when one of them ends."""

    pods: Mapping[str, Sequence[Pod]]
    """Pods by worker."""
    starts: dict[str, int] = field(default_factory=dict)
    """Number of starts by worker, including the first."""
    _lost: set[Node] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _stopped: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._keep, name="nodes", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stopped.set()
        self._thread.join()
        for run_pods in self.pods.values():
            for pod in run_pods:
                pod.kill()

    def lose(self, node: Node) -> None:
        """Takes a node away as a power failure does: nothing leaves it, and its pods are gone."""
        with self._lock:
            node.cut()
            self._lost.add(node)
            for pod in self._on(node):
                pod.kill()

    def bring_back(self, node: Node) -> None:
        """Starts a lost node and its pods."""
        with self._lock:
            node.repair()
            self._lost.remove(node)
            for pod in self._on(node):
                pod.start()

    def _on(self, node: Node) -> list[Pod]:
        return [pod for parts in self.pods.values() for pod in parts if pod.node == node]

    def _keep(self) -> None:
        while True:
            with self._lock:
                self._restart_ended()
            if self._stopped.wait(_AGAIN_S):
                return

    def _restart_ended(self) -> None:
        for name, parts in self.pods.items():
            reachable = [pod for pod in parts if pod.node not in self._lost]
            if any(pod.has_ended for pod in reachable):
                for pod in reachable:
                    pod.kill()
                    pod.start()
                self.starts[name] = self.starts.get(name, 0) + 1


def _values(secret: Manifest) -> dict[str, bytes]:
    encoded = {key: base64.b64decode(text) for key, text in secret.get("data", {}).items()}
    return encoded | {key: text.encode() for key, text in secret.get("stringData", {}).items()}


def _command(container: Mapping[str, Any]) -> list[str]:
    """Returns the command of a container, with this environment's programs."""
    program, *arguments = container.get("command") or _command_of_image(container)
    if program == "torchrun":
        return [sys.executable, "-m", "torch.distributed.run", *arguments]
    assert program == "python"
    return [sys.executable, *arguments]


def _command_of_image(container: Mapping[str, Any]) -> list[str]:
    """Returns the command that the Dockerfile sets for a container's image."""
    stage = re.search(r"/slipstream/(\w+)", container["image"])
    assert stage is not None
    text = (ROOT / "deploy" / "docker" / "Dockerfile").read_text()
    match = re.search(rf" AS {stage.group(1)}\n(?:.+\n)*?CMD (.+)\n", text)
    assert match is not None, stage.group(1)
    return list(yaml.safe_load(match.group(1)))
