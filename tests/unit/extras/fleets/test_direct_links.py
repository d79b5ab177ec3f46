"""Trainer's end and server's end of weights for servers: deadlines, old groups, and members that end."""

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore, PrefixStore

from services.extras.fleets import hosts as hosts_module
from services.extras.fleets.answers import RefusedError
from services.extras.fleets.direct import links as links_module
from services.extras.fleets.direct import source as source_module
from services.extras.fleets.direct.links import WorkerLinks
from services.extras.fleets.direct.messages import DONE, GET, PING, RECEIVE, Message
from services.extras.fleets.direct.relay import GroupRelay
from services.extras.fleets.direct.source import FORMED_KEY, ServersSource
from services.weightsync.group import RankAssignment
from tests.helpers.engines import until
from tests.unit.extras.fleets.servers import FakeEngine


class EndlessBackend:
    """Process group whose collectives after the probe end only with an abort, and without an error."""

    def __init__(self) -> None:
        self.aborted = threading.Event()
        self._num_broadcasts = 0

    def broadcast(self, tensors: Any, options: Any) -> "EndlessBackend":
        self._num_broadcasts += 1
        return self

    def wait(self) -> bool:
        if self._num_broadcasts > 1:
            self.aborted.wait()
        return True

    def abort(self) -> None:
        self.aborted.set()

    def _set_default_timeout(self, timeout: Any) -> None:
        """Ignores the deadline, as NCCL does."""


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> EndlessBackend:
    backend = EndlessBackend()
    monkeypatch.setattr(source_module, "load_callable", lambda path: lambda *_, **__: backend)
    return backend


@pytest.fixture
def source(tmp_path: Path) -> Iterator[ServersSource]:
    source = ServersSource(
        PrefixStore("weights", HashStore()),
        RankAssignment(sources=(0,), num_sources=1, rank=0, num_receivers=1),
        host="127.0.0.1",
        timeout_s=5.0,
        device=torch.device("cpu"),
        folder=tmp_path,
    )
    source._sent = [torch.zeros(4)]
    yield source
    source.abort()


def _repeating(source: ServersSource, timeout_s: float) -> threading.Thread:
    order = {"group": 0, "backend": "gloo", "workers": 1, "again": True, "timeout_s": timeout_s}
    thread = threading.Thread(target=source._follow, args=(order,), daemon=True)
    thread.start()
    return thread


def test_a_version_that_is_sent_again_to_a_server_that_died_ends_at_its_deadline(
    source: ServersSource, backend: EndlessBackend
) -> None:
    thread = _repeating(source, timeout_s=0.1)
    thread.join(5.0)
    assert not thread.is_alive()
    assert backend.aborted.is_set()
    assert b"did not take part" in source._store.get(FORMED_KEY.format(0))


def test_a_version_that_is_sent_again_ends_with_the_epoch(
    source: ServersSource, backend: EndlessBackend
) -> None:
    thread = _repeating(source, timeout_s=60.0)
    while not source._connecting:
        thread.join(0.01)
    source.abort()
    thread.join(5.0)
    assert not thread.is_alive()
    assert b"the epoch has ended" in source._store.get(FORMED_KEY.format(0))


async def _opened(engine: FakeEngine) -> WorkerLinks:
    links = WorkerLinks()
    await links.open(engine)
    return links


async def test_workers_on_several_hosts_connect_to_an_address_and_name_their_own_to_the_trainer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(links_module, "host_address", lambda: "127.0.0.1")
    engine = FakeEngine()
    engine.num_workers = 2
    engine.vllm_config.parallel_config.nnodes_within_dp = 2
    links = await _opened(engine)
    try:
        pings = [(number, {"kind": PING, "job": number}) for number in range(2)]
        answers: list[tuple[int, Message]] = []
        async with asyncio.timeout(10.0):
            answers += await links.exchange(pings, wait_s=5.0)
            while len(answers) < 2:
                answers += await links.exchange([], wait_s=5.0)
        assert sorted(number for number, _ in answers) == [0, 1]
        assert {member._host for member in engine.members} == {"127.0.0.1"}
    finally:
        links.close()
    await until(lambda: all(member._line.closed for member in engine.members))


async def test_a_worker_that_connects_and_says_nothing_keeps_no_other_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hosts_module, "_INTRODUCTION_S", 0.2)
    engine = FakeEngine()
    silent: list[socket.socket] = []
    join = engine.collective_rpc

    async def joined_after_a_silent_worker(method: str, *, args: tuple[str]) -> Any:
        end = socket.socket(socket.AF_UNIX)
        end.connect(json.loads(args[0])["address"])
        silent.append(end)
        return await join(method, args=args)

    monkeypatch.setattr(engine, "collective_rpc", joined_after_a_silent_worker)
    async with asyncio.timeout(10.0):
        links = await _opened(engine)
    links.close()
    silent[0].close()


async def test_a_member_that_ends_is_reported_at_once_after_its_last_message() -> None:
    engine = FakeEngine()
    links = await _opened(engine)
    try:
        # An exchange could already return the answer.
        links._lines[0].send_bytes(json.dumps({"kind": PING, "job": 3}).encode())
        async with asyncio.timeout(10.0):
            while links._received.empty():  # noqa: ASYNC110 -- a queue of the links
                await asyncio.sleep(0.01)
        engine.members[0].close()
        async with asyncio.timeout(2.0):
            assert await links.exchange([], wait_s=5.0) == [(0, {"kind": DONE, "job": 3})]
            with pytest.raises(RefusedError) as raised:
                await links.exchange([], wait_s=5.0)
        assert raised.value.status == 412
    finally:
        links.close()


async def test_a_thread_of_an_earlier_group_asks_no_store_any_more() -> None:
    engine = FakeEngine()
    links = await _opened(engine)
    (member,) = engine.members
    try:
        form = {"kind": "form", "plan": {}}
        await links.exchange([(0, {**form, "job": 1})], wait_s=5.0)
        store = member._store
        asking = asyncio.create_task(asyncio.to_thread(store.get, "source0/1", 30.0))
        ((_, question),) = await links.exchange([], wait_s=5.0)
        assert (question["kind"], question["job"]) == (GET, 1)
        ((_, failed),) = await links.exchange([(0, {**form, "job": 2})], wait_s=5.0)
        assert failed["job"] == 2
        async with asyncio.timeout(5.0):
            with pytest.raises(RuntimeError, match="another group"):
                await asking
        store.set("source0/0", b"old")
        with pytest.raises(RuntimeError, match="another group"):
            store.get("source0/1", 30.0)
        assert not await links.exchange([], wait_s=0.1)
        assert member._store is not store
    finally:
        links.close()


class SharedServer:
    """Server whose answers any of several requests may bring."""

    address, session = "http://server:1", "session"

    def __init__(self) -> None:
        self._answers: list[tuple[int, Message]] = []

    async def exchange(
        self, messages: list[tuple[int, Message]], *, wait_s: float
    ) -> list[tuple[int, Message]]:
        for worker, message in messages:
            if message["kind"] == PING:
                self._answers.append((worker, {"kind": DONE, "job": message["job"]}))
                await asyncio.sleep(0.2)  # another request is faster
                return []
        await asyncio.sleep(0.01)
        answers, self._answers = self._answers, []
        return answers


async def test_a_job_of_an_epoch_that_has_ended_takes_no_answer_from_the_next_epoch() -> None:
    server: Any = SharedServer()
    member = server, server.session, 1
    old, new = (GroupRelay(1, timeout_s=5.0) for _ in range(2))
    receiving = asyncio.create_task(old._run(member, {"kind": RECEIVE}, 30.0))
    await asyncio.sleep(0.05)
    (answer,) = await new._run(member, {"kind": PING}, 5.0)
    assert answer["kind"] == DONE
    assert not receiving.done()
    receiving.cancel()
