"""Runs ``slipstream track`` with the services of this machine, for one run or for all."""

import asyncio
import importlib.util
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from rich.console import Console

from services.cli.local import LocalServices
from services.cli.output import print_line
from services.cli.trackers.child import run_to_end
from services.common.runspec.trackers import TRACKERS
from services.common.task_group import TaskGroup
from services.controller.launch.worker_process import last_lines

FOLDER = "trackers"
"""Name of the trackers' folder in the state directory."""
_AGAIN_S = 5.0
_STOP_GRACE_S = 15.0
_LAST_NUMBERS_S = 60.0


def has_any_tracker() -> bool:
    """Returns True if the package of a tracker is installed."""
    return any(importlib.util.find_spec(kind.package) is not None for kind in TRACKERS.values())


@asynccontextmanager
async def tracking(
    services: LocalServices, state_directory: Path, console: Console, *, run_id: str = ""
) -> AsyncIterator[None]:
    """Writes runs to their trackers until the block ends, in a process that is restarted when it fails.

    Args:
        services: The running services.
        state_directory: Their state directory.
        console: Receives messages about waits and failures.
        run_id: The only run to write, whose last metrics are waited for; empty for all runs.
    """
    async with TaskGroup() as tasks:
        keeping = tasks.create_task(_keep(services, state_directory, console, run_id))
        try:
            yield
            if run_id:
                print_line(console, "the trackers get the last numbers")
                await asyncio.wait((keeping,), timeout=_LAST_NUMBERS_S)
        finally:
            keeping.cancel()


async def _keep(
    services: LocalServices, state_directory: Path, console: Console, run_id: str
) -> None:
    log = state_directory / "logs" / "trackers.log"
    given = ("--url", services.url, "--folder", str(state_directory / FOLDER))
    while True:
        code = await run_to_end(
            *("services.cli.main", "track", *([run_id] if run_id else ()), *given),
            "--stop-on-stdin-eof",
            log=log,
            grace_s=_STOP_GRACE_S,
            environment={"SLIPSTREAM_TOKEN": services.token},
        )
        if code == 0:
            return
        print_line(console, f"no tracker is written to, runs go on: {last_lines(log, 1)}")
        await asyncio.sleep(_AGAIN_S)
