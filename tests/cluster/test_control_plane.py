"""The chart and the launcher with a real API server, scheduler and controllers, and fake nodes."""

import asyncio
import base64
import copy
import json
import re
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from kubernetes.client import ApiClient, Configuration, CoreV1Api, CustomObjectsApi, NodeV1Api

from services.common.errors import FailedPreconditionError
from services.common.runspec.loader import parse_spec
from services.common.runspec.run import RunSpec
from services.controller.launch.launcher import WorkerExit
from services.extras.kubernetes.drain import NodeDrains, QueueDrain
from services.extras.kubernetes.launcher import KubernetesLauncher
from services.extras.kubernetes.pod_api import PodApi, follow, service_reference
from services.extras.kubernetes.worker_pods import RUN_LABEL
from tests.cluster.definitions import defined
from tests.cluster.fake_nodes import fake_nodes
from tests.cluster.job_sets import job_set_kind, job_sets, names
from tests.cluster.node import Cluster
from tests.cluster.release import namespaces
from tests.helpers.chart import CHART, PROFILES
from tests.helpers.tools import require

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

NAMESPACE = "train"
WORKERS = "train-workers"
CONTROLLER = "demo-slipstream-controller"
OWNER = "demo-slipstream-workers"
_KINDS = "all,configmap,secret,serviceaccount,role,rolebinding,networkpolicy,pdb,pvc"


def helm(cluster: Cluster, *arguments: str) -> str:
    (program,) = require("helm4")
    return cluster.command(program, *arguments, "--namespace", NAMESPACE)


def install(cluster: Cluster, *arguments: str) -> str:
    return helm(
        cluster, "upgrade", "--install", "demo", str(CHART), "--create-namespace",
        "-f", str(PROFILES / "multi-node.yaml"), "--set", "controller.persistence.enabled=false",
        "--set", "workers.checkpoints.existingClaim=,workers.modelCache.existingClaim=", *arguments,
    )  # fmt: skip


def objects(cluster: Cluster) -> set[str]:
    """Returns the names of the release's objects."""
    selector = "app.kubernetes.io/instance=demo"
    listed = [
        cluster.command("kubectl", "-n", namespace, "get", _KINDS, "-l", selector, "-o", "name")
        for namespace in (NAMESPACE, WORKERS)
    ]
    return set(" ".join(listed).split())


@pytest.fixture(scope="module")
def nodes(cluster: Cluster) -> Iterator[list[str]]:
    NodeV1Api(cluster.core.api_client).create_runtime_class(
        {"metadata": {"name": "nvidia"}, "handler": "nvidia"}
    )
    with fake_nodes(cluster.core, count=2, gpus=8) as names:
        yield names


@pytest.fixture(scope="module")
def release(cluster: Cluster, nodes: list[str]) -> Iterator[None]:
    install(cluster)
    yield
    if objects(cluster):
        helm(cluster, "uninstall", "demo", "--wait")


def test_install_upgrade_rollback_uninstall_leave_nothing(
    cluster: Cluster, nodes: list[str]
) -> None:
    install(cluster)
    before = objects(cluster)
    assert f"deployment.apps/{CONTROLLER}" in before
    install(cluster, "--set", "controller.logLevel=DEBUG")
    helm(cluster, "rollback", "demo", "1")
    history = json.loads(helm(cluster, "history", "demo", "-o", "json"))
    assert [item["revision"] for item in history] == [1, 2, 3]
    helm(cluster, "uninstall", "demo", "--wait")
    assert objects(cluster) == set()
    assert WORKERS not in namespaces(cluster)


@pytest.mark.parametrize(
    ("account", "verb", "resource", "is_allowed"),
    [
        ("controller", "create", "pods", True),
        ("controller", "delete", "pods", True),
        ("controller", "watch", "pods", True),
        ("controller", "get", f"services/{OWNER}", True),
        ("controller", "get", "services/other", False),
        ("controller", "patch", "pods", True),
        ("controller", "update", "pods", False),
        ("controller", "get", "pods --subresource=log", True),
        ("controller", "create", "pods --subresource=exec", False),
        ("controller", "create", "secrets", True),
        ("controller", "delete", "secrets", True),
        ("controller", "get", "secrets", False),
        ("controller", "list", "secrets", False),
        ("controller", "list", "configmaps", False),
        ("controller", "watch", "events", True),
        ("controller", "create", "deployments", False),
        ("controller", "create", "jobsets.jobset.x-k8s.io", False),
        ("worker", "list", "pods", False),
        ("transferqueue", "list", "pods", False),
    ],
)
def test_accounts_may_do_what_they_need_and_no_more(
    cluster: Cluster, release: None, account: str, verb: str, resource: str, is_allowed: bool
) -> None:
    assert may(cluster, account, verb, resource, namespace=WORKERS) is is_allowed
    is_pod_seen = (account, verb, resource) == (
        "controller",
        "watch",
        "pods",
    )  # of the transferqueue
    assert may(cluster, account, verb, resource, namespace=NAMESPACE) is is_pod_seen
    if verb in ("create", "delete", "patch"):
        assert not may(cluster, account, verb, "nodes", namespace=WORKERS)


def may(cluster: Cluster, account: str, verb: str, resource: str, *, namespace: str) -> bool:
    (kubectl,) = require("kubectl")
    home = WORKERS if account == "worker" else NAMESPACE
    result = subprocess.run(
        [
            kubectl, "--kubeconfig", cluster.kubeconfig, "auth", "can-i", verb, *resource.split(),
            "--as", f"system:serviceaccount:{home}:demo-slipstream-{account}", "-n", namespace,
        ],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.stdout.strip() in ("yes", "no"), result.stderr
    return result.stdout.strip() == "yes"


def controller_account(cluster: Cluster) -> CoreV1Api:
    """Returns a client that has the rights of the controller's service account."""
    for secret in cluster.core.list_namespaced_secret(NAMESPACE).items:
        annotations = secret.metadata.annotations or {}
        if annotations.get("kubernetes.io/service-account.name") == CONTROLLER:
            settings = Configuration(host="https://127.0.0.1:6443")
            settings.ssl_ca_cert = str(cluster.folder / "pki" / "ca.crt")
            token = base64.b64decode(secret.data["token"]).decode()
            settings.api_key["authorization"] = f"Bearer {token}"
            return CoreV1Api(ApiClient(settings))
    raise LookupError("the controller's account has no token")


def write_templates(cluster: Cluster, folder: Path) -> Path:
    config = cluster.core.read_namespaced_config_map("demo-slipstream-workers", NAMESPACE)
    for name, text in config.data.items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def make_spec(replicas: int, *, gpus_per_node: int = 8) -> RunSpec:
    return parse_spec(
        {
            "name": "demo",
            "model": {"path": "tiny:qwen2-0.4m"},
            "data": {"train": {"source": "python", "path": "sort4.py:train"}},
            "rollout": {"replicas": replicas, "rewards": [{"name": "exact_match"}]},
            "trainer": {"steps": 1, "prompts_per_step": 1, "world_size": 8},
            "topology": {"gpus_per_node": gpus_per_node},
        }
    )


class Events:
    """Records what a launcher reports to its run."""

    def __init__(self) -> None:
        self.exits: asyncio.Queue[WorkerExit] = asyncio.Queue()
        self.pending: asyncio.Queue[tuple[str, str, str]] = asyncio.Queue()


class QueueingApi(PodApi):
    """Gates new pods as Kueue's webhook does, on an API server that is older than scheduling gates."""

    admin: CoreV1Api

    async def create(self, pod: Mapping[str, Any]) -> dict[str, Any]:
        gated = copy.deepcopy(dict(pod))
        gated["metadata"]["finalizers"] = ["kueue.x-k8s.io/managed"]
        gated["spec"]["schedulerName"] = "none"
        created = await super().create(gated)
        condition = {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated"}
        created["status"]["conditions"] = [condition]
        patch = {"status": {"conditions": [condition]}}
        self.admin.patch_namespaced_pod_status(created["metadata"]["name"], WORKERS, patch)
        return created


async def open_launcher(
    stack: AsyncExitStack,
    cluster: Cluster,
    folder: Path,
    *,
    pending_timeout_s: float = 60.0,
    make_api: type[PodApi] = PodApi,
) -> tuple[KubernetesLauncher, Events]:
    core, events, QueueingApi.admin = controller_account(cluster), Events(), cluster.core
    launcher = KubernetesLauncher(
        make_api(core, WORKERS),
        write_templates(cluster, folder),
        owner=await service_reference(core, WORKERS, OWNER),
        controller_address="controller:50051",
        on_exit=events.exits.put_nowait,
        on_pending=lambda *pending_events: events.pending.put_nowait(pending_events),
        pending_timeout_s=pending_timeout_s,
    )
    changes = await stack.enter_async_context(
        follow(partial(core.list_namespaced_pod, WORKERS, label_selector=RUN_LABEL))
    )
    tasks = await stack.enter_async_context(asyncio.TaskGroup())
    watching = tasks.create_task(launcher.watch(changes))
    stack.callback(watching.cancel)
    return launcher, events


def run_pods(cluster: Cluster, run_id: str) -> dict[str, tuple[str, str]]:
    """Returns phase and node of a run's pods, by name."""
    listed = cluster.core.list_namespaced_pod(WORKERS, label_selector=f"{RUN_LABEL}={run_id}")
    return {pod.metadata.name: (pod.status.phase, pod.spec.node_name) for pod in listed.items}


async def until(condition: object, timeout_s: float = 30.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110  the API server has to be polled
            await asyncio.sleep(0.1)


async def test_workers_with_gpus_are_placed_and_removed_with_the_controllers_rights(
    cluster: Cluster, release: None, nodes: list[str], tmp_path: Path
) -> None:
    async with AsyncExitStack() as stack:
        launcher, events = await open_launcher(stack, cluster, tmp_path)
        await launcher.start("run_a1", make_spec(replicas=4))

        def all_run() -> bool:
            pods = run_pods(cluster, "run_a1").values()
            return len(pods) == 5 and all(phase == "Running" for phase, _ in pods)

        await until(all_run)
        pods = run_pods(cluster, "run_a1")
        trainer_node = pods["run-a1-trainer-0"][1]
        rollout_nodes = {node for name, (_, node) in pods.items() if "rollout" in name}
        assert rollout_nodes == set(nodes) - {trainer_node}, "the trainer fills its node's 8 GPUs"
        await launcher.stop("run_a1")
        assert run_pods(cluster, "run_a1") == {}
        assert events.exits.empty()


async def test_a_deleted_pod_is_reported_within_seconds(
    cluster: Cluster, release: None, nodes: list[str], tmp_path: Path
) -> None:
    async with AsyncExitStack() as stack:
        launcher, events = await open_launcher(stack, cluster, tmp_path)
        await launcher.start("run_a2", make_spec(replicas=1))
        await until(
            lambda: run_pods(cluster, "run_a2").get("run-a2-rollout-0", ("",))[0] == "Running"
        )
        cluster.core.delete_namespaced_pod("run-a2-rollout-0", WORKERS)
        async with asyncio.timeout(30):
            assert (await events.exits.get()).worker_id == "rollout-0"
        await launcher.stop("run_a2")


async def test_a_run_that_cannot_be_scheduled_fails_with_the_reason(
    cluster: Cluster, release: None, nodes: list[str], tmp_path: Path
) -> None:
    async with AsyncExitStack() as stack:
        launcher, events = await open_launcher(stack, cluster, tmp_path, pending_timeout_s=3)
        await launcher.start("run_a3", make_spec(replicas=20))
        async with asyncio.timeout(20):
            _, reason, message = await events.pending.get()
            exit_ = await events.exits.get()
        assert reason == "Unschedulable"
        assert "nvidia.com/gpu" in message
        assert "could not start: Unschedulable" in exit_.last_lines
        await launcher.stop("run_a3")


async def test_kubectl_drain_ends_once_the_workers_have_left_and_nothing_is_lost(
    cluster: Cluster, release: None, nodes: list[str], tmp_path: Path
) -> None:
    spec, core = make_spec(replicas=1), controller_account(cluster)
    async with AsyncExitStack() as stack:
        launcher, events = await open_launcher(stack, cluster, tmp_path)
        drained_workers: asyncio.Queue[frozenset[str]] = asyncio.Queue()
        drains = NodeDrains(
            [],
            pods=launcher.placed_pods,
            on_drained=lambda run_id, host, workers: drained_workers.put_nowait(workers),
            on_in_service=lambda node: None,
        )
        launcher.on_placed = drains.notify
        changes = await stack.enter_async_context(follow(core.list_node, "nodes"))
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        watching = tasks.create_task(drains.watch(changes))
        stack.callback(watching.cancel)
        await launcher.start("run_d1", spec)
        trainer = "run-d1-trainer-0"
        await until(lambda: run_pods(cluster, "run_d1").get(trainer, ("",))[0] == "Running")
        drained = run_pods(cluster, "run_d1")[trainer][1]
        draining = asyncio.ensure_future(
            asyncio.to_thread(
                cluster.command, "kubectl", "drain", drained, "--force", "--ignore-daemonsets",
                "--delete-emptydir-data", "--timeout=120s",
            )
        )  # fmt: skip
        try:
            async with asyncio.timeout(30):
                assert "trainer-0" in await drained_workers.get()
            # The step in progress ends, and its checkpoint is saved; evictions are refused meanwhile.
            await asyncio.sleep(7)
            assert not draining.done()
            assert run_pods(cluster, "run_d1")[trainer] == ("Running", drained)
            await launcher.release("run_d1", {"trainer-0"})
            starting = asyncio.ensure_future(launcher.start("run_d1", spec))
            async with asyncio.timeout(60):
                await draining
            placed = [pods[1] for pods in run_pods(cluster, "run_d1").values()]
            assert drained not in placed
            if not starting.done():  # the rollout's GPU leaves no room for eight on the other node
                async with asyncio.timeout(30):
                    while (await events.pending.get())[1] != "NoRoom":
                        pass
                await asyncio.to_thread(cluster.command, "kubectl", "uncordon", drained)
            async with asyncio.timeout(60):
                await starting
            assert events.exits.empty()
        finally:
            await asyncio.to_thread(cluster.command, "kubectl", "uncordon", drained)
        await launcher.stop("run_d1")


async def test_the_transferqueue_leaves_a_drained_node_once_runs_have_saved_checkpoints(
    cluster: Cluster, release: None, nodes: list[str]
) -> None:
    core, pod, node = controller_account(cluster), "demo-slipstream-transferqueue-0", nodes[0]
    selector = "app.kubernetes.io/instance=demo,app.kubernetes.io/component=transferqueue"

    def placed() -> dict[str, tuple[str, str]]:
        listed = cluster.core.list_namespaced_pod(NAMESPACE, label_selector=selector).items
        return {pod.metadata.uid: (pod.status.phase, pod.spec.node_name) for pod in listed}

    await until(lambda: len(placed()) == 1)
    (former,) = placed()
    binding = {"metadata": {"name": pod}, "target": {"kind": "Node", "name": node}}
    cluster.core.create_namespaced_binding(NAMESPACE, binding, _preload_content=False)
    await until(lambda: placed() == {former: ("Running", node)})
    saves, saved = asyncio.Event(), asyncio.Event()

    async def save() -> None:
        saves.set()
        await saved.wait()

    drains = NodeDrains(
        [], pods=lambda: (), on_drained=lambda *told: None, on_in_service=lambda name: None
    )
    queue = QueueDrain(PodApi(core, NAMESPACE), drains, save=save)
    drains.on_changed = queue.notify
    async with AsyncExitStack() as stack:
        seen_nodes = await stack.enter_async_context(follow(core.list_node, "nodes"))
        listing = partial(core.list_namespaced_pod, NAMESPACE, label_selector=selector)
        seen_pods = await stack.enter_async_context(follow(listing))
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        for work in (drains.watch(seen_nodes), queue.watch(seen_pods)):
            stack.callback(tasks.create_task(work).cancel)
        draining = asyncio.ensure_future(
            asyncio.to_thread(
                cluster.command, "kubectl", "drain", node, "--force", "--ignore-daemonsets",
                "--delete-emptydir-data", "--timeout=120s",
            )
        )  # fmt: skip
        try:
            async with asyncio.timeout(30):
                await saves.wait()
            await asyncio.sleep(7)  # longer than kubectl waits before it repeats an eviction
            assert not draining.done()
            assert placed() == {former: ("Running", node)}
            saved.set()
            async with asyncio.timeout(60):
                await draining
            assert former not in placed(), "its StatefulSet has created another one"
        finally:
            await asyncio.to_thread(cluster.command, "kubectl", "uncordon", node)


async def test_a_run_waits_for_its_queue_and_leaves_it(
    cluster: Cluster, release: None, nodes: list[str], tmp_path: Path
) -> None:
    install(cluster, "--set", "workers.kueue.queueName=gpus")
    async with AsyncExitStack() as stack:
        launcher, events = await open_launcher(
            stack, cluster, tmp_path, pending_timeout_s=2, make_api=QueueingApi
        )
        cancelled = asyncio.ensure_future(launcher.start("run_a4", make_spec(replicas=1)))
        await until(lambda: len(run_pods(cluster, "run_a4")) == 2)
        cancelled.cancel()
        await launcher.stop("run_a4")
        assert run_pods(cluster, "run_a4") == {}

        starting = asyncio.ensure_future(launcher.start("run_a5", make_spec(replicas=1)))
        await until(lambda: len(run_pods(cluster, "run_a5")) == 2)
        await asyncio.sleep(3)
        assert set(run_pods(cluster, "run_a5").values()) == {("Pending", None)}
        assert not starting.done()
        assert events.exits.empty(), "a queue may take longer than a start"
        pending_events = {events.pending.get_nowait() for _ in range(events.pending.qsize())}
        why = "pod run-a5-rollout-0: waiting for admission by the queue gpus"
        assert ("run_a5", "SchedulingGated", why) in pending_events

        def admit(pod: str) -> None:
            binding = {"metadata": {"name": pod}, "target": {"kind": "Node", "name": nodes[0]}}
            cluster.core.create_namespaced_binding(WORKERS, binding, _preload_content=False)

        for pod in run_pods(cluster, "run_a5"):
            admit(pod)
        await starting
        await launcher.end("run_a5", "rollout-0")
        assert set(run_pods(cluster, "run_a5")) == {"run-a5-trainer-0"}
        starting = asyncio.ensure_future(launcher.start("run_a5", make_spec(replicas=1)))
        await until(lambda: len(run_pods(cluster, "run_a5")) == 2)
        admit("run-a5-rollout-0")
        await starting

        # Added rollouts wait for admission alone; the run continues.
        async with asyncio.timeout(30):
            await launcher.start("run_a5", make_spec(replicas=3))
        await until(lambda: launcher.queued("run_a5") == {"rollout-1", "rollout-2"})
        extra = cluster.core.read_namespaced_pod("run-a5-rollout-1", WORKERS).metadata
        assert extra.labels["kueue.x-k8s.io/pod-group-name"] == "run-a5-rollout-1"
        assert extra.annotations["kueue.x-k8s.io/pod-group-total-count"] == "1"
        admit("run-a5-rollout-1")
        # The API server first shows a new pod without the patched condition.
        await until(lambda: launcher.queued("run_a5") == {"rollout-2"})
        async with asyncio.timeout(30):
            assert await launcher.admitted("run_a5", ["rollout-1", "rollout-2"]) == {"rollout-1"}
        await launcher.end("run_a5", "rollout-2")
        assert "run-a5-rollout-2" not in run_pods(cluster, "run_a5")
        later, _ = await open_launcher(stack, cluster, tmp_path, make_api=QueueingApi)
        async with asyncio.timeout(30):
            await later.start("run_a5", make_spec(replicas=3))
        await until(lambda: later.queued("run_a5") == {"rollout-2"})
        await later.stop("run_a5")
        assert run_pods(cluster, "run_a5") == {}
    install(cluster)


async def test_a_trainer_of_several_nodes_is_a_job_set_where_asked(
    cluster: Cluster, release: None, nodes: list[str], tmp_path: Path
) -> None:
    install(cluster, "--set", "workers.jobSet.enabled=true")
    spec = make_spec(replicas=1, gpus_per_node=4)

    def running(run_id: str) -> set[str]:
        """Returns the names of running pods without their random suffixes."""
        pods = run_pods(cluster, run_id).items()
        return {re.sub(r"(-0-\d)-\w+$", r"\1", n) for n, (phase, _) in pods if phase == "Running"}

    whole = {f"run-a8-{n}" for n in ("trainer-0-node-0-0", "trainer-0-node-0-1", "rollout-0")}
    async with AsyncExitStack() as stack:
        launcher, events = await open_launcher(stack, cluster, tmp_path)
        with pytest.raises(FailedPreconditionError, match=r"workers\.jobSet\.enabled"):
            await launcher.start("run_a7", spec)
        await launcher.stop("run_a7")
        stack.enter_context(job_set_kind(cluster.core))
        stack.enter_context(job_sets(cluster.core, WORKERS))
        await launcher.start("run_a8", spec)
        await until(lambda: running("run_a8") == whole)
        assert names(cluster.core, WORKERS) == ["run-a8-trainer-0"]
        former = {name for name in run_pods(cluster, "run_a8") if "trainer" in name}

        later, events = await open_launcher(stack, cluster, tmp_path)
        await later.start("run_a8", spec)
        assert former < set(run_pods(cluster, "run_a8")), "a later controller keeps them"
        cluster.core.delete_namespaced_pod(max(former), WORKERS)
        async with asyncio.timeout(30):
            assert (await events.exits.get()).worker_id == "trainer-0"
        await later.end("run_a8", "trainer-0")
        assert set(run_pods(cluster, "run_a8")) == {"run-a8-rollout-0"}
        await later.start("run_a8", spec)
        await until(lambda: running("run_a8") == whole)
        assert not former & set(run_pods(cluster, "run_a8"))
        await later.stop("run_a8")
        assert run_pods(cluster, "run_a8") == {}
        await until(lambda: names(cluster.core, WORKERS) == [])
        assert events.exits.empty()
    install(cluster)


async def test_a_run_has_a_pod_group_of_its_size_where_a_gang_scheduler_is_named(
    cluster: Cluster, release: None, nodes: list[str], tmp_path: Path
) -> None:
    # The default scheduler places the pods; this test checks only the pod group.
    values = "workers.gang.scheduler=volcano,workers.schedulerName=default-scheduler"
    install(cluster, "--set", values)
    custom = CustomObjectsApi(cluster.core.api_client)
    resource = ("scheduling.volcano.sh", "v1beta1", WORKERS, "podgroups")

    def groups() -> dict[str, int]:
        listed = custom.list_namespaced_custom_object(*resource)["items"]
        return {
            pod_group["metadata"]["name"]: pod_group["spec"]["minMember"] for pod_group in listed
        }

    async with AsyncExitStack() as stack:
        launcher, _ = await open_launcher(stack, cluster, tmp_path)
        with pytest.raises(FailedPreconditionError, match=r"workers\.gang\.scheduler"):
            await launcher.start("run_a9", make_spec(replicas=1))
        group, version, _, plural = resource
        stack.enter_context(
            defined(cluster.core, "PodGroup", group=group, version=version, plural=plural)
        )
        await launcher.start("run_a9", make_spec(replicas=1))
        assert groups() == {"run-a9": 2}
        await launcher.start("run_a9", make_spec(replicas=3))
        assert groups() == {"run-a9": 4}
        annotations = [
            pod.metadata.annotations["scheduling.k8s.io/group-name"]
            for pod in cluster.core.list_namespaced_pod(WORKERS).items
        ]
        assert annotations == 4 * ["run-a9"]
        await launcher.stop("run_a9")
        assert groups() == {}
    install(cluster)


async def test_what_the_controller_made_goes_with_the_release(
    cluster: Cluster, release: None, nodes: list[str], tmp_path: Path
) -> None:
    # A namespace with claims outlives the release, so its deletion does not remove the pods.
    install(cluster, "--set", "workers.modelCache.existingClaim=models")
    async with AsyncExitStack() as stack:
        launcher, _ = await open_launcher(stack, cluster, tmp_path)
        await launcher.start("run_a6", make_spec(replicas=1))
        await asyncio.to_thread(helm, cluster, "uninstall", "demo", "--wait")
        await until(lambda: run_pods(cluster, "run_a6") == {}, timeout_s=60)
        await until(
            lambda: not cluster.core.list_namespaced_secret(WORKERS, label_selector=RUN_LABEL).items
        )
    assert objects(cluster) == set()
    assert WORKERS in namespaces(cluster)
    install(cluster)
    helm(cluster, "uninstall", "demo", "--wait")
    assert WORKERS not in namespaces(cluster)
