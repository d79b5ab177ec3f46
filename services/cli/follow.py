"""Follows a run to its end: displays progress, then writes the report files."""

import asyncio
import time
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from services.cli.api import Api, ApiError
from services.cli.display import Display, heldout_line, make_display
from services.cli.output import TELL_EVERY_S
from services.cli.report import METRICS, StepLog, summary_lines, write_report
from services.common.task_group import TaskGroup
from services.controller.api.operations import GetTopology

_TOLD = (
    "StateChanged",
    "Waiting",
    "WorkerPending",
    "WorkerLost",
    "RolloutCutOff",
    "RolloutReconnected",
    "WorkerCutOff",
    "WorkerReconnected",
    "GroupFailed",
    "CheckpointFailed",
    "NoProgress",
    "NothingLearned",
    "StepSkipped",
    "QuantizationEnded",
    "Advice",
)


async def follow(
    api: Api, run_id: str, *, state_directory: Path, console: Console
) -> dict[str, Any]:
    """Displays a run until it ends.

    Returns:
        The ended run, with ``summary_path`` added.
    """
    run = (await api.get(run_id)).model_dump(mode="json")
    log = StepLog()
    folder = state_directory / run_id
    folder.mkdir(parents=True, exist_ok=True)
    with make_display(f"{run['name']}  {run_id}", run["target_steps"], console) as display:
        async with TaskGroup() as tasks:
            reasons: deque[str] = deque([""], maxlen=1)
            starting = tasks.create_task(_show_start(api, run_id, display, reasons))
            saving: asyncio.Task[None] | None = None
            last_step = run["target_steps"]
            async for kind, event in api.watch(run_id):
                _show(kind, event, log, display)
                log.append(folder / METRICS)
                if kind in ("StepCommitted", "end"):
                    starting.cancel()
                if kind == "NoProgress":
                    reasons.append(event["message"])
                if kind == "DataOpened":
                    last_step = event["data"]["steps"]
                if kind == "CheckpointStarted" and event["data"]["step"] == last_step:
                    # A controller that was lost meanwhile starts the last checkpoint once more.
                    if saving:
                        saving.cancel()
                    saving = tasks.create_task(_show_saving(api, run_id, display))
                if saving and kind in ("CheckpointSaved", "CheckpointFailed", "end"):
                    saving.cancel()
                if kind == "end":
                    run = event
    wall_seconds = _seconds(run)
    path = write_report(folder, run, log, wall_seconds=wall_seconds)
    for line in summary_lines(run, folder, log, wall_seconds=wall_seconds):
        console.print(line, soft_wrap=True)
    return {**run, "summary_path": str(path)}


def _show(kind: str, event: Mapping[str, Any], log: StepLog, display: Display) -> None:
    for record in log.process(kind, event):
        display.step(record, log.heldout)
    if kind == "DataOpened":
        display.set_num_steps(event["data"]["steps"])
    if kind == "Validated":
        display.print_message(heldout_line(event["data"]))
    elif kind in _TOLD:
        display.print_message(event["message"])


async def _show_start(api: Api, run_id: str, display: Display, reasons: Sequence[str]) -> None:
    """Shows the workers' activities, or the newest reason for no progress, until the first step is done."""
    begin = time.monotonic()
    while True:
        try:
            workers = await api.call(GetTopology(run_id=run_id))
        except ApiError:
            return
        seconds = time.monotonic() - begin
        doing = [worker.model_dump() for worker in workers.items]
        display.workers(doing, seconds=seconds, reason=reasons[-1])
        await asyncio.sleep(TELL_EVERY_S)


async def _show_saving(api: Api, run_id: str, display: Display) -> None:
    """Shows the progress of the last checkpoint, as the trainers report it."""
    begin = time.monotonic()
    while True:
        try:
            workers = await api.call(GetTopology(run_id=run_id))
        except ApiError:
            return
        progress = [
            worker.activity for worker in workers.items if worker.gauges.get("checkpoint_bytes")
        ]
        if progress:
            display.saving(", ".join(progress), seconds=time.monotonic() - begin)
        await asyncio.sleep(TELL_EVERY_S)


def _seconds(run: Mapping[str, Any]) -> float:
    """Returns the duration of an ended run by the controller's clock, without its time in the queue."""
    begin, end = run.get("start_time") or run["create_time"], run["finish_time"]
    return (datetime.fromisoformat(end) - datetime.fromisoformat(begin)).total_seconds()
