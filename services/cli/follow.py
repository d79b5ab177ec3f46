"""Follows a run to its end: shows progress, then writes what is left of it."""

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from services.cli.api import Api, ApiError
from services.cli.display import Display, make_display
from services.cli.report import summary_lines, write_report
from services.cli.steps import StepLog
from services.common.task_group import TaskGroup

_POLL_S = 1.0
_TOLD = ("StateChanged", "Waiting", "WorkerPending", "WorkerLost", "GroupFailed")


async def follow(
    api: Api, run_id: str, *, state_directory: Path, console: Console
) -> dict[str, Any]:
    """Show a run until it ends.

    Returns:
        The ended run, with ``summary_path`` added.
    """
    begin = time.monotonic()
    run = (await api.get(run_id)).model_dump(mode="json")
    log = StepLog()
    with make_display(
        f"{run['name']} {run_id}", run["spec"]["trainer"]["steps"], console
    ) as display:
        async with TaskGroup() as tasks:
            starting = tasks.create_task(_show_start(api, run_id, display))
            async for kind, event in api.watch(run_id):
                _show(kind, event, log, display)
                if kind != "StateChanged" or event["data"]["to"] != "STARTING":
                    starting.cancel()
                if kind == "end":
                    run = event
    wall_seconds = time.monotonic() - begin
    folder = state_directory / run_id
    path = write_report(folder, run, log, wall_seconds=wall_seconds)
    for line in summary_lines(run, folder, wall_seconds=wall_seconds):
        console.print(line, soft_wrap=True, highlight=False, markup=False)
    return {**run, "summary_path": str(path)}


def _show(kind: str, event: Mapping[str, Any], log: StepLog, display: Display) -> None:
    for record in log.take(kind, event):
        display.step(record, log.heldout)
    if kind == "Validated":
        display.note(f"held-out: {event['message']} ({event['data']['reason']})")
    elif kind in _TOLD:
        display.note(event["message"])


async def _show_start(api: Api, run_id: str, display: Display) -> None:
    """Show what the workers load, until the first event that is not of the start."""
    while True:
        try:
            workers = await api.topology(run_id)
            display.workers([worker.model_dump() for worker in workers])
        except ApiError:
            return
        await asyncio.sleep(_POLL_S)
