"""Runs that an earlier command on this machine left unfinished."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from services.cli.api import ApiError
from services.cli.commands.local import SignalHandler, _after_pausing
from services.cli.output import console
from services.controller.api.operations import ListRuns, PauseRun, ResumeRun

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

    async def call(self, operation: object) -> SimpleNamespace | None:
        """Records an operation; a run that pauses refuses to pause again."""
        if isinstance(operation, ListRuns):
            return SimpleNamespace(items=[await self.get(_RUN)])
        self.calls.append(operation)
        if isinstance(operation, PauseRun):
            raise ApiError("409: the run is PAUSING")
        self.states = ["RUNNING"]
        return None


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

    signals = SignalHandler()
    outcome = await _after_pausing(api, _RUN, follow(), signals)  # type: ignore[arg-type]
    assert displayed == [states[0]], "the display shows the wait for the pause"
    assert api.calls == ([ResumeRun(run_id=_RUN)] if is_resumed else [])
    assert outcome == {"state": "RUNNING" if is_resumed else states[-1]}


async def test_a_signal_during_an_earlier_commands_pause_waits_for_it_and_does_not_resume() -> None:
    api, signals = Api("PAUSING", "PAUSING", "PAUSED"), SignalHandler()

    async def follow() -> dict[str, Any]:
        await signals.pause_runs(api, console)  # type: ignore[arg-type]
        return {"state": api.states[0]}

    os.kill(os.getpid(), signal.SIGTERM)
    async with asyncio.timeout(60):
        while not signals.has_come:  # noqa: ASYNC110 -- the handler sets no event that a test may read
            await asyncio.sleep(0)
        outcome = await _after_pausing(api, _RUN, follow(), signals)  # type: ignore[arg-type]
    assert outcome == {"state": "PAUSED"}
    assert ResumeRun(run_id=_RUN) not in api.calls
