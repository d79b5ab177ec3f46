"""Commands that start services on this machine: ``run`` for one run, ``up`` for submitted runs."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from services.cli.api import Api, ApiError
from services.cli.api_calls import DEFAULT_STATE, UP_FILE, StateDirectory, run_until_signal
from services.cli.commands.spec import Overrides, SpecPath, load_checked, startable_launcher
from services.cli.companions import CompanionArgs, companions
from services.cli.follow import StartReport, follow
from services.cli.local import (
    LocalServices,
    PreparedServices,
    local_services,
    prepared_services,
    write_bytecode,
)
from services.cli.output import console, describe, print_line, write
from services.common.runspec.loader import SpecError
from services.common.runspec.run import RunSpec
from services.common.task_group import TaskGroup, until_first
from services.controller.api.operations import (
    CancelRun,
    ForkRun,
    ListCheckpoints,
    ListRuns,
    PauseRun,
    ResumeRun,
)
from services.controller.rules.run_state import TERMINAL
from services.controller.schemas import ListedRun


async def submit_or_resume(
    api: Api, spec: RunSpec, console: Console, *, resume: bool = False
) -> str:
    """Submits a run, or resumes the same run if it was paused or interrupted before.

    An interrupted run with the same name but another specification is cancelled; its checkpoints are kept.

    Args:
        console: Receives messages about an interrupted run.
        resume: If true, a cancelled or failed run with this name is continued from its
            checkpoint, as a new run.

    Returns:
        The id of the run to follow.

    Raises:
        SpecError: If there is nothing to resume.
    """
    document = spec.model_dump(mode="json")
    for active_run in (await api.call(ListRuns(name=spec.name))).items:
        if active_run.state in TERMINAL:
            continue
        how = "paused" if active_run.state == "PAUSED" else "interrupted"
        cut_off = f"{active_run.id} was {how} after step {active_run.step}"
        if (await api.get(active_run.id)).spec == document:
            print_line(console, f"{cut_off}; resuming it")
            if active_run.state == "PAUSED":
                await api.call(ResumeRun(run_id=active_run.id))
            return active_run.id
        print_line(console, f"{cut_off} and has another specification; cancelling it")
        await api.call(CancelRun(run_id=active_run.id))
        async for _ in api.watch(active_run.id):
            pass
    ended_run = await _newest_with_checkpoint(api, spec.name)
    if ended_run is not None and resume:
        print_line(
            console,
            f"{ended_run.id} ended {ended_run.state} after step {ended_run.step}; a new run "
            "continues from there",
        )
        changes = _changes((await api.get(ended_run.id)).spec, document)
        return (await api.call(ForkRun(run_id=ended_run.id, overrides=changes))).id
    if resume:
        why = f"the newest run {spec.name!r} did not end early with a checkpoint; omit the option"
        raise SpecError([f"--resume: {why}"])
    if ended_run is not None:
        print_line(
            console,
            f"{ended_run.id} ended {ended_run.state} after step {ended_run.step}; this is a new run from "
            "step 0; --resume would continue that one",
        )
    return (await api.submit(document)).id


async def _newest_with_checkpoint(api: Api, name: str) -> ListedRun | None:
    """Returns the newest run with a name, if it did not succeed and has a checkpoint."""
    for run in (await api.call(ListRuns(name=name, page_size=1))).items:
        points = (await api.call(ListCheckpoints(run_id=run.id))).items
        if run.state != "SUCCEEDED" and any(point.state == "READY" for point in points):
            return run
    return None


def _changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys of ``new`` whose values differ, nested as in ``new``."""
    changes: dict[str, Any] = {}
    for key, value in new.items():
        before = old.get(key)
        if isinstance(value, Mapping) and isinstance(before, Mapping):
            if inner := _changes(before, value):
                changes[key] = inner
        elif value != before:
            changes[key] = value
    return changes


_PAUSE_TIMEOUT_S = 300.0
_NOT_BEGUN = ("QUEUED", "STARTING")
# Message about a run, by its state when the services end.
_OUTCOMES = {
    "PAUSED": "is paused; the same command resumes it",
    "CANCELLED": "is cancelled",
    "CANCELLING": "is cancelled",
    "STARTING": "had not begun to train; the same command starts it again",
}
_STOPPED = (
    "is stopped, not paused; the same command continues it from its newest checkpoint, if any"
)


class SignalHandler:
    """Catches signals that ask this process to end, from its construction on."""

    def __init__(self) -> None:
        self._came = asyncio.Event()
        self._again = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, self._interrupted)
        loop.add_signal_handler(signal.SIGTERM, self._came.set)
        # Batch systems announce the end of a job's time with a signal that the job selects.
        loop.add_signal_handler(signal.SIGUSR1, self._came.set)
        loop.add_signal_handler(signal.SIGHUP, self._hung_up)

    async def pause_runs(self, api: Api, console: Console) -> None:
        """Waits for a signal, then pauses all active runs; returns when none is active any more.

        A run that has not begun to train cannot pause, and one that takes too long is stopped.

        Args:
            console: Receives messages about progress and about how to resume.
        """
        await self._came.wait()
        active = await _active(api)
        if any(run.state not in _NOT_BEGUN for run in active):
            print_line(console, "pausing after the current step; Ctrl-C again cancels instead")
        for run in active:
            with suppress(ApiError):  # it pauses already, or starts and has nothing to save
                await api.call(PauseRun(run_id=run.id))
        pausing = [run.id for run in await _active(api) if run.state == "PAUSING"]
        paused = asyncio.ensure_future(_until_paused(api, pausing))
        again = asyncio.ensure_future(self._again.wait())
        try:
            async with asyncio.timeout(_PAUSE_TIMEOUT_S):
                await asyncio.wait((paused, again), return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            print_line(console, f"not paused within {_PAUSE_TIMEOUT_S:.0f} s: stopping it now")
        finally:
            again.cancel()
            paused.cancel()
        for run in active:
            with suppress(ApiError):  # the run has ended or is deleted
                if self._again.is_set():
                    await api.call(CancelRun(run_id=run.id))
                state = (await api.get(run.id)).state
                if state == "CANCELLED" or state not in TERMINAL:
                    print_line(console, f"{run.id} {_OUTCOMES.get(state, _STOPPED)}")

    @property
    def has_come(self) -> bool:
        return self._came.is_set()

    def _interrupted(self) -> None:
        (self._again if self._came.is_set() else self._came).set()

    def _hung_up(self) -> None:
        # The terminal is gone, and writing to it would be an error.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for descriptor in (1, 2):
            os.dup2(nowhere, descriptor)
        self._came.set()


async def _active(api: Api) -> list[ListedRun]:
    runs, token = list[ListedRun](), ""
    while True:
        page = await api.call(ListRuns(page_size=500, page_token=token))
        runs += [run for run in page.items if run.state not in (*TERMINAL, "PAUSED")]
        if not (token := page.next_page_token):
            return runs


async def _until_paused(api: Api, run_ids: Sequence[str]) -> None:
    for run_id in run_ids:
        async for kind, _ in api.watch(run_id):
            # The state is queried because events also report earlier pauses.
            if kind == "StateChanged" and (await api.get(run_id)).state == "PAUSED":
                break


Port = Annotated[
    int, typer.Option(help="Port of the REST API; 0 for any free port.", min=0, max=65_535)
]

Launcher = Annotated[
    str,
    typer.Option(
        "--launcher",
        help="What starts the workers: 'process' on this machine, 'slurm' on the nodes of this allocation.",
        callback=startable_launcher,
    ),
]

_RETRY_S = 30.0
# Each command restarts a controller that ends; its imports take minutes on a busy machine.
_AWAY_S = 600.0
# Max restarts of a service before ``slipstream up`` ends.
_UP_RESTARTS = 20
# Exit code that shells use for a command that Ctrl-C ended.
_INTERRUPTED = 130


def run(
    spec: SpecPath,
    overrides: Overrides = None,
    state_directory: StateDirectory = DEFAULT_STATE,
    port: Port = 0,
    launcher: Launcher = "process",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the path of summary.json as the last line.")
    ] = False,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Continue from the newest checkpoint of a run that was cancelled or failed.",
        ),
    ] = False,
) -> None:
    """Start all services on this machine, train, show progress, and stop the services.

    Ctrl-C, a closed terminal, kill, SIGUSR1, and the end of a command that reads the output, such as
    ``tee``, pause the run after its current step, with a checkpoint; a second Ctrl-C cancels it.

    The same command resumes a run that was paused or interrupted.
    """
    write_bytecode()
    start = StartReport()
    start.record_imports()
    with prepared_services(launcher) as prepared:
        with describe(f"checking {spec}", console), start.measured("checks"):
            loaded = load_checked(spec, overrides, is_start=True, launcher=launcher)
        folder = state_directory.resolve()
        services = partial(_started, folder, port=port, launcher=launcher, prepared=prepared)
        work = _run(loaded, folder, services, resume=resume, start=start)
        outcome = run_until_signal(work, needs_reader=False)
    if outcome is None:
        raise typer.Exit(_INTERRUPTED)
    if as_json:
        write(outcome["summary_path"])
    if outcome["state"] != "SUCCEEDED":
        raise typer.Exit(1)


def up(
    state_directory: StateDirectory = DEFAULT_STATE,
    port: Port = 8700,
    launcher: Launcher = "process",
) -> None:
    """Start the controller and the transferqueue, and keep them running for submitted runs.

    Ctrl-C, a closed terminal and kill pause the runs, with checkpoints; a second Ctrl-C cancels them.
    """
    write_bytecode()
    with prepared_services(launcher) as prepared:
        services = partial(_started, port=port, launcher=launcher, prepared=prepared)
        run_until_signal(_up(state_directory.resolve(), services), needs_reader=False)
    raise typer.Exit(_INTERRUPTED)


async def _run(
    spec: RunSpec,
    state_directory: Path,
    start_services: Callable[..., AbstractAsyncContextManager[tuple[LocalServices, Api]]],
    *,
    resume: bool,
    start: StartReport,
) -> dict[str, Any] | None:
    """Returns the ended run, or None if a signal came first.

    Raises:
        ServiceExitedError: If a service ends.
    """
    restarts = spec.limits.max_restarts
    async with AsyncExitStack() as stack:
        with start.measured("services"):
            services, api = await stack.enter_async_context(start_services(max_restarts=restarts))
        run_id = await submit_or_resume(api, spec, console, resume=resume)
        link = (await api.page_link()).replace("/page/", f"/runs/{run_id}")
        print_line(console, f"run page (link for one browser): {link}")
        async with companions(_follows(services, api, state_directory, run_id), spec=spec):
            following = follow(
                api, run_id, state_directory=state_directory, console=console, start=start
            )
            signals = SignalHandler()
            outcome, *_ = await until_first(
                _after_pausing(api, run_id, following, signals),
                signals.pause_runs(api, console),
                services.supervise(),
            )
            return None if outcome.cancelled() else outcome.result()


async def _after_pausing(
    api: Api, run_id: str, following: Coroutine[Any, Any, dict[str, Any]], signals: SignalHandler
) -> dict[str, Any]:
    """Follows a run; resumes it once it pauses, if an earlier command, killed meanwhile, asked for that."""
    async with TaskGroup() as tasks:
        tasks.create_task(_resume_paused(api, run_id, signals))
        return await following


async def _resume_paused(api: Api, run_id: str, signals: SignalHandler) -> None:
    if (await api.get(run_id)).state == "PAUSING":
        print_line(
            console, "an earlier command began to pause this run; it resumes after the pause"
        )
        await _until_paused(api, [run_id])
        # A signal asks for a pause, too.
        if (await api.get(run_id)).state == "PAUSED" and not signals.has_come:
            await api.call(ResumeRun(run_id=run_id))


async def _up(
    state_directory: Path,
    start_services: Callable[..., AbstractAsyncContextManager[tuple[LocalServices, Api]]],
) -> None:
    starting = start_services(state_directory, max_restarts=_UP_RESTARTS)
    async with starting as (services, api):
        print_line(
            console,
            f"controller at {services.url}, API documentation at {services.url}/docs, gRPC at "
            f"{services.grpc_address}; Ctrl-C pauses runs and stops the services\n"
            f"run page (link for one browser): {await api.page_link()}\n"
            f"for other programs: export SLIPSTREAM_URL={services.url} SLIPSTREAM_TOKEN={services.token}",
        )
        interrupts = SignalHandler()
        async with companions(_follows(services, api, state_directory)):
            await until_first(interrupts.pause_runs(api, console), services.supervise())


def _follows(
    services: LocalServices, api: Api, state_directory: Path, run_id: str = ""
) -> CompanionArgs:
    return CompanionArgs(
        api=api,
        url=services.url,
        token=services.token,
        state_directory=state_directory,
        console=console,
        run_id=run_id,
    )


@asynccontextmanager
async def _started(
    state_directory: Path,
    *,
    port: int,
    max_restarts: int,
    launcher: str,
    prepared: PreparedServices,
) -> AsyncIterator[tuple[LocalServices, Api]]:
    """Starts the services and yields them with an API client that waits for a restarted controller.

    Meanwhile, commands in the folder find the controller.
    """
    async with AsyncExitStack() as stack:
        with describe("starting the controller and the transferqueue", console):
            services = await stack.enter_async_context(
                local_services(
                    state_directory,
                    port=port,
                    max_restarts=max_restarts,
                    prepared=prepared,
                    launcher=launcher,
                )
            )
        api = Api(services.url, token=services.token, retry_s=_RETRY_S, away_s=_AWAY_S)
        await stack.enter_async_context(api)
        up_file = state_directory / UP_FILE
        up_file.write_text(json.dumps({"url": services.url}) + "\n", encoding="utf-8")
        stack.callback(up_file.unlink, missing_ok=True)
        yield services, api
