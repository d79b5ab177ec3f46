"""The ``slipstream`` command."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from services.cli.api import Api
from services.cli.calling import (
    DEFAULT_STATE,
    UP_FILE,
    StateDirectory,
    Url,
    call_api,
    console,
    errors,
    run_until_signal,
)
from services.cli.follow import follow
from services.cli.local import LocalServices, local_services
from services.cli.look_commands import add_look_commands
from services.cli.project_commands import add_project_commands
from services.cli.run_commands import add_run_commands
from services.cli.unfinished import submit_or_go_on
from services.common.spec.loader import SpecError, load_spec
from services.common.spec.run import RunSpec
from services.common.task_group import TaskGroup

app = typer.Typer(
    help="Asynchronous reinforcement learning for language models.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)

SpecPath = Annotated[Path, typer.Argument(help="The run's specification: YAML or JSON.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", help="Overrides, such as algorithm.max_staleness=2. May be repeated."),
]
Port = Annotated[int, typer.Option(help="Port of the REST API; 0 takes a free one.")]

_PATIENCE_S = 30.0
# A service that ends more often than this under `slipstream up` ends it.
_UP_RESTARTS = 20


@app.command()
def run(
    spec: SpecPath,
    overrides: Overrides = None,
    state_directory: StateDirectory = DEFAULT_STATE,
    port: Port = 0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the path of summary.json as the last line.")
    ] = False,
) -> None:
    """Start all services on this machine, train, show progress, and end everything.

    Ctrl-C cancels the run. One that was cut off with everything goes on when its specification is run again.
    """
    loaded = _load(spec, overrides)
    ended = run_until_signal(_run(loaded, state_directory.resolve(), port))
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
def up(state_directory: StateDirectory = DEFAULT_STATE, port: Port = 8700) -> None:
    """Start controller and transferqueue, and keep them running for submitted runs."""
    run_until_signal(_up(state_directory.resolve(), port))


@app.command()
def submit(
    spec: SpecPath,
    overrides: Overrides = None,
    label: Annotated[
        list[str] | None, typer.Option(help="Label, such as team=blue. May be repeated.")
    ] = None,
    priority: Annotated[
        int, typer.Option(help="Runs with a higher one start first.", min=-1000, max=1000)
    ] = 0,
    url: Url = None,
) -> None:
    """Submit a run and print its id."""
    labels, loaded = _labels(label or []), _load(spec, overrides)
    created = call_api(
        url,
        lambda api: api.submit(loaded.model_dump(mode="json"), priority=priority, labels=labels),
    )
    sys.stdout.write(f"{created.id}\n")


add_run_commands(app)
add_look_commands(app)
add_project_commands(app)


def _labels(pairs: list[str]) -> dict[str, str]:
    if wrong := [pair for pair in pairs if "=" not in pair]:
        raise typer.BadParameter(f"--label {wrong[0]}: expected KEY=VALUE, such as team=blue")
    return dict(pair.split("=", 1) for pair in pairs)


def _load(path: Path, overrides: list[str] | None) -> RunSpec:
    try:
        spec = load_spec(path, overrides or ())
        # It loads torch, which takes seconds that a mistyped key does not need.
        from services.cli import preflight

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
        # A controller that dies is started again.
        Api(services.url, patience_s=_PATIENCE_S) as api,
    ):
        run_id = await submit_or_go_on(api, spec, console)
        return await _follow_beside(services, api, run_id, state_directory)


async def _follow_beside(
    services: LocalServices, api: Api, run_id: str, state_directory: Path
) -> dict[str, Any]:
    """Follow a run; a dying service ends that."""
    async with TaskGroup() as tasks:
        exits = tasks.create_task(services.keep())
        ended = await follow(api, run_id, state_directory=state_directory, console=console)
        exits.cancel()
    return ended


async def _up(state_directory: Path, port: int) -> None:
    async with local_services(state_directory, port=port, max_restarts=_UP_RESTARTS) as services:
        up_file = state_directory / UP_FILE
        up_file.write_text(json.dumps({"url": services.url}) + "\n", encoding="utf-8")
        console.print(
            f"controller at {services.url}, API documentation at {services.url}/docs, gRPC at "
            f"{services.grpc_address}; Ctrl-C ends it",
            highlight=False,
            soft_wrap=True,
        )
        try:
            await services.keep()
        finally:
            up_file.unlink(missing_ok=True)


if __name__ == "__main__":
    app()
