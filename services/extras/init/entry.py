"""Entry point of the command ``init``; imports none of it."""

from typing import Final

from services.cli.command import Command

INIT: Final = Command(
    panel="Train",
    summary="Write a commented specification for a model and a data set.",
    function="services.extras.init.command:init",
)
