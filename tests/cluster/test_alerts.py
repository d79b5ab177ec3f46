"""Alerts in a real Prometheus that scrapes real services, each provoked by the fault that it reports.

The rules are those of the chart with shorter times and lower thresholds.
"""

import json
import re
import sqlite3
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import httpx
import psutil
import pytest
import yaml
import zmq

from deploy.observability import alerts
from tests.helpers.cli import as_owner, descendants, slipstream, started
from tests.helpers.ports import free_port
from tests.helpers.s3 import Relay, environment, needs_s3, new_bucket, s3_server
from tests.helpers.tools import require

pytestmark = [needs_s3, pytest.mark.cluster, pytest.mark.timeout(900)]

_WITHIN_S = 240.0
_TARGETS = "workers.json"
"""File in which the launcher lists the workers' metrics."""
# The staleness gate and the weight session prevent the conditions of the first two alerts.
# The third needs minutes in which a running run trains no step.
_NOT_PROVOKED = {
    "SlipstreamStalenessViolated",
    "SlipstreamVersionLag",
    "SlipstreamRunMakesNoProgress",
}
_VALUES = {
    "runbookBase": "runbooks",
    "stallSeconds": "1",
    "weightSyncSeconds": "0.001",
    "queueFillRatio": "0",
    "checkpointReserve": "1e9",
    "shards": "1",
}
_SPEC = {
    "name": "provoked",
    "model": {"path": "tiny:qwen2-0.4m"},
    "data": {"train": {"source": "jsonl", "path": "prompts.jsonl"}, "answer_column": None},
    "rollout": {
        "replicas": 1,
        "group_size": 4,
        "max_response_tokens": 4,
        "rewards": [{"name": "reward.py:slow_and_faulty"}],
        "on_reward_failure": "mask",
    },
    "trainer": {"steps": 10_000, "prompts_per_step": 2, "checkpoint": {"every": 1}},
    "limits": {"max_restarts": 3},
    "validation": {"every": 0},
    "algorithm": {},
    "weight_sync": {},
    "samples": {},
}
_REWARDS = """
import random
import time

def slow_and_faulty(prompt, response, answer, row):
    time.sleep(4.0)  # several times as long as a step, also on a busy machine
    if random.random() < 0.3:
        raise ValueError("provoked")
    return random.random()
"""
_SLOW_DATA = """
import time

def prompts():
    time.sleep(8.0)
    return [{"prompt": f"question {i}"} for i in range(32)]
"""


class Provoked:
    """Running services, their Prometheus, and methods that provoke alerts."""

    def __init__(
        self,
        folder: Path,
        command: subprocess.Popen[str],
        api: httpx.Client,
        metrics_port: int,
        bucket: str,
    ) -> None:
        self.folder = folder
        self.bucket = bucket
        self.command = command
        self.prometheus = api
        self.metrics_port = metrics_port
        self.begin = time.time()

    @property
    def url(self) -> str:
        url: str = json.loads((self.folder / "up.json").read_text())["url"]
        return url

    def submit(self, name: str, **changes: Any) -> str:
        """Submits the specification with changes; returns the run's id."""
        spec = {section: values | changes.get(section, {}) if isinstance(values, dict) else values
                for section, values in _SPEC.items()}  # fmt: skip
        path = self.folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(spec))
        result = slipstream("submit", path, "--url", self.url)
        assert result.code == 0, result.err
        return result.out.strip()

    def get(self, path: str) -> httpx.Response:
        """Returns the controller's response."""
        return httpx.get(f"{self.url}{path}", trust_env=False, headers=as_owner(self.url))

    def run(self, run_id: str) -> dict[str, Any]:
        content: dict[str, Any] = self.get(f"/v1/runs/{run_id}").json()
        return content

    def fired(self) -> set[str]:
        """Returns the names of alerts that have fired so far."""
        response = self.prometheus.get(
            "/api/v1/query_range",
            params={
                "query": 'ALERTS{alertstate="firing"}',
                "start": self.begin, "end": time.time(), "step": 1,
            },
        ).raise_for_status()  # fmt: skip
        return {series["metric"]["alertname"] for series in response.json()["data"]["result"]}

    def until(self, *names: str) -> None:
        """Waits until alerts have fired."""
        eventually(lambda: set(names) <= self.fired(), f"{names} to fire")

    def process(self, service: str) -> psutil.Process:
        """Returns the process of a service."""
        running = descendants(self.command)
        (process,) = [process for name, process in running.items() if name.startswith(service)]
        return process

    def successor(self, service: str, former: psutil.Process) -> psutil.Process:
        """Waits for the process that replaces a killed one, and returns it."""
        processes: list[psutil.Process] = []

        def is_there() -> bool:
            with suppress(psutil.NoSuchProcess):
                processes.extend(
                    process
                    for name, process in descendants(self.command).items()
                    if name.startswith(service) and process.pid != former.pid
                )
            return bool(processes)

        eventually(is_there, f"another {service}", every_s=0.05)
        return processes[0]

    def queue_ports(self) -> tuple[int, int]:
        """Returns the ports at which the transferqueue serves gRPC and samples."""
        log = (self.folder / "logs" / "transferqueue.log").read_text()
        control = int(re.findall(r"address=127.0.0.1:(\d+)", log)[0])
        connections = self.process("transferqueue").net_connections(kind="tcp")
        listening = {c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN}
        (data,) = listening - {control, self.metrics_port}
        return control, data


def eventually(condition: Callable[[], bool], what: str, *, every_s: float = 0.5) -> None:
    deadline = time.monotonic() + _WITHIN_S
    while not condition():
        assert time.monotonic() < deadline, f"waited {_WITHIN_S:.0f} s for {what}"
        time.sleep(every_s)


def shortened_rules() -> dict[str, Any]:
    text = json.dumps(alerts.rules())
    for name, value in _VALUES.items():
        text = text.replace(f"@{name}@", value)
    text = text.replace("failing_seconds) > 300", "failing_seconds) > 1")
    rules: dict[str, Any] = json.loads(re.sub(r"\[\d+m\]", "[20s]", text))
    for rule in rules["groups"][0]["rules"]:
        rule["for"] = "1s"
    return rules


@contextmanager
def prometheus(folder: Path, ports: dict[str, int]) -> Iterator[httpx.Client]:
    """Runs a Prometheus that scrapes all processes each second until the block ends; yields its API."""
    (program,) = require("prometheus")
    (folder / "rules.yaml").write_text(yaml.safe_dump(shortened_rules()))
    scraped = [
        {"targets": [f"127.0.0.1:{port}"], "labels": {"pod": name}} for name, port in ports.items()
    ]
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": ["rules.yaml"],
        "scrape_configs": [
            {
                "job_name": "slipstream",
                "static_configs": scraped,
                "file_sd_configs": [
                    {"files": [str(folder / _TARGETS)], "refresh_interval": "1s"},
                ],
            }
        ],
    }
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{ports['prometheus']}"
    process = psutil.Popen(
        [program, f"--config.file={folder}/prometheus.yaml", f"--web.listen-address={address}",
         f"--storage.tsdb.path={folder}/prometheus"],
        stderr=(folder / "prometheus.log").open("w"),
    )  # fmt: skip
    try:
        with httpx.Client(base_url=f"http://{address}", timeout=30, trust_env=False) as client:
            yield client
    finally:
        process.terminate()
        process.wait(30)


@pytest.fixture
def relay(monkeypatch: pytest.MonkeyPatch) -> Iterator[Relay]:
    """Is between all services and an object store."""
    with s3_server() as port, Relay(port) as between:
        for name, value in environment(between.port).items():
            monkeypatch.setenv(name, value)
        yield between


@pytest.fixture
def provoked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, relay: Relay) -> Iterator[Provoked]:
    (tmp_path / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": f"question {i}"}) + "\n" for i in range(32))
    )
    (tmp_path / "reward.py").write_text(_REWARDS)
    (tmp_path / "slow_data.py").write_text(_SLOW_DATA)
    names = ("prometheus", "controller", "transferqueue")
    ports = {name: free_port() for name in names}
    for name in names[1:]:
        monkeypatch.setenv(f"SLIPSTREAM_{name.upper()}_METRICS_PORT", str(ports[name]))
    monkeypatch.setenv("SLIPSTREAM_CONTROLLER_METRIC_TARGETS", str(tmp_path / _TARGETS))
    arguments = ("up", "--port", "0", "--state-directory", tmp_path)
    with (
        started(*arguments, until="controller at http") as (process, _),
        prometheus(tmp_path, ports) as api,
    ):
        bucket = new_bucket(relay.port)
        yield Provoked(tmp_path, process, api, ports["transferqueue"], bucket)


def test_alerts_fire_when_they_are_provoked(provoked: Provoked, relay: Relay) -> None:
    slow = {"train": {"source": "python", "path": "slow_data.py:prompts"}}
    run_id = provoked.submit("slow", data=slow)
    provoked.until("SlipstreamRunStuckStarting")
    provoked.until("SlipstreamCheckpointVolumeFull")
    block_checkpoints(provoked.folder / run_id)
    provoked.until(
        "SlipstreamRunStalled",
        "SlipstreamTrainerStarved",
        "SlipstreamRewardFailures",
        "SlipstreamWeightSyncSlow",
        "SlipstreamQueueNearFull",
        "SlipstreamCheckpointFailed",
    )
    control, data = provoked.queue_ports()
    call_without_token(control)
    send_garbage(data)
    provoked.until("SlipstreamCallersRefused", "SlipstreamMessagesRefused")
    trainer = provoked.process("trainer")
    trainer.kill()
    # Without the suspension the run recovers before the alert fires.
    successor = provoked.successor("trainer", trainer)
    successor.suspend()
    provoked.until("SlipstreamRunRecovering")
    successor.resume()
    slipstream("cancel", run_id, "--url", provoked.url)
    eventually(lambda: provoked.run(run_id)["state"] == "CANCELLED", "the end of the run")
    ask_for_damaged_events(provoked, run_id)

    # The first step makes weights whose products overflow; later ones are trained
    # with them before they are published.
    provoked.submit(
        "infinite",
        algorithm={"max_staleness": 8},
        trainer={"optimizer": {"learning_rate": 1e30}},
        weight_sync={"publish_every": 4},
        limits={"max_restarts": 0},
    )
    provoked.until("SlipstreamNonFiniteStep", "SlipstreamRunFailed")

    run_id = provoked.submit("hasty", weight_sync={"transfer_timeout_s": 1e-6})
    provoked.until("SlipstreamWeightSyncFailing")
    slipstream("cancel", run_id, "--url", provoked.url)

    # Each step makes another policy of the one that sampled the next step's batch.
    checkpoints = {"every": 1, "directory": f"{provoked.bucket}/checkpoints"}
    trainer = {"checkpoint": checkpoints, "optimizer": {"learning_rate": 0.1}}
    samples = {"directory": f"{provoked.bucket}/samples"}
    run_id = provoked.submit("hurried", trainer=trainer, samples=samples)
    provoked.until("SlipstreamPolicyMismatch")
    relay.set("refuse")
    provoked.until("SlipstreamCheckpointUploadFailing", "SlipstreamSampleUploadFailing")
    slipstream("cancel", run_id, "--url", provoked.url)
    fired = provoked.fired()

    provoked.begin = time.time()
    silent = [provoked.process(service) for service in ("controller", "transferqueue")]
    for process in silent:
        process.suspend()
    provoked.until("SlipstreamControllerDown", "SlipstreamQueueShardDown")
    for process in silent:
        process.resume()
    assert {alert.name for alert in alerts.ALL} - fired - provoked.fired() == _NOT_PROVOKED


def block_checkpoints(folder: Path) -> None:
    """Replaces a run's checkpoint folder with a file, also while a checkpoint is being written."""
    checkpoints = folder / "checkpoints"
    for attempt in range(100):
        try:
            checkpoints.touch(exist_ok=False)
        except FileExistsError:
            checkpoints.rename(folder / f"blocked-{attempt}")
        else:
            return
    raise TimeoutError("checkpoints are made faster than they are moved away")


def call_without_token(port: int) -> None:
    """Sends unauthenticated calls often enough for the alert's rate."""
    # A connection with several refused calls is closed, so each call has its own.
    options = [("grpc.use_local_subchannel_pool", 1)]
    for _ in range(50):
        with grpc.insecure_channel(f"127.0.0.1:{port}", options) as channel:
            call = channel.unary_unary("/slipstream.transferqueue.v1.TransferQueueService/GetStats")
            with pytest.raises(grpc.RpcError) as refused:
                call(b"", timeout=20)
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


def send_garbage(port: int) -> None:
    """Sends bytes to the data plane, which has not admitted the sender and so does not answer."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.connect(f"tcp://127.0.0.1:{port}")
        dealer.send_multipart([b"garbage", b"more"])
        dealer.close(linger=20_000)  # milliseconds until it must have been sent


def ask_for_damaged_events(provoked: Provoked, run_id: str) -> None:
    """Damages the stored events of a run, and requests them until the alert fires."""
    with sqlite3.connect(provoked.folder / "slipstream.db") as database:
        database.execute("update events set data_json = '{' where run_id = ?", (run_id,))

    def is_seen() -> bool:
        answer = provoked.get(f"/v1/runs/{run_id}/events")
        assert answer.status_code == 500
        return "SlipstreamApiErrors" in provoked.fired()

    eventually(is_seen, "SlipstreamApiErrors to fire")
