"""Runs that an earlier command on this machine left unfinished."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from services.cli.commands.local import _after_pausing
from services.controller.api.operations import ResumeRun

_RUN = "run_" + "0" * 32


class Api:
    """API with one run, which changes its state with each event that is read."""

    def __init__(self, *states: str) -> None:
        self.states = list(states)
        self.calls: list[object] = []

    async def get(self, run_id: str) -> SimpleNamespace:
        """Returns the run in its state."""
        return SimpleNamespace(id=run_id, state=self.states[0])

    async def watch(self, _: str) -> AsyncIterator[tuple[str, Mapping[str, Any]]]:
        """Yields a change for each further state."""
        while len(self.states) > 1:
            del self.states[0]
            yield "StateChanged", {}

    async def call(self, operation: object) -> None:
        """Records an operation."""
        self.calls.append(operation)
        self.states = ["RUNNING"]


@pytest.mark.parametrize(
    ("states", "is_resumed"),
    [
        (("PAUSING", "PAUSING", "PAUSED"), True),
        (("PAUSING", "FAILED"), False),
        (("RUNNING",), False),
    ],
)
async def test_a_run_whose_pause_was_killed_is_resumed_once_it_has_paused(
    states: tuple[str, ...], is_resumed: bool
) -> None:
    api = Api(*states)
    displayed = []

    async def follow() -> dict[str, Any]:
        displayed.append(api.states[0])
        async with asyncio.timeout(10):
            while api.states[0] in ("PAUSING", "PAUSED"):  # noqa: ASYNC110 -- states set no event
                await asyncio.sleep(0)
        return {"state": api.states[0]}

    outcome = await _after_pausing(api, _RUN, follow())  # type: ignore[arg-type]
    assert displayed == [states[0]], "the display shows the wait for the pause"
    assert api.calls == ([ResumeRun(run_id=_RUN)] if is_resumed else [])
    assert outcome == {"state": "RUNNING" if is_resumed else states[-1]}
