"""Metadata of all partitions: visible samples, watchers, leases, and byte quotas of runs.

All code here runs on one event loop and changes state only between awaits, so there are no locks.
The bytes are stored elsewhere: a put is added after its bytes have arrived, and blobs that no row
uses any more are passed to ``free``.
"""

from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from services.common.errors import (
    AlreadyExistsError,
    FailedPreconditionError,
    InvalidArgumentError,
    ResourceExhaustedError,
)
from services.common.fields import run_of
from services.common.host import Clock
from services.common.task_group import Waiters
from services.transferqueue.index.columns import Row
from services.transferqueue.index.leasing import Leasing
from services.transferqueue.index.partition import Partition, find
from services.wire.batch import BlobRef, KVBatchMeta
from services.wire.transferqueue.types import LostSamples, PartitionImage, PartitionStats


class Quotas:
    """Bytes that runs use of their quotas; only the shards' capacity limits a run without a quota."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._waiters = Waiters()
        self._limits: Counter[str] = Counter()
        self._used: Counter[str] = Counter()

    def raise_to(self, run: str, quota_bytes: int) -> None:
        """Raises the quota of a run to at least ``quota_bytes``; 0 sets no quota."""
        self._limits[run] = max(self._limits[run], quota_bytes)
        self._waiters.wake(run)

    def remove(self, run: str) -> None:
        del self._limits[run]

    def limit(self, run: str) -> int:
        """Returns the quota of a run in bytes; 0 without a quota."""
        return self._limits[run]

    async def charge(self, run: str, size_bytes: int, *, wait_s: float) -> None:
        """Charges a run; waits until there is space.

        Raises:
            ResourceExhaustedError: If there was no space in time.
            InvalidArgumentError: If the size alone exceeds the quota.
        """
        deadline = self._clock.monotonic() + wait_s
        while True:
            limit, used_bytes = self._limits[run], self._used[run]
            if not limit or used_bytes + size_bytes <= limit:
                self._used[run] += size_bytes
                return
            if size_bytes > limit:
                raise InvalidArgumentError(
                    f"a put of {size_bytes} bytes exceeds the whole quota of {run}, {limit} bytes; "
                    "raise quota_bytes or store fewer samples at once",
                    run=run,
                )
            rest_s = deadline - self._clock.monotonic()
            if rest_s <= 0:
                raise ResourceExhaustedError(
                    f"quota of {run}: {used_bytes} of {limit} bytes are in use and {size_bytes} more did "
                    f"not fit within {wait_s} s; release samples or raise the quota",
                    run=run,
                    used_bytes=used_bytes,
                    quota_bytes=limit,
                )
            await self._waiters.wait(run, timeout_s=rest_s)

    def credit(self, run: str, size_bytes: int) -> None:
        """Credits a run and wakes its waiting puts."""
        self._used[run] -= size_bytes
        self._waiters.wake(run)


MAX_PUSH_KEYS = 4096
"""Max samples in one message to a watcher."""
_REMEMBERED_PUTS = 4096


@dataclass(frozen=True, slots=True)
class _Charge:
    """Bytes of a put that is not visible."""

    run: str
    size_bytes: int


class Index:
    """Metadata of all partitions of a transferqueue.

    Args:
        free: Deletes blobs that no row uses any more.
    """

    def __init__(self, free: Callable[[Sequence[BlobRef]], None], clock: Clock) -> None:
        self._free = free
        self._partitions: dict[str, Partition] = {}
        self._losses: dict[str, list[LostSamples]] = {}
        self._committed: OrderedDict[str, None] = OrderedDict()
        self._quotas = Quotas(clock)
        self._charges: dict[str, _Charge] = {}
        self._waiters = Waiters()
        self.leasing = Leasing(self._partitions, self._waiters, clock)

    def create_partition(
        self,
        partition_id: str,
        *,
        required_fields: Sequence[str],
        quota_bytes: int,
    ) -> None:
        """Creates a partition; a repeated call with the same fields changes nothing.

        Raises:
            FailedPreconditionError: If it exists with other required fields.
        """
        partition = self._partitions.get(partition_id)
        if partition is not None and partition.required_fields != set(required_fields):
            raise FailedPreconditionError(
                f"partition {partition_id} exists with required fields {sorted(partition.required_fields)}, "
                f"got {sorted(required_fields)}; drop it first",
                partition_id=partition_id,
            )
        self._quotas.raise_to(run_of(partition_id), quota_bytes)
        if partition is None:
            self._partitions[partition_id] = Partition(partition_id, required_fields)
            self.leasing.open(partition_id)
            self._losses[partition_id] = []

    def drop_partition(self, partition_id: str) -> int:
        """Deletes a partition; returns how many samples it had."""
        partition = self._partitions.get(partition_id)
        if partition is None:
            return 0
        num_keys = len(partition.rows)
        self._remove(partition, list(partition.rows.values()))
        self.leasing.close(partition_id)
        del self._partitions[partition_id], self._losses[partition_id]
        run = run_of(partition_id)
        if not self.has_run(run):
            self._quotas.remove(run)
        self._waiters.wake(partition_id)
        return num_keys

    async def reserve(
        self, put_id: str, partition_id: str, *, size_bytes: int, wait_s: float
    ) -> None:
        """Charges the run's quota for the bytes of a put that will arrive; waits until there is space.

        Raises:
            AlreadyExistsError: If the put is charged.
            NotFoundError: If there is no such partition.
            ResourceExhaustedError: If the quota had no space in time.
            InvalidArgumentError: If the bytes alone exceed the quota.
        """
        find(self._partitions, partition_id)
        charge = _Charge(run_of(partition_id), size_bytes)
        if put_id in self._charges:
            raise AlreadyExistsError(f"put {put_id} already has a reservation", put_id=put_id)
        await self._quotas.charge(charge.run, size_bytes, wait_s=wait_s)
        self._charges[put_id] = charge

    def cancel(self, put_id: str) -> None:
        """Reverts the charge of a put that is not visible; changes nothing if there is none."""
        if (charge := self._charges.pop(put_id, None)) is not None:
            self._quotas.credit(charge.run, charge.size_bytes)

    async def commit(self, meta: KVBatchMeta, *, put_id: str) -> int:
        """Makes a put visible after its bytes were stored and charged; a repeated call changes nothing.

        Returns:
            The partition's revision.

        Raises:
            ServiceError: If the put breaks a rule; then nothing of it is visible.
        """
        partition = find(self._partitions, meta.partition_id)
        if put_id in self._committed:
            return partition.revision
        extensions = partition.add(meta)
        self._charges.pop(put_id, None)  # the stored samples are charged now
        self._committed[put_id] = None
        if len(self._committed) > _REMEMBERED_PUTS:
            self._committed.popitem(last=False)
        self.leasing.offer(meta.partition_id, extensions)
        self._waiters.wake(meta.partition_id)
        return partition.revision

    def has_run(self, run_id: str) -> bool:
        """Returns True if a run has a partition, as every run has from its start to its end."""
        return any(run_of(partition_id) == run_id for partition_id in self._partitions)

    def get(self, partition_id: str, keys: Sequence[str]) -> KVBatchMeta:
        """Describes samples by key, or all of them if ``keys`` is empty.

        Raises:
            NotFoundError: If the partition or a key does not exist.
        """
        partition = find(self._partitions, partition_id)
        return partition.describe(partition.get(keys or list(partition.rows)))

    def release(self, partition_id: str, keys: Sequence[str], attempts: Sequence[int] = ()) -> int:
        """Deletes samples; returns how many.

        Args:
            attempts: Newest attempt to delete, one for each key; samples of later ones stay.

        Raises:
            NotFoundError: If there is no such partition.
            InvalidArgumentError: If there are attempts, but not one for each key.
        """
        partition = find(self._partitions, partition_id)
        if attempts and len(attempts) != len(keys):
            raise InvalidArgumentError(
                f"expected one attempt for each of {len(keys)} keys, got {len(attempts)}"
            )
        rows = [partition.rows[key] for key in dict.fromkeys(keys) if key in partition.rows]
        if attempts:
            newest = dict(zip(keys, attempts, strict=True))
            rows = [row for row in rows if int(row.tag("attempt") or 0) <= newest[row.key]]
        self._remove(partition, rows)
        return len(rows)

    async def watch(self, partition_id: str, revision: int) -> AsyncIterator[KVBatchMeta]:
        """Streams complete samples that are new or changed after ``revision``.

        Raises:
            NotFoundError: If the partition does not exist or is dropped.
        """
        while True:
            partition = find(self._partitions, partition_id)
            meta, revision = partition.changes_since(revision, limit=MAX_PUSH_KEYS)
            if meta is not None:
                yield meta
            elif partition.revision <= revision:
                await self._waiters.wait(partition_id, timeout_s=None)

    def remove_shard(self, shard_id: str) -> None:
        """Deletes the samples that had a value on a dead shard, and records them as lost.

        Samples that a consumer acknowledged are lost too: other consumers may still need them.
        """
        for name, partition in self._partitions.items():
            rows = partition.rows_on(shard_id)
            keys = tuple(row.key for row in rows)
            self._remove(partition, rows)
            if keys:
                self._losses[name].append(LostSamples(keys=keys, shard_id=shard_id))
                self._waiters.wake(name)

    async def watch_lost_samples(self, partition_id: str) -> AsyncIterator[LostSamples]:
        """Streams all losses of a partition, the earlier ones first."""
        num_seen = 0
        while True:
            find(self._partitions, partition_id)
            losses = self._losses[partition_id][num_seen:]
            for loss in losses:
                yield loss
            num_seen += len(losses)
            if not losses:
                await self._waiters.wait(partition_id, timeout_s=None)

    def export(self, run_id: str) -> list[PartitionImage]:
        """Returns the full metadata of a run's partitions, for a snapshot."""
        return [
            PartitionImage(
                partition_id=name,
                required_fields=tuple(sorted(partition.required_fields)),
                quota_bytes=self._quotas.limit(run_id),
                puts=partition.describe_puts(),
                acked=self.leasing.export(name),
            )
            for name, partition in self._partitions.items()
            if run_of(name) == run_id
        ]

    def stats(self) -> list[PartitionStats]:
        return [
            PartitionStats(
                partition_id=name,
                num_keys=len(partition.rows),
                num_ready=partition.num_complete,
                num_leased=self.leasing.num_leased(name),
                stored_bytes=partition.stored_bytes,
                quota_bytes=self._quotas.limit(run_of(name)),
                revision=partition.revision,
            )
            for name, partition in self._partitions.items()
        ]

    def num_samples(self) -> int:
        """Returns the number of samples in all partitions; safe to call from any thread."""
        return sum(len(partition.rows) for partition in list(self._partitions.values()))

    def _remove(self, partition: Partition, rows: Sequence[Row]) -> None:
        unused = partition.remove(rows)
        self.leasing.remove_rows(partition.partition_id, rows)
        if unused:
            self._quotas.credit(
                run_of(partition.partition_id), sum(blob.size_bytes for blob in unused)
            )
            self._free(unused)
