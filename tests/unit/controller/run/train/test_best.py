"""Tests that the best checkpoint of a run is one that exists."""

import asyncio

import pytest

from services.common.errors import FailedPreconditionError
from services.controller.run.train.checkpoints import CheckpointStore
from services.controller.store.records import EventFilter, Submission
from tests.helpers.rest import open_manager
from tests.unit.controller.workers import MemoryQueue, Workers, specification

_BEST = {"metric": "greedy"}


@pytest.fixture
def workers(monkeypatch) -> Workers:
    workers = Workers(MemoryQueue())
    monkeypatch.setattr("services.controller.run.lifecycle.loop.connect", workers.assemble)
    return workers


async def best_of(database, workers, *, checkpoint, steps, mode="overlap", every=2):
    """Runs to the end; returns the best step, and the steps of the checkpoints that exist."""
    async with open_manager(database, queue=workers.queue) as manager, asyncio.timeout(20):
        spec = specification(
            trainer={
                "steps": steps,
                "prompts_per_step": 2,
                "checkpoint": {"best": _BEST, "keep": 9, **checkpoint},
            },
            validation={"every": every, "before_train": False, "mode": mode},
        )
        run_id = (await manager.create(Submission(spec=spec)))[0].run_id
        await manager.drivers.wait()
        run = await manager.get(run_id)
        assert run.state == "SUCCEEDED", run.message
        listed = CheckpointStore(database).list_checkpoints(run_id)
        validated = await manager.feed.page(
            run_id, after_seq=0, limit=1000, only=EventFilter(types=("Validated",))
        )
    ready = {checkpoint.step for checkpoint in listed if checkpoint.state == "READY"}
    best = run.summary["best"]
    return None if best is None else best["step"], ready, [event.message for event in validated]


@pytest.mark.parametrize("mode", ["overlap", "barrier"])
async def test_the_first_checkpoint_with_the_highest_score_is_the_best(database, workers, mode):
    best, ready, _ = await best_of(database, workers, checkpoint={"every": 2}, steps=5, mode=mode)
    assert (best, ready) == (2, {2, 4, 5})


async def test_a_final_step_that_is_not_saved_is_not_the_best(database, workers):
    best, ready, messages = await best_of(
        database, workers, checkpoint={"every": 2, "at_end": False}, steps=1
    )
    assert (best, ready) == (None, set())
    assert len(messages) == 1


async def test_a_final_step_that_is_saved_is_the_best(database, workers):
    best, ready, _ = await best_of(database, workers, checkpoint={"every": 2}, steps=1)
    assert (best, ready) == (1, {1})


async def test_a_step_that_is_not_saved_because_its_critic_did_not_change_is_not_the_best(
    database, workers
):
    workers.reported = {2: {"critic_skipped": 1.0}}
    best, ready, messages = await best_of(database, workers, checkpoint={"every": 2}, steps=5)
    assert best in ready
    assert (best, ready) == (4, {3, 4, 5})
    assert "no checkpoint has this version" in messages[0]


@pytest.mark.parametrize("mode", ["overlap", "barrier"])
async def test_a_step_whose_save_failed_is_not_the_best(database, workers, monkeypatch, mode):
    save_checkpoint = workers.save_checkpoint

    async def save(step, **options):
        if step == 2:
            raise FailedPreconditionError("no space left on the device")
        return await save_checkpoint(step, **options)

    monkeypatch.setattr(workers, "save_checkpoint", save)
    best, ready, _ = await best_of(database, workers, checkpoint={"every": 2}, steps=5, mode=mode)
    assert (best, ready) == (4, {4, 5})


async def test_the_best_checkpoint_outlives_the_failed_save_of_a_better_version(
    database, workers, monkeypatch
):
    save_checkpoint, scores = workers.save_checkpoint, {2: 0.5, 4: 0.0, 6: 1.0}
    monkeypatch.setattr(
        "services.controller.run.pipeline.score_of",
        lambda evaluation, best: scores[evaluation.step],
    )

    async def save(step, **options):
        if step == 6:
            raise FailedPreconditionError("no space left on the device")
        return await save_checkpoint(step, **options)

    monkeypatch.setattr(workers, "save_checkpoint", save)
    checkpoint = {"every": 2, "keep": 1, "at_end": False}
    best, ready, messages = await best_of(
        database, workers, checkpoint=checkpoint, steps=6, mode="barrier"
    )
    assert (best, ready) == (2, {2, 4})
    assert len(messages) == 3
