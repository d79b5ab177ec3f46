"""Entry point of the command ``doctor``; imports none of it."""

from typing import Final

from services.cli.command import Command

DOCTOR: Final = Command(
    panel="Train",
    summary="List the engines, rewards, sandboxes and other parts that are installed, and what is broken.",
    function="services.extras.doctor.command:doctor",
)
