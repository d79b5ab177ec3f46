"""Commands that act on a run."""

import json
from typing import Annotated

import typer
import yaml
from pydantic import ValidationError

from services.cli.api import Api
from services.cli.calling import (
    DEFAULT_STATE,
    RunId,
    StateDirectory,
    Url,
    call_api,
    console,
)
from services.cli.follow import follow
from services.controller.api.models import ForkRequest, RunView


def add_run_commands(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (watch, cancel, pause, resume, checkpoint, evaluate, fork, delete):
        app.command()(command)
    app.command(name="delete-checkpoint")(delete_checkpoint)


def watch(run_id: RunId, url: Url = None, state_directory: StateDirectory = DEFAULT_STATE) -> None:
    """Show a run's progress until it ends."""
    ended = call_api(
        url, lambda api: follow(api, run_id, state_directory=state_directory, console=console)
    )
    if ended["state"] != "SUCCEEDED":
        raise typer.Exit(1)


def cancel(
    run_id: RunId,
    grace_seconds: Annotated[
        float,
        typer.Option(
            help="Time for the run to finish its step; 0 ends it at once.", min=0, max=86_400
        ),
    ] = 0.0,
    save_checkpoint: Annotated[
        bool, typer.Option(help="Save a checkpoint behind that step.")
    ] = False,
    url: Url = None,
) -> None:
    """End a run."""
    _say(
        call_api(
            url,
            lambda api: api.cancel(
                run_id, grace_seconds=grace_seconds, save_checkpoint=save_checkpoint
            ),
        )
    )


def pause(
    run_id: RunId,
    checkpoint: Annotated[
        bool, typer.Option(help="Save a checkpoint; otherwise it goes on from the one before.")
    ] = True,
    url: Url = None,
) -> None:
    """Finish the current step, save a checkpoint and stop the run's workers."""
    _say(call_api(url, lambda api: api.pause(run_id, checkpoint=checkpoint)))


def resume(run_id: RunId, url: Url = None) -> None:
    """Let a paused run go on from its checkpoint."""
    _say(call_api(url, lambda api: api.resume(run_id)))


def checkpoint(run_id: RunId, url: Url = None) -> None:
    """Save a checkpoint at the end of the current step."""
    call_api(url, lambda api: api.checkpoint(run_id))
    console.print(f"{run_id} saves a checkpoint at the end of its step", highlight=False)


def evaluate(run_id: RunId, url: Url = None) -> None:
    """Evaluate the weights that are served now; `events` shows the result."""
    call_api(url, lambda api: api.evaluate(run_id))
    console.print(f"{run_id} evaluates its weights", highlight=False)


def fork(
    run_id: RunId,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", help="Overrides, such as trainer.steps=200. May be repeated."),
    ] = None,
    name: Annotated[str, typer.Option(help="Name of the new run.")] = "",
    checkpoint_id: Annotated[
        str, typer.Option(help="Checkpoint to go on from. Default: the newest one.")
    ] = "",
    url: Url = None,
) -> None:
    """Start a new run that goes on from a checkpoint, and print its id."""
    changes = _nested(overrides or [])
    try:
        request = ForkRequest(checkpoint_id=checkpoint_id, name=name, overrides=changes)
    except ValidationError as error:
        wrong = error.errors()[0]
        raise typer.BadParameter(f"{wrong['loc'][0]}: {wrong['msg']}") from error
    created = call_api(url, lambda api: api.fork(run_id, request))
    typer.echo(created.id)


def delete(
    run_id: RunId,
    checkpoints: Annotated[bool, typer.Option(help="Delete its checkpoints too.")] = False,
    url: Url = None,
) -> None:
    """Forget a run that has ended."""

    async def work(api: Api) -> None:
        await api.delete(await api.get(run_id), delete_checkpoints=checkpoints)

    call_api(url, work)
    console.print(f"{run_id} is forgotten", highlight=False)


def delete_checkpoint(
    run_id: RunId,
    checkpoint_id: Annotated[str, typer.Argument(help="Id, as `checkpoints` shows it.")],
    url: Url = None,
) -> None:
    """Delete a checkpoint that no run needs."""
    call_api(url, lambda api: api.delete_checkpoint(run_id, checkpoint_id))
    console.print(f"{checkpoint_id} is deleted", highlight=False)


def _say(run: RunView) -> None:
    console.print(f"{run.id} is {run.state}", highlight=False)


def _nested(assignments: list[str]) -> dict[str, object]:
    result: dict[str, object] = {}
    for assignment in assignments:
        key, separator, text = assignment.partition("=")
        if not separator:
            raise typer.BadParameter(f"{assignment}: expected KEY=VALUE, such as trainer.steps=200")
        *parents, leaf = key.split(".")
        target = result
        for part in parents:
            inner = target.setdefault(part, {})
            if not isinstance(inner, dict):
                raise typer.BadParameter(f"{assignment}: {part!r} holds a value already")
            target = inner
        target[leaf] = json.loads(json.dumps(yaml.safe_load(text)))
    return result
