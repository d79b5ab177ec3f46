"""Address of the controller that a command names; without the API client, whose import takes a while."""

from typing import Annotated

import typer

from services.cli.settings import CliSettings
from services.cli.state_directory import running_controllers

Url = Annotated[
    str | None,
    typer.Option(
        help="REST address of the controller. Default: SLIPSTREAM_URL, or the controller that runs here."
    ),
]


def is_controller_here(url: str | None) -> bool:
    """Returns True if no controller is named, or if the named one was started on this machine."""
    named = url or CliSettings().url
    return not named or named.rstrip("/") in running_controllers()
