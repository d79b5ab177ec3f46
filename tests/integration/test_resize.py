"""Rollouts join and leave a training run, on request and after losses."""

import signal
import time

import httpx
import pytest

from tests.helpers.cli import as_owner, ranks_of, started
from tests.helpers.patching import patch_run
from tests.helpers.ports import free_port

pytestmark = pytest.mark.timeout(300)

ROWS = """
import time
from pathlib import Path

def rows():
    while Path({loading!r}).exists():
        time.sleep(0.05)
    return [{{"prompt": f"question {{number}}"}} for number in range(32)]
"""


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


@pytest.mark.parametrize(
    "signal_", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.nightly)]
)
def test_training_continues_while_rollouts_come_go_and_are_replaced(plumbing, tmp_path, signal_):
    port = free_port()
    # A rollout does not finish loading while this file exists.
    loading = tmp_path / "loading"
    (tmp_path / "rows.py").write_text(ROWS.format(loading=str(loading)))
    arguments = (
        *("run", plumbing, "--state-directory", tmp_path / "runs", "--port", str(port)),
        *("--set", f"data.train={{source: python, path: '{tmp_path}/rows.py:rows'}}"),
        *("--set", "trainer.steps=100000", "--set", "rollout.replicas=2"),
    )
    url = f"http://127.0.0.1:{port}"
    with (
        started(*arguments, until=r"step +2/"),
        httpx.Client(base_url=url, timeout=30, headers=as_owner(url)) as api,
    ):
        (run,) = api.get("/v1/runs").json()["items"]
        run_id = run["id"]

        def shown() -> dict:
            return api.get(f"/v1/runs/{run_id}").raise_for_status().json()

        def events_of(kind: str, after: int = 0) -> list[int]:
            query = {"type": kind, "after_seq": after}
            response = api.get(f"/v1/runs/{run_id}/events", params=query).raise_for_status()
            return [event["seq"] for event in response.json()["items"]]

        for count, replicas in enumerate((1, 2), start=1):
            resize(api, run_id, replicas)
            until(lambda count=count: len(events_of("Resized")) == count)
            names = {f"rollout-{index}" for index in range(replicas)}
            until(lambda names=names: rollouts(api, run_id) == names)
            reached = shown()["step"]
            until(lambda reached=reached: shown()["step"] >= reached + 3)
            # The training loop does not restart when rollouts join or leave.
            assert len(events_of("WorkersReady")) == 1
        assert (events_of("WorkerLost"), events_of("ResizeFailed")) == ([], [])
        ended = shown()
        assert (ended["state"], ended["spec"]["rollout"]["replicas"]) == ("RUNNING", 2)

        loading.touch()
        ranks_of("rollout-1", tmp_path / "runs")["0"].send_signal(signal_)
        until(lambda: events_of("WorkerLost"))
        (loss_event,) = events_of("WorkerLost")
        until(lambda: events_of("StepCommitted", after=loss_event))
        assert not events_of("Replaced")
        loading.unlink()
        until(lambda: events_of("Replaced"))
        until(lambda: rollouts(api, run_id) == {"rollout-0", "rollout-1"})
        assert len(events_of("WorkersReady")) == 2  # at the start, and after the loss
        assert shown()["state"] == "RUNNING"
