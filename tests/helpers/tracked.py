"""Writes a run to a tracker, and reads back the values that trackers stored on this machine."""

import importlib
import importlib.util
import json
import multiprocessing
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import pytest

from services.common.callables import load_callable
from services.common.runspec.trackers import TRACKERS, TrackerSpec
from services.controller.schemas import RunView
from services.extras.trackers.tracker import COLUMNS, EventPosition

Point = tuple[str, int, float]
"""Name, step, value."""

RUN = RunView(
    id=f"run_{1:032x}",
    project="default",
    name="sort",
    desired="RUNNING",
    state="RUNNING",
    state_reason="",
    message="",
    priority=0,
    labels={"team": "blue"},
    created_by="",
    step=0,
    weight_version=0,
    summary={},
    spec_digest="",
    target_steps=3,
    create_time=datetime.now(UTC),
    update_time=datetime.now(UTC),
    revision=1,
    generation=1,
    spec={"name": "sort", "trainer": {"steps": 3}, "rollout": {"rewards": [{"name": "exact"}]}},
)
ROW = [None if name == "reward" else "| what\nit wrote |" for name in COLUMNS]


def needs(*packages: str) -> pytest.MarkDecorator:
    """Skips a test if a tracker is not installed, except in CI, which has all."""
    missing_packages = [name for name in packages if importlib.util.find_spec(name) is None]
    is_skipped = bool(missing_packages) and not os.environ.get("CI")
    return pytest.mark.skipif(is_skipped, reason=f"not installed: {', '.join(missing_packages)}")


def of_tensorboard(folder: Path) -> list[Point]:
    """Returns all scalars below a folder."""
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    return [
        (value.tag, event.step, value.simple_value)
        for path in sorted(folder.rglob("events.out.tfevents.*"))
        for event in LegacyEventFileLoader(str(path)).Load()
        for value in event.summary.value
        if value.HasField("simple_value")
    ]


def of_mlflow(uri: str) -> list[Point]:
    """Returns all metrics of all runs."""
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    ids = [experiment.experiment_id for experiment in client.search_experiments()]
    return [
        (name, metric.step, metric.value)
        for run in client.search_runs(ids)
        for name in run.data.metrics
        for metric in client.get_metric_history(run.info.run_id, name)
    ]


def of_trackio(folder: Path) -> list[Point]:
    """Returns all numbers in Trackio's databases."""
    points = []
    for path in folder.glob("*.db"):
        with sqlite3.connect(path) as connection:
            for step, metrics in connection.execute("SELECT step, metrics FROM metrics"):
                points += [
                    (name, step, value)
                    for name, value in json.loads(metrics).items()
                    if isinstance(value, int | float)
                ]
    return points


def of_wandb(folder: Path) -> list[Point]:
    """Returns all numbers that wandb would send, of all sessions of a run."""
    from services.extras.trackers.wandb_runs import rows_of

    points = []
    for record in rows_of(folder, "*"):
        row = {
            item.key or "/".join(item.nested_key): json.loads(item.value_json)
            for item in record.history.item
        }
        points += [
            (name, row["step"], value)
            for name, value in row.items()
            if isinstance(value, int | float) and not name.startswith("_") and name != "step"
        ]
    return points


def curve(points: list[Point], name: str) -> list[int]:
    """Returns the steps at which a metric has values, once per value."""
    return sorted(step for point_name, step, _ in points if point_name == name)


def environment(folder: Path) -> dict[str, str]:
    """Returns an environment in which trackers store everything in a folder."""
    return {
        "WANDB_MODE": "offline",
        "MLFLOW_TRACKING_URI": f"file:{folder}/mlflow",
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "TRACKIO_DIR": f"{folder}/trackio",
    }


def write(kind: str, folder: Path, *processes: Sequence[int], num_killed: int) -> None:
    """Writes a run's metrics in several processes.

    After its steps, each process writes an evaluation and a table of samples of its second to last step.

    Args:
        kind: The tracker.
        folder: Folder for the tracker's files.
        processes: The steps that each process writes, one process after the other.
        num_killed: The first processes are killed after their steps; the others end the run.
    """
    message = json.dumps([kind, str(folder), processes, num_killed])
    result = subprocess.run(
        [sys.executable, "-m", "tests.helpers.tracked", message],
        env={**os.environ, **environment(folder)},
        cwd=Path(__file__).parents[2],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert result.returncode == 0, result.stderr


def _write_all(kind: str, folder: str, processes: list[list[int]], num_killed: int) -> None:
    """Forks each process from this one, which imports the tracker's library only once."""
    importlib.import_module(kind)
    for index, steps in enumerate(processes):
        process = multiprocessing.get_context("fork").Process(
            target=_write, args=(kind, folder, steps, index < num_killed)
        )
        process.start()
        process.join()
        assert process.exitcode == (-signal.SIGKILL if index < num_killed else 0)


def _write(kind: str, folder: str, steps: list[int], is_killed: bool) -> None:
    tracker = load_callable(TRACKERS[kind].opens)(RUN, TrackerSpec(kind=kind), Path(folder))
    for step in steps:
        moment = EventPosition(seq=10 * step, step=step, time=1e9 + step)
        tracker.numbers(moment, {"reward_mean": step / 8, "reward/a b": -1.0})
    later = EventPosition(seq=10 * steps[-1] + 1, step=steps[-1] - 1, time=1e9)
    tracker.numbers(later, {"heldout/greedy": 0.5})
    tracker.samples(later, "heldout", [ROW])
    if is_killed:
        os.kill(os.getpid(), signal.SIGKILL)
    tracker.close("SUCCEEDED")


if __name__ == "__main__":
    _write_all(*json.loads(sys.argv[1]))
