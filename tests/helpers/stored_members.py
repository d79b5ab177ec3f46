"""Weight members in one process that use a store, and a store in memory that dies at a chosen operation."""

import asyncio

from services.common.errors import NotFoundError, UnavailableError
from services.weightsync.transfer import TransferRequest
from services.weightsync.weight_plan import version_digest
from tests.helpers.weight_members import Cluster


class MemoryFolder:
    """Implements ``StoreFolder`` in memory; all members of a test share its objects.

    Attributes:
        objects: Content by name.
        num_operations: Operations that began.
        dies_at: Number of the operation from which on all fail; None for none.
        is_torn: True if an interrupted operation may have had its effect.
    """

    url = "memory://weights"

    def __init__(self):
        self.objects = {}
        self.num_operations = 0
        self.dies_at = None
        self.is_torn = False
        self.operations = []

    def revive(self):
        self.dies_at = None

    def sizes(self):
        self._begin("list")
        return {name: len(content) for name, content in self.objects.items()}

    def read(self, name):
        self._begin("read")
        return self._content(name)

    def read_into(self, name, target):
        self._begin("read")
        content = self._content(name)
        size = min(len(content), len(target))
        target[:size] = content[:size]
        return len(content)

    def put(self, name, content):
        effect = lambda: self.objects.__setitem__(name, bytes(content))  # noqa: E731
        self._begin("put", effect)
        effect()

    def delete(self, names):
        for name in names:
            effect = lambda name=name: self.objects.pop(name, None)  # noqa: E731
            self._begin("delete", effect)
            effect()

    def _content(self, name):
        if name not in self.objects:
            raise NotFoundError(f"{self.url}/{name} does not exist")
        return self.objects[name]

    def _begin(self, kind, effect=lambda: None):
        self.num_operations += 1
        self.operations.append(kind)
        if self.dies_at is not None and self.num_operations >= self.dies_at:
            if self.is_torn and self.num_operations == self.dies_at:
                effect()
            raise UnavailableError("the store is gone")


class StoredCluster(Cluster):
    """Sources that write to a store, and receivers that read from it later."""

    def __init__(self, num_sources=1, mode="shadow", *, url="memory://weights", **options):
        super().__init__(num_sources, mode, backend="storage", **options)
        self._url = url
        self._num_copies = 0
        self.epochs = {}

    async def form_group(self, epoch=1, members=None):
        self.agree()
        for member in self.members if members is None else members:
            self.epochs[id(member)] = epoch
            await member.form_group(
                epoch,
                receiver=0,
                num_receivers=1,
                backend="storage",
                scope=f"run/{epoch}",
                timeout_s=10,
                url=self._url,
            )

    async def write(self, version, *, base_version=-1, kept_names=()):
        """Deletes other copies and writes one; returns the request for receivers and the version's digest."""
        epoch = self.epochs[id(self.senders[0])]
        for sender in self.senders:
            await sender.prepare(epoch, version, self.plan_hash)
        self._num_copies += 1
        name = f"v{version}-e{epoch}-{self._num_copies}"
        await self.senders[0].retain(epoch, kept_names, timeout_s=10)
        request = {
            "version": version,
            "timeout_s": 10,
            "base_version": base_version,
            "stored": name,
        }
        reports = await asyncio.gather(
            *(sender.transfer(TransferRequest(epoch=epoch, **request)) for sender in self.senders)
        )
        request["manifests"] = tuple(report.manifest for report in reports)
        return request, version_digest([report.digests[0] for report in reports])

    async def load(self, member, request, digest):
        """Reads, adopts and checks a version."""
        epoch = self.epochs[id(member)]
        await member.prepare(epoch, request["version"], self.plan_hash)
        await member.transfer(TransferRequest(epoch=epoch, **request))
        await member.adopt(request["version"], digest)
        await member.check(request["version"], await self.senders[0].score(), 1e-9)

    async def publish(self, version, epoch=1, **options):
        """Writes a version, and loads it on one receiver after the other; returns the digest."""
        request, digest = await self.write(version, **options)
        for member in self.receivers:
            await self.load(member, request, digest)
        return digest
