"""The command ``compare``."""

import asyncio
from collections.abc import Iterator
from typing import Annotated, Any

import typer
from rich.table import Table

from services.cli.api import Api
from services.cli.api_calls import DEFAULT_STATE, StateDirectory, call_api, find_run
from services.cli.controller_address import Url
from services.cli.display import duration
from services.cli.output import console
from services.common.runspec.keys import flat
from services.controller.schemas import RunView

Either = Annotated[str, typer.Argument(help="Name of a run, or the start of its id.")]


def compare(
    run: Either,
    other_run: Either,
    url: Url = None,
    state_directory: StateDirectory = DEFAULT_STATE,
) -> None:
    """Compare two runs: results, and keys of their specifications that differ."""

    async def work(api: Api) -> tuple[RunView, RunView]:
        ids = [await find_run(api, run_name) for run_name in (run, other_run)]
        first, second = await asyncio.gather(*map(api.get, ids))
        return first, second

    runs = call_api(url, work, state_directory=state_directory)
    table = Table("", *(run.name for run in runs), box=None, pad_edge=False)
    for name, values in _rows(*runs):
        table.add_row(name, *values)
    console.print(table, highlight=False)


def _rows(first: RunView, second: RunView) -> Iterator[tuple[str, tuple[str, str]]]:
    results = [_results(run) for run in (first, second)]
    for name in results[0]:
        yield name, (results[0][name], results[1][name])
    specs = [dict(flat(run.spec)) for run in (first, second)]
    for key in dict.fromkeys([*specs[0], *specs[1]]):
        values = tuple(spec.get(key) for spec in specs)
        if values[0] != values[1] and key != "name":
            yield key, (_shown(values[0]), _shown(values[1]))


def _results(run: RunView) -> dict[str, str]:
    summary = run.summary
    heldout, staleness = summary.get("heldout") or {}, summary.get("staleness") or {}
    sync = summary.get("sync_ms") or {}
    seconds = None
    if run.start_time is not None:
        seconds = ((run.finish_time or run.update_time) - run.start_time).total_seconds()
    return {
        "id": run.id,
        "state": run.state,
        "steps": f"{run.step}/{run.target_steps}",
        "took": "-" if seconds is None else duration(seconds),
        "held-out, greedy": _number(heldout.get("greedy"), 3),
        "held-out, sampled": _number(heldout.get("sampled"), 3),
        "staleness, mean": _number(staleness.get("mean"), 2),
        "weight sync, p50 ms": _number(sync.get("p50"), 1),
    }


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _shown(value: Any) -> str:
    return "-" if value is None else str(value)
