"""The commands ``backup`` and ``restore``."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from services.cli.api_calls import DEFAULT_STATE, StateDirectory
from services.cli.output import console, fail
from services.common.errors import ServiceError
from services.controller.settings import DATABASE_FILE
from services.extras.backup import copies


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
