"""An installed release on the test cluster, and its REST API."""

import base64
import itertools
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import yaml
from kubernetes.client import ApiException

from tests.cluster.node import Cluster
from tests.helpers.chart import CHART, PROFILES, ROOT
from tests.helpers.patching import patch_run
from tests.helpers.tools import require

NAMESPACE = "slipstream"
WORKERS = f"{NAMESPACE}-workers"
"""Namespace of the worker pods, which the chart makes."""
TEAM = "team-a"
"""Namespace whose RLRuns the release serves."""
CLEARING_S = 180.0
"""Pods end with their run; a busy node takes a while to clear them away."""
_EXAMPLES = ROOT / "examples"
_CLAIMS = {"checkpoints": WORKERS, "models": WORKERS, "state": NAMESPACE}


@dataclass(frozen=True, slots=True)
class Installed:
    """A release in ready state."""

    cluster: Cluster
    api: httpx.Client
    install_s: float
    """Time from ``helm install --wait`` to its return."""
    figures: dict[str, float] = field(default_factory=dict)
    """Measurements of the tests."""
    values: dict[str, str] = field(default_factory=dict)
    """Values that tests change, by their keys, as the release has them."""

    def member(self, project: str) -> "Installed":
        """The same release as an operator of another project sees it."""
        made = self.execute(
            "deploy/demo-slipstream-controller",
            "-m", "services.controller.tokens", "create", "member", "--project", project,
            namespace=NAMESPACE,
        )  # fmt: skip
        return replace(self, api=open_api(str(self.api.base_url), made.strip()))

    def execute(self, pod: str, *arguments: str, namespace: str = WORKERS) -> str:
        """Run Python in a pod and return its output."""
        return self.cluster.command(
            "kubectl", "-n", namespace, "exec", pod, "--", "python", *arguments
        )

    def helm(self, *arguments: str) -> str:
        """Run Helm in the release's namespace."""
        return helm(self.cluster, *arguments)

    def submit(self, **overrides: Any) -> str:
        """Submits the sort4 example, changed at the top level of its sections; returns the run's id."""
        spec = sort4_spec()
        for section, values in overrides.items():
            is_section = isinstance(values, dict)
            spec[section] = {**spec.get(section, {}), **values} if is_section else values
        answer = self.api.post("/v1/runs", json=spec)
        assert answer.status_code == 201, answer.text
        run_id: str = answer.json()["id"]
        return run_id

    def run(self, run_id: str) -> dict[str, Any]:
        """A run as the API shows it."""
        return dict(self.api.get(f"/v1/runs/{run_id}").raise_for_status().json())

    def events(self, run_id: str, type_: str = "") -> list[dict[str, Any]]:
        """Events of a run."""
        answer = self.api.get(f"/v1/runs/{run_id}/events", params={"type": type_})
        return list(answer.raise_for_status().json()["items"])

    def wait(
        self, run_id: str, condition: Callable[[dict[str, Any]], bool], timeout_s: float
    ) -> dict[str, Any]:
        """Waits until the run fulfils a condition; one that ends otherwise is an error."""
        deadline = time.monotonic() + timeout_s
        while True:
            run = self.run(run_id)
            if condition(run):
                return run
            assert run["state"] not in ("FAILED", "CANCELLED"), run["message"]
            assert time.monotonic() < deadline, f"{run['state']}: {self.events(run_id)[-3:]}"
            time.sleep(0.5)

    def scale(self, run_id: str, replicas: int) -> None:
        """Change a run's number of rollouts through the API."""
        patch_run(self.api, run_id, {"rollout_replicas": replicas})

    def workers(self, run_id: str) -> set[str]:
        """Pods of a run that are not ending, without the run's name."""
        prefix = f"{run_id.replace('_', '-')}-"
        pods = [pod for pod in self.pods(run_id) if pod.metadata.deletion_timestamp is None]
        return {pod.metadata.name.removeprefix(prefix) for pod in pods}

    def upgrade(self, *values: str) -> None:
        """Upgrades the release to values, unless it has them; returns when the API answers."""
        wanted = dict(value.split("=", 1) for value in values)
        if wanted.items() <= self.values.items():
            return
        changes = [part for value in values for part in ("--set", value)]
        self.helm("upgrade", "demo", str(CHART), "--reset-then-reuse-values", "--wait", *changes)
        self.values.update(wanted)
        self.ready()

    def ready(self, timeout_s: float = 120.0) -> None:
        """Waits until the API answers, as it does not while the controller is replaced."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                self.api.get("/v1/runs", timeout=2).raise_for_status()
            except httpx.HTTPError:
                assert time.monotonic() < deadline, "the API does not answer"
                time.sleep(0.5)
            else:
                return

    def cancel_runs(self) -> None:
        """Ends runs that a failed test left, and waits until their pods are gone."""
        self.ready()
        left = [run["id"] for run in self.api.get("/v1/runs").json()["items"] if not _is_over(run)]
        for run_id in left:
            self.api.post(f"/v1/runs/{run_id}/cancel").raise_for_status()
            # The controller would wait up to a minute for a pod whose containers never started.
            remove = self.cluster.core.delete_collection_namespaced_pod
            selector = f"slipstream.dev/run={run_id}"
            remove(WORKERS, label_selector=selector, grace_period_seconds=0)
        eventually(lambda: not any(map(self.pods, left)), timeout_s=CLEARING_S)

    def pods(self, run_id: str = "") -> list[Any]:
        """Pods of the release, or of one run."""
        selector = f"slipstream.dev/run={run_id}" if run_id else ""
        return list_pods(self.cluster, selector)


def list_pods(cluster: Cluster, selector: str = "") -> list[Any]:
    """Pods of the release in both of its namespaces, besides deleted ones that have ended.

    A kubelet that misses the end of a container shows such a pod until it collects containers, once a minute.
    """
    listed = [
        cluster.core.list_namespaced_pod(namespace, label_selector=selector).items
        for namespace in (NAMESPACE, WORKERS)
    ]
    return [pod for pod in itertools.chain.from_iterable(listed) if not has_ended(pod)]


def has_ended(pod: Any) -> bool:
    """Returns True for a deleted pod whose containers have all ended, or whose grace period is over."""
    if (deadline := pod.metadata.deletion_timestamp) is None:
        return False
    containers = pod.status.container_statuses or []
    return datetime.now(UTC) >= deadline or all(one.state.terminated for one in containers)


def _is_over(run: dict[str, Any]) -> bool:
    return run["state"] in ("SUCCEEDED", "FAILED", "CANCELLED")


def helm(cluster: Cluster, *arguments: str) -> str:
    """Run Helm in the release's namespace."""
    (program,) = require("helm4")
    return cluster.command(program, *arguments, "--namespace", NAMESPACE, timeout_s=300)


def sort4_spec() -> dict[str, Any]:
    """The sort4 example with its code where the pods have it."""
    text = (_EXAMPLES / "sort4.yaml").read_text(encoding="utf-8")
    spec: dict[str, Any] = yaml.safe_load(text.replace("sort4.py:", "sort4:"))
    return spec


@contextmanager
def installed_release(cluster: Cluster) -> Iterator[Installed]:
    """A release with the CPU profile until the block ends; what its pods said is kept."""
    try:
        yield _install(cluster)
    finally:
        keep_logs(cluster, cluster.folder / "pods")
        _uninstall(cluster)


def _install(cluster: Cluster) -> Installed:
    for namespace in (NAMESPACE, TEAM):
        create_namespace(cluster, namespace)
    make_volume(cluster, "state")
    begin = time.monotonic()
    helm(
        cluster, "install", "demo", str(CHART), "--wait", "--timeout", "120s",
        "-f", str(PROFILES / "cpu-smoke.yaml"), "--set", "image.registry=localhost,image.tag=test",
        "--set", "workers.codeConfigMap=code,workers.checkpoints.existingClaim=checkpoints",
        "--set", "workers.modelCache.existingClaim=models,controller.persistence.existingClaim=state",
        "--set", "controller.persistence.enabled=true,transferqueue.shards=2",
        "--set", f"workers.rolloutScales.enabled=true,rlruns.namespaces={{{TEAM}}}",
        "--set", "trackers.enabled=true,trackers.persistence.enabled=false",
    )  # fmt: skip
    install_s = time.monotonic() - begin
    code = {"sort4.py": (_EXAMPLES / "sort4.py").read_text(encoding="utf-8")}
    cluster.core.create_namespaced_config_map(WORKERS, {"metadata": {"name": "code"}, "data": code})
    for name in ("checkpoints", "models"):
        make_volume(cluster, name)
    service = cluster.core.read_namespaced_service("demo-slipstream-controller", NAMESPACE)
    secret = cluster.core.read_namespaced_secret("demo-slipstream-admin-token", NAMESPACE)
    token = base64.b64decode(secret.data["token"]).decode()
    api = open_api(f"http://{service.spec.cluster_ip}:8080", token)
    release = Installed(cluster, api, install_s, values={"workers.jobSet.enabled": "false"})
    release.ready()  # kube-proxy learns of the pod a moment after Helm
    return release


def _uninstall(cluster: Cluster) -> None:
    """Removes the release and its objects."""
    helm(cluster, "uninstall", "demo", "--wait", "--ignore-not-found")
    core = cluster.core
    for name, namespace in _CLAIMS.items():  # those of workers, too, outlive the release
        core.delete_namespaced_persistent_volume_claim(name, namespace)
    eventually(lambda: not core.list_persistent_volume_claim_for_all_namespaces().items, CLEARING_S)
    core.delete_namespace(WORKERS)
    eventually(lambda: WORKERS not in namespaces(cluster), CLEARING_S)
    for name in _CLAIMS:
        core.delete_persistent_volume(name)
    eventually(lambda: not core.list_persistent_volume().items, CLEARING_S)
    shutil.rmtree(cluster.folder / "volumes")


def open_api(url: str, token: str) -> httpx.Client:
    """A client of the API; each call has a connection of its own, as a kept one may be closed by then."""
    return httpx.Client(
        headers={"Authorization": f"Bearer {token}"},
        base_url=url,
        timeout=30,
        trust_env=False,
        transport=httpx.HTTPTransport(
            retries=8,  # the controller may be on its way
            limits=httpx.Limits(max_keepalive_connections=0),
        ),
    )


def make_volume(cluster: Cluster, name: str) -> None:
    """A claim with a folder of this machine behind it."""
    folder = cluster.folder / "volumes" / name
    folder.mkdir(parents=True)
    folder.chmod(0o777)  # kubelets do not give folders of the host to a pod's group
    size = {"storage": "1Gi"}
    cluster.core.create_persistent_volume(
        {
            "metadata": {"name": name},
            "spec": {
                "capacity": size,
                "accessModes": ["ReadWriteMany"],
                "hostPath": {"path": str(folder)},
                "storageClassName": "test",
                "claimRef": {"name": name, "namespace": _CLAIMS[name]},
            },
        }
    )
    cluster.core.create_namespaced_persistent_volume_claim(
        _CLAIMS[name],
        {
            "metadata": {"name": name},
            "spec": {
                "accessModes": ["ReadWriteMany"],
                "resources": {"requests": size},
                "storageClassName": "test",
                "volumeName": name,
            },
        },
    )


def namespaces(cluster: Cluster) -> set[str]:
    """Names of all namespaces."""
    return {namespace.metadata.name for namespace in cluster.core.list_namespace().items}


def create_namespace(cluster: Cluster, name: str) -> None:
    """Creates a namespace unless it is there."""
    try:
        cluster.core.create_namespace({"metadata": {"name": name}})
    except ApiException as error:
        if error.status != 409:
            raise


def keep_logs(cluster: Cluster, folder: Path) -> None:
    """Writes the logs of every started pod."""
    folder.mkdir(exist_ok=True)
    for pod in list_pods(cluster):
        name, namespace = pod.metadata.name, pod.metadata.namespace
        try:
            text = cluster.command("kubectl", "-n", namespace, "logs", name, "--all-containers")
        except RuntimeError as error:  # it may have no container yet, or be gone by now
            text = str(error)
        (folder / f"{name}.log").write_text(text, encoding="utf-8")


def eventually(condition: Callable[[], bool], timeout_s: float) -> None:
    """Waits until a condition holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.5)
