"""Runs on a real cluster while a node is drained, controllers are replaced, and projects have namespaces."""

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from tests.cluster.figures import record
from tests.cluster.network import NODE_IP
from tests.cluster.node import NODE, Cluster, second_node
from tests.cluster.release import (
    CLEARING_S,
    NAMESPACE,
    WORKERS,
    Installed,
    assert_ledger_closes,
    eventually,
    installed_release,
    open_api,
)
from tests.helpers.databases import postgres_cluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]

_STEPS = {"steps": 5000, "checkpoint": {"every": 0}}
"""More steps than the runs make, and no checkpoints except those of drains."""
_TEAM = "slipstream-blue"


@pytest.fixture(scope="module")
def installed(machine: Cluster) -> Iterator[Installed]:
    with installed_release(machine, has_trackers=False) as release:
        yield release


@pytest.fixture(autouse=True)
def alone(installed: Installed) -> Iterator[None]:
    """Cancels runs that a test left, so that the next test starts without runs."""
    yield
    installed.cancel_runs()


def committed_steps(installed: Installed, run_id: str) -> list[int]:
    """Returns the numbers of at most 500 committed steps, in their order."""
    answer = installed.api.get(
        f"/v1/runs/{run_id}/events", params={"type": "StepCommitted", "limit": 500}
    )
    return [event["data"]["step"] for event in answer.raise_for_status().json()["items"]]


def node_of(installed: Installed, run_id: str, worker: str) -> str:
    """Returns the node of a worker's running pod; empty if there is none."""
    name = f"{run_id.replace('_', '-')}-{worker}"
    running = [
        pod
        for pod in installed.pods(run_id)
        if pod.metadata.name == name and pod.status.phase == "Running"
    ]
    return str(running[0].spec.node_name) if running else ""


def test_a_run_leaves_a_drained_node_and_goes_on_without_a_lost_step(installed: Installed) -> None:
    cluster = installed.cluster
    with second_node(cluster) as second:
        run_id = installed.submit(
            trainer=_STEPS, rollout={"partial_rollout": True}, limits={"max_restarts": 1}
        )
        installed.wait(run_id, lambda run: run["step"] >= 5, timeout_s=400)
        node = node_of(installed, run_id, "trainer-0")
        assert node in (NODE, second)
        before = installed.run(run_id)["step"]
        begin = time.monotonic()
        try:
            cluster.command(
                "kubectl", "drain", node, "--ignore-daemonsets", "--delete-emptydir-data", "--force",
                "--timeout=600s", timeout_s=620,
            )  # fmt: skip
            drain_s = time.monotonic() - begin
            assert installed.events(run_id, "Drained")
            installed.wait(run_id, lambda run: run["step"] >= before + 10, timeout_s=400)
            moved_s = time.monotonic() - begin
            assert node_of(installed, run_id, "trainer-0") == ({NODE, second} - {node}).pop()
        finally:
            cluster.command("kubectl", "uncordon", node)
        assert installed.events(run_id, "WorkerLost") == []
        assert installed.events(run_id, "Rewound") == []
        steps = committed_steps(installed, run_id)
        lost = len(steps) - len(set(steps)) + max(steps) - len(set(steps))
        assert [event["data"]["step"] for event in installed.events(run_id, "CheckpointSaved")]
        installed.api.post(f"/v1/runs/{run_id}/cancel").raise_for_status()
        eventually(lambda: not installed.pods(run_id), timeout_s=CLEARING_S)
        assert_ledger_closes(installed.run(run_id))
        record(
            drain_s=round(drain_s, 1),
            drain_to_ten_steps_s=round(moved_s, 1),
            drain_lost_steps=lost,
        )


@contextmanager
def calling(installed: Installed, run_id: str) -> Iterator[Counter[str]]:
    """Calls the API without pause and without repetition until the block ends; yields the number of answers.

    Each call opens a connection, as calls of many clients do.
    """
    answers: Counter[str] = Counter()
    url, token = str(installed.api.base_url), installed.api.headers["Authorization"].split()[1]
    over = threading.Event()

    def call() -> None:
        with open_api(url, token, retries=0) as api:
            while not over.is_set():
                for path in ("/v1/runs", f"/v1/runs/{run_id}", f"/v1/runs/{run_id}/events"):
                    try:
                        answers[str(api.get(path).status_code)] += 1
                    except httpx.HTTPError as error:
                        answers[f"{type(error).__name__}: {error}"] += 1
                    over.wait(0.02)

    caller = threading.Thread(target=call)
    caller.start()
    try:
        yield answers
    finally:
        over.set()
        caller.join()


def test_no_call_fails_while_one_of_two_controllers_at_a_time_is_replaced(
    installed: Installed,
) -> None:
    with postgres_cluster(NODE_IP) as url:
        if url is None:
            pytest.skip("PostgreSQL is not installed")
        secret = {"metadata": {"name": "database"}, "stringData": {"url": url}}
        installed.cluster.core.create_namespaced_secret(NAMESPACE, secret)
        installed.upgrade("controller.database.existingSecret=database", "controller.replicas=2")
        run_id = installed.submit(trainer=_STEPS)
        installed.wait(run_id, lambda run: run["step"] >= 3, timeout_s=400)
        before = installed.run(run_id)["step"]
        with calling(installed, run_id) as answers:
            upgrades = 0
            while answers.total() < 1000 or upgrades == 0:
                upgrades += 1
                installed.upgrade(f"controller.podAnnotations.upgrade=number-{upgrades}")
            after = installed.run(run_id)["step"]
        failed = answers.total() - answers["200"]
        assert after > before
        installed.wait(run_id, lambda run: run["step"] > after, timeout_s=200)
        assert installed.events(run_id, "WorkerLost") == []
        installed.api.post(f"/v1/runs/{run_id}/cancel").raise_for_status()
        eventually(lambda: not installed.pods(run_id), timeout_s=CLEARING_S)
        assert_ledger_closes(installed.run(run_id))
        installed.upgrade("controller.database.existingSecret=", "controller.replicas=1")
    assert failed == 0, answers
    record(
        upgrade_calls=answers.total(),
        upgrade_failed_calls=failed,
        upgrade_steps=after - before,
        upgrades=upgrades,
    )


def test_the_runs_of_a_project_are_in_its_namespace_within_its_quota(installed: Installed) -> None:
    core = installed.cluster.core
    installed.upgrade(
        f"workers.projects.blue.namespace={_TEAM}",
        "workers.projects.blue.quota.pods=2",
        # The claims are in the namespace of all other projects.
        "workers.projects.blue.checkpoints.existingClaim=",
        "workers.projects.blue.modelCache.existingClaim=",
    )
    code = core.read_namespaced_config_map("code", WORKERS).data
    core.create_namespaced_config_map(_TEAM, {"metadata": {"name": "code"}, "data": code})
    blue = installed.member("blue")
    ours = blue.submit(trainer=_STEPS, rollout={"replicas": 1})
    theirs = installed.submit(trainer={"steps": 8}, rollout={"replicas": 1})
    blue.wait(ours, lambda run: run["step"] >= 1, timeout_s=400)
    selector = f"slipstream.dev/run={ours}"
    pods = core.list_namespaced_pod(_TEAM, label_selector=selector).items
    assert len(pods) == 2
    assert core.list_namespaced_pod(WORKERS, label_selector=selector).items == []
    assert len(core.list_namespaced_secret(_TEAM, label_selector=selector).items) == 1
    used = core.read_namespaced_resource_quota("demo-slipstream-blue", _TEAM).status.used
    assert used["pods"] == "2"
    refused = blue.submit(name="another", rollout={"replicas": 1})
    eventually(lambda: blue.run(refused)["state"] == "FAILED", timeout_s=100)
    assert "exceeded quota" in blue.run(refused)["message"]
    assert_ledger_closes(
        installed.wait(theirs, lambda run: run["state"] == "SUCCEEDED", timeout_s=400)
    )
    blue.api.post(f"/v1/runs/{ours}/cancel").raise_for_status()
    eventually(
        lambda: not core.list_namespaced_pod(_TEAM, label_selector=selector).items, CLEARING_S
    )
    assert_ledger_closes(blue.run(ours))
    assert core.list_namespaced_secret(_TEAM, label_selector=selector).items == []
    assert "trainer-0" in blue.api.get(f"/v1/runs/{ours}/logs").raise_for_status().text
