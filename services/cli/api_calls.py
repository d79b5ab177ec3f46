"""Calls of the controller by commands, and messages for failed calls."""

import asyncio
import json
import os
import re
import signal
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Any, TypeVar

import httpx
import typer
from pydantic import ValidationError

from services.cli.api import NO_CONTROLLER, Api, ApiError
from services.cli.controller_address import CliSettings
from services.cli.local import ServiceExitedError
from services.cli.output import console, errors, fail, tolerate_broken_pipe
from services.cli.state_directory import StateInUseError, find_token, running_controllers
from services.common.runspec.base import did_you_mean
from services.common.runspec.loader import SpecError
from services.common.task_group import TaskGroup, leaves
from services.controller.api.operations import Answer, ListRuns, Operation
from services.controller.settings import DATABASE_FILE
from slipstream_client.request import unreachable

_ID = re.compile("run_[0-9a-f]{32}")
_MAY_BE = re.compile("run_[0-9a-f]{1,32}|[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_MAX_RUNS = 500
# Ids begin with the submission time: this prefix changes within a quarter of an hour.
_MIN_DIGITS = len("run_") + 7


def is_id(text: str) -> bool:
    """Returns True if a text is the complete id of a run."""
    return _ID.fullmatch(text) is not None


def may_be_run(text: str) -> bool:
    """Returns True if a text can be the name of a run or the beginning of its id."""
    return _MAY_BE.fullmatch(text) is not None


async def find_run(api: Api, text: str | None) -> str:
    """Returns the id of a run.

    Args:
        text: The run's id, the beginning of its id, or its name, which selects the newest run
            with that name; None selects the newest run of all.

    Raises:
        ApiError: If there is no such run (status 404), or several ids have this beginning.
    """
    if text is None:
        newest = (await api.call(ListRuns(page_size=1))).items
        if not newest:
            raise ApiError(
                "no runs yet; 'slipstream run' and 'slipstream submit' start one",
                status=HTTPStatus.NOT_FOUND,
            )
        return newest[0].id
    if is_id(text):
        return text
    if matching_runs := (await api.call(ListRuns(name=text, page_size=1))).items:
        return matching_runs[0].id
    runs = (await api.call(ListRuns(page_size=_MAX_RUNS))).items
    ids = [run.id for run in runs if run.id.startswith((text, f"run_{text}"))]
    if len(ids) == 1:
        return ids[0]
    if ids:
        raise ApiError(
            f"the ids of {len(ids)} runs start with {text!r}, such as {ids[0]} and {ids[1]}; use a "
            "longer one"
        )
    meant = did_you_mean(text, sorted({run.name for run in runs}))
    raise ApiError(
        f"no run has the name or id {text!r}; 'slipstream list' shows all runs.{meant}",
        status=HTTPStatus.NOT_FOUND,
    )


def short_ids(ids: Sequence[str]) -> list[str]:
    """Returns the shortest prefix of each id that distinguishes all of them; all have the same length."""
    length = _MIN_DIGITS
    while len({run_id[:length] for run_id in ids}) < len(set(ids)):
        length += 1
    return [run_id[:length] for run_id in ids]


_T = TypeVar("_T")

DEFAULT_STATE = Path("runs")
UP_FILE = "up.json"

# Errors of which only the message is printed. All other errors are bugs and get a traceback.
_TOLD = (ApiError, ServiceExitedError, SpecError, StateInUseError, ValidationError)
_SOME_ID = f"run_{'0' * 32}"


def _given(run_id: str | None) -> str | None:
    """Validates a run's name or id.

    It is empty in ``slipstream watch "$(slipstream submit FILE)"`` if the submission failed.
    """
    if run_id is None:
        return None
    if not run_id:
        raise typer.BadParameter(
            "expected the name or id of a run, got an empty text; was the run submitted?"
        )
    if not may_be_run(run_id):
        raise typer.BadParameter(
            f"expected the name or id of a run, got {run_id!r}; 'slipstream list' shows all runs"
        )
    return run_id


RunId = Annotated[
    str, typer.Argument(help="Name of a run, or the start of its id.", callback=_given)
]
NewestRun = Annotated[
    str | None,
    typer.Argument(
        help="Name of a run, or the start of its id. Default: the newest run.", callback=_given
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")]
StateDirectory = Annotated[
    Path, typer.Option(help="Folder of runs, logs and the database.", file_okay=False)
]
# Statuses after which a command asks the only running controller: it may have a run that the folder lacks.
_NOT_HERE = (HTTPStatus.NOT_FOUND, HTTPStatus.SERVICE_UNAVAILABLE)


def call_api(
    url: str | None, work: Callable[[Api], Awaitable[_T]], *, state_directory: Path = DEFAULT_STATE
) -> _T:
    """Runs work with an API client; a signal cancels it, and failures are reported.

    Args:
        url: Address of the controller. Default: the controller that was started in the folder,
            or else the only running one.
        work: Coroutine function that receives the client.
        state_directory: Folder with the runs to use if no address is given. A folder other than
            the default restricts the call to its runs.
    """
    result: _T = run_until_signal(_with_api(url, work, state_directory))
    return result


def call_operation(
    url: str | None,
    operation: type[Operation[Answer]],
    *,
    state_directory: Path = DEFAULT_STATE,
    **fields: Any,
) -> Answer:
    """Returns the answer to an operation with a single answer; ``run_id`` None is the newest run."""
    is_of_run = "run_id" in fields
    name = fields.get("run_id")
    is_found = name is not None and is_id(name)
    if is_of_run and not is_found:
        fields["run_id"] = _SOME_ID
    try:
        request = operation(**fields)
    except ValidationError as error:
        raise typer.BadParameter(_message_of(error)) from error

    async def work(api: Api) -> Answer:
        if not is_of_run or is_found:
            return await api.call(request)
        return await api.call(request.model_copy(update={"run_id": await find_run(api, name)}))

    return call_api(url, work, state_directory=state_directory)


def of_run(
    url: str | None,
    run_id: str | None,
    work: Callable[[Api, str], Awaitable[_T]],
    *,
    state_directory: Path = DEFAULT_STATE,
) -> _T:
    """Runs work for one run like :func:`call_api`; the work also receives the run's id."""

    async def found(api: Api) -> _T:
        return await work(api, await find_run(api, run_id))

    return call_api(url, found, state_directory=state_directory)


async def _with_api(
    url: str | None, work: Callable[[Api], Awaitable[_T]], state_directory: Path
) -> _T:
    is_default = state_directory == DEFAULT_STATE
    from_environment = CliSettings().url if is_default else ""
    if address := url or from_environment or _started_in(state_directory):
        return await _at(address, work)
    elsewhere = running_controllers() if is_default else []
    if (state_directory / DATABASE_FILE).exists():
        # This imports the controller.
        from services.cli.ended_runs import URL, ended_runs

        try:
            async with ended_runs(state_directory) as http, Api(URL, http=http) as api:
                return await work(api)
        except ApiError as error:
            if error.status not in _NOT_HERE or len(elsewhere) != 1:
                raise
    if len(elsewhere) > 1:
        raise ApiError(
            f"several controllers run on this machine: {', '.join(elsewhere)}; choose one with --url"
        )
    if elsewhere:
        return await _at(elsewhere[0], work)
    if not is_default:
        raise ApiError(f"{state_directory} has no runs: {DATABASE_FILE} does not exist")
    raise ApiError(f"no controller found; {NO_CONTROLLER}")


async def _at(url: str, work: Callable[[Api], Awaitable[_T]]) -> _T:
    async with Api(url, token=CliSettings().token or find_token(url)) as api:
        try:
            return await work(api)
        except httpx.RequestError as error:  # of a stream, which is not retried
            raise unreachable(url, error) from error


def find_controller(url: str | None) -> tuple[str, str]:
    """Returns the address and token of the controller that a command addresses.

    Raises:
        ApiError: If no running controller is known, or several are.
    """
    address = url or CliSettings().url or _started_in(DEFAULT_STATE)
    running = running_controllers()
    if not address and len(running) != 1:
        raise ApiError(
            f"{len(running)} controllers run here; choose one with --url, or start one with 'slipstream up'"
        )
    address = address or running[0]
    return address, CliSettings().token or find_token(address)


def _started_in(state_directory: Path) -> str:
    """Returns the address of the running controller that was started in a folder; empty if there is none."""
    try:
        url = str(json.loads((state_directory / UP_FILE).read_text(encoding="utf-8"))["url"])
    except PermissionError as error:
        raise ApiError(
            f"{state_directory} cannot be read ({error.strerror}); its owner can, or name the controller's "
            "address with --url"
        ) from error
    except (OSError, ValueError, KeyError, TypeError):  # there is none, or it is being written
        return ""
    return url if url in running_controllers() else ""


def run_until_signal(work: Coroutine[Any, Any, Any], *, needs_reader: bool = True) -> Any:
    """Runs a coroutine to its end; SIGINT, SIGTERM and SIGHUP cancel it, and it then cleans up.

    Args:
        needs_reader: If true, the work ends when the reader of standard output has gone. If false,
            this process then sends itself SIGTERM, and further output goes to standard error:
            Ctrl-C also ends the other commands of a pipeline, often before its signal arrives here.
    """

    async def main() -> Any:
        async with TaskGroup() as tasks:
            task = tasks.create_task(work)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        return task.result()

    try:
        with tolerate_broken_pipe(console, None if needs_reader else _terminate):
            return asyncio.run(main())
    except BrokenPipeError:
        raise typer.Exit(0) from None  # the reader has read enough, as `head` does
    except asyncio.CancelledError:
        errors.print("stopped", highlight=False)
        raise typer.Exit(130) from None
    except BaseExceptionGroup as group:
        if group.subgroup(BrokenPipeError) is not None:
            raise typer.Exit(0) from None
        errors_to_report, unknown = group.split(_TOLD)
        if unknown is not None:
            raise
        assert errors_to_report is not None
        for error in _root_causes(leaves(errors_to_report)):
            fail(_message_of(error))
        raise typer.Exit(1) from None


def _terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def _message_of(error: BaseException) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    wrong = error.errors(include_url=False)
    return "\n".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in wrong)


def _root_causes(failures: list[BaseException]) -> list[BaseException]:
    """Returns only the errors of exited services if there are any: they caused the failed calls."""
    exited: list[BaseException] = [
        error for error in failures if isinstance(error, ServiceExitedError)
    ]
    return exited or failures
