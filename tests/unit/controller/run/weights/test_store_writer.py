"""Tests of writing versions to a store that fails for a moment."""

import asyncio
from types import SimpleNamespace

import pytest

from services.common.errors import UnavailableError
from services.common.runspec.run import WeightSyncSpec
from services.controller.run.weights.shelf import Shelf
from services.controller.run.weights.store_channel import StoreChannel, StoreTrouble
from services.controller.run.weights.store_writer import StoreWriter
from services.extras.stored_weights import channel
from services.weightsync.transfer import TransferRequest
from tests.helpers.stored_members import MemoryFolder, StoredCluster


class FailingFolder(MemoryFolder):
    """A store that fails for one object.

    Attributes:
        failing: End of that object's name; empty if none fails.
    """

    failing = ""

    def put(self, name, content):
        if self.failing and name.endswith(self.failing):
            self.failing = ""
            raise UnavailableError("the store is gone")
        super().put(name, content)


class Client:
    """A source in this process, called as through its client."""

    def __init__(self, member):
        self._member = member
        self.retain = member.retain
        self.abort = member.abort

    async def form_group(self, epoch, *, receiver, num_receivers, **options):
        await self._member.form_group(epoch, receiver=-1, num_receivers=num_receivers, **options)

    async def transfer(self, epoch, version, **request):
        return await self._member.transfer(TransferRequest(epoch=epoch, version=version, **request))


class Members:
    """Fake of ``WeightMembers`` without probes."""

    def __init__(self, cluster):
        self.sources = {f"trainer/{n}": Client(m) for n, m in enumerate(cluster.senders)}
        self.plan = SimpleNamespace(num_bytes=1)

    async def call_all(self, calls):
        answers = await asyncio.gather(*calls.values(), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return dict(zip(calls, answers, strict=True))

    async def abort(self, epoch, reason, names):
        for name in names:
            await self.sources[name].abort(epoch, reason)
        return []


class FakeFollowers:
    """Fake of ``Followers``, whose rollouts read what a test says.

    Attributes:
        stopped: Copies whose readers were stopped.
    """

    def __init__(self):
        self.version = 0
        self.copies = set()
        self.held_versions = [0]
        self.stopped = []

    async def stop_readers(self, copy):
        self.stopped.append(copy)
        self.copies.discard(copy)

    def notify(self):
        pass


def writer_of(cluster, followers, *, keep):
    """Returns a writer, its shelf, and a function that prepares and writes a version."""
    cluster.agree()
    storage = {"directory": "/weights", "keep": keep}
    spec = WeightSyncSpec(backend="storage", mode="delta", storage=storage)
    epochs = iter(range(1, 100))
    members, shelf = Members(cluster), Shelf()
    writer = StoreWriter(
        members,
        shelf,
        StoreChannel(spec, "run_1", lambda: next(epochs)),
        followers,
        spec.storage,
        run_id="run_1",
        sends_changes=True,
    )

    async def write(version):
        async def prepare():
            plan, senders = cluster.plan_hash, zip(members.sources, cluster.senders, strict=True)
            return {name: await m.prepare(writer.epoch, version, plan) for name, m in senders}

        copies = await prepare()
        await writer.write(version, versions=copies.values(), prepare=prepare)

    return writer, shelf, write


class CountingFolder(MemoryFolder):
    """A store that notes the largest number of copies that it held at once."""

    most = 0

    def put(self, name, content):
        super().put(name, content)
        self.most = max(self.most, len({name.partition("/")[0] for name in self.objects}))


@pytest.mark.parametrize("keep", [2, 3, 4])
@pytest.mark.parametrize("reading", ["nothing", "the newest", "all", "damaged ones"])
async def test_the_store_never_holds_more_copies_than_allowed(monkeypatch, keep, reading):
    """Each version is written as changes for one rollout and whole for another."""
    store = CountingFolder()
    monkeypatch.setattr(channel, "open_versions", lambda url: store)
    cluster, followers = StoredCluster(1, "delta"), FakeFollowers()
    writer, shelf, write = writer_of(cluster, followers, keep=keep)
    await writer.form()
    followers.held_versions, followers.version = [-1], -1
    for version in range(8):
        cluster.weights["embed"][1, version % 4] += 1
        await write(version)
        assert shelf.find(version, -1) is not None
        followers.version, followers.held_versions = version, [version, -1]
        names = [copy.name for copy in shelf.copies]
        read = {"nothing": [], "the newest": names[-1:]}.get(reading, names)
        followers.copies = {*read}
        if reading == "damaged ones":
            shelf.drop(names[0])
            followers.copies = {names[0]}
    assert store.most == keep
    if reading == "all":
        assert followers.stopped


@pytest.mark.parametrize("failing", ["source-0/manifest.json", "source-1/part-00001"])
async def test_changes_that_were_not_completed_are_followed_by_a_whole_version(
    monkeypatch, failing
):
    """Sources that had sent their changes hold the new version, and cannot send them again."""
    store = FailingFolder()
    monkeypatch.setattr(channel, "open_versions", lambda url: store)
    tries = []

    async def pause(self):
        tries.append(self.cause)
        assert len(tries) < 3

    monkeypatch.setattr(StoreTrouble, "pause", pause)
    cluster = StoredCluster(2, "delta")
    followers = FakeFollowers()
    writer, shelf, write = writer_of(cluster, followers, keep=4)
    await writer.form()
    followers.held_versions = [-1]
    await write(0)
    followers.held_versions = [0]
    cluster.weights["embed"][1, 3] = 1.5
    store.failing = failing
    await write(1)
    assert tries == ["the store is gone"]
    assert not writer.trouble.cause
    assert [(c.version, c.base_version) for c in shelf.copies] == [(0, -1), (1, -1)]
