"""How commands call the controller, and what they say when that fails."""

import asyncio
import json
import re
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console

from services.cli.api import Api, ApiError
from services.cli.local import ServiceExitedError
from services.cli.output import patient
from services.cli.settings import CliSettings
from services.common.spec.loader import SpecError
from services.common.task_group import TaskGroup

_T = TypeVar("_T")

_RUN_ID = re.compile("run_[0-9a-f]{32}")

# What is piped is read by programs too: lines are not broken for a screen that is not there.
console = Console(width=None if sys.stdout.isatty() else 1000)
errors = Console(stderr=True)


def _given(run_id: str) -> str:
    """In ``slipstream watch "$(slipstream submit FILE)"`` nothing is left of a run that was refused."""
    if not run_id:
        raise typer.BadParameter("is empty: was the run submitted?")
    if not _RUN_ID.fullmatch(run_id):
        raise typer.BadParameter(
            f"{run_id!r} is no id of a run; 'slipstream list' shows those there are"
        )
    return run_id


RunId = Annotated[str, typer.Argument(help="Id of a run, such as run_0198....", callback=_given)]
StateDirectory = Annotated[Path, typer.Option(help="Folder of runs, logs and the database.")]
Url = Annotated[str | None, typer.Option(help="REST address of the controller.")]

DEFAULT_STATE = Path("runs")
UP_FILE = "up.json"


def call_api(url: str | None, work: Callable[[Api], Awaitable[_T]]) -> _T:
    """Do something with the controller; a signal ends it, and a failure is explained."""
    result: _T = run_until_signal(_with_api(url, work))
    return result


async def _with_api(url: str | None, work: Callable[[Api], Awaitable[_T]]) -> _T:
    async with Api(_find_url(url), token=CliSettings().token) as api:
        return await work(api)


def _find_url(url: str | None) -> str:
    if found := url or CliSettings().url:
        return found
    up_file = DEFAULT_STATE / UP_FILE
    if not up_file.exists():
        raise ApiError(
            "no controller is known: start one here with 'slipstream up', or give --url or SLIPSTREAM_URL"
        )
    found = json.loads(up_file.read_text(encoding="utf-8"))["url"]
    return str(found)


def run_until_signal(work: Coroutine[Any, Any, Any]) -> Any:
    """Run to the end; SIGINT and SIGTERM cancel the work, which then cleans up."""

    async def main() -> Any:
        async with TaskGroup() as tasks:
            task = tasks.create_task(work)
            for number in (signal.SIGINT, signal.SIGTERM):
                asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        return task.result()

    try:
        with patient(console):
            return asyncio.run(main())
    except asyncio.CancelledError:
        errors.print("stopped", highlight=False)
        raise typer.Exit(130) from None
    except BaseExceptionGroup as group:
        known, unknown = group.split((ApiError, ServiceExitedError, SpecError))
        if unknown is not None:
            raise
        assert known is not None
        for error in _most_telling(list(_leaves(known))):
            errors.print(
                f"error: {error}", style="red", soft_wrap=True, highlight=False, markup=False
            )
        raise typer.Exit(1) from None


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error


def _most_telling(found: list[BaseException]) -> list[BaseException]:
    """A service that ended explains the calls that it broke."""
    exited: list[BaseException] = [
        error for error in found if isinstance(error, ServiceExitedError)
    ]
    return exited or found
