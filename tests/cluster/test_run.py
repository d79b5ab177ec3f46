"""Runs of the README's example on a real cluster, with real containers and Helm."""

import base64
import json
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import yaml
from kubernetes.client import AutoscalingV1Api, CustomObjectsApi
from sqlalchemy import create_engine, text

from deploy.observability import dashboards
from deploy.observability.panels import Dashboard
from services.extras.kubernetes.scale import GROUP, PLURAL, VERSION
from tests.cluster.figures import record
from tests.cluster.job_sets import job_set_kind, job_sets, names
from tests.cluster.network import NODE_IP
from tests.cluster.node import Cluster
from tests.cluster.prometheus import Prometheus, empty_panels, plot, prometheus
from tests.cluster.release import (
    CLEARING_S,
    NAMESPACE,
    TEAM,
    WORKERS,
    Installed,
    assert_ledger_closes,
    eventually,
    installed_release,
)
from tests.helpers.chart import ROOT
from tests.helpers.databases import postgres_cluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def installed(machine: Cluster) -> Iterator[Installed]:
    # Kubernetes takes half a minute to know a new kind, so the kind is defined long before its test.
    with job_set_kind(machine.core), installed_release(machine) as release:
        yield release


@pytest.fixture(autouse=True)
def alone(installed: Installed) -> Iterator[None]:
    """Cancels runs that a test left, so that the next test starts without runs."""
    yield
    installed.cancel_runs()


@pytest.fixture(scope="module")
def scraping(installed: Installed) -> Iterator[Prometheus]:
    with prometheus(installed.cluster) as server:
        yield server


def test_helm_test_passes(installed: Installed) -> None:
    assert "all services are healthy" in installed.helm(
        "test", "demo", "--logs", "--timeout", "120s"
    )


def test_sort4_trains_to_the_end_while_prometheus_scrapes_every_pod(
    installed: Installed, scraping: Prometheus
) -> None:
    begin = time.monotonic()
    run_id = installed.submit(trainer={"checkpoint": {"every": 10}})
    installed.wait(run_id, lambda run: run["step"] >= 1, timeout_s=300)
    first_step_s = time.monotonic() - begin
    pods = {pod.metadata.name for pod in installed.pods() if pod.status.phase == "Running"}
    scraped = {pod for pod in pods if "trackers" not in pod}
    assert len(scraped) == 6  # controller, two pods of the transferqueue, trainer, two rollouts
    installed.wait(run_id, lambda run: run["step"] >= 10, timeout_s=300)
    assert scraping.targets() == dict.fromkeys(scraped, "up")
    run = installed.wait(run_id, lambda run: run["state"] == "SUCCEEDED", timeout_s=600)
    assert_ledger_closes(run)
    assert run["step"] == 50
    eventually(lambda: not installed.pods(run_id), timeout_s=CLEARING_S)
    # The logs outlive the pods.
    logs = installed.api.get(f"/v1/runs/{run_id}/logs").raise_for_status().text.splitlines()
    components = {json.loads(line)["component"] for line in logs}
    assert components == {"trainer-0", "rollout-0", "rollout-1"}
    installed.figures["first_step_s"] = round(first_step_s, 1)


def test_the_example_of_an_object_trains_and_is_suspended_resumed_and_deleted(
    installed: Installed,
) -> None:
    kubectl = partial(installed.cluster.command, "kubectl", "-n", TEAM)
    team = installed.member(TEAM)

    def status() -> dict[str, Any]:
        body = json.loads(kubectl("get", "rlrun", "sort4", "-o", "json"))
        return dict(body.get("status", {}))

    def is_in(phase: str) -> bool:
        return status().get("phase") == phase

    body = yaml.safe_load((ROOT / "examples" / "rlrun.yaml").read_text(encoding="utf-8"))
    body["spec"]["trainer"]["steps"] = 1000  # more steps than the run makes during this test
    file = installed.cluster.folder / "rlrun.yaml"
    file.write_text(yaml.safe_dump(body), encoding="utf-8")
    begin = time.monotonic()
    kubectl("apply", "-f", file)
    eventually(lambda: "runId" in status(), timeout_s=60)
    run_id = status()["runId"]
    team.wait(run_id, lambda run: run["step"] >= 1, timeout_s=300)
    installed.figures["apply_to_first_step_s"] = round(time.monotonic() - begin, 1)
    eventually(lambda: status()["step"] >= 1, timeout_s=20)

    (pod,) = [pod for pod in installed.pods() if "slipstream-controller" in pod.metadata.name]
    installed.cluster.core.delete_namespaced_pod(pod.metadata.name, NAMESPACE)
    kubectl("patch", "rlrun", "sort4", "--type=merge", "-p", '{"spec": {"suspend": true}}')
    eventually(lambda: is_in("Paused"), timeout_s=200)
    eventually(lambda: not installed.pods(run_id), timeout_s=CLEARING_S)
    step = status()["step"]
    kubectl("patch", "rlrun", "sort4", "--type=merge", "-p", '{"spec": {"suspend": false}}')
    eventually(lambda: is_in("Running") and status()["step"] > step, timeout_s=300)
    kubectl("delete", "rlrun", "sort4", "--timeout=120s")
    eventually(lambda: not installed.pods(run_id), timeout_s=CLEARING_S)
    assert team.run(run_id)["state"] == "CANCELLED"


_UNUSED_PANELS = {
    "Loss scale",  # in float16
    "Uploads of checkpoints and samples",  # to an object store
    *("Tokens by run", "Requests by run", "Tokens against shares"),  # on servers that runs share
}
"""Panels of what the runs of this file do not use, which have no data here."""


@pytest.mark.parametrize("dashboard", dashboards.ALL, ids=lambda dashboard: dashboard.uid)
def test_every_panel_has_data(
    installed: Installed, scraping: Prometheus, dashboard: Dashboard
) -> None:
    plot(scraping, dashboard, installed.cluster.folder / f"{dashboard.uid}.png", seconds=180)
    assert set(empty_panels(scraping, dashboard, seconds=180)) <= _UNUSED_PANELS


@pytest.mark.timeout(1500)
def test_a_run_survives_an_upgrade_a_new_certificate_and_the_loss_of_every_pod(
    installed: Installed,
) -> None:
    """Uses one run for all faults, because most of a run's time is its start."""
    # More steps than the run makes during this test.
    trainer = {"steps": 5000, "checkpoint": {"every": 5}}
    run_id = installed.submit(
        limits={"max_restarts": 5}, rollout={"partial_rollout": True}, trainer=trainer
    )
    prefix = run_id.replace("_", "-")
    core = installed.cluster.core

    def train(steps: int) -> None:
        installed.ready()
        step = installed.run(run_id)["step"]
        installed.wait(run_id, lambda run: run["step"] >= step + steps, timeout_s=400)

    def lose(victim: str, *, grace_s: int | None = 0) -> None:
        # Pods of the previous run may still exist.
        pods = installed.pods(run_id if victim in workers else "")
        (pod,) = [pod for pod in pods if victim in pod.metadata.name]
        core.delete_namespaced_pod(
            pod.metadata.name, pod.metadata.namespace, grace_period_seconds=grace_s
        )

    def lost() -> list[list[str]]:
        return [event["data"]["workers"] for event in installed.events(run_id, "WorkerLost")]

    def written() -> str:
        secrets = core.list_namespaced_secret(
            WORKERS, label_selector=f"slipstream.dev/run={run_id}"
        )
        # The secret does not exist while it is replaced.
        return (
            base64.b64decode(secrets.items[0].data["tls.crt"]).decode() if secrets.items else before
        )

    def mounted() -> str:
        show = "print(open('/etc/slipstream/tls/tls.crt').read())"
        return installed.execute(f"{prefix}-rollout-0", "-c", show)

    workers = ("rollout-0", "rollout-1", "trainer-0")
    train(5)
    before = ""
    before = written()
    assert before in mounted()
    # A controller cannot read the certificate's age, so a new controller issues another certificate.
    installed.upgrade("controller.podAnnotations.upgraded=yes")
    eventually(lambda: written() != before, timeout_s=60)
    renewed = written()
    eventually(lambda: renewed in mounted(), timeout_s=100)
    train(5)
    assert lost() == []
    for number, victim in enumerate(workers, 1):
        # The first is preempted: it stores its work and ends within its grace period.
        lose(victim, grace_s=None if victim == "rollout-0" else 0)
        eventually(lambda number=number: len(lost()) >= number, timeout_s=100)
        train(8)
        # The next pod is lost only after this one was replaced.
        eventually(lambda: len(installed.workers(run_id)) == 3, timeout_s=100)
    assert lost() == [[victim] for victim in workers]
    assert (
        "rollout-0 exited with exit code 0" in installed.events(run_id, "WorkerLost")[0]["message"]
    )
    for victim in ("slipstream-controller", "transferqueue-shard-0", "transferqueue-0"):
        lose(victim)
        train(8)
    installed.api.post(f"/v1/runs/{run_id}/cancel").raise_for_status()
    eventually(lambda: not installed.pods(run_id), timeout_s=CLEARING_S)
    assert_ledger_closes(installed.run(run_id))


def test_rollouts_of_a_running_run_are_scaled_by_hand_and_by_an_autoscaler(
    installed: Installed,
) -> None:
    changes = {"rollout": {"replicas": 1}, "trainer": {"steps": 1000}}
    run_id = installed.submit(**changes)
    installed.wait(run_id, lambda run: run["step"] >= 3, timeout_s=300)
    installed.scale(run_id, 2)
    eventually(lambda: len(installed.events(run_id, "Resized")) == 1, timeout_s=200)
    assert installed.workers(run_id) == {"trainer-0", "rollout-0", "rollout-1"}
    name = run_id.replace("_", "-")
    installed.cluster.command(
        "kubectl", "-n", WORKERS, "scale", f"rolloutscale/{name}", "--replicas=1"
    )
    eventually(lambda: len(installed.events(run_id, "Resized")) == 2, timeout_s=100)
    assert installed.workers(run_id) == {"trainer-0", "rollout-0"}
    target = {"apiVersion": "slipstream.dev/v1alpha1", "kind": "RolloutScale", "name": name}
    autoscaler = {
        "metadata": {"name": name},
        "spec": {"scaleTargetRef": target, "minReplicas": 2, "maxReplicas": 3},
    }
    autoscalers = AutoscalingV1Api(installed.cluster.core.api_client)
    autoscalers.create_namespaced_horizontal_pod_autoscaler(WORKERS, autoscaler)
    eventually(lambda: len(installed.events(run_id, "Resized")) == 3, timeout_s=200)
    assert installed.workers(run_id) == {"trainer-0", "rollout-0", "rollout-1"}
    before = installed.run(run_id)["step"]
    installed.wait(run_id, lambda run: run["step"] > before, timeout_s=100)
    autoscalers.delete_namespaced_horizontal_pod_autoscaler(name, WORKERS)
    installed.api.post(f"/v1/runs/{run_id}/cancel").raise_for_status()
    eventually(lambda: not installed.pods(run_id), timeout_s=CLEARING_S)
    assert_ledger_closes(installed.run(run_id))
    scales = CustomObjectsApi(installed.cluster.core.api_client)
    listing = (GROUP, VERSION, WORKERS, PLURAL)
    eventually(lambda: scales.list_namespaced_custom_object(*listing)["items"] == [], timeout_s=30)


def test_a_trainer_on_two_nodes_is_a_set_of_pods_that_live_and_die_together(
    installed: Installed,
) -> None:
    trainer = {"world_size": 2, "steps": 20, "checkpoint": {"every": 5}}
    limits = {"max_restarts": 5}
    installed.upgrade("workers.jobSet.enabled=false")
    run_id = installed.submit(topology={"gpus_per_node": 1}, trainer=trainer, limits=limits)
    installed.wait(run_id, lambda run: run["step"] >= 6, timeout_s=300)
    assert {"trainer-0", "trainer-0-node-1"} < installed.workers(run_id)
    prefix = run_id.replace("_", "-")
    for name in ("trainer-0", "trainer-0-node-1", "rollout-0"):
        assert_ports_are_open_to_workers(installed.execute(f"{prefix}-{name}", "-c", _LISTENING))
    installed.cluster.core.delete_namespaced_pod(
        f"{prefix}-trainer-0-node-1", WORKERS, grace_period_seconds=0
    )
    run = installed.wait(run_id, lambda run: run["state"] == "SUCCEEDED", timeout_s=400)
    assert run["step"] == 20
    assert_ledger_closes(run)
    (lost,) = installed.events(run_id, "WorkerLost")
    assert lost["data"]["workers"] == ["trainer-0"]


def test_a_trainer_on_two_nodes_is_a_job_set_where_asked(installed: Installed) -> None:
    core = installed.cluster.core
    trainer = {"world_size": 2, "steps": 20, "checkpoint": {"every": 5}}
    limits = {"max_restarts": 5}
    installed.upgrade("workers.jobSet.enabled=true")
    with job_sets(core, WORKERS):
        run_id = installed.submit(topology={"gpus_per_node": 1}, trainer=trainer, limits=limits)
        installed.wait(run_id, lambda run: run["step"] >= 6, timeout_s=300)
        (name,) = names(core, WORKERS)
        (second,) = [
            pod.metadata.name
            for pod in installed.pods(run_id)
            if pod.metadata.name.startswith(f"{name}-node-0-1-")
        ]
        core.delete_namespaced_pod(second, WORKERS, grace_period_seconds=0)
        run = installed.wait(run_id, lambda run: run["state"] == "SUCCEEDED", timeout_s=400)
        assert run["step"] == 20
        assert_ledger_closes(run)
        (lost,) = installed.events(run_id, "WorkerLost")
        assert lost["data"]["workers"] == ["trainer-0"]
        logs = installed.api.get(
            f"/v1/runs/{run_id}/logs", params={"component": "trainer-0-node-1"}
        )
        assert "trainer" in logs.raise_for_status().text
        eventually(lambda: not installed.pods(run_id), timeout_s=CLEARING_S)
        eventually(lambda: names(core, WORKERS) == [], timeout_s=30)


# Prints a run's status and the steps of its loss, from the database in the trackers' pod.
_TRACKED = """
import sys
from mlflow import MlflowClient
client = MlflowClient("sqlite:////var/lib/slipstream/mlflow.db")
experiments = [each.experiment_id for each in client.search_experiments()]
for run in client.search_runs(experiments, f"tags.`slipstream.run` = '{sys.argv[1]}'"):
    steps = [each.step for each in client.get_metric_history(run.info.run_id, "loss")]
    print(run.info.status, *sorted(steps))
"""


def test_a_run_in_turns_is_one_pod_that_holds_both_sides_and_is_tracked(
    installed: Installed,
) -> None:
    run_id = installed.submit(
        trackers=[{"kind": "mlflow"}],
        topology={"placement": "colocated"},
        algorithm={"max_staleness": 1},
        rollout={"replicas": 1},
        trainer={"steps": 20, "checkpoint": {"every": 5}},
        limits={"max_restarts": 5},
    )
    installed.wait(run_id, lambda run: run["step"] >= 6, timeout_s=300)
    (pod,) = installed.pods(run_id)
    assert {container.name for container in pod.spec.containers} == {"trainer-0", "rollout-0"}
    # The loss of either worker replaces the whole pod.
    installed.cluster.core.delete_namespaced_pod(pod.metadata.name, WORKERS, grace_period_seconds=0)
    run = installed.wait(run_id, lambda run: run["state"] == "SUCCEEDED", timeout_s=400)
    assert run["step"] == 20
    assert_ledger_closes(run)
    steps = installed.api.get(f"/v1/runs/{run_id}/metrics").raise_for_status().json()
    switches = {item["name"]: item["values"] for item in steps["items"]}["gpu_switch_s"]
    assert all(seconds is not None for seconds in switches)

    def tracked() -> list[str]:
        show = ("-c", _TRACKED, run_id)
        return installed.execute(
            "deploy/demo-slipstream-trackers", *show, namespace=NAMESPACE
        ).split()

    expected = ["FINISHED", *map(str, range(1, 21))]
    eventually(lambda: tracked() == expected, timeout_s=60)


# Requests the samples of one run as a worker of another run.
_PRY = """
import asyncio, sys
from services.common.security.credentials import acting_as
from services.common.errors import ServiceError
from services.rollout.settings import RolloutSettings
from services.wire.transferqueue.client import TransferQueueClient

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
    for path in ("", "/events", "/logs", "/groups", "/samples", "/checkpoints", "/topology"):
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


def test_runs_live_in_a_postgresql_that_a_secret_names(installed: Installed) -> None:
    with postgres_cluster(NODE_IP) as url:
        if url is None:
            pytest.skip("PostgreSQL is not installed")
        secret = {"metadata": {"name": "database"}, "stringData": {"url": url}}
        installed.cluster.core.create_namespaced_secret(NAMESPACE, secret)
        installed.upgrade("controller.database.existingSecret=database")
        run_id = installed.submit(trainer={"steps": 5})
        run = installed.wait(run_id, lambda run: run["state"] == "SUCCEEDED", timeout_s=300)
        assert_ledger_closes(run)
        with create_engine(url).connect() as connection:
            assert connection.scalar(text("select state from runs")) == "SUCCEEDED"
        installed.upgrade("controller.database.existingSecret=")
    assert len(installed.api.get("/v1/runs").json()["items"]) > 1, "the runs of the file are back"


@pytest.mark.parametrize(
    ("values", "says"),
    [
        (["trainer.image.repository=slipstream/none"], "slipstream/none"),
        (
            ["trainer.image.repository=slipstream/trainer", "workers.codeConfigMap=none"],
            'configmap "none" not found',
        ),
    ],
    ids=["image", "volume"],
)
def test_what_is_not_there_shows_on_the_run(
    installed: Installed, values: list[str], says: str
) -> None:
    """Must run last in this release, which keeps the changed values."""
    installed.upgrade(*values)
    run_id = installed.submit()
    eventually(lambda: bool(installed.events(run_id, "WorkerPending")), timeout_s=90)
    assert says in installed.events(run_id, "WorkerPending")[0]["message"]
    placed = {item["type"]: item for item in installed.run(run_id)["conditions"]}["Placed"]
    assert placed["status"] == "False"
    assert says in placed["message"]


def test_install_and_first_step_are_within_the_bars(installed: Installed) -> None:
    record(install_s=round(installed.install_s, 1), **installed.figures)


# Prints the ports on which a pod listens for other pods, from the kernel's tables.
_LISTENING = """
loopback = ("0100007F", "00000000000000000000000001000000")
for table in ("tcp", "tcp6"):
    for line in list(open(f"/proc/net/{table}"))[1:]:
        (address, port), state = line.split()[1].rsplit(":", 1), line.split()[3]
        if state == "0A" and address not in loopback:
            print(int(port, 16))
"""


def assert_ports_are_open_to_workers(listening: str) -> None:
    """Asserts that the network policies admit all ports on which a worker listens."""
    ports = {int(line) for line in listening.split()}
    assert ports
    for port in ports:
        assert (
            port in range(29500, 39501) or port in range(50051, 50060) or port in range(9090, 9100)
        )
