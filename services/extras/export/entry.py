"""Entry point of the command ``export``; imports none of it."""

from typing import Final

from services.cli.command import Command

EXPORT: Final = Command(
    panel="Control",
    summary="Write a run's weights as a Hugging Face or DCP folder, adapters merged, with its tokenizer.",
    function="services.extras.export.command:export",
)
