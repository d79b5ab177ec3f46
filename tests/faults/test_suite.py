"""Runs side by side, results after each run, files of failed runs."""

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import psutil
import pytest

from tests.faults import __main__ as suite_module
from tests.faults.__main__ import Suite, num_kills
from tests.faults.parallel import side_by_side
from tests.faults.training import until

_WAIT_S = 60.0


def _wait_for_the_others(folder: Path, meeting: Path, name: str, count: int) -> dict[str, object]:
    """Ends once ``count`` tasks have come to a folder, which tasks one after the other never do."""
    meeting.joinpath(name).touch()
    end = time.monotonic() + _WAIT_S
    while len(list(meeting.iterdir())) < count:
        assert time.monotonic() < end, "the tasks do not run side by side"
        time.sleep(0.01)
    return {"name": name, "is_empty": not list(folder.iterdir())}


def _fail(folder: Path, *, is_reported: bool) -> dict[str, object]:
    folder.joinpath("log").write_text("the cause")
    if is_reported:
        return {"failure": "AssertionError: a prompt trained twice", "wrong": "data"}
    raise KeyError("a process that has ended")


def sleep(folder: Path, file: Path) -> dict[str, object]:
    """Writes the id of a process that a task must end."""
    with subprocess.Popen(["sleep", "1000"], start_new_session=True) as process:
        try:
            file.with_suffix(".part").write_text(str(process.pid))
            file.with_suffix(".part").replace(file)
            process.wait()
        finally:
            process.kill()
    return {}


_SLEEPER = """
import sys
from functools import partial
from pathlib import Path
from tests.faults.parallel import side_by_side
from tests.faults.test_suite import sleep
if __name__ == "__main__":
    list(side_by_side(iter([(0, partial(sleep, file=Path(sys.argv[1])))]), 1))
"""


def test_a_terminated_suite_leaves_no_process(tmp_path):
    file, script = tmp_path / "pid", tmp_path / "sleeper.py"
    script.write_text(_SLEEPER)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, script, file]
    with subprocess.Popen(command, start_new_session=True, env=environment) as suite:
        until(file.exists, "the task", _WAIT_S)
        os.killpg(suite.pid, signal.SIGTERM)
        suite.wait(_WAIT_S)
    pid = int(file.read_text())
    until(lambda: not psutil.pid_exists(pid), "the end of the task's process", _WAIT_S)


def test_tasks_run_side_by_side_in_folders_of_their_own(tmp_path):
    names = [str(number) for number in range(3)]
    tasks = (
        (name, partial(_wait_for_the_others, meeting=tmp_path, name=name, count=3))
        for name in names
    )
    results = dict(side_by_side(tasks, 3))
    assert results == {name: {"name": name, "is_empty": True} for name in names}


@pytest.mark.parametrize("is_reported", [True, False])
def test_the_files_of_a_failed_task_are_kept(tmp_path, is_reported):
    keep = tmp_path / "kept"
    tasks = iter([("only", partial(_fail, is_reported=is_reported))])
    ((_, result),) = side_by_side(tasks, 1, keep)
    assert result["wrong"] == ("data" if is_reported else "suite")
    assert (keep / result["files"] / "log").read_text() == "the cause"


def _survive(folder: Path, seed: int, kind: str, *, kills: int, steps: int) -> dict[str, object]:
    """Stands for a run of the suite."""
    if seed == 1:
        raise KeyError(kind)
    return {"killed": {"trainer": kills}, "trained": steps}


def test_runs_go_on_until_the_kills_are_done_and_after_a_failure(tmp_path, monkeypatch):
    monkeypatch.setattr(suite_module, "tried", _survive)
    path = tmp_path / "faults.json"
    earlier = {"commit": "abc", "seed": 0, "kind": "lag 0", "killed": {"trainer": 3}}
    suite = Suite(
        commit="abc", path=path, results={"runs": [earlier]}, end=time.monotonic() + _WAIT_S
    )
    failed = suite.make_kills(["lag 0", "lag 1"], 9, kills=3, steps=5)
    runs = json.loads(path.read_text())["runs"]
    assert [(run["seed"], run["kind"]) for run in runs] == [
        (0, "lag 0"),
        (1, "lag 1"),
        (2, "lag 0"),
        (3, "lag 1"),
    ]
    assert (failed, num_kills(runs, "abc")) == ([1], 9)
    assert json.loads(path.read_text())["kills"] == {"abc": 9}


def test_no_run_begins_after_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr(suite_module, "tried", _survive)
    suite = Suite(commit="abc", path=tmp_path / "faults.json", results={}, end=time.monotonic())
    assert suite.make_kills(["lag 0"], 9, kills=3, steps=5) == []
