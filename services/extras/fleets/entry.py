"""Entry point of the command ``fleet``; imports none of it."""

from typing import Final

from services.cli.command import Command

FLEET: Final = Command(
    panel="Inspect",
    summary="Show the fleets of engine servers: health, versions, adapters, and use by each run.",
    function="services.extras.fleets.command:fleet",
)
