"""The ``track`` command: writes runs to experiment trackers, outside of the controller."""

from pathlib import Path
from typing import Annotated

import typer

from services.cli.api import Api, ApiError
from services.cli.api_calls import find_controller, find_run, run_until_signal
from services.cli.controller_address import Url
from services.cli.output import console, errors, fail, print_line
from services.common.runspec.base import did_you_mean
from services.common.runspec.trackers import TRACKERS
from services.controller.api.operations import GetVersion
from services.extras.trackers.processes import DEADLINE_S, TrackerProcesses

# Max seconds that calls wait for a controller that restarts.
_RETRY_S = 600.0


def track(
    run: Annotated[
        str,
        typer.Argument(
            help=(
                "Only this run, until it ends or pauses; ended runs are allowed. Default: all runs with "
                "trackers."
            )
        ),
    ] = "",
    to: Annotated[
        list[str] | None,
        typer.Option(
            help=(f"Trackers for RUN instead of its own: {', '.join(TRACKERS)}. May be repeated.")
        ),
    ] = None,
    folder: Annotated[
        Path,
        typer.Option(
            help="Folder of cursors and of the files that trackers write.", file_okay=False
        ),
    ] = Path("runs/trackers"),
    deadline_s: Annotated[
        float,
        typer.Option(help="Max seconds of one tracker call; a slower tracker is restarted.", min=1),
    ] = DEADLINE_S,
    url: Url = None,
) -> None:
    """Send runs to wandb, tensorboard, mlflow or trackio, during or after the run."""
    kinds = _known(to or [])
    if kinds and not run:
        raise typer.BadParameter("--to needs a run: slipstream track RUN --to tensorboard")

    async def work() -> None:
        address, token = find_controller(url)
        async with Api(address, token=token) as api:
            try:
                await api.call(GetVersion())
            except ApiError as error:
                if error.status:  # it answers
                    raise
                print_line(errors, f"{error}; it is called again for {_RETRY_S:.0f} s")
        async with Api(address, token=token, retry_s=_RETRY_S) as api:
            processes = TrackerProcesses(
                api, url=address, token=token, folder=folder, deadline_s=deadline_s, on_failure=fail
            )
            if run:
                run_id = await find_run(api, run)
                kinds_written = ", ".join(await processes.follow(run_id, kinds))
                print_line(
                    console, f"{run_id} is written to {kinds_written}; files are in {folder}"
                )
            else:
                await processes.follow_project()

    run_until_signal(work())


def _known(kinds: list[str]) -> list[str]:
    for kind in kinds:
        if kind not in TRACKERS:
            raise typer.BadParameter(
                f"--to {kind}: expected one of {', '.join(TRACKERS)}.{did_you_mean(kind, tuple(TRACKERS))}"
            )
    return list(dict.fromkeys(kinds))
