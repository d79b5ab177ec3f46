"""Commands that only look: runs, events, logs, numbers, checkpoints, workers."""

import sys
from datetime import UTC, datetime
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from services.cli.api import Api
from services.cli.calling import RunId, Url, call_api, console
from services.controller.api.models import EventView, RunView

Follow = Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run has ended.")]


def add_look_commands(app: typer.Typer) -> None:
    """Add the commands."""
    app.command(name="list")(list_)
    for command in (get, events, logs, metrics, checkpoints, workers):
        app.command()(command)


def list_(
    state: Annotated[str, typer.Option(help="Only runs in this state.")] = "",
    label: Annotated[str, typer.Option(help="Only runs with this label, such as team=blue.")] = "",
    url: Url = None,
) -> None:
    """List runs, newest first."""
    page = call_api(url, lambda api: api.list_runs(state=state.upper(), label=label))
    table = Table("id", "name", "state", "step", "held-out", "age", box=None, pad_edge=False)
    table.columns[0].no_wrap = True
    for run in page.items:
        table.add_row(
            run.id, run.name, run.state, _steps(run), _heldout(run), _age(run.create_time)
        )
    console.print(table if page.items else "no runs", highlight=False)


def get(
    run_id: RunId,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON, as it is done when piped.")
    ] = False,
    url: Url = None,
) -> None:
    """Show one run."""
    run = call_api(url, lambda api: api.get(run_id))
    if as_json or not console.is_terminal:
        sys.stdout.write(run.model_dump_json(indent=2) + "\n")
        return
    prompts = run.summary.get("prompts", {})
    facts = {
        "name": run.name,
        "state": f"{run.state} ({run.state_reason})",
        "doing": ", ".join(run.activities).lower() or "-",
        "step": _steps(run),
        "weights": f"version {run.weight_version}" if run.weight_version >= 0 else "-",
        "held-out": _heldout(run),
        "prompts": ", ".join(f"{prompts[name]} {name}" for name in prompts if name != "reasons")
        or "-",
        "submitted": f"{_age(run.create_time)} ago by {run.created_by or 'somebody'}",
        "labels": ", ".join(f"{key}={value}" for key, value in run.labels.items()) or "-",
    }
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, value in facts.items():
        table.add_row(name, value)
    console.print(table, highlight=False)
    console.print(_conditions(run), highlight=False)
    if run.message:
        console.print(f"\n{run.message}", highlight=False, markup=False)


def events(
    run_id: RunId,
    follow: Follow = False,
    type_: Annotated[str, typer.Option("--type", help="Only events of this type.")] = "",
    url: Url = None,
) -> None:
    """Show what happened to a run."""

    async def work(api: Api) -> None:
        if not follow:
            for event in await api.events(run_id, type_=type_):
                _print_event(event)
            return
        async for kind, data in api.watch(run_id):
            if kind != "end" and type_ in ("", kind):
                _print_event(EventView.model_validate(data))

    call_api(url, work)


def logs(
    run_id: RunId,
    component: Annotated[str, typer.Argument(help="One worker, such as rollout-0.")] = "",
    tail: Annotated[int, typer.Option(help="Last lines of each worker.", min=0, max=10_000)] = 100,
    follow: Follow = False,
    url: Url = None,
) -> None:
    """Show what the workers of a run wrote."""

    async def work(api: Api) -> None:
        async for line in api.logs(
            run_id, component=component, tail_lines=max(tail, 1), follow=follow
        ):
            prefix = "" if component else f"{line.component:<12} "
            console.print(f"{prefix}{line.line}", soft_wrap=True, highlight=False, markup=False)

    call_api(url, work)


def metrics(
    run_id: RunId,
    name: Annotated[
        str, typer.Argument(help="Number, such as reward_mean. Default: their names.")
    ] = "",
    url: Url = None,
) -> None:
    """Show a number of each step, or which numbers there are."""
    points = call_api(url, lambda api: api.metrics(run_id, name=name))
    if not name:
        console.print("\n".join(sorted({point.name for point in points})), highlight=False)
        return
    for point in points:
        console.print(f"{point.step:>8}  {point.value:.6g}", highlight=False)


def checkpoints(run_id: RunId, url: Url = None) -> None:
    """List the checkpoints of a run, newest first."""
    table = Table("id", "step", "version", "state", "age", "path", box=None, pad_edge=False)
    for item in call_api(url, lambda api: api.checkpoints(run_id)):
        table.add_row(
            item.id,
            str(item.step),
            str(item.weight_version),
            item.state,
            _age(item.create_time),
            item.path or item.message,
        )
    console.print(table, highlight=False)


def workers(run_id: RunId, url: Url = None) -> None:
    """List the workers of a run and what they are doing."""
    table = Table("worker", "state", "version", "doing", box=None, pad_edge=False)
    for worker in call_api(url, lambda api: api.topology(run_id)):
        version = str(worker.weight_version) if worker.weight_version >= 0 else "-"
        table.add_row(worker.worker_id, worker.state, version, worker.activity)
    console.print(table, highlight=False)


def _conditions(run: RunView) -> Table:
    table = Table("\ncondition", "\nis", "\nfor", "\nwhy", box=None, pad_edge=False)
    for condition in run.conditions:
        reason, message = condition.reason, condition.message
        why = message if message.startswith(reason) else f"{reason}: {message}".removesuffix(": ")
        since = _age(condition.last_transition_time)
        table.add_row(condition.type, condition.status.lower(), since, escape(why))
    return table


def _print_event(event: EventView) -> None:
    time = event.time.astimezone().strftime("%H:%M:%S")
    text = event.message.splitlines()[0] if event.message else ""
    console.print(
        f"{event.seq:>6}  {time}  {event.type:<18} {text}",
        soft_wrap=True,
        highlight=False,
        markup=False,
    )


def _steps(run: RunView) -> str:
    return f"{run.step}/{run.spec['trainer']['steps']}"


def _heldout(run: RunView) -> str:
    scores = run.summary.get("heldout") or {}
    found = [scores.get(name) for name in ("greedy", "sampled")]
    return " / ".join("-" if score is None else f"{score:.3f}" for score in found)


def _age(moment: datetime) -> str:
    seconds = int((datetime.now(UTC) - moment).total_seconds())
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds // size} {unit}"
    return f"{max(seconds, 0)} s"
