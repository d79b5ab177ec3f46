"""Runs on a real cluster: real containers, real Helm, the example that the README shows."""

import time
from collections.abc import Callable, Iterator

import pytest

from deploy.observability import dashboards
from tests.cluster.node import Cluster, node
from tests.cluster.prometheus import Prometheus, empty_panels, plot, prometheus
from tests.cluster.release import Installed, install, keep_logs

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

# A run that survives losses: checkpoints on a volume, and restarts allowed.
_SURVIVES = {
    "limits": {"max_restarts": 5},
    "trainer": {"steps": 80, "checkpoint": {"every": 5}},
}


@pytest.fixture(scope="module")
def installed(cluster: Cluster) -> Iterator[Installed]:
    with node(cluster):
        release = install(cluster)
        yield release
        keep_logs(cluster, cluster.folder / "pods")


@pytest.fixture(scope="module")
def scraping(installed: Installed) -> Iterator[Prometheus]:
    with prometheus(installed.cluster) as server:
        yield server


def test_install_is_ready_within_a_minute(installed: Installed) -> None:
    assert installed.install_s <= 60


def test_helm_test_passes(installed: Installed) -> None:
    assert "every service answers" in installed.helm("test", "demo", "--logs", "--timeout", "120s")


def test_sort4_trains_to_the_end_while_prometheus_scrapes_every_pod(
    installed: Installed, scraping: Prometheus
) -> None:
    begin = time.monotonic()
    run_id = installed.submit()
    installed.wait(run_id, lambda run: run["step"] >= 1, timeout_s=300)
    first_step_s = time.monotonic() - begin
    pods = {pod.metadata.name for pod in installed.pods() if pod.status.phase == "Running"}
    assert len(pods) == 5
    installed.wait(run_id, lambda run: run["step"] >= 10, timeout_s=300)
    assert scraping.targets() == dict.fromkeys(pods, "up")
    run = installed.wait(run_id, lambda run: run["state"] == "SUCCEEDED", timeout_s=600)
    assert_ledger_closes(run)
    assert run["step"] == 50
    eventually(lambda: not installed.pods(run_id), timeout_s=60)
    assert first_step_s <= 90


@pytest.mark.parametrize("dashboard", dashboards.ALL, ids=lambda dashboard: dashboard.uid)
def test_every_panel_has_data(
    installed: Installed, scraping: Prometheus, dashboard: dashboards.Dashboard
) -> None:
    plot(scraping, dashboard, installed.cluster.folder / f"{dashboard.uid}.png", seconds=180)
    assert empty_panels(scraping, dashboard, seconds=180) == []


@pytest.mark.parametrize("victim", ["rollout-1", "trainer-0", "controller", "transferqueue"])
def test_a_run_survives_the_loss_of(installed: Installed, victim: str) -> None:
    run_id = installed.submit(**_SURVIVES)
    installed.wait(run_id, lambda run: run["step"] >= 8, timeout_s=300)
    (pod,) = [pod for pod in installed.pods() if victim in pod.metadata.name]
    installed.cluster.core.delete_namespaced_pod(
        pod.metadata.name, pod.metadata.namespace, grace_period_seconds=0
    )
    installed.ready()
    run = installed.wait(run_id, lambda run: run["state"] == "SUCCEEDED", timeout_s=400)
    assert run["step"] == 80
    assert_ledger_closes(run)


def test_an_upgrade_in_the_middle_does_not_disturb_a_run(installed: Installed) -> None:
    run_id = installed.submit(**_SURVIVES)
    installed.wait(run_id, lambda run: run["step"] >= 5, timeout_s=300)
    installed.upgrade("controller.podAnnotations.upgraded=yes")
    installed.ready()
    run = installed.wait(run_id, lambda run: run["state"] == "SUCCEEDED", timeout_s=400)
    assert_ledger_closes(run)


def test_an_image_that_is_not_there_shows_on_the_run(installed: Installed) -> None:
    installed.upgrade("trainer.image.repository=slipstream/none")
    installed.ready()
    run_id = installed.submit()
    eventually(lambda: bool(installed.events(run_id, "WorkerPending")), timeout_s=90)
    assert "slipstream/none" in installed.events(run_id, "WorkerPending")[0]["message"]
    installed.api.post(f"/v1/runs/{run_id}/cancel").raise_for_status()


def assert_ledger_closes(run: dict[str, dict[str, dict[str, int]]]) -> None:
    """Every prompt that was issued is accounted for."""
    prompts = run["summary"]["prompts"]
    ended = ("consumed", "dropped", "quarantined", "outstanding")
    assert prompts["issued"] == sum(prompts[state] for state in ended)


def eventually(condition: Callable[[], bool], timeout_s: float) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.5)
