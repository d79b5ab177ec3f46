"""Runs on a real cluster: real containers, real Helm, the example that the README shows."""

import json
import os
import time
from collections.abc import Callable, Iterator

import pytest

from deploy.observability import dashboards
from tests.cluster.node import Cluster, node
from tests.cluster.prometheus import Prometheus, empty_panels, plot, prometheus
from tests.cluster.release import Installed, install, keep_logs
from tests.unit.deploy.chart import ROOT

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

_BARS = {"install_s": 60.0, "first_step_s": 90.0}
_RESULTS = ROOT / "bench" / "results" / "cluster.json"

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
    assert len(pods) == 6  # controller, two of the transferqueue, trainer, two rollouts
    installed.wait(run_id, lambda run: run["step"] >= 10, timeout_s=300)
    assert scraping.targets() == dict.fromkeys(pods, "up")
    run = installed.wait(run_id, lambda run: run["state"] == "SUCCEEDED", timeout_s=600)
    assert_ledger_closes(run)
    assert run["step"] == 50
    eventually(lambda: not installed.pods(run_id), timeout_s=60)
    installed.figures["first_step_s"] = round(first_step_s, 1)


@pytest.mark.parametrize("dashboard", dashboards.ALL, ids=lambda dashboard: dashboard.uid)
def test_every_panel_has_data(
    installed: Installed, scraping: Prometheus, dashboard: dashboards.Dashboard
) -> None:
    plot(scraping, dashboard, installed.cluster.folder / f"{dashboard.uid}.png", seconds=180)
    assert empty_panels(scraping, dashboard, seconds=180) == []


@pytest.mark.parametrize(
    "victim",
    ["rollout-1", "trainer-0", "slipstream-controller", "transferqueue-shard-0", "transferqueue-0"],
)
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


# Asks, as a worker of one run, for the samples of another.
_PRY = """
import asyncio, sys
from services.common.credentials import acting_as
from services.common.errors import ServiceError
from services.rollout.settings import RolloutSettings
from services.transferqueue.client import TransferQueueClient

async def pry():
    address, partition = sys.argv[1:]
    with acting_as(RolloutSettings().identity()):
        async with TransferQueueClient.connect(address) as queue:
            try:
                print("found", (await queue.get_batch(partition)).num_keys)
            except ServiceError as error:
                print(type(error).__name__)

asyncio.run(pry())
"""


def test_runs_of_two_projects_train_at_once_and_see_nothing_of_each_other(
    installed: Installed,
) -> None:
    small = {"rollout": {"replicas": 1}, "trainer": {"steps": 15}}
    blue, red = installed.member("blue"), installed.member("red")
    ours, theirs = blue.submit(**small), red.submit(**small)
    for user, run_id in ((blue, ours), (red, theirs)):
        user.wait(run_id, lambda run: run["step"] >= 1, timeout_s=400)
    assert [run["id"] for run in blue.api.get("/v1/runs").json()["items"]] == [ours]
    for path in ("", "/events", "/logs", "/samples", "/checkpoints", "/topology"):
        assert red.api.get(f"/v1/runs/{ours}{path}").status_code == 404
    assert red.api.post(f"/v1/runs/{ours}/cancel").status_code == 404
    queue = "demo-slipstream-transferqueue.slipstream.svc:50051"
    pod = f"{theirs.replace('_', '-')}-rollout-0"
    assert "found" in installed.execute(pod, "-c", _PRY, queue, f"{theirs}/train")
    stolen = installed.execute(pod, "-c", _PRY, queue, f"{ours}/train")
    assert stolen.strip() == "PermissionDeniedError"
    for user, run_id in ((blue, ours), (red, theirs)):
        ended = user.wait(run_id, lambda run: run["state"] == "SUCCEEDED", timeout_s=500)
        assert_ledger_closes(ended)


def test_an_image_that_is_not_there_shows_on_the_run(installed: Installed) -> None:
    installed.upgrade("trainer.image.repository=slipstream/none")
    installed.ready()
    run_id = installed.submit()
    eventually(lambda: bool(installed.events(run_id, "WorkerPending")), timeout_s=90)
    assert "slipstream/none" in installed.events(run_id, "WorkerPending")[0]["message"]
    installed.api.post(f"/v1/runs/{run_id}/cancel").raise_for_status()


def test_install_and_first_step_are_within_the_bars(installed: Installed) -> None:
    figures = {"install_s": round(installed.install_s, 1), **installed.figures}
    report = {
        "figures": figures,
        "bars": _BARS,
        "load_1m": os.getloadavg()[0],
        "cores": os.cpu_count(),
    }
    _RESULTS.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    assert {name: value for name, value in figures.items() if value > _BARS[name]} == {}


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
