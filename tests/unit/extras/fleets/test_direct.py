"""Weights reach the workers of attached servers from the trainer: verified, while members come and go."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import pytest
import torch

from services.common.errors import ServiceError
from services.common.rpc.client import open_channel
from services.common.rpc.server import serve
from services.common.runspec.run import WeightSyncSpec
from services.controller.api.membership import RendezvousServicer
from services.controller.membership import RendezvousStore, Worker
from services.controller.run.weights.session import WeightSession
from services.extras.fleets import fleet as fleet_module
from services.extras.fleets.direct import relay as relay_module
from services.extras.fleets.direct import source as source_module
from services.extras.fleets.engine import FleetEngine
from services.weightsync.canary import Canary
from services.weightsync.member import WeightMember
from services.weightsync.modes.shadow import ShadowReceiver
from services.weightsync.server import serve_member
from services.wire.controller import Rendezvous
from slipstream.controller.v1 import membership_pb2_grpc
from tests.helpers.direct_weights import FleetSink
from tests.helpers.engines import made, request, until
from tests.helpers.weight_members import Cluster, Source
from tests.unit.extras.fleets.servers import (
    SPECS,
    FakeServer,
    attached_engine,
    serving,
    tensors,
)


class Trainer(Source):
    """Trainer rank whose weights all have one value, as the fake engine shows it."""

    def score_canary(self) -> Canary:
        return Canary((1, 2, 3), (-float(self.weights["bias"][0]),) * 2)


class Run:
    """A trainer, a rollout whose engine is a fleet, and the session of their controller."""

    def __init__(self, engine: FleetEngine, *, num_sources: int = 1, timeout_s: float = 30) -> None:
        self.engine = engine
        self.cluster = Cluster(
            num_sources,
            "servers",
            specs=SPECS,
            sinks=[FleetSink(engine)],
            backend="servers",
            timeout_s=timeout_s,
        )
        for source in self.cluster.sources:
            source.__class__ = Trainer
        self.epoch = 0

    async def form(self) -> None:
        self.epoch += 1
        await self.cluster.form_group(self.epoch)

    async def publish(self, version: int, value: float | None = None) -> str:
        """Trains to a value, the version's own by default, and publishes it; returns the digest."""
        for name, tensor in tensors(value if value is not None else version + 1.0).items():
            self.cluster.weights[name].copy_(tensor)
        digest: str = await self.cluster.publish(version, self.epoch)
        return digest

    async def abort(self) -> None:
        for member in self.cluster.members:
            await member.abort(self.epoch, "the test says so")

    @property
    def served(self) -> list[tuple[int | None, str]]:
        return [(server.version, server.digest) for server in self.engine.backend.fleet.serving]


@asynccontextmanager
async def _run(servers: list[FakeServer], **options: Any) -> AsyncIterator[Run]:
    events: list[str] = []
    async with attached_engine(servers, events) as engine:
        run = Run(engine, **options)
        run.events = events  # type: ignore[attr-defined]
        await run.form()
        try:
            yield run
        finally:
            await run.abort()


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(fleet_module, "_PROBE_EVERY_S", 0.05)
    monkeypatch.setattr(relay_module, "_LONGEST_FORM_S", 5.0)
    monkeypatch.setattr(relay_module, "_PING_S", 1.0)
    yield
    relay_module.GroupRelay.fleet = None


@pytest.mark.parametrize(("num_sources", "num_workers"), [(1, 1), (1, 2), (2, 1)])
async def test_every_worker_of_every_server_receives_each_version(
    num_sources: int, num_workers: int
) -> None:
    async with serving(2) as servers:
        for server in servers:
            server.engine.num_workers = num_workers
        async with _run(servers, num_sources=num_sources) as run:
            for version in range(5):
                digest = await run.publish(version)
                assert run.served == [(version, digest)] * 2
                assert [server.engine.bias for server in servers] == [version + 1.0] * 2


async def test_a_load_waits_until_the_received_version_is_prepared() -> None:
    async with serving(1) as servers, _run(servers) as run:
        prepared: list[float] = []

        def prepare(received: Any) -> None:
            time.sleep(0.2)
            assert servers[0].engine.bias != float(received["bias"][0])  # not loaded yet
            prepared.append(float(received["bias"][0]))

        servers[0].engine.on_received = prepare
        for version in (0, 1):
            digest = await run.publish(version)
            assert run.served == [(version, digest)]
        assert prepared == [1.0, 2.0]
        assert servers[0].engine.members[0].phases_ms["prepare"] >= 200


async def test_what_a_worker_prepared_ends_before_the_memory_of_the_version() -> None:
    async with serving(1) as servers, _run(servers) as run:
        engine, prepared = servers[0].engine, dict[str, Any]()
        engine.on_received, engine.on_dropped = prepared.update, prepared.clear
        await run.publish(0)
        assert prepared
        (member,) = engine.members
        await asyncio.to_thread(member.close)
        assert not prepared


async def test_a_version_that_could_not_be_prepared_is_refused_with_the_reason() -> None:
    async with serving(2) as servers, _run(servers) as run:
        await run.publish(0)

        def fail(received: Any) -> None:
            raise ValueError("the layout is strange")

        servers[0].engine.on_received = fail
        digest = await run.publish(1)
        await until(lambda: "the layout is strange" in str(run.events), poll_s=0.01)  # type: ignore[attr-defined]
        assert run.served == [(1, digest)]
        assert servers[0].engine.bias == 1.0


async def test_a_response_has_only_tokens_of_versions_that_its_server_served() -> None:
    async with serving(1) as servers, _run(servers) as run:
        await run.publish(0)
        task = asyncio.create_task(run.engine.generate(request("r", (1, 2), max_tokens=6)))
        has_made = made(run.engine, 3)
        for _ in range(3):
            servers[0].engine.steps.release()
        # Tokens that the server has sampled, but that have not arrived, are sampled again.
        await until(has_made, poll_s=0.005)
        await run.publish(1)
        for _ in range(8):
            servers[0].engine.steps.release()
        result = await task
        assert [version for version, _ in result.version_runs] == [0, 1]
        versions = [v for version, count in result.version_runs for v in [version] * count]
        assert list(result.logprobs) == [-(version + 1.0) for version in versions]


async def test_a_server_that_restarts_receives_the_version_again() -> None:
    async with serving(2) as servers, _run(servers) as run:
        digest = await run.publish(0)
        await servers[0].restart()
        await until(lambda: servers[0].engine.bias == 1.0, poll_s=0.01)
        await until(lambda: run.served == [(0, digest)] * 2, poll_s=0.01)
        digest = await run.publish(1)
        assert run.served == [(1, digest)] * 2


async def test_the_only_server_receives_the_version_again() -> None:
    async with serving(1) as servers, _run(servers) as run:
        digest = await run.publish(0)
        await servers[0].restart()
        await until(lambda: run.served == [(0, digest)], poll_s=0.01)


async def test_a_version_that_no_server_received_waits_for_the_first_one() -> None:
    async with serving(1) as servers, _run(servers) as run:
        await run.publish(0)
        await servers[0].stop()
        await until(lambda: not run.engine.backend.fleet.attached, poll_s=0.01)
        for name, tensor in tensors(7.0).items():
            run.cluster.weights[name].copy_(tensor)
        digest = await run.cluster.send(1, run.epoch)
        await run.cluster.receivers[0].adopt(1, digest)
        await servers[0].start()
        await until(lambda: run.served == [(1, digest)], poll_s=0.01)
        assert servers[0].engine.bias == 7.0


async def test_a_server_that_comes_late_joins_the_group() -> None:
    async with serving(2) as servers:
        await servers[1].stop()
        async with attached_engine(servers, [], number=1) as engine:
            run = Run(engine)
            await run.form()
            digest = await run.publish(0)
            assert run.served == [(0, digest)]
            await servers[1].start()
            await until(lambda: run.served == [(0, digest)] * 2, poll_s=0.01)
            digest = await run.publish(1)
            assert run.served == [(1, digest)] * 2
            await run.abort()


async def test_a_transfer_with_a_server_that_dies_fails_and_the_next_epoch_is_without_it() -> None:
    async with serving(2) as servers, _run(servers) as run:
        await run.publish(0)
        for member in servers[0].engine.members:
            member.close()
        with pytest.raises((ServiceError, RuntimeError)):
            await run.publish(1)
        await run.abort()
        await servers[0].stop()
        await run.form()
        digest = await run.publish(1)
        assert run.served == [(1, digest)]
        assert servers[1].engine.bias == 2.0


async def test_a_transfer_that_workers_report_as_failed_takes_no_server_out_of_service(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with serving(2) as servers, _run(servers) as run:
        digest = await run.publish(0)
        sessions = {server.session for server in run.engine.backend.fleet.serving}

        def fail(*arguments: Any) -> Any:
            raise RuntimeError("the trainer has ended")

        with monkeypatch.context() as context:
            context.setattr(ShadowReceiver, "receive", fail)
            with pytest.raises(ServiceError):
                await run.publish(1)
        assert run.served == [(0, digest)] * 2
        assert not any("Lost" in event for event in run.events)  # type: ignore[attr-defined]
        await run.abort()
        await run.form()
        digest = await run.publish(1)
        assert run.served == [(1, digest)] * 2
        assert {server.session for server in run.engine.backend.fleet.serving} == sessions


async def test_a_trainer_that_freezes_in_a_transfer_takes_no_server_out_of_service(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with serving(2) as servers, _run(servers, timeout_s=1.0) as run:
        digest = await run.publish(0)
        go_on = threading.Event()
        monkeypatch.setattr(source_module, "_send", lambda *_: go_on.wait(10.0))
        with pytest.raises(ServiceError):
            await run.publish(1)
        await asyncio.sleep(1.5)  # longer than the workers' reports
        go_on.set()
        assert run.served == [(0, digest)] * 2
        assert not any("Lost" in event for event in run.events)  # type: ignore[attr-defined]


async def test_workers_that_cannot_join_are_named_and_the_others_receive() -> None:
    async with serving(2) as servers, _run(servers) as run:
        servers[0].engine.num_workers = 0
        servers[0].engine._join = _refuse  # type: ignore[method-assign]
        digest = await run.publish(0)
        assert run.served == [(0, digest)]
        assert any("has no such method" in event for event in run.events)  # type: ignore[attr-defined]


def _refuse(middleware: dict[str, str]) -> list[dict[str, Any]]:
    raise RuntimeError("the extension has no such method")


@asynccontextmanager
async def _session(engine: FleetEngine, source: Trainer) -> AsyncIterator[WeightSession]:
    """Yields a controller's session with a trainer and a rollout that it calls over gRPC."""
    store = RendezvousStore()
    store.open("run_1")
    add = membership_pb2_grpc.add_RendezvousServiceServicer_to_server
    async with AsyncExitStack() as stack:

        async def served(register: Callable[[Any], None]) -> str:
            return f"127.0.0.1:{await stack.enter_async_context(serve('127.0.0.1:0', register))}"

        address = await served(lambda server: add(RendezvousServicer(store), server))
        channel = await stack.enter_async_context(open_channel(address, "controller"))
        meetings, loop = (
            membership_pb2_grpc.RendezvousServiceStub(channel),
            asyncio.get_running_loop(),
        )
        workers = []
        for name, side in (
            ("trainer", {"source": source}),
            ("rollout-0", {"sink": FleetSink(engine)}),
        ):
            member = WeightMember(
                **side,
                device=torch.device("cpu"),
                host="127.0.0.1",
                rendezvous=lambda scope: Rendezvous(meetings, loop, scope),
            )
            workers.append(
                Worker(
                    run_id="run_1",
                    worker_id=name,
                    incarnation=name,
                    role=name.partition("-")[0],
                    address=await served(partial(serve_member, member)),
                    host_id="host",
                    last_heartbeat=0.0,
                )
            )
        spec = WeightSyncSpec(mode="servers", transfer_timeout_s=5.0, answer_timeout_s=5.0)
        session = WeightSession(spec, "run_1")
        await session.open(workers[0], workers[1:])
        try:
            yield session
        finally:
            await session.close()


async def test_a_session_of_the_controller_publishes_again_without_a_server_that_died() -> None:
    async with serving(2) as servers, attached_engine(servers, []) as engine:
        source = Trainer(specs=SPECS)
        async with _session(engine, source) as session:
            for version in range(3):
                for name, tensor in tensors(version + 1.0).items():
                    source.weights[name].copy_(tensor)
                if version == 2:
                    for member in servers[0].engine.members:
                        member.close()
                report = await session.publish(partial(int, version))
                assert (report.version, report.lost) == (version, ())
                serving_now = engine.backend.fleet.serving
                assert (version, report.digest) in [(s.version, s.digest) for s in serving_now]
            # The server itself lives, attaches again, and receives the version.
            await until(lambda: len(engine.backend.fleet.serving) == 2, poll_s=0.01)
            assert [server.engine.bias for server in servers] == [3.0, 3.0]
