"""Entry points of records and replays; imports none of them."""

from typing import Final

from services.cli.command import Command

_HERE: Final = "services.extras.replay.command"

REPLAY: Final = Command(
    panel="Inspect",
    summary="Repeat the training of a recorded run bit by bit, or with other settings and compare curves.",
    function=f"{_HERE}:replay",
)
DIFF: Final = Command(
    panel="Inspect",
    summary="Show the first step at which two recorded runs part, and why.",
    function=f"{_HERE}:diff",
)
