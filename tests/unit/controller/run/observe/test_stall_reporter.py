"""Tests that a stalled run reports its reason when a step takes longer than usual, and again later."""

import asyncio

import pytest

from services.controller.rules.ledger import Ledger
from services.controller.run.observe.waits import StallReporter, Waits
from services.extras.fake_engine.virtual_time import VirtualTimeLoop


class Journal:
    def __init__(self):
        self.notes = []

    async def record_event(self, note, ledger):
        self.notes.append((note.type, note.data["reason"], note.data["seconds"]))


class LoopClock:
    def monotonic(self):
        return asyncio.get_running_loop().time()


def stall_reporter(*, activity="", ledger=None):
    return StallReporter(
        journal=Journal(),
        waits=Waits(),
        ledger=ledger or Ledger(3),
        groups_per_step=4,
        clock=LoopClock(),
        activity=lambda: activity,
    )


async def watched():
    still = stall_reporter()
    task = asyncio.create_task(still.watch())
    for _ in range(3):
        await asyncio.sleep(50)
        still.record_step()
    await asyncio.sleep(149)
    assert not still.journal.notes, "three such steps may pass"
    await asyncio.sleep(2)
    assert len(still.journal.notes) == 1
    await asyncio.sleep(299)
    assert len(still.journal.notes) == 2, "and the next time after twice as long"
    assert still.journal.notes[1][2] == pytest.approx(450)
    still.record_step()
    await asyncio.sleep(60)
    assert len(still.journal.notes) == 2
    task.cancel()


def test_a_stall_is_reported_after_the_duration_of_recent_steps():
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(watched())


@pytest.mark.parametrize(
    ("waited", "reason"),
    [
        ("barrier", "WaitsForOldest"),
        ("weight_sync", "WaitsForWeights"),
        ("checkpoint", "WaitsForCheckpoint"),
        ("no_data", "NoGroupRuns"),
    ],
)
def test_the_reason_is_what_is_waited_for(waited, reason):
    still = stall_reporter()
    with still.waits(waited):
        assert still.waiting_reason()[0] == reason
    assert stall_reporter(activity="TRAINING").waiting_reason()[0] == "StepIsLong"


def test_groups_are_counted_with_those_that_were_given_up():
    ledger = Ledger(3)
    first, second, _ = (ledger.issue(row, position=row) for row in range(3))
    ledger.lease(first, "rollout-0", version=0, now=0.0)
    ledger.complete(first, oldest_version=0)
    ledger.drop(first, "equal_rewards")
    ledger.lease(second, "rollout-0", version=0, now=0.0)
    reason, why = stall_reporter(ledger=ledger).waiting_reason()
    assert reason == "WaitsForGroups"
    assert "1 equal_rewards" in why
    ledger.requeue(second)
    assert stall_reporter(ledger=ledger).waiting_reason()[0] == "NoGroupRuns"
