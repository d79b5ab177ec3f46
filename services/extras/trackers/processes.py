"""Starts one process per run and tracker, and restarts processes that end."""

import asyncio
import importlib.util
import os
import signal
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext, suppress
from http import HTTPStatus
from pathlib import Path

from rich.console import Console

from services.cli.api import Api, ApiError
from services.cli.companions import CompanionArgs
from services.cli.output import print_line
from services.common.parent import module_command
from services.common.runspec.trackers import TRACKERS
from services.common.task_group import TaskGroup, leaves
from services.controller.api.operations import ListRuns, ReportTracker
from services.controller.launch.worker_process import last_lines
from services.extras.trackers.tracker import CURSORS, GONE, Cursor, TrackerJob, cursor_path

FOLDER = "trackers"
"""Name of the trackers' folder in the state directory."""
DEADLINE_S = 120.0
_FIRST_PAUSE_S = 2.0
_MAX_PAUSE_S = 300.0
# Running time after which a process counts as recovered and the restart delay is reset.
_STEADY_S = 120.0
_STOP_GRACE_S = 10.0
_AGAIN_S = 5.0
_LAST_NUMBERS_S = 60.0
_IDLE = ("QUEUED", "PAUSED", "SUCCEEDED", "FAILED", "CANCELLED")
_LISTED = 500


def track_runs(args: CompanionArgs) -> AbstractAsyncContextManager[None]:
    """Writes runs that name trackers; see :class:`~services.cli.companions.OpenCompanion`."""
    if not args.run_id and not has_any_tracker():
        return nullcontext()
    folder = args.state_directory / FOLDER
    processes = TrackerProcesses(args.api, url=args.url, token=args.token, folder=folder)
    return tracking(processes, args.console, run_id=args.run_id)


def has_any_tracker() -> bool:
    """Returns True if the package of a tracker is installed."""
    return any(importlib.util.find_spec(kind.package) is not None for kind in TRACKERS.values())


@asynccontextmanager
async def tracking(
    processes: "TrackerProcesses", console: Console, *, run_id: str = ""
) -> AsyncIterator[None]:
    """Writes runs to their trackers until the block ends; errors do not end the block.

    Args:
        console: Receives messages about waits and failures.
        run_id: The only run to write, whose last metrics are waited for; empty for all runs.
    """
    async with TaskGroup() as tasks:
        writing = tasks.create_task(_write_always(processes, console, run_id))
        try:
            yield
            if run_id:
                print_line(console, "writing the last metrics to the trackers")
                await asyncio.wait((writing,), timeout=_LAST_NUMBERS_S)
                if not writing.done():
                    late = await processes.incomplete(run_id)
                    print_line(
                        console,
                        f"{', '.join(late)} did not get all metrics within {_LAST_NUMBERS_S:.0f} s; after "
                        f"'slipstream up', 'slipstream track {run_id}' writes the rest",
                    )
        finally:
            writing.cancel()


async def _write_always(processes: "TrackerProcesses", console: Console, run_id: str) -> None:
    while True:
        try:
            await (processes.follow(run_id, ()) if run_id else processes.follow_project())
            is_done = True
        except* Exception as group:  # noqa: BLE001 -- runs go on without trackers
            is_done = False
            print_line(
                console, f"writing to trackers failed, but runs continue: {leaves(group)[0]}"
            )
        if is_done:
            return
        await asyncio.sleep(_AGAIN_S)


class TrackerProcesses:
    """The processes that write runs to trackers.

    Args:
        token: API token, with which the processes read runs and report failures.
        folder: Folder of cursors, logs and files that trackers write.
        deadline_s: Max seconds of one call of a tracker; after that, its process ends.
        on_failure: Called with the message of each failure of a tracker, which is also an event of the run.
    """

    def __init__(
        self,
        api: Api,
        *,
        url: str,
        token: str,
        folder: Path,
        deadline_s: float = DEADLINE_S,
        on_failure: Callable[[str], None] = lambda message: None,
    ) -> None:
        self._api = api
        self._url = url
        self._folder = folder
        self._deadline_s = deadline_s
        self._on_failure = on_failure
        self._environment = _environment(folder, token)
        self._begun_runs: set[str] = set()

    async def follow_project(self) -> None:
        """Writes all runs of the project that name trackers, forever."""
        self._begun_runs.clear()
        async with TaskGroup() as tasks:
            while True:
                for run_id in await self._unwritten():
                    await self._begin(run_id, tasks)
                # Every event of a run starts its processes, so a run that appears in between is
                # not missed.
                async for kind, event in self._api.watch_all():
                    if kind != "overflow":
                        await self._begin(event["run_id"], tasks)
                await asyncio.sleep(_FIRST_PAUSE_S)

    async def follow(self, run_id: str, kinds: Sequence[str]) -> Sequence[str]:
        """Writes one run until it ends or pauses; returns the trackers.

        Args:
            kinds: Trackers; empty for those that the run names.

        Raises:
            ApiError: If the run does not exist or names no trackers.
        """
        kinds_followed = kinds or await self._kinds(run_id)
        if not kinds_followed:
            raise ApiError(f"{run_id} has no trackers; add --to KIND, such as --to tensorboard")
        async with TaskGroup() as tasks:
            for kind in kinds_followed:
                tasks.create_task(self._supervise(run_id, kind))
        return kinds_followed

    async def incomplete(self, run_id: str) -> list[str]:
        """Returns the trackers of a run to which not all of it is written."""
        paths = {
            kind: cursor_path(self._folder, run_id, kind) for kind in await self._kinds(run_id)
        }
        return [kind for kind, path in paths.items() if not Cursor.read(path).is_done]

    async def _unwritten(self) -> list[str]:
        """Returns the running runs, and those that are not completely written."""
        runs = (await self._api.call(ListRuns(page_size=_LISTED))).items
        cursors = (self._folder / CURSORS).glob("*/*.json")
        unfinished_runs = [path.parent.name for path in cursors if not Cursor.read(path).is_done]
        return [run.id for run in runs if run.state not in _IDLE] + unfinished_runs

    async def _kinds(self, run_id: str) -> list[str]:
        run = await self._api.get(run_id)
        return [tracker["kind"] for tracker in run.spec.get("trackers", ())]

    async def _begin(self, run_id: str, tasks: TaskGroup) -> None:
        if run_id in self._begun_runs:
            return
        self._begun_runs.add(run_id)
        with suppress(ApiError):  # it was deleted meanwhile
            if kinds := await self._kinds(run_id):
                tasks.create_task(self._write(run_id, kinds))

    async def _write(self, run_id: str, kinds: Sequence[str]) -> None:
        async with TaskGroup() as tasks:
            for kind in kinds:
                tasks.create_task(self._supervise(run_id, kind))
        # The next event of a paused run starts its processes again.
        self._begun_runs.discard(run_id)

    async def _supervise(self, run_id: str, kind: str) -> None:
        """Keeps a process running that writes a run to a tracker, until the run ends or pauses."""
        clock = asyncio.get_running_loop().time
        pause_s, is_reported = _FIRST_PAUSE_S, False
        while True:
            job = TrackerJob(
                url=self._url,
                run_id=run_id,
                kind=kind,
                folder=self._folder,
                deadline_s=self._deadline_s,
                is_failing=is_reported,
            )
            begin = clock()
            code = await self._run(job)
            if code == 0:
                return
            if clock() - begin > _STEADY_S:
                pause_s, is_reported = _FIRST_PAUSE_S, False
            if code == GONE and await self._is_gone(run_id):
                return
            if code != GONE and not is_reported:
                is_reported = await self._report(job, self._failure_message(job, code))
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)

    async def _run(self, job: TrackerJob) -> int:
        return await run_to_end(
            "services.extras.trackers",
            job.model_dump_json(),
            log=self._log(job),
            grace_s=_STOP_GRACE_S,
            environment=self._environment,
        )

    async def _report(self, job: TrackerJob, why: str) -> bool:
        self._on_failure(f"{job.run_id}: {job.kind} failed and is retried: {why}")
        report = ReportTracker(run_id=job.run_id, tracker=job.kind, is_writing=False, message=why)
        with suppress(ApiError):
            await self._api.call(report)
            return True
        return False

    async def _is_gone(self, run_id: str) -> bool:
        """Returns True if the run does not exist any more."""
        try:
            await self._api.get(run_id)
        except ApiError as error:
            return error.status == HTTPStatus.NOT_FOUND
        return False

    def _failure_message(self, job: TrackerJob, code: int) -> str:
        if code == -signal.SIGALRM:
            return f"the tracker did not respond within {job.deadline_s:.0f} s"
        if code < 0:
            return f"the tracker's process was killed by {signal.Signals(-code).name}"
        text = last_lines(self._log(job), 1).replace("\0", "")
        return text[-1000:] or f"the tracker's process exited with code {code}"

    def _log(self, job: TrackerJob) -> Path:
        return cursor_path(self._folder, job.run_id, job.kind).with_suffix(".log")


def _environment(folder: Path, token: str) -> dict[str, str]:
    """Returns environment variables of the processes: token and default locations of trackers' files."""
    folder = folder.absolute()
    defaults = {
        "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db",
        "TRACKIO_DIR": f"{folder}/trackio",
    }
    unset = {name: value for name, value in defaults.items() if not os.environ.get(name)}
    return {**unset, "SLIPSTREAM_TOKEN": token}


async def run_to_end(
    *arguments: str, log: Path, grace_s: float, environment: Mapping[str, str]
) -> int:
    """Runs a Python module in a subprocess to its end; a cancellation terminates, then kills it.

    The subprocess reads standard input, whose end reports that this process is gone.

    Args:
        log: File for its output.
        grace_s: Seconds between termination and kill.

    Returns:
        The exit code; if a signal ended the process, the negative signal number.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *module_command(*arguments),
            env={**os.environ, **environment},
            stdin=asyncio.subprocess.PIPE,
            stdout=output,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        return await process.wait()
    finally:
        if process.returncode is None:
            await _end(process, grace_s)


async def _end(process: asyncio.subprocess.Process, grace_s: float) -> None:
    with suppress(ProcessLookupError):
        process.terminate()
    try:
        async with asyncio.timeout(grace_s):
            await process.wait()
    except TimeoutError:
        with suppress(ProcessLookupError):
            process.kill()
