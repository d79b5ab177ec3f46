"""Trackers of running and ended runs: kills, failing trackers, repeated events."""

import asyncio
import io
import json
import sqlite3
from pathlib import Path

import pytest
from rich.console import Console

from services.cli.api import Api
from services.common.task_group import TaskGroup
from services.controller.api.operations import CancelRun
from services.extras.trackers.processes import TrackerProcesses, tracking
from tests.helpers import tracked
from tests.helpers.cli import SORT4, descendants, slipstream, started
from tests.helpers.controllers import ADMIN, SPEC, running_controller
from tests.helpers.tracked import curve, needs

STEPS = 14
SHORT = (
    f"trainer.steps={STEPS}",
    "trainer.prompts_per_step=8",
    "model.warm_start.steps=5",
    "trainer.checkpoint.every=3",
    "validation.every=5",
    "limits.max_restarts=20",
    "trackers=[{kind: tensorboard, samples_every: 3}, {kind: trackio}]",
)
# A file sets if this tracker fails, hangs or works.
_TRACKER = """
import os, pathlib, time
from types import SimpleNamespace
folder = pathlib.Path(os.environ["TRACKIO_DIR"])

class Markdown(str): pass

def init(project, **options):
    mood = (folder / "mood").read_text()
    while mood == "hangs":
        time.sleep(1)
    if mood == "fails":
        raise RuntimeError("no room for one more run")
    def log(row, step):
        with (folder / "rows").open("a") as file:
            file.write(f"{step}\\n")
    return SimpleNamespace(log=log, finish=lambda: None)
"""


def evaluated(state: Path) -> list[int]:
    """Returns the weight versions that the run evaluated; an interrupted evaluation may be missing."""
    with sqlite3.connect(state / "slipstream.db") as connection:
        rows = connection.execute(
            "SELECT data_json FROM events WHERE type = 'Validated'"
        ).fetchall()
    reported = [json.loads(row) for (row,) in rows]
    return sorted(data["version"] for data in reported if data["num_samples"])


@pytest.mark.nightly
@needs("tensorboard", "trackio")
@pytest.mark.timeout(400)
def test_curves_are_whole_though_controller_and_trackers_were_killed(tmp_path):
    settings = [argument for override in SHORT for argument in ("--set", override)]
    arguments = ("run", SORT4, "--state-directory", tmp_path, *settings)
    with started(*arguments, until=r"step +6/") as (process, lines):
        children = descendants(process)
        victims = [name for name in children if name.startswith(("controller", "cli"))]
        assert len(victims) >= 3, "the controller and a process for each tracker"
        for name in victims:
            children[name].kill()
        out, _ = process.communicate(timeout=300)
        assert process.returncode == 0, "".join(lines) + out
    folder = tmp_path / "trackers"
    points = {
        "tensorboard": tracked.of_tensorboard(folder / "tensorboard"),
        "trackio": tracked.of_trackio(folder / "trackio"),
    }
    for kind, points_of_kind in points.items():
        assert curve(points_of_kind, "reward_mean") == [*range(1, STEPS + 1)], kind
        assert curve(points_of_kind, "heldout/greedy") == evaluated(tmp_path), kind
    (files,) = (folder / "tensorboard").rglob("sort4-*")
    text = b"".join(path.read_bytes() for path in files.iterdir())
    assert b"samples/train" in text and b"samples/heldout" in text


@needs("tensorboard")
def test_a_run_that_has_ended_is_written_on_request(system, plumbing, tmp_path):
    result = system.train(plumbing)
    run_id = Path(result.out.splitlines()[-1]).parent.name
    arguments = ("track", run_id, "--url", system.url, "--folder", tmp_path)
    assert "has no trackers" in slipstream(*arguments).err
    for _ in range(2):
        tracked_run = slipstream(*arguments, "--to", "tensorboard")
        assert tracked_run.code == 0, tracked_run.out + tracked_run.err
        assert run_id in tracked_run.out and "tensorboard" in tracked_run.out
    assert curve(tracked.of_tensorboard(tmp_path), "reward_mean") == [1, 2, 3]


@pytest.fixture
def mood_file(tmp_path, monkeypatch) -> Path:
    """Replaces trackio with a tracker whose behavior a file sets; returns the file."""
    package = tmp_path / "packages" / "trackio"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(_TRACKER)
    (package / "sqlite_storage.py").write_text(
        "class SQLiteStorage:\n    get_logs = staticmethod(lambda project, name: [])\n"
    )
    (package / "utils.py").write_text(
        "def resolve_space_id_and_server_url(*_):\n    return None, None\n"
    )
    repository = Path(__file__).parents[2]
    monkeypatch.setenv("PYTHONPATH", f"{package.parent}:{repository}")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    return tmp_path / "mood"


@pytest.mark.parametrize(
    ("mood", "why"), [("fails", "no room for one more run"), ("hangs", "within 2 s")]
)
async def test_a_failed_tracker_is_reported_once_and_recovers(tmp_path, mood_file, mood, why):
    mood_file.write_text(mood)
    with running_controller(tmp_path) as controller:
        async with Api(controller.url, token=ADMIN) as api, TaskGroup() as tasks:
            run = await api.submit({**SPEC, "trackers": [{"kind": "trackio"}]})
            printed, reported = [], []
            processes = TrackerProcesses(
                api,
                url=controller.url,
                token=ADMIN,
                folder=tmp_path / "kept",
                deadline_s=2.0,
                on_failure=printed.append,
            )
            following = tasks.create_task(processes.follow(run.id, []))
            async with asyncio.timeout(90):
                async for kind, event in api.watch(run.id):
                    if kind.startswith("Tracker"):
                        reported.append((kind, event["message"]))
                        mood_file.write_text("works")
                    if kind == "TrackerRecovered":
                        await api.call(CancelRun(run_id=run.id))
                await following
    assert [kind for kind, _ in reported] == ["TrackerFailed", "TrackerRecovered"]
    assert why in reported[0][1] and why in printed[0]
    cursor = json.loads((tmp_path / "kept" / "cursors" / run.id / "trackio.json").read_text())
    assert cursor["is_done"]


async def test_a_tracker_that_is_not_complete_at_the_end_is_named(tmp_path, mood_file, monkeypatch):
    monkeypatch.setattr("services.extras.trackers.processes._LAST_NUMBERS_S", 1.0)
    mood_file.write_text("hangs")
    output = io.StringIO()
    with running_controller(tmp_path) as controller:
        async with Api(controller.url, token=ADMIN) as api, asyncio.timeout(90):
            run = await api.submit({**SPEC, "trackers": [{"kind": "trackio"}]})
            processes = TrackerProcesses(
                api, url=controller.url, token=ADMIN, folder=tmp_path / "kept"
            )
            async with tracking(processes, Console(file=output, width=200), run_id=run.id):
                await api.call(CancelRun(run_id=run.id))
    assert "trackio did not get all metrics" in output.getvalue()
    assert f"slipstream track {run.id}" in output.getvalue()
