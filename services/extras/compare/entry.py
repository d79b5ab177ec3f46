"""Entry point of the command ``compare``; imports none of it."""

from typing import Final

from services.cli.command import Command

COMPARE: Final = Command(
    panel="Inspect",
    summary="Compare two runs: results, and keys of their specifications that differ.",
    function="services.extras.compare.command:compare",
)
