"""Commands that act on a run or on the controller."""

from typing import Annotated, Any

import typer
from rich.table import Table

from services.cli.api import Api, ApiError, fields_of
from services.cli.api_calls import (
    DEFAULT_STATE,
    RunId,
    StateDirectory,
    call_api,
    call_operation,
    of_run,
)
from services.cli.controller_address import Url
from services.cli.display import heldout_line
from services.cli.follow import follow
from services.cli.output import console, write
from services.common.runspec.loader import SpecError, apply_override
from services.controller.api.operations import (
    CancelRun,
    DeleteCheckpoint,
    DeleteRun,
    EvaluateRun,
    ForkRun,
    GetQuota,
    GetVersion,
    PauseRun,
    ResumeRun,
    SaveRun,
    UpdateRun,
)
from services.controller.schemas import RunView


def watch(run_id: RunId, url: Url = None, state_directory: StateDirectory = DEFAULT_STATE) -> None:
    """Show a run's progress until it ends."""

    async def work(api: Api, run_key: str) -> dict[str, Any]:
        return await follow(api, run_key, state_directory=state_directory, console=console)

    final_run = of_run(url, run_id, work)
    if final_run["state"] != "SUCCEEDED":
        raise typer.Exit(1)


def cancel(
    run_id: RunId,
    grace_seconds: Annotated[
        float,
        typer.Option(
            help="Seconds in which the run can finish its step; 0 cancels it at once.",
            min=0,
            max=86_400,
        ),
    ] = 0.0,
    save_checkpoint: Annotated[
        bool, typer.Option(help="Save a checkpoint after that step.")
    ] = False,
    url: Url = None,
) -> None:
    """Cancel a run."""
    _print_state(
        call_operation(
            url,
            CancelRun,
            run_id=run_id,
            grace_seconds=grace_seconds,
            save_checkpoint=save_checkpoint,
        )
    )


def pause(
    run_id: RunId,
    checkpoint: Annotated[
        bool,
        typer.Option(help="Save a checkpoint; otherwise the run resumes from the previous one."),
    ] = True,
    url: Url = None,
) -> None:
    """Finish the current step, save a checkpoint and stop the run's workers."""
    _print_state(call_operation(url, PauseRun, run_id=run_id, checkpoint=checkpoint))


def resume(run_id: RunId, url: Url = None) -> None:
    """Resume a paused run from its checkpoint."""
    _print_state(call_operation(url, ResumeRun, run_id=run_id))


def checkpoint(run_id: RunId, url: Url = None) -> None:
    """Save a checkpoint at the end of the current step."""
    call_operation(url, SaveRun, run_id=run_id)
    console.print(f"{run_id} will save a checkpoint at the end of its step", highlight=False)


def evaluate(
    run_id: RunId,
    wait: Annotated[bool, typer.Option(help="Wait for the result.")] = True,
    url: Url = None,
) -> None:
    """Evaluate the current weights, and show the result."""

    async def work(api: Api, run_key: str) -> str:
        run = await api.get(run_key)
        with fields_of(api.url, "the run"):
            if run.spec["data"]["heldout"] is None:
                raise ApiError(f"{run.name} has no data.heldout to evaluate on")
        last_seq = max((event.seq for event in await api.events(run_key)), default=0)
        await api.call(EvaluateRun(run_id=run_key))
        if not wait:
            return f"{run_key} is evaluating its weights"
        async for kind, event in api.watch(run_key):
            if kind == "Validated" and event["seq"] > last_seq:
                with fields_of(api.url, "event Validated"):
                    return heldout_line(event["data"])
        return f"{run_key} has ended; 'slipstream get' shows its last evaluation"

    console.print(of_run(url, run_id, work), highlight=False)


def set_keys(
    run_id: RunId,
    assignments: Annotated[
        list[str],
        typer.Argument(
            metavar="KEY=VALUE...",
            help="New values, such as trainer.checkpoint.every=20, priority=5 or labels.team=blue.",
        ),
    ],
    url: Url = None,
) -> None:
    """Change keys of a run while it trains: limits, intervals, rollouts, priority, labels."""
    changes = _changes(assignments)
    attributes: dict[str, Any] = {
        name: changes.pop(name) for name in ("priority", "labels") if name in changes
    }

    async def work(api: Api, key: str) -> RunView:
        run = await api.get(key)
        if isinstance(labels := attributes.get("labels"), dict):
            attributes["labels"] = {**run.labels, **labels}
        arguments: dict[str, Any] = {"run_id": key, "if_match": f'"{run.revision}"', **attributes}
        return await api.call(UpdateRun(spec=changes or None, **arguments))

    updated_run = of_run(url, run_id, work)
    console.print(f"{updated_run.id}: changed {', '.join(assignments)}", highlight=False)


def fork(
    run_id: RunId,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", help="Overrides, such as trainer.steps=200. May be repeated."),
    ] = None,
    name: Annotated[
        str,
        typer.Option(
            help="Name of the new run. Default: that of the run, with -fork while that name is in use."
        ),
    ] = "",
    checkpoint_id: Annotated[
        str, typer.Option(help="Checkpoint to continue from. Default: the newest one.")
    ] = "",
    url: Url = None,
) -> None:
    """Start a new run from a checkpoint of another one, and print its id."""
    changes = _changes(overrides or [])
    created = call_operation(
        url, ForkRun, run_id=run_id, checkpoint_id=checkpoint_id, name=name, overrides=changes
    )
    write(created.id)


def delete(
    run_id: RunId,
    checkpoints: Annotated[bool, typer.Option(help="Also delete the run's checkpoints.")] = False,
    url: Url = None,
) -> None:
    """Delete a run that has ended."""

    async def work(api: Api, run_key: str) -> None:
        etag = f'"{(await api.get(run_key)).revision}"'
        await api.call(DeleteRun(run_id=run_key, if_match=etag, delete_checkpoints=checkpoints))

    of_run(url, run_id, work)
    console.print(f"deleted {run_id}", highlight=False)


def delete_checkpoint(
    run_id: RunId,
    checkpoint_id: Annotated[
        str, typer.Argument(help="Id of the checkpoint, as 'slipstream checkpoints' prints it.")
    ],
    url: Url = None,
) -> None:
    """Delete a checkpoint that no run uses."""
    call_operation(url, DeleteCheckpoint, run_id=run_id, checkpoint_id=checkpoint_id)
    console.print(f"deleted {checkpoint_id}", highlight=False)


def _print_state(run: RunView) -> None:
    console.print(f"{run.id} is {run.state}", highlight=False)


def _changes(assignments: list[str]) -> dict[str, Any]:
    """Returns the changes of a specification that assignments such as ``trainer.steps=200`` make."""
    changes: dict[str, Any] = {}
    try:
        for assignment in assignments:
            apply_override(changes, assignment)
    except SpecError as error:
        raise typer.BadParameter(str(error)) from error
    return changes


_QUOTAS = (
    ("active runs", "active_runs", "max_active_runs"),
    ("queued runs", "queued_runs", "max_queued_runs"),
    ("GPUs", "gpus", "max_gpus"),
    ("transferqueue bytes", "transferqueue_bytes", "max_transferqueue_bytes"),
    ("checkpoint bytes", "checkpoint_bytes", "max_checkpoint_bytes"),
    ("event streams", "event_streams", "max_event_streams"),
)


def quota(url: Url = None) -> None:
    """Show the project's usage and limits."""
    view = call_operation(url, GetQuota)
    table = Table(f"project {view.project}", "uses", "of", box=None, pad_edge=False)
    for name, used_field, limit in _QUOTAS:
        table.add_row(name, f"{getattr(view, used_field):,}", _bound(getattr(view, limit)))
    table.add_row("requests a second", "", _bound(view.max_requests_per_second))
    console.print(table, highlight=False)


def version(url: Url = None) -> None:
    """Show the release of the controller."""
    console.print(call_operation(url, GetVersion).version, highlight=False)


def page(url: Url = None) -> None:
    """Print a link to the run page that signs in one browser, once."""
    write(call_api(url, lambda api: api.page_link()))


def _bound(limit: int) -> str:
    return f"{limit:,}" if limit else "no limit"
