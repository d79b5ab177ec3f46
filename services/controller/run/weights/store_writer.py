"""Writes weight versions to a store through the sources, and deletes what no rollout needs.

::

    form -> prepare -> retain (old copies are deleted) -> transfer of all sources -> the copy is on the shelf
"""

import logging
import sys
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping

from services.common.errors import DeadlineExceededError, ServiceError
from services.common.runspec.run import WeightStorageSpec
from services.common.stores import without_secrets
from services.controller import metrics
from services.controller.run.state.worker_failures import UnresponsiveError
from services.controller.run.weights.followers import Followers
from services.controller.run.weights.members import WeightMembers
from services.controller.run.weights.shelf import Shelf, StoredCopy
from services.controller.run.weights.store_channel import StoreChannel, StoreTrouble
from services.weightsync.weight_plan import version_digest

logger = logging.getLogger(__name__)

_CLEAN_UP_S = 10.0


class StoreWriter:
    """Writes versions of one session, one after the other.

    Args:
        sends_changes: True if sources can send the changes since the version that they hold.
    """

    def __init__(
        self,
        members: WeightMembers,
        shelf: Shelf,
        channel: StoreChannel,
        followers: Followers,
        storage: WeightStorageSpec,
        *,
        run_id: str,
        sends_changes: bool,
    ) -> None:
        self._members = members
        self._shelf = shelf
        self._channel = channel
        self._followers = followers
        self._storage = storage
        self._run_id = run_id
        self._sends_changes = sends_changes
        self._num_copies = 0
        self._timeout_s = 0.0
        self.epoch = -1
        """Epoch of the sources' channels; -1 while they have none."""
        self.trouble = StoreTrouble()
        self.digest = ""
        """Digest of the version that was written last."""
        self.num_bytes = 0
        """Bytes that were written, in total."""

    async def form(self) -> None:
        """Opens the store at all sources, which find out whether they may write.

        Raises:
            ServiceError: If one may not, with the store's cause.
        """
        self.epoch = self._channel.next_epoch()
        sources = self._members.sources.items()
        await self._members.call_all(
            {name: self._channel.open(m, self.epoch, receiver=None) for name, m in sources}
        )

    async def reopen(self) -> None:
        """Opens the store until that succeeds; raises as :meth:`write`."""
        await self._persist(self.form)

    async def write(
        self,
        version: int,
        *,
        versions: Collection[int],
        prepare: Callable[[], Awaitable[Mapping[str, int]]],
    ) -> None:
        """Writes the copies of a version that rollouts need and that the store lacks.

        Args:
            version: Version that the sources have prepared.
            versions: Version that each source sent last and still holds.
            prepare: Prepares the sources again after a failure, and returns what each of them holds then;
                they have copied their weights before.

        Raises:
            UnavailableError: If the trainer does not answer.
            StoreFailedError: If the store fails for longer than ``weight_sync.storage.timeout_s``.
        """

        async def attempt() -> None:
            nonlocal versions
            if self.epoch < 0:
                await self.form()
                # A source that had sent all parts before the failure holds this version now.
                versions = (await prepare()).values()
            held_version = min(versions) if len({*versions}) == 1 else -1
            for base in list(self._missing(version, held_version)):
                await self._write_copy(version, base)

        await self._persist(attempt)

    async def close(self) -> None:
        """Deletes all versions of the run, which no rollout reads any more."""
        try:
            await self._followers.stop()
            if self.epoch >= 0:
                await self._retain([], timeout_s=_CLEAN_UP_S)
        except ServiceError as error:
            logger.warning(
                "weight versions stay in the store",
                extra={
                    "run": self._run_id,
                    "url": without_secrets(self._channel.url),
                    "why": error.message,
                },
            )

    async def _persist(self, attempt: Callable[[], Awaitable[None]]) -> None:
        """Repeats an attempt until it succeeds; each after the first begins with a new epoch."""
        while True:
            try:
                await attempt()
            except UnresponsiveError:
                raise
            except ServiceError as error:
                epoch, self.epoch = self.epoch, -1
                if absent := await self._members.abort(epoch, str(error), [*self._members.sources]):
                    raise self._members.unpublishable(absent) from error
                (name, *_) = self._members.sources
                self._channel.record(name, self.trouble, error)
                if isinstance(error, DeadlineExceededError):
                    self._timeout_s = self._channel.slower_timeout_s(self._deadline_s())
                await self.trouble.pause()
            else:
                self.trouble = StoreTrouble()
                return

    def _missing(self, version: int, held_version: int) -> Iterator[int]:
        """Yields the bases of the copies that are to be written; -1 for a whole copy."""
        rollouts = self._followers.held_versions
        base = held_version if self._sends_changes and held_version < version else -1
        near = [v for v in rollouts if v == base or self._shelf.path(v, base) is not None]
        if base < 0 or not any(v >= 0 for v in near):
            base = -1
        elif self._shelf.find(version, base) is None:
            yield base
        reached = {version, *(near if base >= 0 else ())}
        is_whole_needed = not rollouts or any(
            v < 0 or (v not in reached and self._shelf.path(v, version) is None) for v in rollouts
        )
        if is_whole_needed and self._shelf.find(version, -1) is None:
            yield -1

    async def _write_copy(self, version: int, base: int) -> None:
        await self._make_room()
        self._num_copies += 1
        kind = "whole" if base < 0 else "changes"
        name = f"v{version:08d}-e{self.epoch}-{self._num_copies}-{kind}"
        sources = self._members.sources
        transfers = await self._members.call_all(
            {
                source: member.transfer(
                    self.epoch,
                    version,
                    base_version=base,
                    timeout_s=self._deadline_s(),
                    stored=name,
                )
                for source, member in sources.items()
            }
        )
        copy = StoredCopy(
            name=name,
            version=version,
            base_version=base,
            manifests=tuple(transfers[source].manifest for source in sources),
            num_bytes=sum(transfers[source].num_bytes for source in sources),
        )
        self.digest = version_digest([d for source in sources for d in transfers[source].digests])
        self.num_bytes += copy.num_bytes
        self._shelf.add(copy)
        metrics.STORED_VERSIONS.labels(self._run_id).set(len(self._shelf.copies))
        self._followers.notify()

    async def _make_room(self) -> None:
        """Deletes copies, so that one more is within the limit.

        Those that rollouts read stay, unless there are too many; their readers stop before they are deleted.
        """
        limit, followers = self._storage.keep - 1, self._followers
        names = self._shelf.retain(limit, newest=followers.version, loading_names=followers.copies)
        while True:
            # A damaged copy left the shelf, but another rollout may read it.
            names = [*(followers.copies - {*names}), *names]
            if len(names) <= limit:
                break
            await followers.stop_readers(names[0])
            names = self._shelf.retain(limit, newest=sys.maxsize, loading_names=followers.copies)
        await self._retain(names, timeout_s=self._deadline_s())

    async def _retain(self, names: Collection[str], *, timeout_s: float) -> None:
        (name, first), *_ = self._members.sources.items()
        call = first.retain(self.epoch, [*names], timeout_s=timeout_s)
        await self._members.call_all({name: call})

    def _deadline_s(self) -> float:
        return max(self._channel.timeout_s(self._members.plan.num_bytes), self._timeout_s)
