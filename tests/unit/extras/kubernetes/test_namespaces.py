"""Tests of the launcher of projects with separate namespaces."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.common.errors import (
    FailedPreconditionError,
    NotFoundError,
    ServiceError,
    UnavailableError,
)
from services.extras.kubernetes.drain import NodeDrains
from services.extras.kubernetes.launcher import KubernetesLauncher
from services.extras.kubernetes.namespaces import NamespaceLaunchers
from services.extras.kubernetes.pod_api import Seen
from services.extras.kubernetes.worker_pods import load_templates, project_namespaces
from tests.unit.extras.kubernetes.test_kubernetes_launcher import (
    ROLLOUT,
    RUN,
    SPEC,
    TRAINER,
    FakeCluster,
    launching,
    write_templates,
)

SHARED, VISION = "train-workers", "vision"


class Installation:
    """Launchers of two namespaces, and the project of the run."""

    def __init__(self, folder: Path) -> None:
        self.folder = write_templates(folder)
        self.project = ""
        self.pods = {namespace: FakeCluster() for namespace in (SHARED, VISION)}
        for role in ("trainer", "rollout"):
            template = yaml.safe_load((folder / f"{role}.yaml").read_text())
            for prefix, namespace in (("", SHARED), ("vision.", VISION)):
                template["metadata"]["namespace"] = namespace
                (folder / f"{prefix}{role}.yaml").write_text(yaml.safe_dump(template))
        self.launchers: dict[str, KubernetesLauncher] = {}
        self.everywhere = self.restarted()

    def restarted(self) -> NamespaceLaunchers:
        """Returns the launcher of a controller that knows nothing of earlier starts."""
        return NamespaceLaunchers(self.launchers, self.namespace_of)

    async def namespace_of(self, run_id: str) -> str:
        assert run_id == RUN
        return load_templates(self.folder, self.project).namespace

    def places(self) -> dict[str, set[str]]:
        return {namespace: set(cluster.pods) for namespace, cluster in self.pods.items()}

    def share_node_network(self) -> None:
        """Writes templates whose pods share the network of their node."""
        for file in self.folder.glob("*.yaml"):
            template = yaml.safe_load(file.read_text())
            template["spec"]["hostNetwork"] = True
            file.write_text(yaml.safe_dump(template))


@pytest.fixture
async def installation(tmp_path: Path) -> AsyncIterator[Installation]:
    installation = Installation(tmp_path)

    async def project_of(run_id: str) -> str:
        return installation.project

    async with AsyncExitStack() as stack:
        for namespace, cluster in installation.pods.items():
            launcher, _ = await stack.enter_async_context(launching(cluster, tmp_path))
            launcher.project_of = project_of
            installation.launchers[namespace] = launcher
        yield installation


async def test_a_run_has_its_pods_in_the_namespace_of_its_project(
    installation: Installation,
) -> None:
    everywhere = installation.everywhere
    assert project_namespaces(installation.folder) == {VISION}
    for project, namespace in (("vision", VISION), ("speech", SHARED)):
        installation.project = project
        await everywhere.start(RUN, SPEC)
        assert installation.places()[namespace] == {TRAINER, ROLLOUT}
        cluster = installation.pods[namespace]
        assert {pod["metadata"]["namespace"] for pod in cluster.pods.values()} == {namespace}
        assert set(cluster.secrets) == {"run-01-identity"}
        assert set(cluster.policies) == {"run-01-workers"}
        await everywhere.stop(RUN)
        assert installation.places() == {SHARED: set(), VISION: set()}
        assert cluster.secrets == cluster.policies == {}


async def test_a_run_is_never_in_two_namespaces(installation: Installation) -> None:
    await installation.everywhere.start(RUN, SPEC)
    installation.project = "vision"  # the administrator gave the project a namespace
    await installation.restarted().start(RUN, SPEC)
    assert installation.places() == {SHARED: set(), VISION: {TRAINER, ROLLOUT}}


async def test_a_deleted_namespace_holds_up_no_run_of_others(
    installation: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refused(selector: str) -> list[dict[str, Any]]:
        raise FailedPreconditionError("Kubernetes refused list of pods: forbidden")

    monkeypatch.setattr(installation.pods[VISION], "list", refused)
    await installation.everywhere.start(RUN, SPEC)
    assert installation.places()[SHARED] == {TRAINER, ROLLOUT}
    await installation.everywhere.stop(RUN)
    assert installation.places()[SHARED] == set()
    installation.project = "vision"
    with pytest.raises(FailedPreconditionError):
        await installation.everywhere.start(RUN, SPEC)


@pytest.mark.parametrize("is_known", [True, False], ids=["known", "lost by the database"])
async def test_a_later_controller_ends_the_pods_of_a_run_in_any_namespace(
    installation: Installation, is_known: bool
) -> None:
    installation.project = "vision"
    await installation.everywhere.start(RUN, SPEC)
    installation.project = "vision" if is_known else ""
    await installation.restarted().stop(RUN)
    assert installation.places() == {SHARED: set(), VISION: set()}
    assert installation.pods[VISION].secrets == {}


async def test_a_namespace_of_a_later_upgrade_is_awaited(installation: Installation) -> None:
    del installation.launchers[VISION]
    installation.project = "vision"
    with pytest.raises(UnavailableError, match=VISION):
        await installation.everywhere.start(RUN, SPEC)
    await installation.everywhere.stop(RUN)  # a run that never started can be cancelled


async def test_pods_of_every_namespace_leave_a_drained_node(installation: Installation) -> None:
    installation.project = "vision"
    everywhere, cluster = installation.everywhere, installation.pods[VISION]
    await everywhere.start(RUN, SPEC)
    drained: list[tuple[str, frozenset[str]]] = []
    drains = NodeDrains(
        (),
        pods=everywhere.placed_pods,
        on_drained=lambda run_id, host, workers: drained.append((run_id, workers)),
        on_in_service=lambda node: None,
    )
    cluster.place(TRAINER, "node-1")
    await cluster.settle()
    drains.process(Seen(name="node-1", body={"spec": {"unschedulable": True}}))
    assert drained == [(RUN, frozenset({"trainer-0"}))]
    cluster.evicts = True
    async with asyncio.timeout(5):
        await everywhere.release(RUN, ["trainer-0"])
    assert installation.places() == {SHARED: set(), VISION: {ROLLOUT}}
    assert cluster.evictable == [TRAINER]


@pytest.mark.parametrize("error", [FailedPreconditionError, NotFoundError])
async def test_a_deleted_namespace_holds_up_no_run_on_the_network_of_nodes(
    installation: Installation, monkeypatch: pytest.MonkeyPatch, error: type[ServiceError]
) -> None:
    async def refused(selector: str) -> list[dict[str, Any]]:
        raise error("Kubernetes refused list of pods")

    launcher = installation.launchers[SHARED]
    launcher.neighbours = [installation.pods[VISION]]
    monkeypatch.setattr(installation.pods[VISION], "list", refused)
    installation.share_node_network()
    await launcher.start(RUN, SPEC)
    assert installation.places()[SHARED] == {TRAINER, ROLLOUT}
    # A run learns from its namespace why it cannot start.
    monkeypatch.setattr(installation.pods[SHARED], "list", refused)
    with pytest.raises(error):
        await launcher.start(RUN, SPEC)


async def test_runs_of_two_namespaces_share_no_port_of_a_node(installation: Installation) -> None:
    """With the nodes' network, the ports of the other namespace's pods are taken."""
    annotation = "slipstream.dev/node-ports"
    for namespace, project in ((SHARED, ""), (VISION, "vision")):
        installation.project = project
        launcher = installation.launchers[namespace]
        launcher.neighbours = [
            cluster for name, cluster in installation.pods.items() if name != namespace
        ]
        installation.share_node_network()
        # The same run in both, so that both begin to search at the same port.
        await launcher.start(RUN, SPEC)
    ports = [
        port
        for cluster in installation.pods.values()
        for pod in cluster.pods.values()
        for port in pod["metadata"]["annotations"][annotation].split(",")
    ]
    assert len(ports) == len(set(ports)) == 12
