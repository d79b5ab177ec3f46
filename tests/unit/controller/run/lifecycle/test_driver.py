"""Tests of which exits of workers end a run, and after which the run continues."""

import asyncio
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from services.common.errors import FailedPreconditionError, UnavailableError
from services.common.lifetime import OUTAGE_EXIT
from services.controller.api.membership import MembershipServicer
from services.controller.launch.launcher import ExternalLauncher, WorkerExit
from services.controller.rules.run_state import RunEvent
from services.controller.run.state.worker_failures import UnpublishableError, UnresponsiveError
from services.controller.schemas import PauseOptions
from services.controller.settings import ControllerSettings
from services.controller.store.records import EventFilter, Submission
from services.controller.store.rows import Request, read_requests, write_request
from services.controller.store.runs import RunStore
from slipstream.controller.v1 import membership_pb2
from slipstream.type.v1 import worker_pb2
from tests.helpers.rest import open_manager
from tests.unit.controller.workers import MemoryQueue, Workers, rollout_of, specification


@pytest.fixture
def workers(monkeypatch) -> Workers:
    workers = Workers(MemoryQueue())
    monkeypatch.setattr("services.controller.run.lifecycle.loop.connect", workers.assemble)
    monkeypatch.setattr("services.controller.run.lifecycle.driver._EXIT_REPORT_S", 0.0)
    return workers


def ended(run_id, worker_id, code=1) -> WorkerExit:
    return WorkerExit(run_id=run_id, worker_id=worker_id, code=code, last_lines="no memory")


@pytest.mark.parametrize(
    ("is_running", "is_other_there", "code", "ends_the_run"),
    [
        (False, True, 1, True),
        (True, False, 1, False),
        (True, True, 1, False),
        (False, True, -9, False),
        (False, True, OUTAGE_EXIT, False),
    ],
    ids=["at the start", "started before", "others go on", "killed", "no answer of a service"],
)
async def test_a_rollout_that_cannot_load_fails_a_run_at_its_first_start(
    database, workers, is_running, is_other_there, code, ends_the_run
):
    workers.has_rollout = is_other_there
    workers.may_train.clear()
    if not is_running:
        workers.may_connect.clear()
    async with open_manager(database, queue=workers.queue) as manager, asyncio.timeout(20):
        run_id = (await manager.create(Submission(spec=specification())))[0].run_id
        await (workers.trains if is_running else workers.connects).wait()
        workers.connects.clear()
        manager.drivers.worker_exited(ended(run_id, "rollout-1", code))
        if ends_the_run:
            await manager.drivers.wait()
            run = await manager.get(run_id)
            assert (run.state, run.state_reason) == ("FAILED", "WorkerLost")
            assert "no memory" in run.message
        else:
            await workers.connects.wait()
            assert not (await manager.get(run_id)).is_terminal


@pytest.mark.parametrize(
    ("state", "later", "is_reported"),
    [("draining", "draining", True), ("loaded", "draining", True), ("loaded", "loaded", False)],
)
async def test_the_end_of_a_rollout_that_stores_its_work_is_waited_for(
    database, workers, monkeypatch, state, later, is_reported
):
    monkeypatch.setattr("services.controller.run.lifecycle.driver._EXIT_REPORT_S", 0.1)
    workers.may_train.clear()
    async with open_manager(database, queue=workers.queue) as manager, asyncio.timeout(20):
        run_id = (await manager.create(Submission(spec=specification())))[0].run_id
        await workers.trains.wait()
        worker = manager.workers(run_id)[0]
        worker.state = state
        workers.connects.clear()
        workers.lose()
        loop = asyncio.get_running_loop()
        loop.call_later(0.02, setattr, worker, "state", later)
        loop.call_later(0.3, manager.drivers.worker_exited, ended(run_id, "rollout-0"))
        await workers.connects.wait()
        (loss_event,) = await manager.feed.page(
            run_id, after_seq=0, only=EventFilter(types=("WorkerLost",))
        )
        assert ("rollout-0 exited with exit code 1" in loss_event.message) is is_reported


@pytest.mark.parametrize("lost_worker", ["", "trainer-0", "rollout-1"])
async def test_a_run_that_cannot_train_until_somebody_answers_again_says_that_it_recovers(
    database, workers, lost_worker
):
    workers.may_train.clear()
    async with open_manager(database, queue=workers.queue) as manager, asyncio.timeout(20):
        run_id = (await manager.create(Submission(spec=specification())))[0].run_id
        await workers.trains.wait()
        workers.connects.clear()
        workers.may_connect.clear()
        if lost_worker:
            manager.drivers.worker_exited(ended(run_id, lost_worker))
        else:  # ranks of the trainer do not answer, and nobody has reported an exit yet
            workers.lose()
        await workers.connects.wait()
        expected_state = "RUNNING" if lost_worker == "rollout-1" else "RECOVERING"
        assert (await manager.get(run_id)).state == expected_state
        workers.may_connect.set()
        while (await manager.get(run_id)).state != "RUNNING":  # noqa: ASYNC110 -- a row of the database
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("is_late", [False, True], ids=["at once", "recovered meanwhile"])
async def test_a_recovering_run_can_be_paused(database, workers, is_late):
    workers.may_train.clear()
    async with open_manager(database, queue=workers.queue) as manager, asyncio.timeout(20):
        run_id = (await manager.create(Submission(spec=specification())))[0].run_id
        await workers.trains.wait()
        workers.connects.clear()
        workers.may_connect.clear()
        workers.lose()
        await workers.connects.wait()
        driver = manager.drivers.find(run_id)
        if is_late:  # the driver hears of the pause once it has recovered
            workers.trains.clear()
            RunStore(database).apply(run_id, RunEvent.PAUSE, reason="PausedByUser")
            workers.may_connect.set()
            await workers.trains.wait()
            await driver.pause(saves=False)
        else:
            await manager.pause(run_id, PauseOptions(checkpoint=False))
            workers.may_connect.set()
        workers.may_train.set()
        await manager.drivers.wait()
        run = await manager.get(run_id)
        assert (run.state, run.state_reason) == ("PAUSED", "PausedByUser")


async def test_a_run_that_loses_its_trainer_while_a_user_pauses_it_is_paused(database, workers):
    workers.may_train.clear()
    async with open_manager(database, queue=workers.queue) as manager, asyncio.timeout(20):
        run_id = (await manager.create(Submission(spec=specification())))[0].run_id
        await workers.trains.wait()
        driver = manager.drivers.find(run_id)
        move = driver._move

        async def paused_before(event, reason, message):
            if event is RunEvent.LOSE:
                await manager.pause(run_id, PauseOptions(checkpoint=False))
            return await move(event, reason, message)

        driver._move = paused_before
        workers.may_train.set()
        workers.lose()
        await manager.drivers.wait()
        assert (await manager.get(run_id)).state == "PAUSED"


async def test_a_trainer_with_a_rank_that_stays_silent_is_lost_and_restarts(
    database, workers, monkeypatch
):
    """The run could enter its loops with none of the trainer's other ranks."""
    ended_workers, answers = [], asyncio.Event()

    async def assemble(*args, **kwargs):
        if workers.lost and not ended_workers:
            raise UnresponsiveError("trainer-0/2", "does not answer within 60 s")
        if ended_workers:
            answers.set()
        return await workers.assemble(*args, **kwargs)

    class Ending(ExternalLauncher):
        async def end(self, run_id, worker_id):
            ended_workers.append(worker_id)

    monkeypatch.setattr("services.controller.run.lifecycle.loop.connect", assemble)
    workers.may_train.clear()
    async with open_manager(database, queue=workers.queue) as manager, asyncio.timeout(20):
        manager.drivers.services = replace(manager.drivers.services, launcher=Ending())
        run_id = (await manager.create(Submission(spec=specification())))[0].run_id
        await workers.trains.wait()
        workers.lose()
        await answers.wait()
        events = await manager.feed.page(
            run_id, after_seq=0, only=EventFilter(types=("WorkerLost",))
        )
        assert ended_workers == ["trainer-0"]
        assert events[-1].data["workers"] == ["trainer-0"]
        assert "trainer-0/2 does not answer" in events[-1].message


@pytest.mark.parametrize(
    ("next_error", "lost_workers", "goes_on"),
    [
        (UnresponsiveError("trainer-0/2", "does not answer within 60 s"), ["trainer-0"], True),
        (None, [], True),
        (UnresponsiveError("rollout-0", "does not answer within 60 s"), [], False),
        (UnavailableError("the transferqueue does not answer"), [], False),
        (FailedPreconditionError("no transport reaches all members"), [], False),
    ],
    ids=["it stays silent", "it answers again", "another worker", "a service", "a setting"],
)
async def test_a_member_that_does_not_answer_a_publication_is_one_loss_with_one_cause(
    database, workers, monkeypatch, next_error, lost_workers, goes_on
):
    """The cause names the worker if that is still silent when the run enters its loops again."""
    message = "trainer-0/2 at a:1 does not answer, so no version can be published"
    errors = [UnpublishableError(message, {"trainer-0"}), *([next_error] if next_error else [])]
    trains_again = asyncio.Event()

    async def train_step(command, *, timeout_s):
        if len(errors) == 1 + (next_error is not None):
            raise errors.pop(0)
        trains_again.set()
        await asyncio.Event().wait()

    async def assemble(*args, **kwargs):
        if next_error in errors and len(errors) == 1:
            raise errors.pop()
        return await workers.assemble(*args, **kwargs)

    monkeypatch.setattr("services.controller.run.lifecycle.loop.connect", assemble)
    monkeypatch.setattr(workers, "train_step", train_step)
    async with open_manager(database, queue=workers.queue) as manager, asyncio.timeout(60):
        spec = specification(limits={"max_restarts": 1})
        run_id = (await manager.create(Submission(spec=spec)))[0].run_id
        await (trains_again.wait() if goes_on else manager.drivers.wait())
        only = EventFilter(types=("WorkerLost",))
        (event,) = await manager.feed.page(run_id, after_seq=0, only=only)
        assert event.data["workers"] == lost_workers
        assert str(next_error if lost_workers else message) in event.message
        assert (await manager.get(run_id)).is_terminal != goes_on


async def test_the_log_of_a_worker_that_does_not_answer_is_named(database, workers, monkeypatch):
    returned = asyncio.Event()

    async def assemble(*args, **kwargs):
        if workers.lost and not returned.is_set():
            returned.set()
            raise UnavailableError(
                "rollout-1 at 10.0.0.7:50051 does not answer, so nothing goes on"
            )
        return await workers.assemble(*args, **kwargs)

    monkeypatch.setattr("services.controller.run.lifecycle.loop.connect", assemble)
    workers.may_train.clear()
    async with open_manager(database, queue=workers.queue) as manager, asyncio.timeout(20):
        run_id = (await manager.create(Submission(spec=specification())))[0].run_id
        await workers.trains.wait()
        workers.connects.clear()
        workers.lose()
        await workers.connects.wait()
        events = await manager.feed.page(
            run_id, after_seq=0, only=EventFilter(types=("WorkerLost",))
        )
        assert any(
            event.message.endswith(f"nothing goes on (log: slipstream logs {run_id} rollout-1)")
            for event in events
        )


async def test_a_worker_that_reports_its_failure_is_lost_for_that_reason(database, workers):
    workers.may_train.clear()
    async with open_manager(database, queue=workers.queue) as manager, asyncio.timeout(20):
        run_id = (await manager.create(Submission(spec=specification())))[0].run_id
        await workers.trains.wait()
        workers.connects.clear()
        manager.workers(run_id)[0].state = "failed"
        manager.drivers.worker_failed(run_id, "rollout-0", cause="its engine stalled")
        # The worker's exit, which follows the report, is not a failure at the start.
        manager.drivers.worker_exited(ended(run_id, "rollout-0"))
        await workers.connects.wait()
        (loss_event,) = await manager.feed.page(
            run_id, after_seq=0, only=EventFilter(types=("WorkerLost",))
        )
        assert loss_event.data["workers"] == ["rollout-0"]
        assert not (await manager.get(run_id)).is_terminal


async def test_the_end_of_a_worker_that_is_being_removed_counts_for_no_later_loss(
    database, workers, monkeypatch
):
    workers.may_train.clear()
    async with open_manager(database, queue=workers.queue) as manager, asyncio.timeout(20):

        async def end(launcher, run_id, worker_id):
            manager.drivers.worker_exited(ended(run_id, worker_id, -9))

        monkeypatch.setattr(ExternalLauncher, "end", end)
        run_id = (await manager.create(Submission(spec=specification())))[0].run_id
        await workers.trains.wait()
        for worker_id in ("rollout-0", "rollout-1"):
            workers.connects.clear()
            manager.drivers.worker_failed(run_id, worker_id, cause="its engine stalled")
            await workers.connects.wait()
        loss_events = await manager.feed.page(
            run_id, after_seq=0, only=EventFilter(types=("WorkerLost",))
        )
        assert [event.data["workers"] for event in loss_events] == [["rollout-0"], ["rollout-1"]]


async def test_a_restart_of_the_rollouts_that_a_dead_controller_ordered_is_finished(
    database, workers
):
    workers.may_train.clear()
    async with open_manager(database, queue=workers.queue) as manager, asyncio.timeout(20):
        run_id = (await manager.create(Submission(spec=specification())))[0].run_id
        await workers.trains.wait()
        manager.drivers.detach()
        await manager.drivers.wait()
    request = Request(kind="restart_rollouts", request_id="req_1", options={})
    with database.write() as connection:
        write_request(connection, run_id, request)
    workers.connects.clear()
    async with open_manager(database, queue=workers.queue) as manager, asyncio.timeout(20):
        await workers.connects.wait()
        only = EventFilter(types=("RolloutsRestarted",))
        (restarted,) = await manager.feed.page(run_id, after_seq=0, only=only)
        assert restarted.data == {"workers": ["rollout-0", "rollout-1"]}
    with database.read() as connection:
        assert read_requests(connection, run_id) == []


async def test_a_scoring_worker_that_cannot_reach_the_transferqueue_is_reported(
    database, workers, monkeypatch
):
    monkeypatch.setattr("services.controller.run.pipeline.CUT_OFF_EVERY_S", 0.01)
    scorer = SimpleNamespace(worker_id="ref_logp-0", is_cut_off=True, activity="tq:1 is away")
    workers.other_workers = [scorer]
    workers.may_train.clear()
    async with open_manager(database, queue=workers.queue) as manager, asyncio.timeout(20):
        run_id = (await manager.create(Submission(spec=specification())))[0].run_id

        async def reported(kind):
            only = EventFilter(types=(kind,))
            while not (result := await manager.feed.page(run_id, after_seq=0, only=only)):  # noqa: ASYNC110 -- the test polls stored events
                await asyncio.sleep(0.01)
            return result

        (cut,) = await reported("WorkerCutOff")
        assert cut.data["workers"] == ["ref_logp-0"]
        assert "tq:1" in cut.message
        scorer.is_cut_off = False
        (back,) = await reported("WorkerReconnected")
        assert back.data["workers"] == ["ref_logp-0"]


async def test_epochs_that_end_within_the_warmup_of_the_critic_fail_the_run(database, workers):
    spec = specification(
        algorithm={"advantage": "gae"},
        critic={"warmup_steps": 32},
        data={**specification().data.model_dump(mode="json"), "epochs": 1},  # 64 rows are 32 steps
        trainer={"prompts_per_step": 2},
    )
    async with open_manager(database, queue=workers.queue) as manager, asyncio.timeout(20):
        run_id = (await manager.create(Submission(spec=spec)))[0].run_id
        await manager.drivers.wait()
        run = await manager.get(run_id)
    assert (run.state, run.step) == ("FAILED", 0)
    assert "critic.warmup_steps (32)" in run.message
    assert "data.epochs (32)" in run.message


async def test_what_workers_report_as_they_end_is_recorded_before_the_run_has_ended(
    database, workers, tmp_path
):
    workers.may_train.clear()
    only = EventFilter(types=("CheckpointUploaded", "StateChanged"))
    async with open_manager(database, queue=workers.queue) as manager, asyncio.timeout(60):
        drivers = manager.drivers
        membership = drivers.services.membership
        settings = ControllerSettings(transferqueue_address="tq:1", state_directory=tmp_path)
        servicer = MembershipServicer(manager, membership, settings, time)
        orders = []

        class Launcher(ExternalLauncher):
            async def stop(self, run_id):
                worker = manager.workers(run_id)[0]
                with pytest.raises(FailedPreconditionError):
                    await membership.register(rollout_of(run_id, 1))
                with pytest.raises(FailedPreconditionError):
                    await membership.rendezvous.get(f"{run_id}/1", "address", 60)
                heartbeat = membership_pb2.HeartbeatRequest(
                    run_id=run_id,
                    worker_id=worker.worker_id,
                    incarnation=worker.incarnation,
                    state=worker_pb2.WORKER_STATE_READY,
                )
                heartbeat.events.add(number=1, type="CheckpointUploaded", step=2, key="upload_a")
                orders.append((await servicer.Heartbeat(heartbeat, None)).order)

        drivers.services = replace(drivers.services, launcher=Launcher())
        run_id = (await manager.create(Submission(spec=specification())))[0].run_id
        await workers.trains.wait()
        await manager.cancel(run_id)
        await drivers.wait()
        assert not manager.workers(run_id)
        events = await manager.feed.page(run_id, after_seq=0, only=only)
    assert orders == [membership_pb2.HeartbeatResponse.ORDER_STOP]
    kinds = [event.type for event in events]
    assert "CheckpointUploaded" in kinds
    assert kinds[-1] == "StateChanged"


async def test_what_workers_report_with_a_key_is_recorded_once_whoever_reports_it(
    database, workers
):
    workers.may_train.clear()
    workers.held_from = 2
    async with open_manager(database, queue=workers.queue) as manager, asyncio.timeout(20):
        run_id = (await manager.create(Submission(spec=specification())))[0].run_id
        await workers.trains.wait()
        worker = rollout_of(run_id, 0)
        # The process that ends, and the one that replaces it, may report at the same time.
        await asyncio.gather(
            *(
                manager.drivers.worker_reported(
                    worker, "CheckpointUploaded", "stored", step=step, key=key
                )
                for step, key in (
                    *((2, "upload_a"), (2, "upload_a"), (2, 'upload_"b%'), (2, 'upload_"b%')),
                    *((0, ""), (0, "")),
                )
            )
        )
        only = EventFilter(types=("CheckpointUploaded",))
        uploads = await manager.feed.page(run_id, after_seq=0, only=only)
        workers.may_train.set()
        await manager.drivers.wait()
    upload = {"worker": worker.worker_id, "step": 2}
    assert sorted((event.data for event in uploads), key=repr) == sorted(
        [
            upload | {"key": "upload_a"},
            upload | {"key": 'upload_"b%'},
            {"worker": worker.worker_id},
            {"worker": worker.worker_id},
        ],
        key=repr,
    )
