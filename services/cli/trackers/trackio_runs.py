"""Runs in Trackio: a database here or, where its own settings say so, a Space or a server."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import trackio
from trackio.sqlite_storage import SQLiteStorage
from trackio.utils import resolve_space_id_and_server_url

from services.cli.trackers.tracker import Moment, Newest, Split, as_markdown
from services.common.runspec.trackers import TrackerSpec
from services.controller.models import RunView

_REREADS = 500


class TrackioRun:
    """One run.

    Args:
        run: As it was opened.
        known: Rows that it has; None if that cannot be found out.
    """

    def __init__(self, run: Any, known: Sequence[Mapping[str, Any]] | None) -> None:
        self._run = run
        # A thread of trackio's writes rows half a second later.
        self.rereads = 0 if known is None else _REREADS
        self._newest = Newest()
        for row in known or ():
            for name in row:
                self._newest.saw(name, int(row["step"]))

    def numbers(self, moment: Moment, numbers: Mapping[str, float]) -> None:
        """Log a row."""
        if new := self._newest.take(moment.step, numbers):
            self._run.log(new, step=moment.step)

    def samples(self, moment: Moment, split: Split, rows: Sequence[Sequence[Any]]) -> None:
        """Log a table as text."""
        name = f"samples/{split}"
        if self._newest.take(moment.step, {name: 0.0}):
            self._run.log({name: trackio.Markdown(as_markdown(rows))}, step=moment.step)

    def close(self, state: str) -> None:
        """Send what is left."""
        self._run.finish()


def open_run(run: RunView, spec: TrackerSpec, folder: Path) -> TrackioRun:
    """A run of a project, with its specification."""
    name = f"{run.name}-{run.id.removeprefix('run_')[-8:]}"
    # Only a database here can be asked what it has; elsewhere the cursor has to do.
    is_here = not any(resolve_space_id_and_server_url(None, None))
    known = SQLiteStorage.get_logs(spec.project, name) if is_here else None
    made = trackio.init(
        spec.project,
        name=name,
        config={**run.spec, "run_id": run.id, "tags": list(spec.tags)},
        resume="allow",
        embed=False,
        auto_log_gpu=False,
        auto_log_cpu=False,
    )
    return TrackioRun(made, known)
