"""After the loss of a rollout the others continue, and its replacement joins."""

import signal

import httpx
import pytest

from tests.helpers.cli import as_owner, ranks_of, started
from tests.helpers.ports import free_port
from tests.integration.test_resize import rollouts, until

pytestmark = pytest.mark.timeout(300)

ROWS = """
import time
from pathlib import Path

def rows():
    while Path({loading!r}).exists():
        time.sleep(0.05)
    return [{{"prompt": f"question {{number}}"}} for number in range(32)]
"""


@pytest.mark.parametrize(
    "signal_", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.nightly)]
)
def test_training_continues_while_a_lost_rollout_is_replaced(plumbing, tmp_path, signal_):
    port = free_port()
    # A rollout loads for as long as this file exists.
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
        loading.touch()
        ranks_of("rollout-1", tmp_path / "runs")["0"].send_signal(signal_)

        def told(kind: str, after: int = 0) -> list[int]:
            query = {"type": kind, "after_seq": after}
            found = api.get(f"/v1/runs/{run_id}/events", params=query).raise_for_status()
            return [event["seq"] for event in found.json()["items"]]

        until(lambda: told("WorkerLost"))
        (lost,) = told("WorkerLost")
        until(lambda: told("StepCommitted", after=lost))
        assert not told("Replaced")
        loading.unlink()
        until(lambda: told("Replaced"))
        until(lambda: rollouts(api, run_id) == {"rollout-0", "rollout-1"})
        assert len(told("WorkersReady")) == 2  # at first, and without the lost one
        assert api.get(f"/v1/runs/{run_id}").json()["state"] == "RUNNING"
