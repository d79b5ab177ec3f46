"""Release of the chart on the test cluster, and its REST API."""

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
"""Namespace of the worker pods, which the chart creates."""
TEAM = "team-a"
"""Namespace whose RLRuns the release serves."""
CLEARING_S = 180.0
"""Time limit for the removal of an ended run's pods, which a busy node delays."""
_EXAMPLES = ROOT / "examples"
_CLAIMS = {"checkpoints": WORKERS, "models": WORKERS, "state": NAMESPACE}


@dataclass(frozen=True, slots=True)
class Installed:
    """Release whose API answers."""

    cluster: Cluster
    api: httpx.Client
    install_s: float
    """Time from ``helm install --wait`` to its return."""
    figures: dict[str, float] = field(default_factory=dict)
    """Measurements of the tests, by name."""
    values: dict[str, str] = field(default_factory=dict)
    """Current values of the chart's keys that tests change."""

    def member(self, project: str) -> "Installed":
        """Returns this release with an API client of a user of another project."""
        token = self.execute(
            "deploy/demo-slipstream-controller",
            "-m", "services.controller.tokens", "create", "member", "--project", project,
            namespace=NAMESPACE,
        )  # fmt: skip
        return replace(self, api=open_api(str(self.api.base_url), token.strip()))

    def execute(self, pod: str, *arguments: str, namespace: str = WORKERS) -> str:
        """Runs Python in a pod and returns its output."""
        return self.cluster.command(
            "kubectl", "-n", namespace, "exec", pod, "--", "python", *arguments
        )

    def helm(self, *arguments: str) -> str:
        """Runs Helm in the release's namespace and returns its output."""
        return helm(self.cluster, *arguments)

    def submit(self, **overrides: Any) -> str:
        """Submits the sort4 example with some keys of its sections changed; returns the run's id."""
        spec = sort4_spec()
        for section, values in overrides.items():
            is_section = isinstance(values, dict)
            spec[section] = {**spec.get(section, {}), **values} if is_section else values
        answer = self.api.post("/v1/runs", json=spec)
        assert answer.status_code == 201, answer.text
        run_id: str = answer.json()["id"]
        return run_id

    def run(self, run_id: str) -> dict[str, Any]:
        """Returns a run as the API shows it."""
        return dict(self.api.get(f"/v1/runs/{run_id}").raise_for_status().json())

    def events(self, run_id: str, type_: str = "") -> list[dict[str, Any]]:
        """Returns the events of a run, optionally of one type."""
        answer = self.api.get(f"/v1/runs/{run_id}/events", params={"type": type_})
        return list(answer.raise_for_status().json()["items"])

    def wait(
        self, run_id: str, condition: Callable[[dict[str, Any]], bool], timeout_s: float
    ) -> dict[str, Any]:
        """Waits until a run meets a condition and returns it; a failed or cancelled run is an error."""
        deadline = time.monotonic() + timeout_s
        while True:
            run = self.run(run_id)
            if condition(run):
                return run
            assert run["state"] not in ("FAILED", "CANCELLED"), run["message"]
            assert time.monotonic() < deadline, f"{run['state']}: {self.events(run_id)[-3:]}"
            time.sleep(0.5)

    def scale(self, run_id: str, replicas: int) -> None:
        """Changes a run's number of rollouts through the API."""
        patch_run(self.api, run_id, {"rollout_replicas": replicas})

    def workers(self, run_id: str) -> set[str]:
        """Returns the names of a run's pods that are not being deleted, without the prefix of the run."""
        prefix = f"{run_id.replace('_', '-')}-"
        pods = [pod for pod in self.pods(run_id) if pod.metadata.deletion_timestamp is None]
        return {pod.metadata.name.removeprefix(prefix) for pod in pods}

    def upgrade(self, *values: str) -> None:
        """Upgrades the release to values unless it has them, and waits until the API answers."""
        new_values = dict(value.split("=", 1) for value in values)
        if new_values.items() <= self.values.items():
            return
        changes = [argument for value in values for argument in ("--set", value)]
        self.helm("upgrade", "demo", str(CHART), "--reset-then-reuse-values", "--wait", *changes)
        self.values.update(new_values)
        self.ready()

    def ready(self, timeout_s: float = 120.0) -> None:
        """Waits until the API answers; it does not answer while the controller is replaced."""
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
        """Cancels runs that a failed test left, and waits until their pods are gone."""
        self.ready()
        run_ids = [
            run["id"] for run in self.api.get("/v1/runs").json()["items"] if not _is_over(run)
        ]
        for run_id in run_ids:
            self.api.post(f"/v1/runs/{run_id}/cancel").raise_for_status()
            # The controller waits up to a minute for a pod whose containers never started.
            remove = self.cluster.core.delete_collection_namespaced_pod
            selector = f"slipstream.dev/run={run_id}"
            remove(WORKERS, label_selector=selector, grace_period_seconds=0)
        eventually(lambda: not any(map(self.pods, run_ids)), timeout_s=CLEARING_S)

    def pods(self, run_id: str = "") -> list[Any]:
        """Returns the pods of the release, or of one run."""
        selector = f"slipstream.dev/run={run_id}" if run_id else ""
        return list_pods(self.cluster, selector)


def list_pods(cluster: Cluster, selector: str = "") -> list[Any]:
    """Returns the release's pods in both of its namespaces, without deleted pods that have ended.

    A kubelet that misses the end of a container reports such a pod until it collects containers, once a
    minute.
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
    return datetime.now(UTC) >= deadline or all(
        container.state.terminated for container in containers
    )


def _is_over(run: dict[str, Any]) -> bool:
    return run["state"] in ("SUCCEEDED", "FAILED", "CANCELLED")


def helm(cluster: Cluster, *arguments: str) -> str:
    """Runs Helm in the release's namespace and returns its output."""
    (program,) = require("helm4")
    return cluster.command(program, *arguments, "--namespace", NAMESPACE, timeout_s=300)


def sort4_spec() -> dict[str, Any]:
    """Returns the sort4 example, which names its code as the module that pods have."""
    text = (_EXAMPLES / "sort4.yaml").read_text(encoding="utf-8")
    spec: dict[str, Any] = yaml.safe_load(text.replace("sort4.py:", "sort4:"))
    return spec


@contextmanager
def installed_release(cluster: Cluster, *, has_trackers: bool = True) -> Iterator[Installed]:
    """Installs a release with the CPU profile until the block ends, and then writes its pods' logs."""
    try:
        yield _install(cluster, has_trackers=has_trackers)
    finally:
        keep_logs(cluster, cluster.folder / "pods")
        _uninstall(cluster)


def _install(cluster: Cluster, *, has_trackers: bool) -> Installed:
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
        "--set", f"trackers.enabled={str(has_trackers).lower()},trackers.persistence.enabled=false",
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
    release.ready()  # kube-proxy routes to the pod a moment after Helm returns
    return release


def _uninstall(cluster: Cluster) -> None:
    """Removes the release and its objects."""
    helm(cluster, "uninstall", "demo", "--wait", "--ignore-not-found")
    core = cluster.core
    for name, namespace in _CLAIMS.items():  # claims outlive the release, also those of workers
        core.delete_namespaced_persistent_volume_claim(name, namespace)
    eventually(lambda: not core.list_persistent_volume_claim_for_all_namespaces().items, CLEARING_S)
    core.delete_namespace(WORKERS)
    eventually(lambda: WORKERS not in namespaces(cluster), CLEARING_S)
    for name in _CLAIMS:
        core.delete_persistent_volume(name)
    eventually(lambda: not core.list_persistent_volume().items, CLEARING_S)
    shutil.rmtree(cluster.folder / "volumes")


def open_api(url: str, token: str, *, retries: int = 8) -> httpx.Client:
    """Returns a client of the API with one connection per call, because an idle one may have been closed.

    Args:
        retries: Repetitions of a connection that fails, because the controller may still be starting.
    """
    return httpx.Client(
        headers={"Authorization": f"Bearer {token}"},
        base_url=url,
        timeout=30,
        trust_env=False,
        transport=httpx.HTTPTransport(
            retries=retries,
            limits=httpx.Limits(max_keepalive_connections=0),
        ),
    )


def make_volume(cluster: Cluster, name: str) -> None:
    """Creates a volume in a folder of this machine, and a claim that is bound to it."""
    folder = cluster.folder / "volumes" / name
    folder.mkdir(parents=True)
    folder.chmod(0o777)  # a kubelet does not change the group of host folders to that of the pod
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
    """Returns the names of all namespaces."""
    return {namespace.metadata.name for namespace in cluster.core.list_namespace().items}


def create_namespace(cluster: Cluster, name: str) -> None:
    """Creates a namespace unless it exists."""
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
        except RuntimeError as error:  # the pod may have no container yet, or no longer exist
            text = str(error)
        (folder / f"{name}.log").write_text(text, encoding="utf-8")


def eventually(condition: Callable[[], bool], timeout_s: float) -> None:
    """Waits until a condition holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.5)


def assert_ledger_closes(run: dict[str, dict[str, dict[str, int]]]) -> None:
    """Asserts that every issued prompt is accounted for."""
    prompts = run["summary"]["prompts"]
    ended = ("consumed", "dropped", "quarantined", "outstanding")
    assert prompts["issued"] == sum(prompts[state] for state in ended)
