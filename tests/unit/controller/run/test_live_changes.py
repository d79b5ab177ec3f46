"""User requests to a training run: changed limits, and durable requests."""

import asyncio
from dataclasses import replace

import pytest

from services.common.errors import FailedPreconditionError, UnavailableError
from services.controller.launch.launcher import ExternalLauncher
from services.controller.rules.ledger import GroupState
from services.controller.run.train.checkpoints import CheckpointStore
from services.controller.schemas import PauseOptions, RunPatch
from services.controller.store.records import Submission
from services.controller.store.rows import read_requests
from services.controller.store.runs import StaleRevisionError
from services.wire.controller import GroupFailure
from tests.helpers.rest import open_manager
from tests.unit.controller.workers import MemoryQueue, Workers, specification


@pytest.fixture
def workers(monkeypatch) -> Workers:
    workers = Workers(MemoryQueue())
    monkeypatch.setattr("services.controller.run.lifecycle.loop.connect", workers.assemble)
    return workers


async def submitted(manager, **connections) -> str:
    return (await manager.create(Submission(spec=specification(**connections))))[0].run_id


async def patched(manager, run_id, patch) -> None:
    while True:
        run = await manager.get(run_id)
        try:
            await manager.patch(run_id, patch, revision=run.revision)
        except StaleRevisionError:
            continue  # a published version changed the revision of the run
        return


async def events_of(manager, run_id, *types) -> list:
    events = await manager.feed.page(run_id, after_seq=0, limit=1000)
    return [event for event in events if event.type in types]


async def ended(manager, run_id):
    async with asyncio.timeout(20):
        await manager.drivers.wait()
    run = await manager.get(run_id)
    assert run.state == "SUCCEEDED", run.message
    return run


async def test_a_run_trains_to_its_end(database, workers):
    async with open_manager(database, queue=workers.queue) as manager:
        run_id = await submitted(manager)
        assert (await ended(manager, run_id)).step == 4


async def test_samples_left_out_of_a_step_are_reported(database, workers):
    workers.left_out = {f"group-{number}.0": 131_072 for number in range(10)}
    async with open_manager(database, queue=workers.queue) as manager:
        run_id = await submitted(manager)
        assert (await ended(manager, run_id)).step == 4
        (event,) = await events_of(manager, run_id, "SamplesLeftOut")
    assert event.data["step"] == 2
    assert event.data["samples"] == workers.left_out
    assert "group-0.0 (131,072 tokens)" in event.message
    assert "rollout.max_response_tokens" in event.message


async def test_a_limit_that_changes_holds_from_the_next_step_on(database, workers):
    workers.may_train.clear()
    async with open_manager(database, queue=workers.queue) as manager:
        run_id = await submitted(manager)
        await workers.trains.wait()
        await patched(manager, run_id, RunPatch(limits={"step_timeout_s": 77.0}))
        workers.may_train.set()
        await ended(manager, run_id)
    assert workers.step_timeouts[1:] == [77.0, 77.0, 77.0]


async def test_a_stall_is_found_under_the_limit_that_holds_now(database, workers):
    workers.may_train.clear()
    async with open_manager(database, queue=workers.queue) as manager:
        run_id = await submitted(manager)
        await workers.trains.wait()
        workers.may_generate = False
        await patched(manager, run_id, RunPatch(limits={"stall_timeout_s": 0.02}))
        workers.may_train.set()
        async with asyncio.timeout(20):
            await workers.cancels.wait()


async def lose_the_trainer(workers) -> None:
    """Makes the running train step fail, and returns when the run waits for its workers."""
    workers.connects.clear()
    workers.may_connect.clear()
    workers.lose()
    await workers.connects.wait()


async def test_what_is_asked_of_a_run_outlives_the_loss_of_a_worker(database, workers, monkeypatch):
    monkeypatch.setattr("services.controller.run.lifecycle.driver._EXIT_REPORT_S", 0.0)
    workers.may_train.clear()
    async with open_manager(database, queue=workers.queue) as manager:
        run_id = await submitted(manager)
        await workers.trains.wait()
        driver = manager.drivers.running(await manager.get(run_id))
        await driver.save()
        await lose_the_trainer(workers)
        await driver.evaluate()
        workers.may_connect.set()
        await ended(manager, run_id)
        (evaluated,) = await events_of(manager, run_id, "Validated")
        assert evaluated.data["reason"] == "manual"
    assert workers.saved == [1, 4]


class Hours:
    """Fake clock that a test advances."""

    def __init__(self):
        self.now = 1e9

    def time(self):
        return self.now

    def monotonic(self):
        return self.now


@pytest.mark.parametrize(
    ("rule", "saved"),
    [
        ({}, [2, 4, 5]),
        ({"every_s": 300.0}, [1, 2, 3, 4, 5]),
        ({"every_s": 0}, [5]),
        ({"every": 3}, [3, 5]),
    ],
)
async def test_a_run_that_takes_long_is_saved_by_time(database, workers, monkeypatch, rule, saved):
    clock = Hours()
    train_step = workers.train_step

    async def train_for_minutes(command, **kwargs):
        clock.now += 400.0
        return await train_step(command, **kwargs)

    monkeypatch.setattr(workers, "train_step", train_for_minutes)
    trainer = {"steps": 5, "prompts_per_step": 2, "checkpoint": rule}
    async with open_manager(database, queue=workers.queue) as manager:
        manager.drivers.services = replace(manager.drivers.services, clock=clock)
        run_id = await submitted(manager, trainer=trainer)
        await ended(manager, run_id)
    assert workers.saved == saved


@pytest.mark.parametrize("is_lost", [False, True], ids=["at once", "before a loss"])
async def test_a_clock_that_is_set_back_delays_no_checkpoint(
    database, workers, monkeypatch, is_lost
):
    clock, set_back_s = Hours(), 0.0
    monkeypatch.setattr(clock, "time", lambda: clock.now - set_back_s)
    monkeypatch.setattr("services.controller.run.lifecycle.driver._EXIT_REPORT_S", 0.0)
    train_step = workers.train_step

    async def train_for_minutes(command, **kwargs):
        nonlocal set_back_s
        clock.now += 100.0
        if command.step == 5 and not set_back_s:
            set_back_s = 7200.0
            if is_lost:
                workers.trained = 5
                raise UnavailableError("the trainer does not answer")
        return await train_step(command, **kwargs)

    monkeypatch.setattr(workers, "train_step", train_for_minutes)
    trainer = {"steps": 7, "prompts_per_step": 2, "checkpoint": {"every_s": 300.0}}
    async with open_manager(database, queue=workers.queue) as manager:
        manager.drivers.services = replace(manager.drivers.services, clock=clock)
        run_id = await submitted(manager, trainer=trainer)
        await ended(manager, run_id)
    # After a loss it is unknown how much time passed, so the checkpoint is due.
    assert workers.saved == ([3, 5, 7] if is_lost else [3, 6, 7])


async def test_skipped_steps_are_not_saved_until_the_weights_change(database, workers):
    workers.skipped = {3, 4, 5, 6}
    workers.reported = {6: {"rewound_to_step": 2.0}}
    trainer = {"steps": 9, "prompts_per_step": 2, "checkpoint": {"every": 2, "keep": 2}}
    async with open_manager(database, queue=workers.queue) as manager:
        run_id = await submitted(manager, trainer=trainer)
        await ended(manager, run_id)
        rewound = await events_of(manager, run_id, "Rewound")
    assert workers.saved == [2, 7, 8, 9]
    assert [(event.data["step"], event.data["version"]) for event in rewound] == [(2, 6)]


async def test_a_critic_that_returns_to_a_checkpoint_is_an_event(database, workers):
    skipped = {"critic_skipped": 1.0}
    workers.reported = {3: skipped, 4: {**skipped, "critic_rewound_to_step": 2.0}}
    trainer = {"steps": 5, "prompts_per_step": 2, "checkpoint": {"every": 2}}
    async with open_manager(database, queue=workers.queue) as manager:
        run_id = await submitted(manager, trainer=trainer)
        await ended(manager, run_id)
        (rewound,) = await events_of(manager, run_id, "Rewound")
    assert workers.saved == [2, 5]
    assert rewound.data == {"step": 2, "version": 4, "reason": "not_finite"}
    assert "the critic restored the weights of step 2" in rewound.message


async def test_a_checkpoint_of_a_skipped_step_replaces_none_from_before(database, workers):
    workers.skipped = {5, 6}
    trainer = {"steps": 6, "prompts_per_step": 2, "checkpoint": {"every": 2, "keep": 1}}
    async with open_manager(database, queue=workers.queue) as manager:
        run_id = await submitted(manager, trainer=trainer)
        await ended(manager, run_id)
        saved = await events_of(manager, run_id, "CheckpointSaved")
        listed = CheckpointStore(database).list_checkpoints(run_id)
    usable = {checkpoint.step for checkpoint in listed if checkpoint.state == "READY"}
    assert [event.data["step"] for event in saved] == [2, 4, 6]
    assert workers.kept_steps[-1] == [4]
    assert usable == {4, 6}


@pytest.mark.parametrize(
    ("checkpoint", "saved"),
    [
        ({"every_s": 0, "at_end": False}, []),
        ({"every": 3, "at_end": False}, [3]),
        ({"every": 2, "at_end": False}, [2, 4]),
        ({"every": 3}, [3, 4]),
    ],
)
async def test_the_last_step_is_saved_unless_the_run_asks_otherwise(
    database, workers, checkpoint, saved
):
    trainer = {"steps": 4, "prompts_per_step": 2, "checkpoint": checkpoint}
    async with open_manager(database, queue=workers.queue) as manager:
        run_id = await submitted(manager, trainer=trainer)
        await ended(manager, run_id)
    assert workers.saved == saved


async def test_a_pause_saves_no_step_twice(database, workers):
    workers.may_train.clear()
    workers.held_from = 2
    trainer = {"steps": 4, "prompts_per_step": 2, "checkpoint": {"every": 2}}
    async with open_manager(database, queue=workers.queue) as manager:
        run_id = await submitted(manager, trainer=trainer)
        await workers.trains.wait()
        await manager.drivers.running(await manager.get(run_id)).pause()
        workers.may_train.set()
        async with asyncio.timeout(20):
            await manager.drivers.wait()
        saved = await events_of(manager, run_id, "CheckpointSaved")
    assert workers.saved == [2]
    assert [event.data["step"] for event in saved] == [2, 2]  # the second event adds newer samples
    assert saved[0].data["path"] == saved[1].data["path"]
    assert (
        len(set(workers.queue.snapshots)) == 2
    )  # no snapshot replaces the snapshot of a valid checkpoint


async def test_what_is_asked_of_a_run_outlives_its_controller(database, workers):
    workers.may_train.clear()
    async with open_manager(database, queue=workers.queue) as first:
        run_id = await submitted(first)
        await workers.trains.wait()
        driver = first.drivers.running(await first.get(run_id))
        await driver.save()
        workers.may_answer = False
        await driver.evaluate()
        await first.close(leave=True)
    workers.may_train.set()
    workers.may_answer = True
    async with open_manager(database, queue=workers.queue) as second:
        await ended(second, run_id)
        (evaluated,) = await events_of(second, run_id, "Validated")
        assert (evaluated.data["reason"], evaluated.data["status"]) == ("manual", "ok")
    assert workers.saved == [1, 4]


class FullHost(ExternalLauncher):
    """Fake launcher of a host with room for two rollouts."""

    async def start(self, run_id, spec, *, later=()):
        if spec.rollout.replicas > 2:
            raise FailedPreconditionError("no room")


class ScratchVolume(ExternalLauncher):
    """Fake launcher of pods that have no claim for checkpoints."""

    async def why_volatile(self, run_id, folder):
        return f"{folder or 'the default folder'} is a volume of the pod"


async def test_checkpoints_that_are_lost_with_the_trainer_are_reported_as_such(database, workers):
    trainer = {"steps": 2, "prompts_per_step": 2, "checkpoint": {"every": 2}}
    async with open_manager(database, queue=workers.queue) as manager:
        manager.drivers.services = replace(manager.drivers.services, launcher=ScratchVolume())
        run_id = await submitted(manager, trainer=trainer)
        await ended(manager, run_id)
        (warning,) = await events_of(manager, run_id, "CheckpointsVolatile")
        (saved,) = await events_of(manager, run_id, "CheckpointSaved")
        run = await manager.get(run_id)
    assert warning.seq < saved.seq
    assert saved.data["reason"] == "Volatile"
    (current,) = [
        condition for condition in run.conditions if condition.type == "CheckpointCurrent"
    ]
    assert (current.status, current.reason) == ("False", "Volatile")


class FullQueue(ExternalLauncher):
    """Fake launcher whose queue has quota for two rollouts."""

    def queued(self, run_id):
        return {"rollout-2"}

    async def admitted(self, run_id, worker_ids):
        await asyncio.get_running_loop().create_future()


@pytest.mark.parametrize("pauses", [False, True])
async def test_a_run_trains_recovers_and_pauses_while_a_rollout_waits_in_a_queue(
    database, workers, monkeypatch, pauses
):
    monkeypatch.setattr("services.controller.run.lifecycle.driver._EXIT_REPORT_S", 0.0)
    workers.may_train.clear()
    async with open_manager(database, queue=workers.queue) as manager:
        services = manager.drivers.services
        manager.drivers.services = replace(services, launcher=FullQueue())
        run_id = await submitted(manager)
        async with asyncio.timeout(20):
            await workers.trains.wait()
        await patched(manager, run_id, RunPatch(rollout_replicas=3))
        async with asyncio.timeout(20):
            await lose_the_trainer(workers)
        if pauses:
            await manager.pause(run_id, PauseOptions(checkpoint=False))
        workers.may_connect.set()
        workers.may_train.set()
        if pauses:
            async with asyncio.timeout(20):
                await manager.drivers.wait()
            assert (await manager.get(run_id)).state == "PAUSED"
        else:
            assert (await ended(manager, run_id)).step == 4
        assert not await events_of(manager, run_id, "Resized", "ResizeFailed")


async def test_a_run_that_does_not_get_more_rollouts_is_recorded_with_those_that_it_has(
    database, workers
):
    workers.may_train.clear()
    async with open_manager(database, queue=workers.queue) as manager:
        services = manager.drivers.services
        manager.drivers.services = replace(services, launcher=FullHost())
        run_id = await submitted(manager)
        before = await manager.get(run_id)
        async with asyncio.timeout(20):
            await workers.trains.wait()
        await patched(manager, run_id, RunPatch(rollout_replicas=3))
        async with asyncio.timeout(20):
            while not await events_of(manager, run_id, "ResizeFailed"):  # noqa: ASYNC110
                await asyncio.sleep(0)
        run = await manager.get(run_id)
        assert (run.spec_json, run.spec_digest) == (before.spec_json, before.spec_digest)
        assert (run.needs, run.generation) == (before.needs, before.generation + 2)
        with database.read() as connection:
            assert read_requests(connection, run_id) == []
        workers.may_train.set()
        await ended(manager, run_id)


async def test_a_pause_without_a_checkpoint_stays_one_under_another_controller(database, workers):
    workers.may_train.clear()
    workers.held_from = 2
    async with open_manager(database, queue=workers.queue) as first:
        run_id = await submitted(first)
        await workers.trains.wait()
        await first.pause(run_id, PauseOptions(checkpoint=False))
        await first.close(leave=True)
    workers.may_train.set()
    async with open_manager(database, queue=workers.queue) as second:
        async with asyncio.timeout(20):
            await second.drivers.wait()
        assert (await second.get(run_id)).state == "PAUSED"
        await second.resume(run_id)
        await ended(second, run_id)
    assert workers.saved == [4]


async def test_a_request_that_was_answered_is_not_answered_again(database, workers):
    workers.may_train.clear()
    async with open_manager(database, queue=workers.queue) as manager:
        run_id = await submitted(manager)
        await workers.trains.wait()
        driver = manager.drivers.running(await manager.get(run_id))
        await driver.save()
        await driver.save()
        await driver.evaluate()
        workers.may_train.set()
        await ended(manager, run_id)
        assert len(await events_of(manager, run_id, "Validated")) == 1
        with database.read() as connection:
            assert read_requests(connection, run_id) == []
    assert workers.saved == [1, 4]


async def test_the_last_evaluation_does_not_wait_for_the_last_checkpoint(database, workers):
    workers.may_save.clear()
    at_end = {"every": 0, "before_train": False, "at_end": True}
    async with open_manager(database, queue=workers.queue) as manager:
        run_id = await submitted(manager, validation=at_end)
        async with asyncio.timeout(20):
            for kind in ("Validated", "CheckpointStarted"):  # in any order
                while not await events_of(manager, run_id, kind):  # noqa: ASYNC110 -- the test polls events
                    await asyncio.sleep(0)
        assert not await events_of(manager, run_id, "CheckpointSaved")
        workers.may_save.set()
        await ended(manager, run_id)
        assert await events_of(manager, run_id, "CheckpointSaved")


@pytest.mark.parametrize("max_staleness", [0, 1, 4])
async def test_a_batch_is_scored_under_the_weights_that_its_step_starts_from(
    database, workers, max_staleness
):
    workers.publishing_turns = 2000
    spec = specification(
        trainer={"steps": 6, "prompts_per_step": 2, "updates_per_step": 2},
        algorithm={"max_staleness": max_staleness, "correction": "decoupled"},
        topology={
            "task_groups": ["train", "logp", "generate"],
            "ratios": [0.25, 0.25, 0.5],
            "gpus": 4,
        },
    )
    async with open_manager(database, queue=workers.queue) as manager:
        run_id = (await manager.create(Submission(spec=spec)))[0].run_id
        await ended(manager, run_id)
    assert workers.scored == [(version, version) for version in range(6)]


async def test_a_step_that_takes_too_long_names_its_limit(database, workers, monkeypatch):
    monkeypatch.setattr("services.controller.run.lifecycle.driver._EXIT_REPORT_S", 0.0)
    async with open_manager(database, queue=workers.queue) as manager:
        run_id = await submitted(manager)
        workers.takes_too_long = True
        await patched(manager, run_id, RunPatch(limits={"step_timeout_s": 0.01, "max_restarts": 0}))
        async with asyncio.timeout(20):
            await manager.drivers.wait()
        run = await manager.get(run_id)
    assert run.state == "FAILED"
    assert "limits.step_timeout_s" in run.message


async def test_a_run_that_fails_before_its_first_step_reports_its_quarantined_groups(
    database, workers
):
    workers.may_generate = False
    async with open_manager(database, queue=workers.queue) as manager, asyncio.timeout(20):
        run_id = await submitted(manager)
        driver, running = manager.drivers.find(run_id), []
        while not running:
            await asyncio.sleep(0.01)
            if driver._pipeline is not None:
                running = driver._pipeline.ledger.in_state(GroupState.GENERATING)
        failures = [
            GroupFailure(
                group_id=group.group_id,
                attempt=group.attempt,
                reason="prompt_too_long",
                message="too long",
                retryable=False,
                worker_id="rollout-0",
            )
            for group in running
        ]
        await manager.drivers.report_failures(run_id, failures)
        run = await manager.get(run_id)
        assert (run.step, run.summary["prompts"]["quarantined"]) == (0, len(failures))
