"""A run on a real cluster: real containers, real Helm, the example that the README shows."""

import time
from collections.abc import Iterator

import pytest

from tests.cluster.node import Cluster, node
from tests.cluster.release import Installed, install

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def installed(cluster: Cluster) -> Iterator[Installed]:
    with node(cluster):
        yield install(cluster)


def test_install_is_ready_within_a_minute(installed: Installed) -> None:
    assert installed.install_s <= 60


def test_helm_test_passes(installed: Installed) -> None:
    assert "answers" in installed.helm("test", "demo", "--logs", "--timeout", "120s")


def test_sort4_trains_to_the_end_and_leaves_no_pods(installed: Installed) -> None:
    begin = time.monotonic()
    run_id = installed.submit()
    installed.wait(run_id, lambda run: run["step"] >= 1, timeout_s=300)
    first_step_s = time.monotonic() - begin
    run = installed.wait(run_id, lambda run: run["state"] == "SUCCEEDED", timeout_s=600)
    prompts = run["summary"]["prompts"]
    assert run["step"] == 50
    assert prompts["issued"] == sum(
        prompts[state] for state in ("consumed", "dropped", "quarantined", "outstanding")
    )
    assert installed.pods(run_id) == []
    assert first_step_s <= 90


def test_a_killed_rollout_is_noticed_within_seconds(installed: Installed) -> None:
    run_id = installed.submit()
    installed.wait(run_id, lambda run: run["step"] >= 2, timeout_s=300)
    (victim,) = [pod for pod in installed.pods(run_id) if "rollout-1" in pod.metadata.name]
    installed.cluster.core.delete_namespaced_pod(
        victim.metadata.name, victim.metadata.namespace, grace_period_seconds=0
    )
    begin = time.monotonic()
    while installed.run(run_id)["state"] == "RUNNING":
        assert time.monotonic() - begin < 30
        time.sleep(0.2)
    ended = installed.run(run_id)
    assert "rollout-1" in ended["message"]


def test_an_image_that_is_not_there_shows_on_the_run(installed: Installed) -> None:
    installed.helm(
        "upgrade",
        "demo",
        "deploy/helm/slipstream",
        "--reuse-values",
        "--set",
        "trainer.image.repository=slipstream/none",
    )
    run_id = installed.submit()
    begin = time.monotonic()
    while not (shown := installed.events(run_id, "WorkerPending")):
        assert time.monotonic() - begin < 90
        time.sleep(0.5)
    assert "slipstream/none" in shown[0]["message"]
    installed.api.post(f"/v1/runs/{run_id}/cancel").raise_for_status()
    installed.helm("rollback", "demo", "1")
