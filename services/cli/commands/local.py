"""Commands that start services on this machine: ``run`` for one run, ``up`` for submitted runs."""

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from services.cli.api import Api
from services.cli.api_calls import DEFAULT_STATE, UP_FILE, StateDirectory, run_until_signal
from services.cli.commands.spec import Overrides, SpecPath, load_checked
from services.cli.follow import follow
from services.cli.local import LocalServices, local_services
from services.cli.output import console, describe, print_line, write
from services.cli.resume import submit_or_resume
from services.cli.signals import SignalHandler
from services.cli.trackers.processes import FOLDER, TrackerProcesses, has_any_tracker, tracking
from services.common.runspec.run import RunSpec
from services.common.task_group import until_first

Port = Annotated[int, typer.Option(help="Port of the REST API; 0 takes a free one.")]

_PATIENCE_S = 30.0
# Max restarts of a service before ``slipstream up`` ends.
_UP_RESTARTS = 20
# Exit code that shells use for a command that Ctrl-C ended.
_INTERRUPTED = 130


def run(
    spec: SpecPath,
    overrides: Overrides = None,
    state_directory: StateDirectory = DEFAULT_STATE,
    port: Port = 0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the path of summary.json as the last line.")
    ] = False,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Go on from the newest checkpoint of a run that was cancelled or failed.",
        ),
    ] = False,
) -> None:
    """Start all services on this machine, train, show progress, and end everything.

    Ctrl-C, a closed terminal, kill, and the end of a command that reads the output, such as
    ``tee``, pause the run after its current step, with a checkpoint; a second Ctrl-C cancels it.

    The same command resumes a run that was paused or interrupted.
    """
    with describe(f"checking {spec}", console):
        loaded = load_checked(spec, overrides)
    work = _run(loaded, state_directory.resolve(), port, resume=resume)
    ended = run_until_signal(work, needs_reader=False)
    if ended is None:
        raise typer.Exit(_INTERRUPTED)
    if as_json:
        write(ended["summary_path"])
    if ended["state"] != "SUCCEEDED":
        raise typer.Exit(1)


def up(state_directory: StateDirectory = DEFAULT_STATE, port: Port = 8700) -> None:
    """Start controller and transferqueue, and keep them running for submitted runs.

    Ctrl-C, a closed terminal and kill pause the runs, with checkpoints; a second Ctrl-C cancels
    them.
    """
    run_until_signal(_up(state_directory.resolve(), port), needs_reader=False)
    raise typer.Exit(_INTERRUPTED)


async def _run(
    spec: RunSpec, state_directory: Path, port: int, *, resume: bool
) -> dict[str, Any] | None:
    """Returns the ended run, or None if a signal came first."""
    restarts = spec.limits.max_restarts
    async with _started(state_directory, port=port, max_restarts=restarts) as (services, api):
        run_id = await submit_or_resume(api, spec, console, resume=resume)
        link = (await api.page_link()).replace("/page/", f"/runs/{run_id}")
        print_line(console, f"run page, for one browser: {link}")
        tracked = tracking(_trackers(services, api, state_directory), console, run_id=run_id)
        async with tracked if spec.trackers else nullcontext():
            return await _follow_beside(services, api, run_id, state_directory)


async def _follow_beside(
    services: LocalServices, api: Api, run_id: str, state_directory: Path
) -> dict[str, Any] | None:
    """Follows a run until it ends; returns None after a signal, raises if a service dies."""
    following, *_ = await until_first(
        follow(api, run_id, state_directory=state_directory, console=console),
        SignalHandler().pause_runs(api, console),
        services.keep(),
    )
    return None if following.cancelled() else following.result()


async def _up(state_directory: Path, port: int) -> None:
    async with _started(state_directory, port=port, max_restarts=_UP_RESTARTS) as (services, api):
        print_line(
            console,
            f"controller at {services.url}, API documentation at {services.url}/docs, gRPC at "
            f"{services.grpc_address}; Ctrl-C pauses runs and ends it\n"
            f"run page, for one browser: {await api.page_link()}",
        )
        interrupts = SignalHandler()
        tracked = tracking(_trackers(services, api, state_directory), console)
        async with tracked if has_any_tracker() else nullcontext():
            await until_first(interrupts.pause_runs(api, console), services.keep())


def _trackers(services: LocalServices, api: Api, state_directory: Path) -> TrackerProcesses:
    return TrackerProcesses(
        api, url=services.url, token=services.token, folder=state_directory / FOLDER
    )


@asynccontextmanager
async def _started(
    state_directory: Path, *, port: int, max_restarts: int
) -> AsyncIterator[tuple[LocalServices, Api]]:
    """Starts the services and yields them with an API client that waits for a restarted controller.

    Meanwhile, commands in the folder find the controller.
    """
    async with AsyncExitStack() as stack:
        with describe("starting the controller and the transferqueue", console):
            services = await stack.enter_async_context(
                local_services(state_directory, port=port, max_restarts=max_restarts)
            )
        api = Api(services.url, token=services.token, patience_s=_PATIENCE_S)
        await stack.enter_async_context(api)
        up_file = state_directory / UP_FILE
        up_file.write_text(json.dumps({"url": services.url}) + "\n", encoding="utf-8")
        stack.callback(up_file.unlink, missing_ok=True)
        yield services, api
