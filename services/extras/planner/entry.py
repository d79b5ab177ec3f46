"""Entry points of the planner; imports none of it."""

from typing import Final

from services.cli.command import Command

PLAN: Final = Command(
    panel="Train",
    summary="Predict step time, idle shares, staleness and memory for splits of the GPUs, and recommend one.",
    function="services.extras.planner.command:plan",
)
