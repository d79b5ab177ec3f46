"""Read-only commands on runs: state, events, logs, metrics, groups, checkpoints, workers."""

import json
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Annotated

import typer
from pydantic import BaseModel
from rich.filesize import decimal
from rich.table import Table

from services.cli.api import Api, ApiError
from services.cli.api_calls import (
    DEFAULT_STATE,
    AsJson,
    NewestRun,
    StateDirectory,
    call_api,
    call_operation,
    find_run,
    may_be_run,
    of_run,
    short_ids,
)
from services.cli.controller_address import Url
from services.cli.display import set_line
from services.cli.output import console, errors, fail, label_pairs, write
from services.controller.api.operations import (
    GetTopology,
    ListCheckpoints,
    ListGroups,
    ListMetrics,
    ListRuns,
)
from services.controller.rules.run_state import TERMINAL
from services.controller.schemas import (
    CheckpointPage,
    EventView,
    ListedRun,
    MetricPage,
    RunView,
)

Follow = Annotated[bool, typer.Option("--follow", "-f", help="Follow until the run has ended.")]


def list_(
    state: Annotated[str, typer.Option(help="Only runs in this state.")] = "",
    label: Annotated[str, typer.Option(help="Only runs with this label, such as team=blue.")] = "",
    limit: Annotated[int, typer.Option(help="Max number of runs.", min=1, max=500)] = 50,
    as_json: AsJson = False,
    state_directory: StateDirectory = DEFAULT_STATE,
    url: Url = None,
) -> None:
    """List runs, newest first."""
    label_pairs([label] if label else [])
    page = call_operation(
        url,
        ListRuns,
        state_directory=state_directory,
        state=state.upper() or None,
        label=label,
        page_size=limit,
    )
    if as_json:
        _write_json(page.items)
        return
    table = Table("id", "name", "state", "step", "held-out", "age", box=None, pad_edge=False)
    table.columns[0].no_wrap = True
    ids = [run.id for run in page.items]
    # Programs that read the output get complete ids.
    shown_ids = short_ids(ids) if console.is_terminal else ids
    for run, run_id in zip(page.items, shown_ids, strict=True):
        table.add_row(
            run_id, run.name, run.state, _steps(run), _heldout(run), _age(run.create_time)
        )
    console.print(table if page.items else "no runs")
    if page.next_page_token:
        _hint(f"older runs exist; --limit shows more than {limit}")


def get(
    run_id: NewestRun = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON; the default if the output is piped.")
    ] = False,
    state_directory: StateDirectory = DEFAULT_STATE,
    url: Url = None,
) -> None:
    """Show one run."""
    run = of_run(url, run_id, Api.get, state_directory=state_directory)
    if as_json or not console.is_terminal:
        write(run.model_dump_json(indent=2))
        return
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, value in _facts(run).items():
        table.add_row(name, value)
    console.print(table)
    if run.state not in TERMINAL:
        console.print(_conditions(run))
    if run.error is not None:
        console.print(f"\n{run.error.component} failed ({run.error.code})")
    if run.message:
        console.print(f"\n{run.message}")


def _facts(run: RunView) -> dict[str, str]:
    """Returns the facts of a run to display, by name."""
    prompts = run.summary.get("prompts", {})
    counts = (f"{count} {name}" for name, count in prompts.items() if name != "reasons")
    learning = run.summary.get("nothing_learned") or run.summary.get("reward_drop")
    return {
        "name": run.name,
        "state": f"{run.state} ({run.state_reason})",
        "doing": ", ".join(run.activities).lower() or "-",
        "step": _steps(run),
        "advice": run.summary.get("advice", {}).get("message", "-"),
        **({"learning": learning["message"]} if learning else {}),
        "weights": f"version {run.weight_version}" if run.weight_version >= 0 else "-",
        "held-out": _heldout(run),
        **{f"  {name}": set_line(scores) for name, scores in _heldout_sets(run).items()},
        "prompts": ", ".join(counts) or "-",
        "submitted": f"{_age(run.create_time)} ago by {run.created_by or 'unknown'}",
        "started": f"{_age(run.start_time)} ago" if run.start_time else "-",
        "ended": f"{_age(run.finish_time)} ago" if run.finish_time else "-",
        "labels": ", ".join(f"{key}={value}" for key, value in run.labels.items()) or "-",
    }


def events(
    run_id: NewestRun = None,
    follow: Follow = False,
    type_: Annotated[str, typer.Option("--type", help="Only events of this type.")] = "",
    as_json: AsJson = False,
    state_directory: StateDirectory = DEFAULT_STATE,
    url: Url = None,
) -> None:
    """Show the events of a run."""

    def show(event: EventView) -> None:
        if as_json:
            _write_json([event])
        else:
            _print_event(event)

    async def work(api: Api, full_id: str) -> None:
        if not follow:
            for event in await api.events(full_id, type_=type_):
                show(event)
            return
        async for kind, data in api.watch(full_id):
            if kind != "end" and type_ in ("", kind):
                show(EventView.model_validate(data))

    of_run(url, run_id, work, state_directory=state_directory)


def logs(
    run_id: NewestRun = None,
    component: Annotated[str, typer.Argument(help="One worker, such as rollout-0.")] = "",
    tail: Annotated[
        int, typer.Option(help="Number of last lines of each worker.", min=1, max=10_000)
    ] = 100,
    follow: Follow = False,
    state_directory: StateDirectory = DEFAULT_STATE,
    url: Url = None,
) -> None:
    """Show the logs of a run's workers."""

    async def work(api: Api, full_id: str) -> None:
        is_empty = True
        lines = api.logs(full_id, component=component, tail_lines=tail, follow=follow)
        async for line in lines:
            is_empty = False
            prefix = "" if component else f"{line.component:<12} "
            console.print(f"{prefix}{line.line}", soft_wrap=True)
        if is_empty:
            _hint(f"no log lines of {component or 'any worker'}")

    of_run(url, run_id, work, state_directory=state_directory)


def metrics(
    run_id: Annotated[
        str,
        typer.Argument(
            help=(
                "Name of a run, or the start of its id. Default: the newest run, also if only NAME is "
                "given."
            )
        ),
    ] = "",
    name: Annotated[
        str,
        typer.Argument(help="Number, such as reward_mean. Default: list the names of all numbers."),
    ] = "",
    as_json: AsJson = False,
    state_directory: StateDirectory = DEFAULT_STATE,
    url: Url = None,
) -> None:
    """Show one number for each step, or list the available numbers."""

    async def work(api: Api) -> tuple[str, MetricPage]:
        found_id, number = await _run_and_number(api, run_id, name)
        operation = ListMetrics(run_id=found_id, name=[number] if number else [])
        return number, await api.call(operation)

    number, metrics_page = call_api(url, work, state_directory=state_directory)
    if number and not metrics_page.items:
        fail(f"unknown number {number!r}; omit it to list all names")
        raise typer.Exit(1)
    if not metrics_page.items:
        _hint("the run has finished no step")
    if as_json:
        _write_metrics(metrics_page)
    elif number:
        for step, value in _by_step(metrics_page):
            console.print(f"{step:>8}  {value:.6g}")
    else:
        console.print("\n".join(metric.name for metric in metrics_page.items))


async def _run_and_number(api: Api, run: str, number: str) -> tuple[str, str]:
    """Returns a run and the requested metric; an argument that names no run is a metric of the newest run."""
    if not run or number:
        return await find_run(api, run or None), number
    try:
        if may_be_run(run):
            return await find_run(api, run), ""
    except ApiError as error:
        if error.status != HTTPStatus.NOT_FOUND:
            raise
        newest = await find_run(api, None)
        if not (await api.call(ListMetrics(run_id=newest, name=[run]))).items:
            raise
        return newest, run
    return await find_run(api, None), run


def groups(
    run_id: NewestRun = None,
    after_step: Annotated[int, typer.Option(help="Show steps after this one.", min=0)] = 0,
    steps: Annotated[int, typer.Option(help="Max number of steps.", min=1, max=100)] = 10,
    as_json: AsJson = False,
    state_directory: StateDirectory = DEFAULT_STATE,
    url: Url = None,
) -> None:
    """List the groups that steps trained, then groups in flight and dropped groups."""
    columns = ("group", "row", "attempt", "state", "step", "staleness", "why")
    table = Table(*columns, box=None, pad_edge=False)
    page = call_operation(
        url,
        ListGroups,
        state_directory=state_directory,
        run_id=run_id,
        after_step=after_step,
        steps=steps,
    )
    if as_json:
        _write_json(page.items)
        return
    for item in page.items:
        step, staleness = (
            "-" if number is None else str(number) for number in (item.step, item.staleness)
        )
        row, attempt = str(item.row), str(item.attempt)
        table.add_row(item.group_id, row, attempt, item.state, step, staleness, item.reason)
    console.print(table)


def checkpoints(
    run_id: NewestRun = None,
    all_: Annotated[bool, typer.Option("--all", help="Include deleted ones.")] = False,
    as_json: AsJson = False,
    state_directory: StateDirectory = DEFAULT_STATE,
    url: Url = None,
) -> None:
    """List the checkpoints of a run, newest first."""
    columns = ("id", "step", "version", "state", "age", "size", "path")
    table = Table(*columns, box=None, pad_edge=False)

    async def work(api: Api, full_id: str) -> tuple[RunView, CheckpointPage]:
        return await api.get(full_id), await api.call(ListCheckpoints(run_id=full_id))

    run, page = of_run(url, run_id, work, state_directory=state_directory)
    shown_items = [item for item in page.items if item.state != "DELETED" or all_]
    if as_json:
        _write_json(shown_items)
        return
    best = run.summary.get("best") or {}
    for item in shown_items:
        table.add_row(
            item.id,
            str(item.step),
            str(item.weight_version),
            f"{item.state}, best" if item.step == best.get("step") else item.state,
            _age(item.create_time),
            _size(item.size_bytes),
            item.path or item.message,
        )
    console.print(table if table.row_count else "no checkpoints")


def workers(
    run_id: NewestRun = None,
    as_json: AsJson = False,
    state_directory: StateDirectory = DEFAULT_STATE,
    url: Url = None,
) -> None:
    """List the workers of a run and their current activity."""
    views = call_operation(url, GetTopology, state_directory=state_directory, run_id=run_id).items
    if as_json:
        _write_json(views)
        return
    table = Table("worker", "state", "version", "doing", box=None, pad_edge=False)
    for worker in views:
        version = str(worker.weight_version) if worker.weight_version >= 0 else "-"
        table.add_row(worker.worker_id, worker.state, version, worker.activity)
    console.print(table if table.row_count else "no workers")


def _write_json(items: Iterable[BaseModel]) -> None:
    for item in items:
        write(item.model_dump_json())


def _write_metrics(page: MetricPage) -> None:
    """Writes one JSON object per step with its metrics."""
    for index, step in enumerate(page.steps):
        numbers = {metric.name: metric.values[index] for metric in page.items}
        values = {name: value for name, value in numbers.items() if value is not None}
        write(json.dumps({"step": step, **values}))


def _by_step(page: MetricPage) -> Iterator[tuple[int, float]]:
    """Yields the steps and values of the only metric."""
    for metric in page.items:
        for step, value in zip(page.steps, metric.values, strict=True):
            if value is not None:
                yield step, value


def _hint(text: str) -> None:
    """Prints a hint to standard error, so that programs do not read it as output."""
    errors.print(text, soft_wrap=True)


def _conditions(run: RunView) -> Table:
    table = Table("\ncondition", "\nis", "\nfor", "\nwhy", box=None, pad_edge=False)
    for condition in run.conditions:
        reason, message = condition.reason, condition.message
        why = message if message.startswith(reason) else f"{reason}: {message}".removesuffix(": ")
        since = _age(condition.last_transition_time)
        table.add_row(condition.type, condition.status.lower(), since, why)
    return table


def _print_event(event: EventView) -> None:
    time = event.time.astimezone().strftime("%H:%M:%S")
    text = event.message.splitlines()[0] if event.message else ""
    console.print(
        f"{event.seq:>6}  {time}  {event.type:<18} {text}",
        soft_wrap=True,
    )


def _steps(run: ListedRun) -> str:
    return f"{run.step}/{run.target_steps or '?'}"


def _heldout(run: ListedRun) -> str:
    scores = run.summary.get("heldout") or {}
    values = [scores.get(name) for name in ("greedy", "sampled")]
    return " / ".join("-" if score is None else f"{score:.3f}" for score in values)


def _heldout_sets(run: ListedRun) -> dict[str, dict[str, float]]:
    """Returns the scores of each set if there are several."""
    sets: dict[str, dict[str, float]] = (run.summary.get("heldout") or {}).get("sets", {})
    return sets if len(sets) > 1 else {}


def _size(num_bytes: int) -> str:
    """Formats bytes for a terminal; returns the exact number otherwise."""
    return decimal(num_bytes) if console.is_terminal else str(num_bytes)


def _age(moment: datetime) -> str:
    seconds = int((datetime.now(UTC) - moment).total_seconds())
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds // size} {unit}"
    return f"{max(seconds, 0)} s"
