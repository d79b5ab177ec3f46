"""Tests of the transport that leaves weight versions in a store."""

import asyncio
import threading

import pytest
import torch

from services.common.errors import DataLossError, ServiceError, UnavailableError
from services.extras.stored_weights import channel
from services.weightsync.transfer import TransferRequest
from tests.helpers.stored_members import MemoryFolder, StoredCluster


@pytest.fixture
def store(monkeypatch):
    folder = MemoryFolder()
    monkeypatch.setattr(channel, "open_versions", lambda url: folder)
    return folder


def change(cluster, version):
    cluster.weights["embed"][version * 7, 3] = version + 0.5


@pytest.mark.parametrize("num_sources", [1, 2])
@pytest.mark.parametrize("mode", ["shadow", "delta", "cpu_async"])
async def test_receivers_serve_what_was_written(store, mode, num_sources):
    cluster = StoredCluster(num_sources, mode)
    await cluster.form_group()
    for version in range(3):
        change(cluster, version)
        base = version - 1 if mode == "delta" else -1
        await cluster.publish(version, base_version=base)
        assert cluster.serves_what_was_sent()
    assert cluster.ready == [0, 0, 1, 1, 2, 2]


async def test_each_receiver_loads_when_it_can(store):
    cluster = StoredCluster()
    await cluster.form_group()
    slow, fast = cluster.receivers
    first, _first_digest = await cluster.write(0)
    change(cluster, 1)
    second, second_digest = await cluster.write(1, kept_names=[first["stored"]])
    await cluster.load(fast, second, second_digest)
    live = cluster.sinks[0].live["embed"].clone()
    await slow.prepare(1, 0, cluster.plan_hash)
    assert torch.equal(cluster.sinks[0].live["embed"], live)
    await cluster.load(slow, second, second_digest)
    assert cluster.serves_what_was_sent()


async def test_changes_are_small_and_need_their_base(store):
    cluster = StoredCluster(mode="delta", bucket_bytes=1 << 20)
    await cluster.form_group()
    first = await cluster.write(0)
    for member in cluster.receivers:
        await cluster.load(member, *first)
    num_bytes = sum(map(len, store.objects.values()))
    change(cluster, 1)
    request, digest = await cluster.write(1, base_version=0)
    assert sum(map(len, store.objects.values())) < num_bytes / 5
    await cluster.load(cluster.receivers[0], request, digest)
    # The other one has left its group, and so lost what it held.
    await cluster.form_group(2, [cluster.receivers[1]])
    with pytest.raises(DataLossError, match="expected a delta from version -1"):
        await cluster.load(cluster.receivers[1], request, digest)


@pytest.mark.parametrize("is_torn", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("num_sources", [1, 2])
async def test_a_version_whose_writing_was_interrupted_anywhere_is_never_served(
    store, num_sources, is_torn
):
    """Ends the store at each operation, before it has an effect or just after; then all starts again."""
    cluster = StoredCluster(num_sources, bucket_bytes=8192)
    await cluster.form_group()
    request, digest = await cluster.write(0)
    for member in cluster.receivers:
        await cluster.load(member, request, digest)
    version, epoch, num_interrupted = 0, 1, 0
    store.is_torn = is_torn
    while True:
        version += 1
        change(cluster, version % 40)
        served = [{name: t.clone() for name, t in sink.live.items()} for sink in cluster.sinks]
        store.dies_at = store.num_operations + 1 + num_interrupted
        try:
            request, digest = await cluster.write(version, kept_names=[request["stored"]])
        except ServiceError as error:
            assert "the store is gone" in str(error)
        else:
            break
        num_interrupted += 1
        store.revive()
        for sink, live in zip(cluster.sinks, served, strict=True):
            assert all(torch.equal(sink.live[name], tensor) for name, tensor in live.items())
        epoch += 1
        await cluster.form_group(epoch, cluster.senders)
        store.is_torn, torn = False, store.is_torn
        request, digest = await cluster.write(version)
        store.is_torn = torn
        for member in cluster.receivers:
            await cluster.load(member, request, digest)
        assert cluster.serves_what_was_sent()
        # Only the version that was just written is left, whatever the interrupted one had written.
        assert {name.split("/")[0] for name in store.objects} == {request["stored"]}
    assert num_interrupted >= 6


async def test_a_manifest_is_written_after_all_parts(store):
    cluster = StoredCluster(bucket_bytes=8192)
    await cluster.form_group()
    request, _ = await cluster.write(0)
    names = [name.split("/")[-1] for name in store.objects if name.startswith(request["stored"])]
    assert names[-1] == "manifest.json"
    assert len(names) == 5  # three buckets, and what the source states about them


async def test_a_read_that_was_interrupted_anywhere_changes_nothing_that_is_served(store):
    cluster = StoredCluster(bucket_bytes=8192)
    await cluster.form_group()
    request, digest = await cluster.write(0)
    member, sink = cluster.receivers[0], cluster.sinks[0]
    await cluster.load(member, request, digest)
    change(cluster, 1)
    request, digest = await cluster.write(1)
    served = {name: tensor.clone() for name, tensor in sink.live.items()}
    num_reads = epoch = 1
    while True:
        store.dies_at = store.num_operations + num_reads
        try:
            await cluster.load(member, request, digest)
        except UnavailableError:
            assert sink.version == 0
            assert all(torch.equal(sink.live[name], tensor) for name, tensor in served.items())
        else:
            break
        store.revive()
        num_reads, epoch = num_reads + 1, epoch + 1
        await cluster.form_group(epoch, [member])
    assert num_reads > 4
    assert torch.equal(sink.live["embed"], cluster.weights["embed"])


@pytest.mark.parametrize("damage", ["flipped", "shorter", "longer", "missing"])
async def test_a_damaged_object_is_never_served(store, damage):
    cluster = StoredCluster(bucket_bytes=8192)
    await cluster.form_group()
    member, sink = cluster.receivers[0], cluster.sinks[0]
    request, digest = await cluster.write(0)
    intact = dict(store.objects)
    for epoch, (name, content) in enumerate(sorted(intact.items()), 2):
        flipped = bytes([content[0] ^ 1]) + content[1:]
        damaged = {"flipped": flipped, "shorter": content[:-1], "longer": content + b"x"}
        store.objects = {**intact, name: damaged[damage]} if damage in damaged else dict(intact)
        if damage == "missing":
            del store.objects[name]
        with pytest.raises(DataLossError, match="rejected"):
            await cluster.load(member, request, digest)
        assert sink.version == -1
        await cluster.form_group(epoch, [member])
    store.objects = intact
    await cluster.load(member, request, digest)
    assert sink.version == 0


async def test_another_run_s_objects_are_left_alone(tmp_path):
    other = tmp_path / "run_2" / "v0-e1-1" / "source-0"
    other.mkdir(parents=True)
    (other / "part-00000").write_bytes(b"theirs")
    cluster = StoredCluster(url=str(tmp_path / "run_1"))
    await cluster.form_group()
    for version in range(3):
        change(cluster, version)
        await cluster.publish(version)
    assert cluster.serves_what_was_sent()
    assert len(list((tmp_path / "run_1").iterdir())) == 1
    assert (other / "part-00000").read_bytes() == b"theirs"


async def test_what_a_run_has_besides_in_the_same_folder_is_left_alone(tmp_path):
    run = tmp_path / "run_1"
    others = ["checkpoints/step-00000010/manifest.json", "logs/trainer-0.log", "vocab/source-0/a"]
    for name in others:
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_bytes(b"theirs")
    foreign_names = [
        "probe_1f",
        ".writing-file_1f",
        "v1-e1-1/source-0/.writing-file_2e",
        "v1-e1-1/source-0/part",
    ]
    for name in foreign_names:
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_bytes(b"left by a killed process")
    cluster = StoredCluster(url=str(run))
    await cluster.form_group()
    await cluster.publish(0)
    await cluster.senders[0].retain(1, [], timeout_s=10)
    files = {path.relative_to(run).as_posix() for path in run.rglob("*") if path.is_file()}
    assert files == {*others}


async def test_a_folder_that_cannot_be_written_is_reported_when_the_store_is_opened(tmp_path):
    (tmp_path / "file").write_text("")
    cluster = StoredCluster(url=str(tmp_path / "file" / "run_1"))
    with pytest.raises(UnavailableError, match="Not a directory"):
        await cluster.form_group()


async def test_an_abort_ends_a_write_that_hangs(store):
    cluster = StoredCluster()
    await cluster.form_group()
    begun, release = threading.Event(), threading.Event()
    honest = store.put

    def hang(name, content):
        begun.set()
        release.wait(30)
        honest(name, content)

    store.put = hang
    writing = asyncio.create_task(cluster.write(0))
    await asyncio.to_thread(begun.wait, 10)
    await cluster.senders[0].abort(1, "a test")
    with pytest.raises(ServiceError, match="aborted"):
        await writing
    release.set()
    assert not any(name.endswith("manifest.json") for name in store.objects)


async def test_a_transfer_that_fails_late_leaves_a_newer_group_alone(store, monkeypatch):
    cluster = StoredCluster()
    await cluster.form_group()
    (sender,) = cluster.senders
    began, ends, loop = asyncio.Event(), threading.Event(), asyncio.get_running_loop()

    def exchange(*_):
        loop.call_soon_threadsafe(began.set)
        ends.wait(30)
        raise UnavailableError("the store is gone")

    monkeypatch.setattr(sender, "_exchange", exchange)
    await sender.prepare(1, 0, cluster.plan_hash)
    request = TransferRequest(epoch=1, version=0, timeout_s=30, base_version=-1, stored="v0")
    transfer = asyncio.create_task(sender.transfer(request))
    await began.wait()
    await cluster.form_group(2, [sender])
    ends.set()
    with pytest.raises(UnavailableError, match="the store is gone"):
        await transfer
    await sender.prepare(2, 0, cluster.plan_hash)
