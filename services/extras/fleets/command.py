"""The ``fleet`` command: shows fleets of engine servers."""

import json
from typing import Annotated

import typer
from rich.table import Table

from services.cli.api_calls import call_operation
from services.cli.controller_address import Url
from services.cli.output import console, write
from services.controller.api.operations import GetFleet, ListFleets
from services.controller.schemas import FleetServerView, FleetView


def fleet(
    name: Annotated[str, typer.Argument(help="Fleet to show. Default: all.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    url: Url = None,
) -> None:
    """Show the fleets of engine servers: health, versions, adapters, and use by each run."""
    fleets = (
        [call_operation(url, GetFleet, name=name)]
        if name
        else list(call_operation(url, ListFleets).items)
    )
    if as_json:
        write(json.dumps([view.model_dump(mode="json") for view in fleets], indent=2))
        return
    if not fleets:
        console.print("no fleets; an administrator configures SLIPSTREAM_CONTROLLER_FLEETS_FILE")
    for view in fleets:
        console.print(_table(view), highlight=False)


def _table(fleet: FleetView) -> Table:
    columns = ("server", "run", "share", "version", "tokens", "running", "waiting")
    table = Table(*columns, title=f"fleet {fleet.name}", box=None, pad_edge=False)
    for server in fleet.servers:
        for row in _rows(server):
            table.add_row(*row)
    return table


def _rows(server: FleetServerView) -> list[tuple[str, ...]]:
    if not server.is_healthy:
        return [(server.address, f"no answer: {server.problem}")]
    if server.runs:
        total = sum(run.share for run in server.runs)
        return [
            (
                server.address,
                run.run_id or "another project",
                f"{run.share / total:.0%}",
                "" if run.weight_version is None else str(run.weight_version),
                f"{run.tokens:,}",
                str(run.running),
                str(run.waiting),
            )
            for run in server.runs
        ]
    if server.weight_version is None:
        return [(server.address, server.exclusive_run or "idle", "", "")]
    run = server.exclusive_run or "another project"
    return [(server.address, run, "", str(server.weight_version))]
