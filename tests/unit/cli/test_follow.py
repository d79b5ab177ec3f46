"""Tests of the command that follows a run to its end."""

import asyncio
from io import StringIO
from types import SimpleNamespace

import pytest
from rich.console import Console

from services.cli.api import ApiError
from services.cli.follow import _seconds, follow
from tests.helpers.tracked import RUN
from tests.unit.cli.test_steps import RUN as ENDED_RUN

ENDED = RUN.model_copy(
    update={
        "state": "SUCCEEDED",
        "start_time": RUN.create_time,
        "finish_time": RUN.create_time,
        "summary": ENDED_RUN["summary"],
    }
).model_dump(mode="json")


class Api:
    """Fake API of a run whose last checkpoint started twice, because the controller was lost in between."""

    url = "http://controller"

    async def get(self, run_id):
        return RUN

    async def watch(self, run_id):
        for _ in range(2):
            started = {"step": RUN.target_steps}
            yield "CheckpointStarted", {"message": "", "data": started, "time": ENDED["start_time"]}
            await asyncio.sleep(0)
        yield "end", ENDED

    async def call(self, operation):
        return SimpleNamespace(items=[])


async def test_a_last_checkpoint_that_is_started_twice_does_not_hold_the_command(tmp_path):
    async with asyncio.timeout(30):
        ended = await follow(Api(), RUN.id, state_directory=tmp_path, console=Console(quiet=True))
    assert ended["state"] == "SUCCEEDED"


async def test_a_tracker_that_fails_is_shown_with_the_reason(tmp_path):
    class Untracked(Api):
        async def watch(self, run_id):
            yield "TrackerFailed", {"message": "no key", "data": {}, "time": ENDED["start_time"]}
            yield "end", ENDED

    printed = StringIO()
    await follow(Untracked(), RUN.id, state_directory=tmp_path, console=Console(file=printed))
    assert "no key" in printed.getvalue()


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        ("StepCommitted", {}),
        ("StepCommitted", {"step": "one"}),
        ("StepCommitted", {"step": None}),
        ("DataOpened", {"steps": []}),
        ("DataOpened", {}),
        ("CheckpointStarted", {}),
        ("Validated", {"num_samples": 1}),
        ("Validated", {"num_samples": 1, "version": 1, "greedy": "x", "sampled": {}}),
    ],
)
async def test_events_of_a_server_without_their_fields_are_no_traceback(tmp_path, kind, data):
    class Wrong(Api):
        async def watch(self, run_id):
            yield kind, {"message": "", "data": data, "time": ENDED["start_time"]}
            yield "end", ENDED

    wrong = pytest.RaisesExc(ApiError, match="does not answer as a controller")
    with pytest.RaisesGroup(wrong):
        await follow(Wrong(), RUN.id, state_directory=tmp_path, console=Console(quiet=True))


@pytest.mark.parametrize(
    ("start", "finish", "seconds"),
    [("10:00:00", "10:00:05", 5.0), ("10:00:00", "06:53:52", 0.0), (None, "10:00:02", 3.0)],
)
def test_a_run_does_not_last_a_negative_time_after_the_clock_was_set_back(start, finish, seconds):
    day = "2026-11-30T"
    run = {
        "create_time": f"{day}09:59:59+00:00",
        "start_time": start and f"{day}{start}+00:00",
        "finish_time": f"{day}{finish}+00:00",
    }
    assert _seconds(run) == seconds
