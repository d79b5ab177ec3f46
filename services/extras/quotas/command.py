"""Command that manages quotas on the database's host: ``python -m services.extras.quotas.command``."""

import sys
from dataclasses import asdict
from typing import Annotated

import sqlalchemy as sa
import typer

from services.controller.settings import ControllerSettings, Limits
from services.controller.store.database import Database
from services.controller.store.tables import QUOTAS

app = typer.Typer(help="Manages limits of projects.", no_args_is_help=True, add_completion=False)
Project = Annotated[str, typer.Argument(help="Name of the project.")]

_NAMES = tuple(Limits.__dataclass_fields__)


@app.command(name="set")
def set_(
    project: Project,
    max_active_runs: Annotated[int, typer.Option(min=0, help="Max active runs.")],
    max_queued_runs: Annotated[int, typer.Option(min=0, help="Max queued runs.")],
    max_gpus: Annotated[
        int, typer.Option(min=0, help="Max GPUs of active runs; 0 for unlimited.")
    ] = 0,
    max_transferqueue_bytes: Annotated[
        int, typer.Option(min=0, help="Max bytes in the transferqueue; 0 for unlimited.")
    ] = 0,
    max_checkpoint_bytes: Annotated[
        int,
        typer.Option(
            min=0, help="Bytes of checkpoints at which no further run starts; 0 for unlimited."
        ),
    ] = 0,
    max_requests_per_second: Annotated[
        int,
        typer.Option(min=0, help="Max requests per second to each controller; 0 for unlimited."),
    ] = 0,
    max_event_streams: Annotated[
        int, typer.Option(min=0, help="Max open streams at each controller; 0 for unlimited.")
    ] = 0,
) -> None:
    """Sets the limits of a project, in effect from the next submission or start of a run."""
    limits = Limits(
        max_active_runs=max_active_runs,
        max_queued_runs=max_queued_runs,
        max_gpus=max_gpus,
        max_transferqueue_bytes=max_transferqueue_bytes,
        max_checkpoint_bytes=max_checkpoint_bytes,
        max_requests_per_second=max_requests_per_second,
        max_event_streams=max_event_streams,
    )
    with _database().write() as connection:
        connection.execute(QUOTAS.delete().where(QUOTAS.c.project == project))
        connection.execute(QUOTAS.insert().values(project=project, **asdict(limits)))


@app.command(name="list")
def list_() -> None:
    with _database().read() as connection:
        for row in connection.execute(sa.select(QUOTAS).order_by(QUOTAS.c.project)):
            limits = "\t".join(f"{name} {getattr(row, name)}" for name in _NAMES)
            sys.stdout.write(f"{row.project}\t{limits}\n")


@app.command()
def reset(project: Project) -> None:
    """Resets a project to the default limits of the controller's settings."""
    with _database().write() as connection:
        connection.execute(QUOTAS.delete().where(QUOTAS.c.project == project))


def _database() -> Database:
    return Database(ControllerSettings().database)


if __name__ == "__main__":
    app()
