"""Entry point of the command ``samples``; imports none of it."""

from typing import Final

from services.cli.command import Command

SAMPLES: Final = Command(
    panel="Inspect",
    summary="Show samples of a run: prompts, responses, rewards and their use in training.",
    function="services.extras.samples.command:samples",
)
