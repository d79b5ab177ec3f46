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
from services.controller.api.operations import CancelRun, ListRuns, PauseRun, ResumeRun

_RUN = "run_" + "0" * 32
_NEW, _OLD = "run_" + "1" * 32, "run_" + "2" * 32


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
            return SimpleNamespace(items=[await self.get(_RUN)], next_page_token="")
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


class ManyRuns:
    """API with two pages of runs: each is in a state, and in another one from its pause on."""

    def __init__(self, states: Mapping[str, tuple[str, str]]) -> None:
        self.states = {run_id: [*pair] for run_id, pair in states.items()}
        self.paused: list[str] = []

    async def get(self, run_id: str) -> SimpleNamespace:
        """Returns a run in its state."""
        return SimpleNamespace(id=run_id, state=self.states[run_id][0])

    async def watch(self, run_id: str) -> AsyncIterator[tuple[str, Mapping[str, Any]]]:
        """Yields the end of a pause."""
        del self.states[run_id][0]
        yield "StateChanged", {}

    async def call(self, operation: object) -> SimpleNamespace | None:
        """Lists half of the runs, or pauses one that trains."""
        if isinstance(operation, ListRuns):
            runs = [await self.get(run_id) for run_id in self.states]
            half = slice(1) if not operation.page_token else slice(1, None)
            return SimpleNamespace(items=runs[half], next_page_token="" if half.start else "next")
        assert isinstance(operation, PauseRun)
        if self.states[operation.run_id][0] == "STARTING":
            raise ApiError("409: the run is STARTING")
        self.paused.append(operation.run_id)
        self.states[operation.run_id].insert(0, "PAUSING")
        del self.states[operation.run_id][1]
        return None


@pytest.mark.parametrize(
    ("states", "lines"),
    [
        (
            {_NEW: ("RUNNING", "PAUSED"), _OLD: ("RUNNING", "PAUSED")},
            ["pausing after", f"{_NEW} is paused; the same", f"{_OLD} is paused; the same"],
        ),
        ({_NEW: ("STARTING", ""), _OLD: ("SUCCEEDED", "")}, [f"{_NEW} had not begun to train"]),
        (
            {_NEW: ("STARTING", ""), _OLD: ("RUNNING", "PAUSED")},
            ["pausing after", f"{_NEW} had not begun to train", f"{_OLD} is paused"],
        ),
        ({_NEW: ("RUNNING", "SUCCEEDED"), _OLD: ("PAUSED", "")}, ["pausing after"]),
        ({_NEW: ("RUNNING", "FAILED"), _OLD: ("CANCELLED", "")}, ["pausing after"]),
    ],
)
async def test_a_signal_pauses_what_trains_and_tells_what_became_of_each_run(
    states: dict[str, tuple[str, str]], lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    printed = _printed(monkeypatch)
    api, signals = ManyRuns(states), SignalHandler()
    os.kill(os.getpid(), signal.SIGTERM)
    async with asyncio.timeout(60):
        await signals.pause_runs(api, console)  # type: ignore[arg-type]
    assert [line[: len(begin)] for line, begin in zip(printed, lines, strict=True)] == lines


async def test_a_run_that_does_not_pause_in_time_is_not_called_paused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("services.cli.commands.local._PAUSE_TIMEOUT_S", 0.0)
    printed = _printed(monkeypatch)

    class Slow(Api):
        async def watch(self, _: str) -> AsyncIterator[tuple[str, Mapping[str, Any]]]:
            await asyncio.Event().wait()
            yield "StateChanged", {}

    signals = SignalHandler()
    os.kill(os.getpid(), signal.SIGTERM)
    async with asyncio.timeout(60):
        await signals.pause_runs(Slow("PAUSING"), console)  # type: ignore[arg-type]
    assert "not paused within" in printed[1]
    assert "is stopped, not paused" in printed[2]


async def test_a_second_signal_cancels_the_runs_that_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    printed = _printed(monkeypatch)

    class Slow(Api):
        async def watch(self, _: str) -> AsyncIterator[tuple[str, Mapping[str, Any]]]:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.Event().wait()
            yield "StateChanged", {}

        async def call(self, operation: object) -> SimpleNamespace | None:
            if isinstance(operation, CancelRun):
                self.states = ["CANCELLING"]
                return None
            return await super().call(operation)

    signals = SignalHandler()
    os.kill(os.getpid(), signal.SIGINT)
    async with asyncio.timeout(60):
        await signals.pause_runs(Slow("PAUSING"), console)  # type: ignore[arg-type]
    assert printed[1:] == [f"{_RUN} is cancelled"]


def _printed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns a list that receives the lines of the command."""
    lines: list[str] = []
    monkeypatch.setattr(
        "services.cli.commands.local.print_line", lambda console, line: lines.append(line)
    )
    return lines
