"""Workers leave drained hosts while a run trains; the launcher of the test drains hosts that a file names."""

import json
from collections.abc import Collection
from pathlib import Path

import httpx
import pytest

from tests.helpers.cli import as_owner, started
from tests.helpers.packages import install
from tests.helpers.ports import free_port
from tests.integration.test_resize import rollouts, until

pytestmark = pytest.mark.timeout(300)

LAUNCHER = """
import asyncio
import json
from contextlib import asynccontextmanager
from pathlib import Path

from services.common.launchers import LauncherKind
from services.controller.manager.launchers import open_processes
from services.controller.run.lifecycle.drains import DrainedHost

KIND = LauncherKind(opener="draining:opened", site="services.common.launchers:Site", shares_files=True)


@asynccontextmanager
async def opened(args):
    async with open_processes(args) as launcher:
        async def release(run_id, worker_ids):
            for worker_id in sorted(worker_ids):
                await launcher.end(run_id, worker_id)

        launcher.release = release
        watching = args.tasks.create_task(watch(args))
        yield launcher
        watching.cancel()


async def watch(args):
    known = set()
    while True:
        await asyncio.sleep(0.2)
        file = args.settings.state_directory / "drained.json"
        drained = json.loads(file.read_text()) if file.exists() else {}
        for run_id in args.manager.drivers.driven_runs():
            for host, workers in drained.items():
                if host not in known:
                    known.add(host)
                    args.manager.drivers.host_drained(
                        run_id, DrainedHost(name=host, reason="cordoned", since=0.0), workers
                    )
"""


def test_a_run_trains_each_step_once_while_its_hosts_are_drained(
    plumbing: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, state, port = tmp_path / "package", tmp_path / "runs", free_port()
    folder.mkdir()
    (folder / "draining.py").write_text(LAUNCHER)
    install(
        folder, monkeypatch, entry_points={"slipstream.launchers": {"draining": "draining:KIND"}}
    )
    arguments = (
        *("run", plumbing, "--state-directory", state, "--port", str(port)),
        *("--launcher", "draining", "--set", "trainer.steps=100000"),
        *("--set", "rollout.replicas=2", "--set", "rollout.partial_rollout=true"),
        *("--set", "trainer.checkpoint.every=0"),
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

        def events_of(*kinds: str) -> list[dict]:
            query = {"type": [*kinds], "limit": 500}
            return api.get(f"/v1/runs/{run_id}/events", params=query).json()["items"]

        def drain(host: str, workers: Collection[str]) -> None:
            file = state / "drained.json"
            drained = json.loads(file.read_text()) if file.exists() else {}
            partial = file.with_suffix(".partial")
            partial.write_text(json.dumps({**drained, host: [*workers]}))
            partial.replace(file)

        drain("node-1", ["rollout-1"])
        until(lambda: len(events_of("Replaced")) == 1)
        until(lambda: rollouts(api, run_id) == {"rollout-0", "rollout-1"})
        assert len(events_of("WorkersReady")) == 1, "the run trained on"

        drain("node-2", ["trainer-0", "rollout-0"])
        until(lambda: len(events_of("Drained")) == 2)
        step = shown()["step"]
        until(lambda: shown()["step"] >= step + 3)
        until(lambda: rollouts(api, run_id) == {"rollout-0", "rollout-1"})
        assert shown()["state"] == "RUNNING"
        assert events_of("WorkerLost", "Rewound", "CheckpointFailed") == []
        (saved,) = events_of("CheckpointSaved")
        steps = [event["data"]["step"] for event in events_of("StepCommitted")]
        assert steps == [*range(1, len(steps) + 1)], "each step once, in order"
        assert saved["data"]["step"] == step
