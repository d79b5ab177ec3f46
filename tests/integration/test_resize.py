"""The number of rollouts changes while a run trains."""

import time

import httpx
import pytest

from tests.helpers.cli import as_owner, started
from tests.helpers.patching import patch_run
from tests.helpers.ports import free_port

pytestmark = pytest.mark.timeout(300)


def rollouts(api: httpx.Client, run_id: str) -> set[str]:
    """Returns the rollouts that serve weights."""
    workers = api.get(f"/v1/runs/{run_id}/topology").raise_for_status().json()["items"]
    return {
        worker["worker_id"]
        for worker in workers
        if worker["role"] == "rollout" and worker["weight_version"] >= 0
    }


def resize(api: httpx.Client, run_id: str, replicas: int) -> int:
    """Requests another number of rollouts; returns the step of the run."""
    return int(patch_run(api, run_id, {"rollout_replicas": replicas})["step"])


def until(condition, timeout_s: float = 90.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_rollouts_come_and_go_while_a_run_trains(plumbing, tmp_path):
    port = free_port()
    arguments = (
        *("run", plumbing, "--state-directory", tmp_path / "runs", "--port", str(port)),
        *("--set", "trainer.steps=100000", "--set", "rollout.replicas=1"),
    )
    url = f"http://127.0.0.1:{port}"
    with (
        started(*arguments, until=r"step +2/"),
        httpx.Client(base_url=url, timeout=30, headers=as_owner(url)) as api,
    ):
        (run,) = api.get("/v1/runs").json()["items"]
        run_id = run["id"]

        def step() -> int:
            return int(api.get(f"/v1/runs/{run_id}").json()["step"])

        def told(kind: str) -> int:
            events = api.get(f"/v1/runs/{run_id}/events", params={"type": kind})
            return len(events.raise_for_status().json()["items"])

        for count, replicas in enumerate((2, 1), start=1):
            resize(api, run_id, replicas)
            until(lambda count=count: told("Resized") == count)
            names = {f"rollout-{index}" for index in range(replicas)}
            until(lambda names=names: rollouts(api, run_id) == names)
            reached = step()
            until(lambda reached=reached: step() >= reached + 3)
            # The loop is left neither for those that join nor for those that leave.
            assert told("WorkersReady") == 1
        assert (told("WorkerLost"), told("ResizeFailed")) == (0, 0)
        ended = api.get(f"/v1/runs/{run_id}").json()
        assert (ended["state"], ended["spec"]["rollout"]["replicas"]) == ("RUNNING", 1)
