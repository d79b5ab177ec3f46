"""Runs calls side by side, each in a separate process, and keeps the files of those that fail."""

import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

Key = TypeVar("Key")
Result = dict[str, Any]
Task = Callable[[Path], Result]
"""A call that gets an empty folder for its files; can be pickled."""


def side_by_side(
    tasks: Iterator[tuple[Key, Task]], jobs: int, keep: Path | None = None
) -> Iterator[tuple[Key, Result]]:
    """Yields the results of tasks in the order in which they end.

    Args:
        tasks: Tasks with their keys; the next one is taken when a process is free.
        jobs: Number of processes.
        keep: Folder for the files of tasks whose result has a failure; by default they are deleted.
    """
    running: dict[Future[Result], Key] = {}
    # Attached servers get their token from the environment, so tasks must not share a process.
    spawned = get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=spawned, max_tasks_per_child=1) as pool:
        while True:
            while len(running) < jobs and (task := next(tasks, None)) is not None:
                running[pool.submit(in_folder, task[1], keep)] = task[0]
            if not running:
                return
            ended, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in ended:
                yield running.pop(future), future.result()


def in_folder(task: Task, keep: Path | None = None) -> Result:
    """Runs a task in a temporary folder; an error of the task itself is a failure, too.

    A process group that gets SIGTERM, as from ``timeout``, leaves no process of the task.
    """
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        folder = Path(name, "files")
        folder.mkdir()
        try:
            result = task(folder)
        except Exception as error:  # noqa: BLE001 - the other tasks go on
            result = {"failure": f"{type(error).__name__}: {error}", "wrong": "suite"}
        if "failure" in result and keep is not None:
            keep.mkdir(parents=True, exist_ok=True)
            shutil.move(folder, keep / Path(name).name)
            result["files"] = Path(name).name
    return result
