"""Tests that what workers report is recorded once, whatever happens to the call that reports it."""

import asyncio
import time
from contextlib import asynccontextmanager, suppress
from types import SimpleNamespace

import pytest

from services.common.errors import UnavailableError
from services.common.rpc.server import serve
from services.common.runspec.loader import canonical_json, spec_digest
from services.common.runspec.run import RunSpec
from services.controller.api.membership import MembershipServicer
from services.controller.membership import Membership
from services.controller.settings import ControllerSettings
from services.controller.store.database import LeaseLostError
from services.trainer.settings import TrainerSettings
from services.wire.controller import WorkerSession
from slipstream.controller.v1 import membership_pb2, membership_pb2_grpc
from slipstream.type.v1 import worker_pb2
from tests.helpers.rest import SPEC
from tests.unit.controller.membership.test_membership import registered, worker

LOST = membership_pb2.WorkerEvent(number=1, type="EngineServerLost", message="lost")
HEARTBEAT = membership_pb2.HeartbeatRequest(
    run_id="run_1",
    worker_id="rollout-0",
    incarnation="a",
    state=worker_pb2.WORKER_STATE_READY,
    events=[LOST],
)


class Drivers:
    """Records events like a database: once ``may_record`` is set, also for a caller that has left."""

    def __init__(self):
        self.may_record = asyncio.Event()
        self.failure = None
        self.messages = []
        self.tasks = SimpleNamespace(create_task=asyncio.ensure_future)

    def find(self, run_id):
        return None

    async def worker_reported(self, worker, kind, message, *, step, key):
        await asyncio.shield(asyncio.ensure_future(self._write(message)))

    async def _write(self, message):
        await self.may_record.wait()
        if self.failure is not None:
            raise self.failure
        self.messages.append(message)


@pytest.fixture
def drivers() -> Drivers:
    return Drivers()


def servicer_of(drivers, membership, folder, **options):
    spec = RunSpec.model_validate(SPEC)
    run = SimpleNamespace(
        spec_json=canonical_json(spec), spec_digest=spec_digest(spec), create_time=1.0
    )

    async def get(run_id):
        return run

    settings = ControllerSettings(
        transferqueue_address="127.0.0.1:1", state_directory=folder, **options
    )
    manager = SimpleNamespace(drivers=drivers, get=get)
    return MembershipServicer(manager, membership, settings, time)


async def test_an_event_is_recorded_once_though_its_first_call_ended_before_it_was(
    drivers, tmp_path
):
    servicer = servicer_of(drivers, await registered(), tmp_path)
    first = asyncio.create_task(servicer.Heartbeat(HEARTBEAT, None))
    await asyncio.sleep(0.01)
    first.cancel()  # as gRPC does at the caller's deadline
    await asyncio.wait([first])
    second = asyncio.create_task(servicer.Heartbeat(HEARTBEAT, None))
    await asyncio.sleep(0.01)
    drivers.may_record.set()
    await second
    assert drivers.messages == ["lost"]


async def test_a_worker_whose_events_wait_for_the_database_is_not_silent(drivers, tmp_path):
    membership = await registered()
    member = membership.find("run_1", "rollout-0")
    servicer = servicer_of(drivers, membership, tmp_path, heartbeat_timeout_s=0.2)
    begin = time.monotonic()
    async with asyncio.timeout(20):
        with pytest.raises(UnavailableError):
            await servicer.Heartbeat(HEARTBEAT, None)
        assert member.last_heartbeat >= begin
        drivers.may_record.set()
        while member.state != "ready":
            with suppress(UnavailableError):
                await servicer.Heartbeat(HEARTBEAT, None)
    assert (member.state, drivers.messages) == ("ready", ["lost"])


async def test_an_event_is_recorded_once_by_a_process_that_registers_again(drivers, tmp_path):
    membership = await registered()
    servicer = servicer_of(drivers, membership, tmp_path)
    drivers.may_record.set()
    for incarnation in ("a", "a", "b"):  # the heartbeat is of "a"
        await membership.register(worker(incarnation))
        await servicer.Heartbeat(HEARTBEAT, None)
    assert drivers.messages == ["lost"]


async def test_a_worker_outlives_a_controller_that_no_longer_leads(drivers, tmp_path):
    drivers.failure = LeaseLostError("another controller is the leader")
    drivers.may_record.set()
    servicer = servicer_of(drivers, await registered(), tmp_path)
    with pytest.raises(UnavailableError, match="another controller is the leader"):
        await servicer.Heartbeat(HEARTBEAT, None)


@asynccontextmanager
async def opened_session(servicer, folder):
    def register(server):
        membership_pb2_grpc.add_MembershipServiceServicer_to_server(servicer, server)

    async with serve("127.0.0.1:0", register) as port, asyncio.timeout(20):
        settings = TrainerSettings(
            controller_address=f"127.0.0.1:{port}",
            run_id="run_1",
            worker_id="trainer-0",
            bind="127.0.0.1:0",
            advertise_host="127.0.0.1",
            state_directory=folder,
        )
        async with WorkerSession(settings, role="trainer", port=1) as session:
            yield session


async def test_an_event_reaches_a_controller_that_has_just_started(drivers, tmp_path):
    servicer = servicer_of(drivers, await registered(), tmp_path)
    drivers.may_record.set()
    async with opened_session(servicer, tmp_path) as session:
        started = Membership(time, 30.0)  # it knows no worker
        started.open_run("run_1")
        servicer._membership = started
        session.report_event("EngineServerLost", "lost")
        await session.send_events()
        assert drivers.messages == ["lost"]


async def test_events_that_a_slow_controller_has_not_recorded_yet_are_sent_again(
    drivers, tmp_path, monkeypatch
):
    """A deadline would say that the store lacks uploads; see ``TrainingPipeline._await_uploads``."""
    servicer = servicer_of(drivers, await registered(), tmp_path)
    async with opened_session(servicer, tmp_path) as session:
        monkeypatch.setattr("services.wire.controller._CALL_TIMEOUT_S", 0.1)
        session.report_event("EngineServerLost", "lost")
        with pytest.raises(UnavailableError):
            await session.send_events()
        monkeypatch.undo()
        drivers.may_record.set()
        await session.send_events()
    assert drivers.messages == ["lost"]
