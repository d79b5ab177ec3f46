"""Copies of a server's memory on the other hosts of its engine."""

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Callable
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from services.extras.external_engine.shared_tensors import open_shared
from services.extras.fleets import hosts as hosts_module
from services.extras.fleets.answers import RefusedError
from services.extras.fleets.hosts import (
    EngineHosts,
    HostMemory,
    accepted,
    description_for,
    listener_for_hosts,
)
from services.extras.fleets.staging import StagedWeights, is_received_memory
from services.weightsync.weight_plan import TensorSpec
from tests.helpers.engines import until

_HOSTS = 3
_SPECS = [TensorSpec("a", (3000,), "float32"), TensorSpec("b", (500, 10), "float32")]


class Engine:
    """Engine whose further hosts are threads of this process."""

    def __init__(self, number: int = _HOSTS) -> None:
        self.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(nnodes_within_dp=number))
        self.joining: Callable[[str, int], Any] = HostMemory
        self.memories: list[Any] = []

    async def collective_rpc(self, method: str, args: tuple[str]) -> list[None]:
        assert method == hosts_module.JOIN_METHOD
        number = self.vllm_config.parallel_config.nnodes_within_dp
        self.memories = [self.joining(args[0], node) for node in range(1, number)]
        return [None] * number


@pytest.fixture
async def engine() -> Engine:
    return Engine()


@pytest.fixture
async def hosts(engine: Engine) -> AsyncIterator[EngineHosts]:
    hosts = EngineHosts(engine, address=lambda: "127.0.0.1")
    yield hosts
    hosts.close()


def _staged(value: float) -> StagedWeights:
    """Returns a version all of whose bytes have arrived."""
    staged = StagedWeights(1, _SPECS, 8192)
    staged.memory.buffer.view(torch.float32).fill_(value)
    for index in range(staged.num_buckets):
        staged.begin(index)
        staged.finish(index)
    return staged


async def _copied(hosts: EngineHosts, staged: StagedWeights) -> str:
    await hosts.prepare(staged.memory)
    for index in range(staged.num_buckets):
        await hosts.copy(staged.memory, *staged.bounds(index))
    return hosts.described(staged.description())


async def test_every_host_opens_a_copy_of_its_own(hosts: EngineHosts) -> None:
    staged = [_staged(1.0), _staged(2.0)]
    for version, value in zip(staged, (1.0, 2.0), strict=True):
        described = await _copied(hosts, version)
        paths = {json.loads(description_for(described, node))["path"] for node in range(_HOSTS)}
        assert len(paths) == _HOSTS
        for node in range(_HOSTS):
            tensors = open_shared(description_for(described, node))
            assert {name: tensor.shape for name, tensor in tensors.items()} == {
                spec.name: torch.Size(spec.shape) for spec in _SPECS
            }
            assert all(bool((tensor == value).all()) for tensor in tensors.values())
    for version in staged:
        version.memory.close()


async def test_large_bytes_travel_in_pieces(
    hosts: EngineHosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts_module, "_PIECE_BYTES", 5000)
    staged = _staged(3.0)
    await hosts.prepare(staged.memory)
    await hosts.copy(staged.memory, 0, staged.memory.buffer.nbytes)
    tensors = open_shared(description_for(hosts.described(staged.description()), 2))
    assert all(bool((tensor == 3.0).all()) for tensor in tensors.values())
    staged.memory.close()


async def test_a_copy_ends_with_the_memory_of_the_server(
    hosts: EngineHosts, engine: Engine
) -> None:
    staged = _staged(1.0)
    await _copied(hosts, staged)
    assert [len(memory._copies) for memory in engine.memories] == [1, 1]
    staged.memory.close()
    await until(lambda: not any(memory._copies for memory in engine.memories))


async def test_the_end_of_a_copy_precedes_the_next_memory_at_its_path(
    hosts: EngineHosts, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    late_threads: list[threading.Thread] = []
    earlier = _staged(1.0)
    path = earlier.memory.path
    await _copied(hosts, earlier)
    with monkeypatch.context() as patches:
        patches.setattr(threading.Thread, "start", lambda thread: late_threads.append(thread))
        earlier.memory.close()
    version = _staged(2.0)
    assert version.memory.path == path  # the system uses a number again
    await hosts.prepare(version.memory)
    await hosts.copy(version.memory, *version.bounds(0))
    for thread in late_threads:
        thread.start()
        thread.join(timeout=10)
    for index in range(1, version.num_buckets):
        await hosts.copy(version.memory, *version.bounds(index))
    described = hosts.described(version.description())
    for node in range(_HOSTS):
        tensors = open_shared(description_for(described, node))
        assert all(bool((tensor == 2.0).all()) for tensor in tensors.values())
    version.memory.close()


async def test_an_engine_of_one_host_needs_no_copies() -> None:
    hosts = EngineHosts(Engine(1))
    staged = _staged(1.0)
    assert await _copied(hosts, staged) == staged.description()
    assert description_for(staged.description(), 0) == staged.description()
    staged.memory.close()


def test_only_memory_of_this_host_is_received_memory(tmp_path: Path) -> None:
    staged = _staged(1.0)
    path = staged.memory.path
    assert is_received_memory(path)
    staged.memory.close()
    assert not is_received_memory(path)
    file = tmp_path / "file"
    file.touch()
    with file.open() as other:  # on another host, the same number may be any file
        assert not is_received_memory(f"/proc/self/fd/{other.fileno()}")


async def test_bytes_that_arrive_changed_are_refused(
    hosts: EngineHosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    staged = _staged(1.0)
    await hosts.prepare(staged.memory)
    checksum_of = hosts_module.checksum_of
    monkeypatch.setattr(
        hosts_module,
        "checksum_of",
        lambda piece: (
            [0, 0] if threading.current_thread().name == "engine-host" else checksum_of(piece)
        ),
    )
    with pytest.raises(RefusedError) as refused:
        await hosts.copy(staged.memory, *staged.bounds(0))
    assert refused.value.status == 500
    assert "another checksum" in refused.value.message
    staged.memory.close()


async def test_a_version_whose_hosts_connected_again_is_announced_again(
    hosts: EngineHosts,
) -> None:
    staged, later = _staged(1.0), _staged(2.0)
    await _copied(hosts, staged)
    hosts.close()
    with pytest.raises(RefusedError) as refused:
        hosts.described(staged.description())
    assert refused.value.status == 409
    # The other version's announcement connects the hosts again.
    described = await _copied(hosts, later)
    with pytest.raises(RefusedError) as refused:
        await hosts.copy(staged.memory, *staged.bounds(1))
    assert refused.value.status == 409
    tensors = open_shared(description_for(described, 1))
    assert all(bool((tensor == 2.0).all()) for tensor in tensors.values())
    for version in (staged, later):
        version.memory.close()


async def test_a_host_that_has_no_room_names_itself_and_the_reason(
    hosts: EngineHosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    staged = _staged(1.0)

    def full(num_bytes: int) -> None:
        raise OSError("Cannot allocate memory")

    monkeypatch.setattr(hosts_module, "SharedMemory", full)
    with pytest.raises(RefusedError, match=r"host [12] of the engine.*Cannot allocate"):
        await hosts.prepare(staged.memory)
    staged.memory.close()


async def test_hosts_that_do_not_connect_are_refused_at_the_deadline(
    hosts: EngineHosts, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts_module, "_JOIN_TIMEOUT_S", 0.2)
    engine.joining = lambda described, node: None
    staged = _staged(1.0)
    with pytest.raises(RefusedError) as refused:
        await hosts.prepare(staged.memory)
    assert refused.value.status == 422
    monkeypatch.undo()
    engine.joining = HostMemory
    await _copied(hosts, staged)
    staged.memory.close()


async def test_a_host_that_connects_and_says_nothing_is_left_after_its_deadline(
    hosts: EngineHosts, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts_module, "_JOIN_TIMEOUT_S", 1.0)
    monkeypatch.setattr(hosts_module, "_INTRODUCTION_S", 0.2)
    silent_lines: Queue[Connection] = Queue()
    engine.joining = lambda described, node: threading.Thread(
        target=lambda: silent_lines.put(_silent(described)), daemon=True
    ).start()
    staged = _staged(1.0)
    with pytest.raises(RefusedError) as refused:
        await hosts.prepare(staged.memory)
    assert refused.value.status == 422
    line = await asyncio.to_thread(silent_lines.get, timeout=5)
    assert await asyncio.to_thread(line.poll, 5), "nobody waits for it any more"
    with pytest.raises((EOFError, ConnectionError)):
        line.recv_bytes()
    line.close()
    engine.joining = HostMemory
    await _copied(hosts, staged)
    staged.memory.close()


def _silent(described: str) -> Connection:
    """Connects with the secret."""
    server = json.loads(described)
    return Client(
        (server["host"], server["port"]),
        family="AF_INET",
        authkey=bytes.fromhex(server["secret"]),
    )


async def test_a_host_that_stops_to_answer_ends_the_transfer_at_its_deadline(
    hosts: EngineHosts, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    staged = _staged(1.0)
    await hosts.prepare(staged.memory)
    released = threading.Event()
    checksum_of = hosts_module.checksum_of

    def frozen(piece: torch.Tensor) -> list[int]:
        if threading.current_thread().name == "engine-host":
            released.wait(10)
        return checksum_of(piece)

    monkeypatch.setattr(hosts_module, "checksum_of", frozen)
    monkeypatch.setattr(hosts_module, "_LEAST_S", 0.2)
    with pytest.raises(RefusedError, match="within 0 s"):
        await hosts.copy(staged.memory, *staged.bounds(0))
    released.set()
    monkeypatch.undo()
    await _copied(hosts, staged)  # over new connections
    staged.memory.close()


async def test_an_address_that_this_host_does_not_have_is_refused(engine: Engine) -> None:
    hosts = EngineHosts(engine, address=lambda: "192.0.2.1")
    staged = _staged(1.0)
    with pytest.raises(RefusedError, match="VLLM_HOST_IP"):
        await hosts.prepare(staged.memory)
    staged.memory.close()


def test_strangers_do_not_keep_workers_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts_module, "_INTRODUCTION_S", 0.2)
    listener = listener_for_hosts(lambda: "127.0.0.1")
    host, port = listener.address
    silent = socket.create_connection((str(host), int(port)))
    with pytest.raises((OSError, EOFError)):
        accepted(listener, b"secret")
    wrong = threading.Thread(target=_connect, args=(listener.address, b"other"), daemon=True)
    wrong.start()
    with pytest.raises(AuthenticationError):
        accepted(listener, b"secret")
    right = threading.Thread(target=_connect, args=(listener.address, b"secret"), daemon=True)
    right.start()
    line, introduction = accepted(listener, b"secret")
    assert introduction == {"node": 1}
    line.close()
    for thread in (wrong, right):
        thread.join(5)
    silent.close()
    listener.close()


def _connect(address: Any, secret: bytes) -> None:
    try:
        with Client(address, authkey=secret) as line:
            line.send_bytes(json.dumps({"node": 1}).encode())
    except (AuthenticationError, EOFError, OSError):
        return


async def test_concurrent_versions_arrive_unmixed(hosts: EngineHosts) -> None:
    versions = [_staged(float(value)) for value in range(4)]
    described = await asyncio.gather(*[_copied(hosts, version) for version in versions])
    for value, text in enumerate(described):
        for node in range(_HOSTS):
            tensors = open_shared(description_for(text, node))
            assert all(bool((tensor == value).all()) for tensor in tensors.values())
    for version in versions:
        version.memory.close()
