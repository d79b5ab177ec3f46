"""Commands that copy the database of this machine's controller."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from services.cli.calling import DEFAULT_STATE, StateDirectory
from services.cli.output import console, fail
from services.common.errors import ServiceError
from services.controller.settings import DATABASE_FILE
from services.controller.store import copies


def backup(
    file: Annotated[
        Path, typer.Argument(help="Where the copy goes; one that is there is replaced.")
    ],
    state_directory: StateDirectory = DEFAULT_STATE,
) -> None:
    """Copy the database, also while a controller works; checkpoints are files and not part of it."""
    with _explained():
        num_runs = copies.backup(state_directory / DATABASE_FILE, file)
    _tell(file, num_runs)


def restore(
    file: Annotated[Path, typer.Argument(help="What 'slipstream backup' wrote.")],
    state_directory: StateDirectory = DEFAULT_STATE,
    force: Annotated[
        bool, typer.Option("--force", help="Give up the database that is there.")
    ] = False,
) -> None:
    """Put a copy in the place of the database, while no controller uses it."""
    database = state_directory / DATABASE_FILE
    with _explained():
        num_runs = copies.restore(file, database, overwrite=force)
    _tell(database, num_runs)


def _tell(file: Path, num_runs: int) -> None:
    noun = "run" if num_runs == 1 else "runs"
    console.print(f"{file}: {num_runs} {noun}", highlight=False, soft_wrap=True)


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except (ServiceError, OSError) as error:
        fail(str(error))
        raise typer.Exit(1) from None
