"""Entry points of commands for trackers; imports none of them."""

from typing import Final

from services.cli.command import Command

TRACK: Final = Command(
    panel="Inspect",
    summary="Send runs to wandb, tensorboard, mlflow or trackio, during or after the run.",
    function="services.extras.trackers.command:track",
)
