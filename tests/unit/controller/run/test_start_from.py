"""Runs that start from the checkpoint of another run."""

import asyncio

import pytest

from services.controller.schemas import ForkRequest, PauseOptions
from services.controller.store import ledgers as ledger_store
from services.controller.store.records import Submission
from tests.helpers.rest import open_manager
from tests.unit.controller.workers import MemoryQueue, Workers, specification

FOLDER = "/checkpoints/step-00000003"


@pytest.fixture
def workers(monkeypatch) -> Workers:
    """Returns workers whose trainer has loaded the checkpoint of step 3."""
    workers = Workers(MemoryQueue())
    workers.trained = 3
    monkeypatch.setattr("services.controller.run.lifecycle.loop.connect", workers.assemble)
    monkeypatch.setattr("services.controller.run.lifecycle.driver._EXIT_REPORT_S", 0.0)
    return workers


async def submitted(manager, *, steps=5, start_from=FOLDER, **connections):
    checkpoint = {} if start_from is None else {"start_from": start_from}
    trainer = {"steps": steps, "prompts_per_step": 2, "checkpoint": checkpoint}
    spec = specification(trainer=trainer, **connections)
    return (await manager.create(Submission(spec=spec)))[0].run_id


async def ended(manager, run_id, state="SUCCEEDED"):
    async with asyncio.timeout(20):
        await manager.drivers.wait()
    run = await manager.get(run_id)
    assert run.state == state, run.message
    return run


async def events_of(manager, run_id, kind):
    events = await manager.feed.page(run_id, after_seq=0, limit=1000)
    return [event for event in events if event.type == kind]


def steps_of(database, run_id):
    with database.read() as connection:
        return [step.step for step in ledger_store.read_steps(connection, run_id)]


@pytest.mark.parametrize("publish_every", [1, 4])
async def test_a_run_starts_after_the_step_of_the_checkpoint(database, workers, publish_every):
    sync = {"publish_every": publish_every}
    algorithm = {"max_staleness": publish_every}
    async with open_manager(database, queue=workers.queue) as manager:
        run_id = await submitted(manager, weight_sync=sync, algorithm=algorithm)
        run = await ended(manager, run_id)
        (event,) = await events_of(manager, run_id, "StartedFromCheckpoint")
    assert (run.step, run.weight_version, run.summary["steps"]) == (5, 5, 5)
    assert event.data == {"step": 3, "version": 3}
    assert steps_of(database, run_id) == [4, 5]
    with database.read() as connection:
        ledger = ledger_store.read_ledger(connection, run_id)
    assert run.summary["prompts"]["consumed"] == ledger.num_issued == 4


async def test_no_more_is_generated_ahead_than_by_any_other_run(database, workers):
    workers.may_train.clear()
    workers.held_from = 4
    async with open_manager(database, queue=workers.queue) as manager:
        run_id = await submitted(manager, steps=40)
        async with asyncio.timeout(20):
            await workers.trains.wait()
        with database.read() as connection:
            issued = ledger_store.read_ledger(connection, run_id).num_issued
        workers.may_train.set()
        await ended(manager, run_id)
    # At staleness 1, one batch is trained and one more is generated.
    assert issued == 4


async def test_a_trainer_that_is_lost_before_its_first_checkpoint_loads_that_one_again(
    database, workers
):
    workers.may_train.clear()
    workers.held_from = 5
    async with open_manager(database, queue=workers.queue) as manager:
        run_id = await submitted(manager)
        async with asyncio.timeout(20):
            await workers.trains.wait()
        workers.trained = 3
        workers.lose()
        run = await ended(manager, run_id)
        assert len(await events_of(manager, run_id, "Rewound")) == 1
    assert run.step == 5
    assert steps_of(database, run_id) == [4, 5]


async def test_it_is_paused_resumed_and_forked_like_any_other(database, workers):
    workers.may_train.clear()
    workers.held_from = 4
    async with open_manager(database, queue=workers.queue) as manager:
        run_id = await submitted(manager)
        async with asyncio.timeout(20):
            await workers.trains.wait()
        await manager.pause(run_id, PauseOptions())
        workers.may_train.set()
        assert (await ended(manager, run_id, "PAUSED")).step == 4
        await manager.resume(run_id)
        assert (await ended(manager, run_id)).step == 5
        assert steps_of(database, run_id) == [4, 5]
        workers.trained, workers.version = 5, -1
        fork = ForkRequest(overrides={"trainer": {"steps": 6}})
        forked = await manager.fork(await manager.get(run_id), fork)
        run = await ended(manager, forked.run_id)
    assert run.step == 6
    assert steps_of(database, forked.run_id) == [4, 5, 6]


async def test_a_checkpoint_that_leaves_nothing_to_train_is_refused_by_key(database, workers):
    async with open_manager(database, queue=workers.queue) as manager:
        run = await ended(manager, await submitted(manager, steps=3), "FAILED")
    assert "trainer.checkpoint.start_from" in run.message


async def test_steps_that_a_run_does_not_know_of_are_refused_without_the_key(database, workers):
    async with open_manager(database, queue=workers.queue) as manager:
        run = await ended(manager, await submitted(manager, start_from=None), "FAILED")
    assert "trainer.checkpoint.directory" in run.message
