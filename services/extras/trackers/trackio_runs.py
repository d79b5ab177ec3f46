"""Runs in Trackio: in a local database or, if Trackio's settings say so, in a Space or on a server."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import trackio
from trackio.sqlite_storage import SQLiteStorage
from trackio.utils import resolve_space_id_and_server_url

from services.common.runspec.trackers import TrackerSpec
from services.controller.schemas import RunView
from services.extras.trackers.tracker import EventPosition, NewestSteps, Split, as_markdown

_REREADS = 500


class TrackioRun:
    """One run in Trackio.

    Args:
        known: Rows that the run already has; None if they cannot be read.
    """

    def __init__(self, run: Any, logs: Sequence[Mapping[str, Any]] | None) -> None:
        self._run = run
        # A thread of trackio writes rows with a delay of half a second.
        self.rereads = 0 if logs is None else _REREADS
        self._newest = NewestSteps()
        for row in logs or ():
            for name in row:
                self._newest.record_step(name, int(row["step"]))

    def numbers(self, moment: EventPosition, numbers: Mapping[str, float]) -> None:
        if new := self._newest.pop_new(moment.step, numbers):
            self._run.log(new, step=moment.step)

    def samples(self, moment: EventPosition, split: Split, rows: Sequence[Sequence[Any]]) -> None:
        """Logs a table as text."""
        name = f"samples/{split}"
        if self._newest.pop_new(moment.step, {name: 0.0}):
            self._run.log({name: trackio.Markdown(as_markdown(rows))}, step=moment.step)

    def close(self, state: str) -> None:
        """Sends the remaining rows."""
        self._run.finish()


def open_run(run: RunView, spec: TrackerSpec, folder: Path) -> TrackioRun:
    name = f"{run.name}-{run.id.removeprefix('run_')[-8:]}"
    # Only a local database can be queried for existing rows; elsewhere the cursor must suffice.
    is_here = not any(resolve_space_id_and_server_url(None, None))
    logs = SQLiteStorage.get_logs(spec.project, name) if is_here else None
    trackio_run = trackio.init(
        spec.project,
        name=name,
        config={**run.spec, "run_id": run.id, "tags": list(spec.tags)},
        resume="allow",
        embed=False,
        auto_log_gpu=False,
        auto_log_cpu=False,
    )
    return TrackioRun(trackio_run, logs)
