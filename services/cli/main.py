"""The ``slipstream`` command."""

import asyncio
import json
import signal
import sys
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from services.cli import preflight
from services.cli.api import Api, ApiError
from services.cli.follow import follow
from services.cli.local import LocalServices, ServiceExitedError, local_services
from services.cli.settings import CliSettings
from services.common.spec.loader import SpecError, load_spec
from services.common.spec.run import RunSpec

app = typer.Typer(
    help="Asynchronous reinforcement learning for language models.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
console = Console()
errors = Console(stderr=True)

SpecPath = Annotated[Path, typer.Argument(help="The run's specification: YAML or JSON.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", help="Overrides, such as algorithm.max_staleness=2. May be repeated."),
]
RunId = Annotated[str, typer.Argument(help="Id of a run, such as run_0198....")]
StateDirectory = Annotated[Path, typer.Option(help="Folder of runs, logs and the database.")]
Url = Annotated[str | None, typer.Option(help="REST address of the controller.")]
Port = Annotated[int, typer.Option(help="Port of the REST API; 0 takes a free one.")]

_DEFAULT_STATE = Path("runs")
_UP_FILE = "up.json"
# A service that ends more often than this under `slipstream up` ends it.
_UP_RESTARTS = 20


@app.command()
def run(
    spec: SpecPath,
    overrides: Overrides = None,
    state_directory: StateDirectory = _DEFAULT_STATE,
    port: Port = 0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the path of summary.json as the last line.")
    ] = False,
) -> None:
    """Start all services on this machine, train, show progress, and end everything."""
    loaded = _load(spec, overrides)
    ended = _run_until_signal(_run(loaded, state_directory.resolve(), port))
    if as_json:
        sys.stdout.write(f"{ended['summary_path']}\n")
    if ended["state"] != "SUCCEEDED":
        raise typer.Exit(1)


@app.command()
def validate(spec: SpecPath, overrides: Overrides = None) -> None:
    """Check a specification and everything it names, without starting anything."""
    loaded = _load(spec, overrides)
    console.print(f"{spec}: run {loaded.name!r} is valid", highlight=False)


@app.command()
def up(state_directory: StateDirectory = _DEFAULT_STATE, port: Port = 8700) -> None:
    """Start controller and transferqueue, and keep them running for submitted runs."""
    _run_until_signal(_up(state_directory.resolve(), port))


@app.command()
def submit(spec: SpecPath, overrides: Overrides = None, url: Url = None) -> None:
    """Submit a run and print its id."""
    loaded = _load(spec, overrides)
    created = _run_until_signal(
        _with_api(url, lambda api: api.submit(loaded.model_dump(mode="json")))
    )
    sys.stdout.write(f"{created['id']}\n")


@app.command()
def get(run_id: RunId, url: Url = None) -> None:
    """Print one run as JSON."""
    sys.stdout.write(
        json.dumps(_run_until_signal(_with_api(url, lambda api: api.get(run_id))), indent=2) + "\n"
    )


@app.command(name="list")
def list_(url: Url = None) -> None:
    """List runs, newest first."""
    table = Table("name", "state", "step", "version", "held-out greedy/sampled")
    table.add_column("id", no_wrap=True, min_width=36)
    for item in _run_until_signal(_with_api(url, lambda api: api.list_runs())):
        heldout = item["summary"].get("heldout") or {}
        table.add_row(
            item["name"],
            item["state"],
            str(item["step"]),
            str(item["weight_version"]),
            f"{heldout.get('greedy')} / {heldout.get('sampled')}",
            item["id"],
        )
    console.print(table)


@app.command()
def watch(run_id: RunId, url: Url = None, state_directory: StateDirectory = _DEFAULT_STATE) -> None:
    """Show a run's progress until it ends."""
    ended = _run_until_signal(
        _with_api(
            url,
            lambda api: follow(api, run_id, state_directory=state_directory, console=console),
        )
    )
    if ended["state"] != "SUCCEEDED":
        raise typer.Exit(1)


@app.command()
def cancel(run_id: RunId, url: Url = None) -> None:
    """End a run."""
    ended = _run_until_signal(_with_api(url, lambda api: api.cancel(run_id)))
    console.print(f"{run_id} is {ended['state']}", highlight=False)


@app.command()
def pause(run_id: RunId, url: Url = None) -> None:
    """Finish the current step, save a checkpoint and stop the run's workers."""
    paused = _run_until_signal(_with_api(url, lambda api: api.pause(run_id)))
    console.print(f"{run_id} is {paused['state']}", highlight=False)


@app.command()
def resume(run_id: RunId, url: Url = None) -> None:
    """Let a paused run go on from its checkpoint."""
    resumed = _run_until_signal(_with_api(url, lambda api: api.resume(run_id)))
    console.print(f"{run_id} is {resumed['state']}", highlight=False)


@app.command()
def checkpoint(run_id: RunId, url: Url = None) -> None:
    """Save a checkpoint at the end of the current step."""
    _run_until_signal(_with_api(url, lambda api: api.checkpoint(run_id)))
    console.print(f"{run_id} saves a checkpoint at the end of its step", highlight=False)


@app.command()
def checkpoints(run_id: RunId, url: Url = None) -> None:
    """List the checkpoints of a run, newest first."""
    table = Table("step", "version", "state", "path")
    for item in _run_until_signal(_with_api(url, lambda api: api.checkpoints(run_id))):
        table.add_row(str(item["step"]), str(item["weight_version"]), item["state"], item["path"])
    console.print(table)


def _load(path: Path, overrides: list[str] | None) -> RunSpec:
    try:
        spec = load_spec(path, overrides or ())
        preflight.check(spec)
    except SpecError as error:
        for problem in error.problems:
            errors.print(
                f"error: {problem}", style="red", soft_wrap=True, highlight=False, markup=False
            )
        raise typer.Exit(2) from error
    return spec


async def _run(spec: RunSpec, state_directory: Path, port: int) -> dict[str, Any]:
    async with (
        local_services(
            state_directory, port=port, max_restarts=spec.limits.max_restarts
        ) as services,
        Api(services.url) as api,
    ):
        created = await api.submit(spec.model_dump(mode="json"))
        return await _follow_beside(services, api, created["id"], state_directory)


async def _follow_beside(
    services: LocalServices, api: Api, run_id: str, state_directory: Path
) -> dict[str, Any]:
    """Follow a run; a dying service ends that."""
    async with asyncio.TaskGroup() as tasks:
        exits = tasks.create_task(services.keep())
        ended = await follow(api, run_id, state_directory=state_directory, console=console)
        exits.cancel()
    return ended


async def _up(state_directory: Path, port: int) -> None:
    async with local_services(state_directory, port=port, max_restarts=_UP_RESTARTS) as services:
        up_file = state_directory / _UP_FILE
        up_file.write_text(json.dumps({"url": services.url}) + "\n", encoding="utf-8")
        console.print(
            f"controller at {services.url}, API documentation at {services.url}/docs; Ctrl-C ends it",
            highlight=False,
        )
        try:
            await services.keep()
        finally:
            up_file.unlink(missing_ok=True)


async def _with_api(url: str | None, work: Any) -> Any:
    async with Api(_find_url(url), token=CliSettings().token) as api:
        return await work(api)


def _find_url(url: str | None) -> str:
    if found := url or CliSettings().url:
        return found
    up_file = _DEFAULT_STATE / _UP_FILE
    if not up_file.exists():
        raise ApiError(
            "no controller is known: start one here with 'slipstream up', or give --url or SLIPSTREAM_URL"
        )
    found = json.loads(up_file.read_text(encoding="utf-8"))["url"]
    return str(found)


def _run_until_signal(work: Coroutine[Any, Any, Any]) -> Any:
    """Run to the end; SIGINT and SIGTERM cancel the work, which then cleans up."""

    async def main() -> Any:
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(work)
            for number in (signal.SIGINT, signal.SIGTERM):
                asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        return task.result()

    try:
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


if __name__ == "__main__":
    app()
