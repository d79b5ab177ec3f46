"""Address of the controller that a command names. Without the API client, whose import takes a while."""

from typing import Annotated

import typer
from pydantic_settings import BaseSettings, SettingsConfigDict

from services.cli.state_directory import running_controllers


class CliSettings(BaseSettings):
    """Settings of the ``slipstream`` command from the environment."""

    model_config = SettingsConfigDict(env_prefix="SLIPSTREAM_", extra="ignore")

    token: str = ""
    """API token, if the controller requires one."""
    url: str = ""
    """REST address of a controller. Default: the controller that ``slipstream up`` started here."""


Url = Annotated[
    str | None,
    typer.Option(
        help="REST address of the controller. Default: SLIPSTREAM_URL, or the controller that runs here."
    ),
]


def is_controller_here(url: str | None) -> bool:
    """Returns True if no controller is named, or if the named one was started on this machine."""
    address = url or CliSettings().url
    return not address or address.rstrip("/") in running_controllers()
