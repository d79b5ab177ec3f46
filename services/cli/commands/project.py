"""Commands on the controller: backup and restore, quota, version and a link to the run page."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from services.cli.api_calls import DEFAULT_STATE, StateDirectory, Url, ask, call_api
from services.cli.output import console, fail, write
from services.common.errors import ServiceError
from services.controller.api.operations import GetQuota, GetVersion
from services.controller.settings import DATABASE_FILE
from services.controller.store import copies


def backup(
    file: Annotated[
        Path, typer.Argument(help="File to write the copy to; an existing file is replaced.")
    ],
    state_directory: StateDirectory = DEFAULT_STATE,
) -> None:
    """Copy the database, also while a controller runs; checkpoints are separate files."""
    with _explained():
        num_runs = copies.backup(state_directory / DATABASE_FILE, file)
    _print_copy(file, num_runs)


def restore(
    file: Annotated[Path, typer.Argument(help="File that 'slipstream backup' wrote.")],
    state_directory: StateDirectory = DEFAULT_STATE,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing database.")] = False,
) -> None:
    """Restore the database from a copy, while no controller uses it."""
    database = state_directory / DATABASE_FILE
    with _explained():
        num_runs = copies.restore(file, database, overwrite=force)
    _print_copy(database, num_runs)


def _print_copy(file: Path, num_runs: int) -> None:
    noun = "run" if num_runs == 1 else "runs"
    console.print(f"{file}: {num_runs} {noun}", highlight=False, soft_wrap=True)


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except (ServiceError, OSError) as error:
        fail(str(error))
        raise typer.Exit(1) from None


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
    found = ask(url, GetQuota)
    table = Table(f"project {found.project}", "uses", "of", box=None, pad_edge=False)
    for name, used, limit in _QUOTAS:
        table.add_row(name, f"{getattr(found, used):,}", _bound(getattr(found, limit)))
    table.add_row("requests a second", "", _bound(found.max_requests_per_second))
    console.print(table, highlight=False)


def version(url: Url = None) -> None:
    """Show the release of the controller."""
    console.print(ask(url, GetVersion).version, highlight=False)


def page(url: Url = None) -> None:
    """Print a link to the run page that signs in one browser, once."""
    write(call_api(url, lambda api: api.page_link()))


def _bound(limit: int) -> str:
    return f"{limit:,}" if limit else "no limit"
