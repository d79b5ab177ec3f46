"""Tests of stored runs, events, ledgers and steps on SQLite and PostgreSQL."""

import pytest

from services.common.runspec.data import CurriculumSpec
from services.controller.rules.difficulty import Difficulty, PromptRate
from services.controller.rules.ledger import GroupState, Ledger
from services.controller.rules.prompts import Mixture, PromptOrder
from services.controller.rules.run_state import RunEvent, RunState
from services.controller.run.state.journal import Journal
from services.controller.run.train.checkpoints import ready_checkpoints
from services.controller.store import ledgers as ledger_store
from services.controller.store.records import NewRun, Note, RequestKey
from services.controller.store.rows import CursorExpiredError, IdempotencyKeyReusedError
from services.controller.store.runs import (
    InvalidTransitionError,
    RunStore,
    StaleRevisionError,
)
from services.controller.store.tables import CHECKPOINTS

pytestmark = pytest.mark.postgresql

RUN = NewRun(run_id="run_1", name="one", spec_json="{}", spec_digest="d")


@pytest.fixture
def store(database):
    return RunStore(database)


@pytest.fixture
def journal(database, store):
    store.create(RUN)
    return Journal("run_1", database=database, store=store, on_event=lambda event: None)


def test_a_repeated_request_returns_the_same_run(store):
    key = RequestKey(scope="u", key="k", body_digest="b")
    run, is_new = store.create(RUN, request=key)
    again = NewRun(run_id="run_2", name="one", spec_json="{}", spec_digest="d")
    assert store.create(again, request=key) == (run, False)
    assert is_new
    other = RequestKey(scope="u", key="k", body_digest="other")
    with pytest.raises(IdempotencyKeyReusedError):
        store.create(again, request=other)


def test_a_transition_and_its_event_are_one(store):
    store.create(RUN)
    run, event = store.apply("run_1", RunEvent.ADMIT, reason="Admitted")
    assert run.state is RunState.STARTING
    assert event.data == {"from": "QUEUED", "to": "STARTING", "reason": "Admitted"}
    with pytest.raises(InvalidTransitionError):
        store.apply("run_1", RunEvent.ADMIT, reason="Admitted")
    assert [event.seq for event in store.events("run_1")] == [1, 2]


def test_a_patch_needs_the_newest_revision(store):
    run, _ = store.create(RUN)
    store.patch("run_1", revision=run.revision, values={"priority": 3})
    with pytest.raises(StaleRevisionError):
        store.patch("run_1", revision=run.revision, values={"priority": 4})
    assert store.get("run_1").priority == 3


async def test_a_ledger_is_read_back_as_it_was_written(journal):
    ledger = Ledger(max_attempts=3)
    groups = [ledger.issue(row=row, position=row + 1) for row in range(4)]
    for group in groups[:3]:
        ledger.lease(group, "rollout-0", version=0, now=0.0)
    ledger.complete(groups[0], oldest_version=0)
    ledger.train([groups[0]])
    await journal.begin_step(1, ledger, version=0, groups=[groups[0]])
    ledger.quarantine(groups[1], "prompt_too_long")
    await journal.save(ledger)
    content = await journal.load()
    assert content.begun is not None
    assert content.begun.groups == ((0, 0, 1, 0),)
    assert content.quarantined_rows == {1}
    restored = Ledger.restore(content.ledger, max_attempts=3, now=0.0)
    assert restored.counts() == ledger.counts()


def order_of(ledger, position=0):
    return PromptOrder(
        Mixture({"train": 3}),
        seed=0,
        shuffle=False,
        position=position,
        returned_rows=ledger.returned,
    )


@pytest.mark.parametrize("is_stored_each_time", [True, False])
async def test_returned_rows_are_read_back(journal, is_stored_each_time):
    steady_ledger = Ledger(max_attempts=3)
    order, issued = order_of(steady_ledger), []
    # A run that restarts after each row, beside one that never does.
    ledger, position, again = Ledger(max_attempts=3), 0, []
    for number in range(24):
        issued.append(order.next_row())
        restarted = order_of(ledger, position)
        again.append(restarted.next_row())
        if number % 4 != 3:
            assert order.give_back(issued[-1]) == restarted.give_back(again[-1])
        position = restarted.position
        if is_stored_each_time or number % 5 == 0:
            await journal.save(ledger)
            ledger = Ledger.restore((await journal.load()).ledger, max_attempts=3, now=0.0)
    assert again == issued


async def test_a_write_names_no_returned_row_that_did_not_change(journal, database):
    ledger = Ledger(max_attempts=3)
    order = PromptOrder(
        Mixture({"train": 1000}), seed=0, shuffle=False, returned_rows=ledger.returned
    )
    for _ in range(500):
        order.give_back(order.next_row())
    await journal.save(ledger)
    order.give_back(order.next_row())
    change = ledger.returned.take_changes()
    assert [row.row for row in change.rows] == [500]
    assert not ledger.returned.take_changes().rows


async def test_a_restart_does_not_reset_how_many_groups_are_replaced(journal):
    ledger = Ledger(max_attempts=3)
    ledger.refilled_before = 7
    await journal.save(ledger)
    content = await journal.load()
    assert Ledger.restore(content.ledger, max_attempts=3, now=0.0).refilled_before == 7


async def test_a_rewound_run_repeats_later_steps(journal):
    ledger = Ledger(max_attempts=3)
    for step in (1, 2):
        group = ledger.issue(row=step, position=step)
        ledger.lease(group, "rollout-0", version=0, now=0.0)
        ledger.complete(group, oldest_version=0)
        ledger.train([group])
        await journal.begin_step(step, ledger, version=step - 1, groups=[group])
        ledger.consume([group])
        note = Note("StepCommitted", "", {}, step)
        await journal.commit_step(step, ledger, note=note, metrics={})
    await journal.rewind(1, version=3, message="lost")
    content = await journal.load()
    assert (content.step, content.version_offset) == (1, 2)
    restored = Ledger.restore(content.ledger, max_attempts=3, now=0.0)
    assert restored.counts()["consumed"] == 1
    (again,) = restored.in_state(GroupState.PENDING)
    assert (again.sequence, again.attempt) == (1, 2)


async def test_a_rewound_run_has_no_checkpoints_of_later_steps(journal, database):
    with database.write() as connection:
        connection.execute(
            CHECKPOINTS.insert(),
            [
                {
                    "checkpoint_id": f"ckpt_{step}",
                    "run_id": "run_1",
                    "step": step,
                    "weight_version": step,
                    "path": f"/checkpoints/step-{step:08d}",
                    "state": "READY",
                    "message": "",
                    "create_time": float(step),
                    "snapshot_id": f"slot-{step}",
                }
                for step in (2, 4)
            ],
        )
    await journal.record_event(Note("StepCommitted", ""), Ledger(max_attempts=3))
    await journal.rewind(2, version=5, message="lost")
    # The run saves a new checkpoint of step 4 when it repeats the step.
    assert [checkpoint.step for checkpoint in await journal.read(ready_checkpoints)] == [2]
    assert await journal.newest_snapshot() == "slot-2"


async def test_a_step_writes_what_it_touched_only(journal, database):
    ledger = Ledger(max_attempts=3)
    for row in range(50):
        ledger.issue(row=row, position=row + 1)
    await journal.save(ledger)
    ledger.lease(ledger.in_state(GroupState.PENDING)[0], "rollout-0", version=0, now=0.0)
    change = ledger.take_changes()
    assert len(change.groups) == 1
    with database.write() as connection:
        ledger_store.write_change(connection, "run_1", change)
    content = await journal.load()
    assert len(content.ledger.groups) == 50


async def test_success_rates_are_stored_with_their_groups(journal, database):
    ledger = Ledger(max_attempts=3)
    ledger.difficulty = Difficulty(9, CurriculumSpec())
    ledger.issue(row=4, position=1)
    ledger.difficulty.observe(4, [0.0, 1.0], step=0)
    ledger.difficulty.observe(7, [1.0, 1.0], step=0)
    await journal.save(ledger)
    ledger.difficulty.observe(4, [1.0, 1.0], step=1)
    await journal.save(ledger)
    content = await journal.load()
    assert sorted(content.rates) == [PromptRate(4, 0.75, 2, 0), PromptRate(7, 1.0, 1, 50)]
    assert len(content.ledger.groups) == 1


async def test_how_long_a_run_is_is_written_when_its_data_is_opened(journal, store):
    for _ in range(2):
        await journal.data_opened({"train.a": 10, "heldout": 3}, steps=7)
    assert store.get("run_1").target_steps == 7
    (event,) = [event for event in store.events("run_1") if event.type == "DataOpened"]
    assert event.data == {"rows": {"train.a": 10, "heldout": 3}, "steps": 7}


async def test_a_resumed_run_warns_that_its_data_has_changed(journal, store):
    for count in (10, 10, 8, 8):
        await journal.data_opened({"train": count, "heldout": 3}, steps=7)
    (event,) = [event for event in store.events("run_1") if event.type == "DataChanged"]
    assert event.data == {
        "before": {"train": 10, "heldout": 3},
        "rows": {"train": 8, "heldout": 3},
    }


def test_old_events_are_forgotten_and_their_cursors_are_refused(database):
    store = RunStore(database, events_kept=20)
    run_id = "run_" + "0" * 32
    store.create(NewRun(run_id=run_id, name="one", spec_json="{}", spec_digest="d"))
    recorded = [store.record(run_id, Note("Tick", "tick")) for _ in range(59)]
    events = store.events(run_id)
    assert [event.seq for event in events] == list(range(41, 61))
    assert store.events(run_id, after_seq=40) == events
    with pytest.raises(CursorExpiredError):
        store.events(run_id, after_seq=39)
    with pytest.raises(CursorExpiredError):
        store.events_since("default", recorded[0].time - 1.0)
    assert store.events_since("default", events[0].time, limit=1)[0].seq > events[0].seq
