"""Tests that what is due after a committed step is done, however the step was committed."""

import asyncio

import pytest

from services.common.errors import UnavailableError
from services.controller.store.records import EventFilter, Submission
from tests.helpers.rest import open_manager
from tests.unit.controller.workers import MemoryQueue, Workers, specification


@pytest.fixture
def workers(monkeypatch) -> Workers:
    workers = Workers(MemoryQueue())
    monkeypatch.setattr("services.controller.run.lifecycle.loop.connect", workers.assemble)
    monkeypatch.setattr("services.controller.run.lifecycle.driver._EXIT_REPORT_S", 0.0)
    return workers


async def events_of(manager, run_id, kind) -> list:
    return await manager.feed.page(run_id, after_seq=0, limit=1000, only=EventFilter(types=(kind,)))


async def ended(manager, run_id) -> None:
    async with asyncio.timeout(20):
        await manager.drivers.wait()
    run = await manager.get(run_id)
    assert run.state == "SUCCEEDED", run.message


@pytest.mark.parametrize("lost_in", [2, 4])
async def test_a_checkpoint_is_saved_after_a_step_that_the_recovery_commits(
    database, workers, lost_in
):
    workers.may_train.clear()
    workers.held_from = lost_in
    trainer = {"steps": 5, "prompts_per_step": 2, "checkpoint": {"every": 2}}
    async with open_manager(database, queue=workers.queue) as manager, asyncio.timeout(20):
        spec = specification(trainer=trainer)
        run_id = (await manager.create(Submission(spec=spec)))[0].run_id
        await workers.trains.wait()
        workers.trained = lost_in  # the trainer trains the step, but its answer is lost
        workers.lose()
        await ended(manager, run_id)
        saved = await events_of(manager, run_id, "CheckpointSaved")
        assert len(await events_of(manager, run_id, "WorkerLost")) == 1
    assert [event.data["step"] for event in saved] == [2, 4, 5]


async def test_a_save_that_a_loss_interrupts_is_repeated(database, workers, monkeypatch):
    save_checkpoint, losses = workers.save_checkpoint, iter([True])

    async def save(step, **options):
        if step == 4 and next(losses, False):
            raise UnavailableError("the trainer does not answer")
        return await save_checkpoint(step, **options)

    monkeypatch.setattr(workers, "save_checkpoint", save)
    trainer = {"steps": 6, "prompts_per_step": 2, "checkpoint": {"every": 2}}
    async with open_manager(database, queue=workers.queue) as manager:
        spec = specification(trainer=trainer)
        run_id = (await manager.create(Submission(spec=spec)))[0].run_id
        await ended(manager, run_id)
        saved = await events_of(manager, run_id, "CheckpointSaved")
    assert [event.data["step"] for event in saved] == [2, 4, 6]


async def test_a_loss_after_a_save_does_not_repeat_it(database, workers):
    workers.may_train.clear()
    workers.held_from = 3
    trainer = {"steps": 4, "prompts_per_step": 2, "checkpoint": {"every": 2}}
    async with open_manager(database, queue=workers.queue) as manager, asyncio.timeout(20):
        spec = specification(trainer=trainer)
        run_id = (await manager.create(Submission(spec=spec)))[0].run_id
        await workers.trains.wait()
        workers.lose()
        await ended(manager, run_id)
        saved = await events_of(manager, run_id, "CheckpointSaved")
    assert [event.data["step"] for event in saved] == [2, 4]


@pytest.mark.parametrize("mode", ["overlap", "barrier"])
async def test_an_evaluation_is_due_after_a_step_that_the_recovery_commits(database, workers, mode):
    workers.may_train.clear()
    workers.held_from = 2
    validation = {"every": 2, "before_train": False, "at_end": False, "mode": mode}
    async with open_manager(database, queue=workers.queue) as manager, asyncio.timeout(20):
        spec = specification(validation=validation)
        run_id = (await manager.create(Submission(spec=spec)))[0].run_id
        await workers.trains.wait()
        workers.trained = 2
        workers.lose()
        await ended(manager, run_id)
        validated = await events_of(manager, run_id, "Validated")
    assert [event.data["step"] for event in validated][-1] == 4
    assert 2 in [event.data["step"] for event in validated]


async def test_an_interrupted_evaluation_is_repeated_or_reported_as_missed(database, workers):
    workers.may_answer = False
    workers.may_train.clear()
    workers.held_from = 3
    validation = {"every": 2, "before_train": False, "at_end": False}
    async with open_manager(database, queue=workers.queue) as manager, asyncio.timeout(20):
        spec = specification(validation=validation)
        run_id = (await manager.create(Submission(spec=spec)))[0].run_id
        await workers.evaluates.wait()
        await workers.trains.wait()
        # The rollouts are lost with the weights of step 2, and the trainer finishes step 3.
        workers.may_answer, workers.version, workers.trained = True, -1, 3
        workers.lose()
        await ended(manager, run_id)
        validated = await events_of(manager, run_id, "Validated")
        run = await manager.get(run_id)
    outcomes = [(event.data["step"], event.data["status"]) for event in validated]
    assert outcomes == [(2, "missed"), (3, "ok"), (4, "ok")]
    assert run.summary["evaluation"] == {
        "weight_version": 4,
        "step": 4,
        "reason": "periodic",
        "state": "ok",
    }


async def test_an_evaluation_whose_weights_a_rewind_lost_is_missed_and_due_again(database, workers):
    workers.may_answer = False
    workers.may_train.clear()
    workers.held_from = 3
    validation = {"every": 2, "before_train": False, "at_end": False}
    async with open_manager(database, queue=workers.queue) as manager, asyncio.timeout(20):
        spec = specification(validation=validation)
        run_id = (await manager.create(Submission(spec=spec)))[0].run_id
        await workers.evaluates.wait()
        await workers.trains.wait()
        # The trainer is lost with step 2; the rollout still serves version 2.
        workers.may_answer, workers.trained, workers.held_from = True, 1, 5
        workers.lose()
        await ended(manager, run_id)
        validated = await events_of(manager, run_id, "Validated")
        (rewound,) = await events_of(manager, run_id, "Rewound")
    assert rewound.data == {"step": 1, "version": 3}
    outcomes = [(e.data["version"], e.data["step"], e.data["status"]) for e in validated]
    assert outcomes == [(2, 2, "missed"), (4, 2, "ok"), (6, 4, "ok")]


async def test_weights_that_a_rewind_lost_are_replaced_before_a_group_starts(database, workers):
    workers.may_train.clear()
    workers.held_from = 4
    async with open_manager(database, queue=workers.queue) as manager, asyncio.timeout(20):
        # The weights of step 1 are not due for a publication.
        spec = specification(weight_sync={"publish_every": 2}, algorithm={"max_staleness": 4})
        run_id = (await manager.create(Submission(spec=spec)))[0].run_id
        await workers.trains.wait()
        assert workers.version == 2
        workers.trained, workers.held_from = 1, 5
        workers.lose()
        await ended(manager, run_id)
        published = await events_of(manager, run_id, "WeightsPublished")
        (rewound,) = await events_of(manager, run_id, "Rewound")
    assert rewound.data == {"step": 1, "version": 4}
    versions = [(event.data["step"], event.data["version"]) for event in published]
    assert versions == [(0, 0), (2, 2), (1, 4), (2, 5), (4, 7)]
