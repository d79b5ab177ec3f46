"""Runs of a release on the nodes of a network."""

import json
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from services.common.runspec.loader import parse_spec
from tests.helpers.ledger_check import check_run
from tests.helpers.patching import patch_run
from tests.helpers.plumbing import PLUMBING, write_plumbing
from tests.nodes.network import Node
from tests.nodes.pods import Release, Workers

# Far above the duration of any wait on a busy machine.
PATIENCE_S = 600.0
_SETTINGS = {"SLIPSTREAM_CONTROLLER_LAUNCHER": "none"}
"""The tests start workers, because there is no Kubernetes."""


def until(condition: Callable[[], object], what: Callable[[], str], timeout_s: float) -> None:
    """Waits until a condition holds.

    Raises:
        AssertionError: If the condition does not hold in time.
    """
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"waited {timeout_s:.0f} s: {what()}"
        time.sleep(0.2)


@dataclass
class Run:
    """Run whose trainer is on two nodes, and whose rollouts are on further nodes."""

    id: str
    workers: Workers
    state: Path
    """State directory of the controller."""
    _api: httpx.Client
    _logs: Callable[[], str]

    def read(self) -> dict[str, Any]:
        """Returns the run as the API shows it."""
        return dict(self._api.get(f"/v1/runs/{self.id}").raise_for_status().json())

    def events(self, type_: str) -> list[dict[str, Any]]:
        """Returns events of a type, oldest first."""
        answer = self._api.get(
            f"/v1/runs/{self.id}/events", params={"type": type_, "page_size": 1000}
        )
        return list(answer.raise_for_status().json()["items"])

    def syncs(self) -> list[dict[str, Any]]:
        """Returns the facts of all weight syncs."""
        return [event["data"] for event in self.events("WeightsPublished")]

    def lost(self) -> list[str]:
        """Returns the causes of all losses of workers."""
        return [str(event["message"]) for event in self.events("WorkerLost")]

    def train(self, steps: int, timeout_s: float = PATIENCE_S) -> None:
        """Waits for further steps.

        Raises:
            AssertionError: If the run ends earlier.
        """
        before = self.read()["step"]

        def is_there() -> bool:
            run = self.read()
            is_over = run["state"] in ("SUCCEEDED", "FAILED", "CANCELLED")
            assert not is_over, f"{run['state']}: {run['message']}\n{self._logs()}"
            return bool(run["step"] >= before + steps)

        until(is_there, self._logs, timeout_s)

    def limit(self, **limits: float) -> None:
        """Changes limits of the running run."""
        patch_run(self._api, self.id, {"limits": limits})

    def until_end(self, timeout_s: float = PATIENCE_S) -> dict[str, Any]:
        """Waits for the end of the run; returns the run as the API shows it."""
        ends = ("SUCCEEDED", "FAILED", "CANCELLED")
        until(lambda: self.read()["state"] in ends, self._logs, timeout_s)
        return self.read()

    def until_synced(self, count: int, timeout_s: float = PATIENCE_S) -> list[float]:
        """Waits for further weight syncs; returns the seconds of their transfers."""
        before = len(self.syncs())
        until(lambda: len(self.syncs()) >= before + count, self._logs, timeout_s)
        return [sync["transfer_ms"] / 1000 for sync in self.syncs()[before:]]

    def finish(self) -> dict[str, int]:
        """Waits until the run has trained all steps; returns the checked facts of its ledger."""
        ended = self.until_end()
        assert ended["state"] == "SUCCEEDED", f"{ended['message']}\n{self._logs()}"
        return check_run(self.state)

    def until_lost(self, number: int, timeout_s: float) -> str:
        """Waits until the run has lost workers ``number`` times; returns the cause of the last loss."""
        until(lambda: len(self.lost()) >= number, self._logs, timeout_s)
        return self.lost()[number - 1]


@dataclass
class Runs:
    """Running release on which tests train."""

    release: Release
    nodes: Mapping[str, Node]
    api: httpx.Client
    figures: dict[str, float]
    """Measurements of the tests."""

    @contextmanager
    def run(
        self,
        *,
        steps: int,
        replicas: int = 1,
        node_ranks: int = 1,
        trainer: Mapping[str, Any] | None = None,
        has_loopback_names: bool = False,
    ) -> Iterator[Run]:
        """Submits a run and starts its workers; stops both when the block ends.

        Args:
            replicas: One or two rollouts.
            node_ranks: Ranks of the trainer on each of its two nodes.
            trainer: Further keys of the section ``trainer``.
            has_loopback_names: True if pods resolve their own host names to 127.0.1.1.
        """
        spec = json.loads(json.dumps(PLUMBING))
        spec["data"]["train"]["path"] = str(self.release.code / "prompts.jsonl")
        spec["rollout"] |= {"replicas": replicas, "rewards": [{"name": "reward:length"}]}
        spec["trainer"] |= {
            "steps": steps,
            "world_size": 2 * node_ranks,
            "checkpoint": {"every": 2},
        }
        spec["trainer"] |= trainer or {}
        spec["topology"] = {"gpus_per_node": node_ranks}
        spec["limits"] = {"max_restarts": 10}
        # A busy machine must not count as a lost link.
        spec["weight_sync"] = {"answer_timeout_s": 5.0}
        answer = self.api.post("/v1/runs", json=spec)
        assert answer.status_code == 201, answer.text
        run_id = answer.json()["id"]
        where = {
            "trainer-0": self.nodes["trainer0"],
            "trainer-0-node-1": self.nodes["trainer1"],
            "rollout-0": self.nodes["rollout"],
            "rollout-1": self.nodes["rollout1"],
        }
        workers = self.release.workers(
            run_id, parse_spec(spec), where, has_loopback_names=has_loopback_names
        )
        run = Run(run_id, workers, self.release.state, self.api, self.release.logs)
        try:
            yield run
        finally:
            workers.close()
            if run.read()["state"] not in ("SUCCEEDED", "FAILED"):
                self.api.post(f"/v1/runs/{run_id}/cancel").raise_for_status()


@contextmanager
def running_release(
    folder: Path, nodes: Mapping[str, Node], figures: dict[str, float]
) -> Iterator[Runs]:
    """Runs a release until the block ends; yields it once its services answer."""
    release = Release(folder, nodes, _SETTINGS)
    write_plumbing(release.code)
    try:
        release.start()
        with httpx.Client(
            base_url=f"http://{nodes['controller'].ip}:8080",
            headers={"Authorization": f"Bearer {release.token}"},
            timeout=30,
            trust_env=False,
        ) as api:

            def answers() -> bool:
                assert not release.has_ended, release.logs()
                try:
                    socket.create_connection((nodes["transferqueue"].ip, 50051)).close()
                    return api.get("/healthz").is_success
                except (OSError, httpx.HTTPError):
                    return False

            until(answers, release.logs, PATIENCE_S)
            yield Runs(release, nodes, api, figures)
    finally:
        release.close()
