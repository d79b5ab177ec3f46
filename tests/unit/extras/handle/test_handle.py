"""Tests of weight transfers through an exported buffer that all members can open, on CPUs and GPUs."""

import asyncio
import json
import multiprocessing
import os
import socket
import stat
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from services.common.errors import DataLossError, FailedPreconditionError
from services.extras.handle import transport as handle
from services.weightsync import arena, shared_buffers
from services.weightsync.group import Channel
from tests.helpers.weight_members import Cluster

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    monkeypatch.setattr(handle, "_CHUNK_BYTES", 4096)  # the bucket size of the tests is two chunks
    monkeypatch.setattr(handle, "_FREE", {})


@pytest.mark.parametrize("num_sources", [1, 2])
@pytest.mark.parametrize("mode", ["shadow", "inplace", "cpu_async", "delta"])
async def test_every_mode_transfers_the_weights_exactly(mode, num_sources):
    cluster = Cluster(num_sources, mode, backend="handle")
    await cluster.form_group()
    for version in range(3):
        cluster.weights["embed"][version * 100, 3] = version
        await cluster.publish(version)
        assert cluster.serves_what_was_sent()
    assert not any(sink.is_paused for sink in cluster.sinks)


def _unexportable_arenas(monkeypatch):
    """Makes the export of arenas fail, so that weights are sent through the buffer."""

    def export(num_bytes, device):
        raise shared_buffers.SharedBufferError("no")

    monkeypatch.setattr(arena, "export_buffer", export)


@pytest.mark.parametrize("num_sources", [1, 2])
@pytest.mark.parametrize("mode", ["shadow", "delta"])
async def test_weights_in_memory_that_cannot_be_exported_take_the_buffer(
    mode, num_sources, monkeypatch
):
    _unexportable_arenas(monkeypatch)
    cluster = Cluster(num_sources, mode, backend="handle")
    await cluster.form_group()
    for version in range(3):
        cluster.weights["embed"][version * 100, 3] = version
        await cluster.publish(version)
        assert cluster.serves_what_was_sent()


async def test_foreign_writes_into_the_arena_are_detected(monkeypatch):
    cluster = Cluster(backend="handle")
    await cluster.form_group()
    await cluster.publish(0)
    cluster.weights["embed"].add_(1)
    await cluster.prepare(1)
    (buffer,) = cluster.senders[0]._sender._arena.buffers.values()
    buffer[77] ^= 1
    results = await cluster.transfer(1)
    assert all(isinstance(result, DataLossError) for result in results[1:])
    assert [sink.version for sink in cluster.sinks] == [0, 0]
    await cluster.form_group(epoch=2)
    await cluster.publish(2, epoch=2)
    assert cluster.serves_what_was_sent()


async def test_foreign_writes_into_the_buffer_are_detected(monkeypatch):
    _unexportable_arenas(monkeypatch)
    cluster = Cluster(backend="handle")
    await cluster.form_group()
    await cluster.publish(0)
    cluster.weights["embed"].add_(1)
    honest = handle.SharedBufferGroup._notify

    def overwritten(buffer, number, chunk):
        if buffer._is_source and len(chunk) == 4096 and number == 1:
            buffer._half(number, chunk)[77] ^= 1
        honest(buffer, number, chunk)

    monkeypatch.setattr(handle.SharedBufferGroup, "_notify", overwritten)
    await cluster.prepare(1)
    results = await cluster.transfer(1)
    assert all(isinstance(result, DataLossError) for result in results[1:])
    assert [sink.version for sink in cluster.sinks] == [0, 0]
    monkeypatch.undo()
    await cluster.form_group(epoch=2)
    await cluster.publish(1, epoch=2)
    assert cluster.serves_what_was_sent()


async def test_a_source_that_leaves_in_a_transfer_leaves_the_weights_as_they_were(monkeypatch):
    cluster = Cluster(backend="handle")
    await cluster.form_group()
    await cluster.publish(0)
    served = [sink.live["embed"].clone() for sink in cluster.sinks]
    cluster.weights["embed"].add_(1)
    honest, sender = Channel.broadcast, cluster.senders[0]
    channels = {*sender._epochs.group(1).channels.values()}

    def broadcast(channel, tensor):
        if channel in channels:
            sender._epochs.leave_group()
            raise RuntimeError("gone")
        return honest(channel, tensor)

    await cluster.prepare(1)
    monkeypatch.setattr(Channel, "broadcast", broadcast)
    results = await cluster.transfer(1)
    assert all(isinstance(result, Exception) for result in results)
    monkeypatch.undo()
    for sink, before in zip(cluster.sinks, served, strict=True):
        assert sink.version == 0
        assert torch.equal(sink.live["embed"], before)
    await cluster.form_group(epoch=2)
    await cluster.publish(1, epoch=2)
    assert cluster.serves_what_was_sent()


async def test_a_later_group_reuses_the_buffer_of_the_previous_one():
    cluster = Cluster(backend="handle")
    await cluster.form_group()
    await cluster.publish(0)
    (channel,) = cluster.senders[0]._epochs.group(1).channels.values()
    first = channel._backend._halves[0].data_ptr()
    del channel
    for member in cluster.members:
        await member.abort(1, "a test")
    await cluster.form_group(epoch=2)
    (channel,) = cluster.senders[0]._epochs.group(2).channels.values()
    assert channel._backend._halves[0].data_ptr() == first


async def test_a_receiver_that_is_faster_than_its_source_does_not_stop_it():
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in ends:
        end.settimeout(20)
    buffer = torch.zeros(8192, dtype=torch.uint8)
    source, receiver = (
        handle.SharedBufferGroup([end], buffer, is_source=is_source)
        for end, is_source in zip(ends, (True, False), strict=True)
    )
    arena = shared_buffers.export_buffer(1000 * 64, CPU)
    received = torch.zeros_like(arena.memory.random_())

    def transfer(group, tensor):
        works = [group.broadcast([bucket], None) for bucket in tensor.split(64)]
        for work in works:
            work.wait()

    send_message = source._send_message

    def slowly(message):
        send_message(message)
        time.sleep(0.0005)

    source._send_message = slowly
    await asyncio.gather(
        asyncio.to_thread(transfer, source, arena.memory),
        asyncio.to_thread(transfer, receiver, received),
    )
    assert torch.equal(received, arena.memory)


async def test_all_members_learn_that_one_cannot_open_the_buffer(monkeypatch):
    opened = []

    def open_file(*_):
        opened.append(1)
        raise OSError("no such process")

    monkeypatch.setattr(shared_buffers, "_open_file", open_file)
    cluster = Cluster(backend="handle")
    cluster.agree()
    seats = [(0, cluster.senders[0]), *enumerate(cluster.receivers)]
    errors = await asyncio.gather(
        *(
            member.form_group(
                1, receiver=number, num_receivers=2, backend="handle", scope="run/1", timeout_s=60
            )
            for number, member in seats
        ),
        return_exceptions=True,
    )
    assert len(opened) == 2
    for error in errors:
        assert isinstance(error, FailedPreconditionError)
        assert "no such process" in error.message


async def test_all_members_learn_that_the_source_cannot_export_memory(monkeypatch):
    def no_file(*_):
        raise OSError("no memory")

    monkeypatch.setattr(shared_buffers, "_export_file", no_file)
    cluster = Cluster(backend="handle")
    with pytest.raises(FailedPreconditionError, match="no memory"):
        await cluster.form_group()


def test_an_exported_buffer_is_the_same_memory_in_another_process():
    buffer = shared_buffers.export_buffer(1 << 16, CPU)
    buffer.memory[5] = 7
    context = multiprocessing.get_context("fork")
    process = context.Process(target=_write, args=(buffer.handle,))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert buffer.memory[6] == 8


def _write(handle: str) -> None:
    memory = shared_buffers.open_buffer(handle, CPU)
    assert memory[5] == 7
    memory[6] = 8


def test_only_exported_buffers_can_be_opened():
    buffer = shared_buffers.export_buffer(1 << 12, CPU)
    honest = json.loads(buffer.handle)
    other = os.memfd_create("other")
    try:
        for change in (
            {"file": other},
            {"file": other, "name": "other"},
            {"process": os.getppid()},
            {"device": "cuda:a"},
            {"num_bytes": None},
        ):
            with pytest.raises(shared_buffers.SharedBufferError):
                shared_buffers.open_buffer(json.dumps(honest | change), CPU)
    finally:
        os.close(other)
    with pytest.raises(shared_buffers.SharedBufferError):
        shared_buffers.open_buffer("no JSON", CPU)


async def test_silent_connections_are_dropped_and_the_group_forms(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    strangers: list[socket.socket] = []
    accepted = handle._accepted

    def accepted_among_strangers(met, count, timeout_s):
        (path,) = tmp_path.glob("weights-*/socket")
        for _ in range(20):
            stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            stranger.connect(str(path))
            strangers.append(stranger)
        strangers[0].send(b"not the secret")
        return accepted(met, count, timeout_s)

    monkeypatch.setattr(handle, "_accepted", accepted_among_strangers)
    cluster = Cluster(backend="handle")
    async with asyncio.timeout(50):
        await cluster.form_group()
    await cluster.publish(0)
    assert cluster.serves_what_was_sent()
    assert len(strangers) == 20
    for stranger in strangers:
        stranger.settimeout(20)
        with suppress(ConnectionError):
            assert stranger.recv(1) == b""
        stranger.close()


def test_the_line_is_a_file_of_this_user_that_goes_again(tmp_path):
    stored = {}

    class Store:
        def set(self, key, value):
            stored[key] = value

    folder = tmp_path / ("a" * 90)  # longer than the address of a Unix socket may be
    with handle._exported(Store(), CPU, folder) as met:
        assert not met.why
        path = Path(json.loads(stored["buffer"])[1])
        assert path.is_relative_to(folder)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert list(folder.iterdir()) == []


def test_the_line_is_closed_to_other_users(monkeypatch, tmp_path):
    class Store:
        def set(self, key, value):
            self.stored = value

    store = Store()
    with handle._exported(store, CPU, tmp_path) as met:
        _, path, secret = json.loads(store.stored)
        monkeypatch.setattr(handle.os, "geteuid", lambda: os.getuid() + 1)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
            other.connect(path)
            other.send(bytes.fromhex(secret))
            with pytest.raises(TimeoutError):
                handle._accepted(met, 1, 0.3)


def test_receivers_that_do_not_come_are_waited_for_until_the_deadline(tmp_path):
    class Store:
        def set(self, key, value):
            """Does nothing."""

    with handle._exported(Store(), CPU, tmp_path) as met, pytest.raises(TimeoutError):
        handle._accepted(met, 1, 0.1)
